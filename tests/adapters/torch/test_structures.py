"""What trainers put into a state: containers, ties, views, strides, plain values of torch."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

import fp_multi as fp
from fp_multi.adapters.torch import load, save

RoundTrip: TypeAlias = Callable[..., Any]
Same: TypeAlias = Callable[..., None]

Pair = namedtuple("Pair", ["first", "second"])


def test_nested_state(round_trip: RoundTrip, same: Same) -> None:
    state = {
        "model": OrderedDict(weight=torch.randn(3, 2), bias=torch.zeros(3)),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "m": torch.ones(2)}, 1: {}}},
        "tuple": (torch.arange(3), None, Pair(torch.ones(1), "x")),
        "numbers": [1, 2.5, float("inf"), 1 + 2j, True, None, "text", 1 << 80],
        "numpy": np.arange(4, dtype=np.float64),
        "bytes": b"\0\1",
        3: {"int key": torch.tensor(7)},
    }
    same(round_trip(state), state)


def test_state_dict_metadata_survives(round_trip: RoundTrip, same: Same) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = model.state_dict()
    loaded = round_trip(state)
    assert loaded._metadata == state._metadata  # type: ignore[attr-defined]
    same(loaded, state)


@pytest.mark.parametrize(
    "value",
    [
        torch.Size([2, 3]),
        torch.Size([]),
        torch.device("cuda", 1),
        torch.device("cpu"),
        torch.bfloat16,
        torch.complex32,
        torch.quint4x2,
        torch.strided,
        torch.sparse_csr,
        torch.channels_last,
        torch.preserve_format,
    ],
    ids=repr,
)
def test_plain_values_of_torch(value: object, round_trip: RoundTrip) -> None:
    loaded = round_trip({"v": value, "again": [value]})
    assert loaded == {"v": value, "again": [value]}
    assert type(loaded["v"]) is type(value)


def test_parameters_and_requires_grad(round_trip: RoundTrip, same: Same) -> None:
    state = {
        "p": torch.nn.Parameter(torch.randn(3)),
        "frozen": torch.nn.Parameter(torch.arange(3), requires_grad=False),
        "leaf": torch.randn(2, requires_grad=True),
        "not a leaf": torch.randn(2, requires_grad=True) * 2,
        "buffer": torch.nn.Buffer(torch.randn(2)) if hasattr(torch.nn, "Buffer") else torch.ones(1),
        "channels_last": torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    }
    loaded = round_trip(state)
    same(loaded, state)
    assert all(value.is_leaf for value in loaded.values())
    assert loaded["channels_last"].stride() == state["channels_last"].stride()


# Ties


def test_tied_weights_come_back_tied(round_trip: RoundTrip, tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(5, 4), "head": torch.nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    loaded = round_trip(model.state_dict())
    assert loaded["head.weight"] is loaded["embedding.weight"]
    assert len(fp.read_manifest(tmp_path / "checkpoint").tensors) == 1


def test_one_transposed_view_twice_is_one(round_trip: RoundTrip) -> None:
    base = torch.randn(3, 4)
    loaded = round_trip([base.t(), base.t(), base])
    assert loaded[0] is loaded[1]
    assert loaded[0] is not loaded[2]


def test_conjugate_views_tie_too(round_trip: RoundTrip) -> None:
    base = torch.randn(3, dtype=torch.complex64)
    view = base.conj()
    loaded = round_trip([view, view, base.conj(), base])
    assert loaded[0] is loaded[1]
    assert loaded[0] is loaded[2]
    assert loaded[0] is not loaded[3]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(4), torch.zeros(4)),
        (torch.empty(0), torch.empty(0)),
        (torch.zeros(0, 3), torch.zeros(0, 3)),
    ],
)
def test_equal_tensors_are_not_tied(a: torch.Tensor, b: torch.Tensor, round_trip: RoundTrip) -> None:
    loaded = round_trip({"a": a, "b": b, "c": a})
    assert loaded["a"] is not loaded["b"]
    assert loaded["a"] is loaded["c"]


def test_same_memory_as_other_type_or_shape_is_not_tied(round_trip: RoundTrip, same: Same) -> None:
    base = torch.arange(4, dtype=torch.int32)
    state = [base, base.view(torch.float32), base.view(2, 2), base[:2], base[2:], base[::2]]
    same(round_trip(state), state)


def test_overlapping_views_become_tensors_of_their_own(round_trip: RoundTrip, same: Same) -> None:
    base = torch.arange(100.0)
    state = {"all": base, "head": base[:60], "tail": base[40:], "window": base.unfold(0, 10, 3)}
    loaded = round_trip(state)
    same(loaded, state)
    loaded["head"].zero_()
    assert loaded["all"][0] == 0.0
    assert loaded["all"][1] == 1.0


def test_of_a_view_only_the_view_is_stored(tmp_path: Path) -> None:
    report = save({"small": torch.zeros(1 << 20)[5:8]}, tmp_path / "c")
    assert report.tensor_nbytes == 12


# Strides


def _cases() -> dict[str, torch.Tensor]:
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
    return {
        "transposed": base.view(6, 20).t(),
        "permuted": base.permute(3, 1, 0, 2),
        "channels_last": base.to(memory_format=torch.channels_last),
        "channels_last_3d": base[:, :, None].to(memory_format=torch.channels_last_3d),
        "depthwise": torch.randn(4, 1, 3, 3).to(memory_format=torch.channels_last),
        "expanded": torch.arange(5.0).expand(7, 5),
        "expanded 0-d": torch.tensor(3.0).expand(2, 3),
        "sliced": base[:, 1:, ::2, 1:4],
        "row": base[1, 2, 3],
        "0-d": base[1, 2, 3, 4],
        "offset": base.view(-1)[7:],
        "conj": torch.randn(3, 2, dtype=torch.complex64).conj(),
        "conj transposed": torch.randn(3, 2, dtype=torch.complex128).mH,
        "conj half": torch.arange(9, dtype=torch.int32).view(torch.complex32).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "real part": torch.randn(3, dtype=torch.complex64).real,
        "diagonal": base.view(12, 10).diagonal(),
        "bfloat16 transposed": base.view(6, 20).to(torch.bfloat16).t(),
        "bool sliced": (base > 7)[..., ::3],
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("case", list(_cases()))
def test_strided_tensors(case: str, round_trip: RoundTrip, same: Same) -> None:
    tensor = _cases()[case]
    loaded = round_trip({"t": tensor})["t"]
    same(loaded, tensor)
    assert loaded.untyped_storage().nbytes() == tensor.nbytes
    if "channels_last" in case or case == "depthwise":
        assert loaded.stride() == tensor.stride()
    else:
        assert loaded.is_contiguous()


@pytest.mark.parametrize("shape", [(4, 1, 3, 3), (4, 3, 1, 1), (1, 1, 1, 1), (0, 2, 3, 3), (1, 3, 2, 2)])
def test_ambiguous_memory_formats(shape: tuple[int, ...], round_trip: RoundTrip) -> None:
    plain = torch.randn(shape)
    channels_last = torch.empty(shape, memory_format=torch.channels_last).copy_(plain)
    loaded = round_trip({"plain": plain, "channels_last": channels_last})
    assert loaded["plain"].stride() == plain.stride()
    assert loaded["channels_last"].stride() == channels_last.stride()


def test_big_strided_tensors(round_trip: RoundTrip, bits: Callable[..., bytes]) -> None:
    # Larger than an I/O block, and not a multiple of anything.
    base = torch.randint(0, 1 << 30, (2051, 1543), dtype=torch.int32)
    state = {
        "t": base.t(),
        "columns": base[:, 3::5],
        "rows": base[::3],
        "expanded": base[:7, None].expand(7, 211, 1543),
        "channels_last": base[:2048, :1536].reshape(8, 96, 64, 64).to(memory_format=torch.channels_last),
    }
    loaded = round_trip(state)
    for name, tensor in state.items():
        assert bits(loaded[name]) == bits(tensor), name


def test_each_loaded_tensor_owns_its_memory(round_trip: RoundTrip) -> None:
    loaded = round_trip([torch.arange(10), torch.arange(10)])
    loaded[0].add_(5)
    assert loaded[1].tolist() == list(range(10))
    assert loaded[0].untyped_storage().nbytes() == 80


# Selecting, targets


def test_only(tmp_path: Path) -> None:
    save({"a": {"w": torch.ones(2), "b": torch.zeros(2)}, "n": 3}, tmp_path / "c")
    loaded = load(tmp_path / "c", only=["a.w"])
    assert list(loaded) == ["a"]
    assert list(loaded["a"]) == ["w"]


@pytest.mark.parametrize("inplace", [False, True])
def test_target(inplace: bool, tmp_path: Path) -> None:
    source = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    source.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    save(source.state_dict(), tmp_path / "c")
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    target = model.state_dict(keep_vars=True)
    loaded = load(tmp_path / "c", target=target, inplace=inplace)
    for name, tensor in source.state_dict().items():
        assert torch.equal(loaded[name], tensor), name
        assert (loaded[name] is target[name]) is inplace
        assert torch.equal(target[name], tensor) is inplace or name.endswith(
            ("running_mean", "running_var", "num_batches_tracked", "1.weight", "1.bias")
        )


def test_inplace_into_strided_and_conjugate_tensors(tmp_path: Path, same: Same) -> None:
    state = {"t": torch.randn(3, 4), "c": torch.randn(4, dtype=torch.complex64)}
    save(state, tmp_path / "c")
    target = {"t": torch.zeros(4, 3).t(), "c": torch.zeros(4, dtype=torch.complex64).conj()}
    load(tmp_path / "c", target=target, inplace=True)
    same(target, state)
    with pytest.raises(fp.errors.TargetMismatchError, match="cannot be filled in place"):
        load(tmp_path / "c", target={**target, "t": torch.zeros(4).expand(3, 4)}, inplace=True)


def test_torch_targets_take_what_numpy_wrote(tmp_path: Path) -> None:
    arrays = {
        "f": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "s": np.float64(3.0),
        "none": np.zeros((0, 2), np.int32),
    }
    fp.save(arrays, tmp_path / "c")
    target = {
        "f": torch.zeros(3, 2).t(),
        "s": torch.zeros(2, dtype=torch.float64)[1],
        "none": torch.zeros(0, 2, dtype=torch.int32),
    }
    load(tmp_path / "c", target=target, inplace=True)
    assert target["f"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert target["s"].item() == 3.0


def test_a_target_of_another_dtype_is_refused(tmp_path: Path) -> None:
    save({"w": torch.zeros(3)}, tmp_path / "c")
    with pytest.raises(fp.errors.TargetMismatchError, match=r"^w: dtype"):
        load(tmp_path / "c", target={"w": torch.zeros(3, dtype=torch.float64)})


def test_the_core_takes_torch_tensors_once_the_adapter_is_there(tmp_path: Path) -> None:
    fp.save({"w": torch.arange(3.0)}, tmp_path / "c")
    assert fp.load(tmp_path / "c")["w"].tolist() == [0.0, 1.0, 2.0]
    assert torch.equal(load(tmp_path / "c")["w"], torch.arange(3.0))
