"""What code that was written for FileSystemWriter and FileSystemReader finds in their place."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.staging import AsyncStager  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys  # noqa: E402

import fp_multi as fp  # noqa: E402
from fp_multi.adapters.torch.dcp import StorageReader, StorageWriter  # noqa: E402


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def _instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """dcp.save and dcp.load without a storage object, and torch's converters, take ours."""
    for module in (_storage_utils, format_utils):
        monkeypatch.setattr(module, "FileSystemWriter", StorageWriter)
        monkeypatch.setattr(module, "FileSystemReader", StorageReader)


class Extension:
    """Stands for a StreamTransformExtension."""


def test_arguments(tmp_path: Path) -> None:
    writer = StorageWriter(
        tmp_path / "c", False, False, 2, 1000, True, False, None, filesystem.SerializationFormat.SAFETENSORS
    )
    assert writer.path == tmp_path / "c"
    assert (writer.single_file_per_rank, writer.sync_files, writer.thread_count) == (False, False, 2)
    assert (writer.per_thread_copy_ahead, writer.overwrite) == (1000, False)
    assert isinstance(writer, AsyncStager)  # dcp.async_save without a stager asks the writer
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    found = {"w": torch.zeros(3)}
    dcp.load(found, storage_reader=StorageReader(path=tmp_path / "c", _extension_registry=object()))
    assert torch.equal(found["w"], torch.ones(3))
    with pytest.warns(UserWarning, match="not applied: Extension"):
        StorageWriter(tmp_path, _extensions=[Extension()])


def test_storage_meta(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c")
    first = writer.save_id
    saved = dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c", storage_writer=writer)
    assert writer.save_id != first  # every save has its own
    reader = StorageReader(tmp_path / "c")
    found = reader.read_metadata()
    assert (found.storage_meta.save_id, found.storage_meta.load_id) == (writer.save_id, reader.load_id)
    assert str(found.storage_meta.checkpoint_id) == str(tmp_path / "c")
    assert found.version == saved.version == filesystem.CURRENT_DCP_VERSION
    # What DCP did not save has no save_id.
    fp.save({"a": 1}, tmp_path / "other")
    assert StorageReader(tmp_path / "other").read_metadata().storage_meta.save_id is None


class Loss:
    """Keeps its history in a stream, as some training loops do."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        stream = io.BytesIO()
        torch.save(self.values, stream)
        return {"values": stream}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        stream = state["values"]
        assert stream.tell() == len(stream.getvalue())  # where it stood
        stream.seek(0)
        self.values = torch.load(stream)


def test_streams(tmp_path: Path) -> None:
    dcp.save(
        {"loss": Loss([0.5, 0.25]), "empty": io.BytesIO(), "bytes": b"x"},
        checkpoint_id=tmp_path / "c",
        storage_writer=StorageWriter(),
    )
    loss, found = Loss([]), {"empty": None, "bytes": None}
    dcp.load({"loss": loss}, checkpoint_id=tmp_path / "c", storage_reader=StorageReader())
    dcp.load(found, checkpoint_id=tmp_path / "c", storage_reader=StorageReader())
    assert loss.values == [0.5, 0.25]
    assert isinstance(found["empty"], io.BytesIO)
    assert found["bytes"] == b"x"
    # For everybody else it is a byte string.
    loaded = fp.load(tmp_path / "c")
    assert torch.load(io.BytesIO(loaded["loss"]["values"])) == [0.5, 0.25]
    assert loaded["empty"] == b""
    # Inside of a value it has no such form.
    with pytest.raises(CheckpointException, match=r"cannot store a value of type _io\.BytesIO"):
        dcp.save({"pair": (1, io.BytesIO())}, checkpoint_id=tmp_path / "d", storage_writer=StorageWriter())


@pytest.mark.usefixtures("_instead")
def test_converters_of_torch(tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(3, 5).state_dict(), "step": 3, "list": [1, "x"]}
    torch.save(state, tmp_path / "a.pt")
    (tmp_path / "c").mkdir()
    os.link(tmp_path / "a.pt", tmp_path / "c" / "beside.pt")
    format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "c")
    fp.verify(tmp_path / "c")
    format_utils.dcp_to_torch_save(tmp_path / "c", tmp_path / "c" / "b.pt")
    found = torch.load(tmp_path / "c" / "b.pt")
    assert torch.equal(found["model"]["weight"], state["model"]["weight"])
    assert (found["step"], found["list"]) == (3, [1, "x"])
    assert (tmp_path / "c" / "beside.pt").exists()


@pytest.mark.usefixtures("_instead")
def test_chosen_by_path(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    for step in (1, 2):
        dcp.save({"model": {"w": torch.full((4,), float(step))}, "step": step}, checkpoint_id=path)
    found = _load_state_dict_from_keys("model", checkpoint_id=path)
    assert torch.equal(found["model"]["w"], torch.full((4,), 2.0))
    with pytest.raises(RuntimeError, match="Cannot detect"):
        dcp.save({}, checkpoint_id="abc://c")
    dcp.save({}, checkpoint_id=path)  # nothing at all
    dcp.load({}, checkpoint_id=path)
    with pytest.raises(CheckpointException, match="Missing key"):
        dcp.load({"step": None}, checkpoint_id=path)


def test_deprecated_names(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "step": 1}
    dcp.save_state_dict(state, StorageWriter(tmp_path / "c"), no_dist=True)
    found = {"w": torch.zeros(2, 3), "step": 0}
    dcp.load_state_dict(found, StorageReader(tmp_path / "c"), no_dist=True)
    assert torch.equal(found["w"], state["w"])
    assert found["step"] == 1
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({"w": torch.zeros(3, 3)}, storage_reader=StorageReader(tmp_path / "c"))
