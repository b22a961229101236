"""Where loaded tensors go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fp_multi as fp
from fp_multi.adapters.torch import load, load_file, save, save_file


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    state = {"w": torch.arange(6.0).view(2, 3), "p": torch.nn.Parameter(weight), "n": 1}
    save(state, tmp_path / "c")
    return tmp_path / "c"


@pytest.fixture
def from_cuda(tmp_path: Path) -> Path:
    """A checkpoint as a machine with two GPUs writes it, without having one."""

    class OnDevice:
        def __init__(self, device: str) -> None:
            self.device = device
            self.tensor = torch.arange(3.0)

    def describe(value: OnDevice, path: str) -> fp.LeafSource:
        return fp.LeafSource(
            "float32",
            (3,),
            12,
            value.tensor.data_ptr(),
            value.tensor,
            kind="torch",
            attrs={"device": value.device},
            itemsize=4,
        )

    fp.register_tensor_type(OnDevice, fp.TensorType(describe))
    fp.save({"a": OnDevice("cuda:0"), "b": OnDevice("cuda:1"), "c": torch.ones(2)}, tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize(
    "map_location",
    [
        None,
        "cpu",
        torch.device("cpu"),
        {},
        {"cpu": "cpu"},
        {"cuda:0": "cpu"},
        lambda storage, location: storage,
        lambda storage, location: None,
        lambda storage, location: storage.clone(),
    ],
)
def test_on_the_cpu(map_location: Any, checkpoint: Path) -> None:
    loaded = load(checkpoint, map_location=map_location)
    assert torch.equal(loaded["w"], torch.arange(6.0).view(2, 3))
    assert type(loaded["p"]) is torch.nn.Parameter
    assert loaded["p"].is_contiguous(memory_format=torch.channels_last)
    assert {value.device.type for value in (loaded["w"], loaded["p"])} == {"cpu"}


@pytest.mark.parametrize("map_location", ["meta", torch.device("meta"), {"cpu": "meta"}, {"cpu": torch.device("meta")}])
def test_on_another_device(map_location: Any, checkpoint: Path) -> None:
    loaded = load(checkpoint, map_location)
    assert (loaded["w"].device.type, loaded["w"].shape) == ("meta", (2, 3))
    assert type(loaded["p"]) is torch.nn.Parameter
    assert loaded["p"].requires_grad


def test_a_function_is_called_like_torch_does(checkpoint: Path) -> None:
    seen = []

    def place(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        assert isinstance(storage, torch.UntypedStorage)
        seen.append((storage.nbytes(), location))
        return storage

    load(checkpoint, map_location=place)
    assert sorted(seen) == [(24, "cpu"), (384, "cpu")]


@pytest.mark.parametrize(
    ("map_location", "expected"),
    [
        ("cpu", {"cpu"}),
        ({"cuda:0": "cpu", "cuda:1": "cpu"}, {"cpu"}),
        ({"cuda:0": "meta", "cuda:1": "cpu"}, {"cpu", "meta"}),
        (lambda storage, location: storage, {"cpu"}),
    ],
)
def test_saved_on_a_gpu_loaded_without(map_location: Any, expected: set[str], from_cuda: Path) -> None:
    loaded = load(from_cuda, map_location=map_location)
    assert {tensor.device.type for tensor in loaded.values()} == expected
    if expected == {"cpu"}:
        assert loaded["a"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("map_location", [None, {"cuda:0": "cpu"}, lambda storage, location: None])
def test_back_on_a_gpu_that_is_not_here(map_location: Any, from_cuda: Path) -> None:
    with pytest.raises(fp.errors.CapabilityError, match=r"'cuda:[01]' is not available.*map_location=\"cpu\""):
        load(from_cuda, map_location=map_location)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("map_location", ["cuda", "cuda:0", torch.device("cuda", 1), 0])
def test_a_device_that_is_not_here_is_refused_before_reading(map_location: Any, tmp_path: Path) -> None:
    with pytest.raises(fp.errors.CapabilityError, match="not available"):
        load(tmp_path / "not even a checkpoint", map_location=map_location)


@pytest.mark.parametrize(
    ("map_location", "words"),
    [
        ("nowhere", "not a device"),
        (["cpu"], "must be a device"),
        (lambda storage, location: "cpu", "returned str"),
        ({"cpu": "nowhere"}, "not a device"),
    ],
)
def test_nonsense(map_location: Any, words: str, checkpoint: Path) -> None:
    with pytest.raises(fp.errors.ConfigError, match=words):
        load(checkpoint, map_location=map_location)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_load_file(device: Any, tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "m.safetensors")
    loaded = load_file(tmp_path / "m.safetensors", device=device)["w"]
    assert loaded.device == torch.device(device)


def test_in_place_from_a_gpu_that_is_not_here(from_cuda: Path) -> None:
    target = {"a": torch.zeros(6)[::2], "b": torch.zeros(3), "c": torch.zeros(2)}
    assert load(from_cuda, target=target, inplace=True)["a"] is target["a"]
    assert target["a"].tolist() == [0.0, 1.0, 2.0]


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    state = {
        "w": torch.arange(3),
        "cl": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "none": torch.zeros(0, 2),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
    }
    with torch.device("meta"):
        save(state, tmp_path / "c")
        loaded = load(tmp_path / "c")
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}
    assert loaded["w"].tolist() == [0, 1, 2]


def test_the_core_reads_what_was_on_a_gpu(from_cuda: Path, bits: Callable[..., bytes]) -> None:
    assert fp.load(from_cuda)["b"].tolist() == [0.0, 1.0, 2.0]
