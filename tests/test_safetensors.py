"""Plain .safetensors files: ours read by the stock library, its files read by us."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as stock

import fp_multi as fp
from fp_multi import _reader, errors


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "big": random.random((700, 901)).astype(np.float32),
        "paged": random.random(4096),
        "odd": random.integers(0, 9, 1001, np.int8),
        "0d": np.array(2.5, np.float16),
        "empty": np.zeros((0, 4), np.uint32),
        "bool": random.random(77) < 0.5,
        "transposed": random.random((30, 40)).T,
    }


def test_stock_reads_ours(tmp_path: Path) -> None:
    report = fp.save_safetensors(tensors(), tmp_path / "f.safetensors", metadata={"format": "pt", "é": "✓"})
    found = stock.load_file(tmp_path / "f.safetensors")
    assert found.keys() == tensors().keys()
    for name, array in tensors().items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes()
    entries, metadata = fp.read_safetensors_header(tmp_path / "f.safetensors")
    assert metadata == {"format": "pt", "é": "✓"}
    assert entries["big"].shape == (700, 901)
    assert report.file_nbytes == os.path.getsize(tmp_path / "f.safetensors")


@pytest.mark.parametrize("padding", range(0, 64, 7))
def test_we_read_stock_at_any_alignment(tmp_path: Path, padding: int) -> None:
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors().items()}
    stock.save_file(contiguous, tmp_path / "f.safetensors", metadata={"pad": "x" * padding})
    for config in (fp.LoadConfig(), fp.LoadConfig(direct="off"), fp.LoadConfig(io_uring="off", block_bytes=64 << 10)):
        found = fp.load_safetensors(tmp_path / "f.safetensors", config=config)
        for name, array in contiguous.items():
            assert found[name].dtype == array.dtype
            assert found[name].shape == array.shape
            assert found[name].tobytes() == array.tobytes()
    assert list(fp.load_safetensors(tmp_path / "f.safetensors", names=["odd", "0d"])) == ["odd", "0d"]
    twice = fp.load_safetensors(tmp_path / "f.safetensors", names=["paged", "paged"])
    assert twice["paged"].tobytes() == contiguous["paged"].tobytes()
    with pytest.raises(errors.KeyNotFoundError, match="'nope'"):
        fp.load_safetensors(tmp_path / "f.safetensors", names=["nope"])


def test_a_file_is_replaced_atomically_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    fp.save_safetensors({"a": np.zeros(5)}, path)
    fp.save_safetensors({"a": np.ones(5)}, path)
    assert fp.load_safetensors(path)["a"].sum() == 5
    assert os.listdir(tmp_path) == ["f.safetensors"]
    (tmp_path / "dir").mkdir()
    with pytest.raises(errors.CheckpointExistsError, match="nothing is replaced"):
        fp.save_safetensors({"a": np.ones(5)}, tmp_path / "dir")


def test_a_file_replaced_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.safetensors"
    fp.save_safetensors({"a": np.zeros(5), "b": np.zeros(70_000)}, path)
    real, calls = _reader.read_ranges, []

    def replaced_meanwhile(*args: Any, **options: Any) -> Any:
        if not calls:  # between the header and the data
            fp.save_safetensors({"b": np.ones(70_000), "a": np.ones(5)}, path)
        calls.append(None)
        return real(*args, **options)

    monkeypatch.setattr(_reader, "read_ranges", replaced_meanwhile)
    found = fp.load_safetensors(path)
    assert len(calls) == 2
    assert found["a"].sum() == 5
    assert found["b"].sum() == 70_000


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(errors.StorageError):
        fp.load_safetensors(tmp_path)


def test_what_the_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    for value, message in (
        ({"a": {"b": np.ones(2)}}, "string names only"),
        ({"a": 1.5}, "string names only"),
        ({3: np.ones(2)}, "string names only"),
        ({"a": np.ones(2, np.complex128)}, "no dtype for complex128"),
        ({"a": np.ones(2, ml_dtypes.int4)}, "no dtype for int4"),
        ({"__metadata__": np.ones(2)}, "reserved"),
    ):
        with pytest.raises(errors.FpMultiError, match=message):
            fp.save_safetensors(value, tmp_path / "f.safetensors")  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.safetensors"
    fp.save_safetensors({"a": np.ones(5000)}, path)
    good = path.read_bytes()
    for bad in (b"", good[:5], good[:3000], good[:-1], good + b"x", b"\xff" * 8 + good[8:]):
        path.write_bytes(bad)
        with pytest.raises(errors.CorruptCheckpointError):
            fp.load_safetensors(path)
    with pytest.raises(errors.CheckpointNotFoundError):
        fp.load_safetensors(tmp_path / "nowhere")
