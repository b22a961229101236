"""save_file and load_file against safetensors.torch, in both directions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fp_multi as fp
from fp_multi.adapters.torch import load_file, save_file

stock = pytest.importorskip("safetensors.torch")

Same = Callable[..., None]
CLASSIC = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32),
    *(torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]
# Known to newer safetensors only.
EXTENDED = [
    dtype
    for name in (*("complex64", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"),)
    if (dtype := getattr(torch, name, None)) is not None
]


def tensors_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    high = 2 if dtype is torch.bool else 256

    def random(*shape: int) -> torch.Tensor:
        data = torch.randint(0, high, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        return data.view(-1).view(dtype).view(shape) if data.numel() else torch.empty(shape, dtype=dtype)

    return {"matrix": random(5, 4), "odd": random(3, 2), "empty": random(0, 4), "row": random(1002)}


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header


@pytest.mark.parametrize("dtype", CLASSIC, ids=str)
def test_stock_reads_ours(dtype: torch.dtype, tmp_path: Path, same: Same) -> None:
    tensors = {**tensors_of(dtype), "0-d": torch.zeros((), dtype=dtype)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt", "who": "me"})
    loaded = stock.load_file(tmp_path / "m.safetensors")
    same({name: loaded[name] for name in tensors}, tensors)
    assert header_of(tmp_path / "m.safetensors")["__metadata__"] == {"format": "pt", "who": "me"}


@pytest.mark.parametrize("dtype", CLASSIC + EXTENDED, ids=str)
def test_we_read_stock(dtype: torch.dtype, tmp_path: Path, same: Same) -> None:
    tensors = tensors_of(dtype)
    if dtype is not getattr(torch, "float4_e2m1fn_x2", None):
        tensors["0-d"] = torch.zeros((), dtype=dtype)
    try:
        stock.save_file(tensors, tmp_path / "m.safetensors", {"k": "v"})
    except KeyError:
        pytest.skip(f"this safetensors does not write {dtype}")
    loaded = load_file(tmp_path / "m.safetensors")
    same({name: loaded[name] for name in tensors}, tensors)
    assert loaded.keys() == tensors.keys()


@pytest.mark.parametrize("dtype", EXTENDED, ids=str)
def test_newer_types_are_stored_as_stock_does_or_refused(dtype: torch.dtype, tmp_path: Path, same: Same) -> None:
    tensors = tensors_of(dtype)
    try:
        save_file(tensors, tmp_path / "m.safetensors")
    except fp.errors.UnsupportedLeafError as error:
        assert "save()" in str(error)  # noqa: PT017 - either is right
        assert not list(tmp_path.iterdir())
        return
    loaded = stock.load_file(tmp_path / "m.safetensors")
    same({name: loaded[name] for name in tensors}, tensors)


def test_any_alignment_of_the_data(tmp_path: Path, same: Same) -> None:
    # Headers of every length modulo 8, as writers other than the stock one make them.
    values = torch.arange(7, dtype=torch.float64)
    data = bytes(values.view(torch.uint8).numpy())
    for padding in range(9):
        header = b'{"t":{"dtype":"F64","shape":[7],"data_offsets":[0,56]}}' + b" " * padding
        path = tmp_path / f"{padding}.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + data)
        same(load_file(path), {"t": values})


def test_odd_names_and_an_empty_file(tmp_path: Path) -> None:
    tensors = {"": torch.ones(1), "a.b": torch.ones(2), "\u00e4/~": torch.ones(3)}
    save_file(tensors, tmp_path / "m.safetensors")
    assert stock.load_file(tmp_path / "m.safetensors").keys() == tensors.keys()
    assert load_file(tmp_path / "m.safetensors").keys() == tensors.keys()
    save_file({}, tmp_path / "none.safetensors")
    assert load_file(tmp_path / "none.safetensors") == {}
    assert stock.load_file(tmp_path / "none.safetensors") == {}


def test_strided_and_conjugate_tensors_are_written_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    other = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    negative = torch.randn(3, dtype=torch.complex64).conj().imag
    tensors = {"t": base.transpose(0, 2), "channels_last": other, "negative": negative}
    save_file(tensors, tmp_path / "m.safetensors")
    for loaded in (load_file(tmp_path / "m.safetensors"), stock.load_file(tmp_path / "m.safetensors")):
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
        assert all(tensor.is_contiguous() for tensor in loaded.values())


def test_parameters_come_back_as_tensors(tmp_path: Path) -> None:
    save_file(torch.nn.Linear(2, 3).state_dict(keep_vars=True), tmp_path / "m.safetensors")
    loaded = load_file(tmp_path / "m.safetensors")
    assert {type(tensor) for tensor in loaded.values()} == {torch.Tensor}
    assert not any(tensor.requires_grad for tensor in loaded.values())


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(3)}, path)
    save_file({"b": torch.ones(2)}, path)
    assert list(load_file(str(path))) == ["b"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.safetensors"]


_BASE = torch.zeros(10)


@pytest.mark.parametrize(
    ("tensors", "group"),
    [
        ({"a": _BASE, "b": _BASE}, "a, b"),
        ({"z": _BASE[:6], "y": _BASE[5:], "other": torch.ones(2)}, "y, z"),
        ({"a": _BASE, "b": _BASE[2:3], "c": _BASE[7:]}, "a, b, c"),
        ({"a": _BASE[::2], "b": _BASE[1::2]}, "a, b"),
    ],
)
def test_shared_memory_is_refused(tensors: dict[str, torch.Tensor], group: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"share memory: {group}\\.") as caught:
        save_file(tensors, tmp_path / "m.safetensors")
    assert isinstance(caught.value, fp.errors.UnsupportedLeafError)
    assert not list(tmp_path.iterdir())


def test_neighbours_do_not_share(tmp_path: Path) -> None:
    tensors = {"a": _BASE[:5], "b": _BASE[5:], "empty": _BASE[:0], "empty too": _BASE[:0]}
    save_file(tensors, tmp_path / "m.safetensors")
    assert stock.load_file(tmp_path / "m.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize(
    ("tensors", "metadata", "words"),
    [
        ([torch.zeros(1)], None, "must be a dict"),
        ({"a": 1}, None, "^a: expected a torch.Tensor"),
        ({1: torch.zeros(1)}, None, "name 1 must be a str"),
        ({"a": torch.eye(2).to_sparse()}, None, "^a: .*to_dense"),
        ({"a": torch.zeros(2, dtype=torch.uint8).view(torch.bits8)}, None, "^a: .*bits8"),
        ({"a": torch.zeros(1)}, {"k": 1}, "dict of str to str"),
        ({"a": torch.zeros(1)}, "text", "dict of str to str"),
    ],
)
def test_bad_arguments(tensors: Any, metadata: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        save_file(tensors, tmp_path / "m.safetensors", metadata)
    assert isinstance(caught.value, fp.errors.UnsupportedLeafError)
    assert not list(tmp_path.iterdir())


def test_other_refusals(tmp_path: Path) -> None:
    for tensor in (torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.complex128)):
        with pytest.raises(fp.errors.UnsupportedLeafError, match=r"^a: "):
            save_file({"a": tensor}, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with pytest.raises(FileNotFoundError):
        load_file(path)
    save_file({"a": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(fp.errors.CorruptCheckpointError):
        load_file(path)


def test_a_shard_of_a_checkpoint_is_a_file_for_everybody(tmp_path: Path, same: Same) -> None:
    from fp_multi.adapters.torch import save

    state = {"layers": [{"w": torch.randn(3, 4).t()}, {"w": torch.ones(2, dtype=torch.bfloat16)}]}
    save(state, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.safetensors")
    expected = {"layers.0.w": state["layers"][0]["w"], "layers.1.w": state["layers"][1]["w"]}
    for loaded in (stock.load_file(shard), load_file(shard)):
        same({name: loaded[name] for name in expected}, expected)
