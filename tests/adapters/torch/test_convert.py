"""fp-multi convert between PyTorch's forms and ours, compared bit for bit through PyTorch itself."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("typer", reason="needs the extra cli: pip install 'fp_multi[cli]'")

import torch.distributed.checkpoint as dcp  # noqa: E402
from conversions import CORRUPT, OK, OTHER, QUICK, convert, growth_mib  # noqa: E402
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # noqa: E402

import fp_multi as fp  # noqa: E402
import fp_multi.adapters.torch as adapter  # noqa: E402


def dcp_save(state: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False), no_dist=True)


def dcp_load(path: Path) -> dict[str, Any]:
    """Everything a directory holds, without a template."""
    state: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _load_state_dict(
            state, storage_reader=dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
        )
    return state


def of_all_dtypes(shells: bool = False) -> dict[str, Any]:
    tensors = {}
    for dtype in adapter._dtypes.ELEMENTS:
        name = str(dtype).removeprefix("torch.")
        shell = name.startswith("bits") or name.removeprefix("u") in {f"int{n}" for n in range(1, 8)}
        if shell and not shells:
            continue
        raw = torch.from_numpy(np.random.default_rng(3).integers(0, 256, 6 * dtype.itemsize, np.uint8))
        if dtype == torch.bool:
            raw = raw % 2
        tensors[name] = raw.view(dtype).view(2, 3)
    return tensors


def a_state() -> dict[str, Any]:
    big = torch.randn(300, 257)
    return {
        "model": {"w": big, "b": torch.randn(7, dtype=torch.float64), "bf16": torch.randn(3, 5).bfloat16()},
        "list": [torch.arange(5), {"deep": torch.zeros(())}, torch.zeros(0, 4)],
        "plain": {"lr": 0.1, "step": 3, "none": None, "name": "x", "betas": (0.9, 0.999), "big": 1 << 70},
        "raw": b"\0\xff",
        "size": torch.Size([2, 3]),
        "pair": (torch.ones(2), 1),
        "types": of_all_dtypes(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }


# torch.distributed.checkpoint


def test_dcp_to_ours_and_back(tmp_path: Path, same: Any) -> None:
    state = a_state()
    dcp_save(state, tmp_path / "dcp")
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert (done.exit_code, done.stderr) == (OK, ""), done.output
    fp.verify(tmp_path / "ours")
    same(adapter.load(tmp_path / "ours"), dcp_load(tmp_path / "dcp"))
    same(adapter.load(tmp_path / "ours"), state)

    done = convert(tmp_path / "ours", tmp_path / "back", "--to", "dcp")
    assert (done.exit_code, done.stderr) == (OK, ""), done.output
    assert done.stdout.count("\n") == 1
    same(dcp_load(tmp_path / "back"), state)
    template = {"model": {name: torch.empty_like(t) for name, t in state["model"].items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(template, checkpoint_id=tmp_path / "back", no_dist=True)
    same(template["model"], state["model"])
    assert {p.name for p in tmp_path.iterdir()} == {"dcp", "ours", "back"}


def test_dcp_without_flattening_is_a_flat_state(tmp_path: Path, same: Any) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    state = {"a.b": torch.arange(3), "c": torch.ones(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), planner=planner, no_dist=True)
    assert convert(tmp_path / "dcp", tmp_path / "ours").exit_code == OK
    same(adapter.load(tmp_path / "ours"), state)


def write_chunks(path: Path, name: str, tensor: Any, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """A directory as several ranks would have written it: a file for each chunk."""
    path.mkdir()
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    storage: dict[Any, Any] = {}
    chunks = []
    for rank, (start, length) in enumerate(boxes):
        part = tensor[tuple(slice(s, s + n) for s, n in zip(start, length, strict=True))].clone()
        file = path / f"__{rank}_0.distcp"
        torch.save(part, file)
        chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(length)))
        storage[MetadataIndex(name, start)] = _StorageInfo(file.name, 0, file.stat().st_size)
    entry = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), chunks)
    metadata = Metadata({name: entry}, planner_data={name: (name,)}, storage_data=storage)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


SPLITS = {
    "rows": [((0, 0), (3, 8)), ((3, 0), (3, 8)), ((6, 0), (1, 8))],
    "columns": [((0, 0), (7, 4)), ((0, 4), (7, 4))],
    "grid, out of order": [((4, 4), (3, 4)), ((0, 0), (4, 4)), ((4, 0), (3, 4)), ((0, 4), (4, 4))],
    "staircase": [((0, 0), (2, 4)), ((0, 4), (5, 4)), ((2, 0), (5, 4)), ((5, 4), (2, 4))],
    "one and an empty one": [((0, 0), (7, 8)), ((7, 0), (0, 8))],
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_chunks_of_many_ranks_are_put_together(tmp_path: Path, split: str, dtype: Any, same: Any) -> None:
    tensor = torch.randn(7, 8, dtype=torch.float64).to(dtype)
    write_chunks(tmp_path / "dcp", "w", tensor, SPLITS[split])
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert done.exit_code == OK, done.output
    same(adapter.load(tmp_path / "ours"), {"w": tensor})


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (3, 8)), ((4, 0), (3, 8))],
        [((0, 0), (3, 8)), ((2, 0), (5, 8))],
        [((0, 0), (7, 4))],
        [((0, 0), (4, 8)), ((2, 0), (3, 8)), ((5, 0), (2, 4))],
        [],
    ],
)
def test_chunks_that_do_not_tile_are_damage(tmp_path: Path, boxes: Any) -> None:
    write_chunks(tmp_path / "dcp", "w", torch.zeros(7, 8), boxes)
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert done.exit_code == CORRUPT
    assert done.stderr.startswith("fp-multi: w: its chunks do not tile the shape (7, 8)")
    assert [p.name for p in tmp_path.iterdir()] == ["dcp"]


def test_bytes_of_another_dtype_than_the_metadata_says(tmp_path: Path) -> None:
    write_chunks(tmp_path / "dcp", "w", torch.zeros(4), [((0,), (4,))])
    torch.save(torch.zeros(4, dtype=torch.bfloat16), tmp_path / "dcp" / "__0_0.distcp")
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    info.length = (tmp_path / "dcp" / "__0_0.distcp").stat().st_size
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert done.exit_code == CORRUPT
    assert "expected torch.float32 [4] as the metadata says, found torch.bfloat16 [4] (torch.strided)" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["dcp"]


def test_chunks_larger_than_their_items_are_damage(tmp_path: Path) -> None:
    write_chunks(tmp_path / "dcp", "w", torch.zeros(8), [((0,), (8,))])
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    entry = metadata.state_dict_metadata["w"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 50])
    file.write_bytes(pickle.dumps(metadata))
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert done.exit_code == CORRUPT
    assert "w has a chunk of" in done.stderr


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        import os

        return os.mkdir, (self.path,)


@pytest.mark.parametrize("place", ["all of it", "a dtype", "a key"])
def test_metadata_cannot_run_code(tmp_path: Path, place: str) -> None:
    dcp_save({"w": torch.zeros(2)}, tmp_path / "dcp")
    file = tmp_path / "dcp" / ".metadata"
    metadata: Any = pickle.loads(file.read_bytes())
    evil = Evil(tmp_path / "owned")
    if place == "all of it":
        metadata = evil
    elif place == "a dtype":
        metadata.state_dict_metadata["w"].size = evil
    else:
        metadata.planner_data = {"w": (evil,)}
    file.write_bytes(pickle.dumps(metadata))
    for option in ((), ("--allow-pickle",)):
        done = convert(tmp_path / "dcp", tmp_path / "ours", *option)
        assert done.exit_code == OTHER
        assert "it names posix.mkdir" in done.stderr
        assert done.stderr.count("\n") == 1
        assert [p.name for p in tmp_path.iterdir()] == ["dcp"]


def test_no_name_in_the_metadata_is_ever_called(tmp_path: Path) -> None:
    # Names that exist in torch, and dotted ones, lead nowhere either.
    for module, name in (("torch", "load"), ("torch", "hub.load"), ("builtins", "eval"), ("collections", "namedtuple")):
        code = f"c{module}\n{name}\n.".encode()
        (tmp_path / "dcp").mkdir(exist_ok=True)
        (tmp_path / "dcp" / ".metadata").write_bytes(code)
        done = convert(tmp_path / "dcp", tmp_path / "ours")
        assert done.exit_code == OTHER, (module, name)
        assert f"it names {module}.{name}" in done.stderr


@pytest.mark.parametrize("where", range(0, 400, 7))
def test_damaged_metadata_is_reported(tmp_path: Path, where: int) -> None:
    dcp_save({"w": torch.zeros(2), "n": 1}, tmp_path / "dcp")
    file = tmp_path / "dcp" / ".metadata"
    content = bytearray(file.read_bytes())
    content[where % len(content)] ^= 0x55
    file.write_bytes(content)
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    # A flipped bit of a number may still be a checkpoint; nothing else may happen than that or a line.
    assert done.exit_code in (OK, CORRUPT, OTHER)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == OK or done.stderr.count("\n") == 1


@pytest.mark.parametrize("keep", [0, 1, 100])
def test_cut_metadata_is_damage(tmp_path: Path, keep: int) -> None:
    dcp_save({"w": torch.zeros(2)}, tmp_path / "dcp")
    file = tmp_path / "dcp" / ".metadata"
    file.write_bytes(file.read_bytes()[:keep])
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert done.exit_code == CORRUPT
    assert done.stderr.startswith(f"fp-multi: {file}: not readable")


def test_missing_and_cut_data_files(tmp_path: Path) -> None:
    dcp_save({"w": torch.zeros(2000)}, tmp_path / "dcp")
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content[:-100])
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert done.exit_code == CORRUPT
    assert "is outside of" in done.stderr
    data.write_bytes(b"\0" * len(content))
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert done.exit_code == CORRUPT
    assert done.stderr.startswith("fp-multi: w (")
    data.unlink()
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert done.exit_code == CORRUPT
    assert "the file is missing" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["dcp"]


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "..", ""])
def test_metadata_cannot_name_files_elsewhere(tmp_path: Path, file: str) -> None:
    dcp_save({"w": torch.zeros(2)}, tmp_path / "dcp")
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    info.relative_path = file
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert done.exit_code == CORRUPT
    assert "names no file of the directory" in done.stderr


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("x",), "b": ("x",)},
        {"a": ("x",), "b": ("x", "y")},
        {"a": ("x", 0), "b": ("x", "y")},
        {"a": ("x", 10**12), "b": ("y",)},
        {"a": ("x", -1), "b": ("y",)},
        {"a": (), "b": ("y",)},
        {"a": (0,), "b": ("y",)},
        {"a": ("x", 1.5), "b": ("y",)},
    ],
)
def test_places_that_make_no_sense_are_damage(tmp_path: Path, paths: Any) -> None:
    dcp_save({"a": torch.zeros(2), "b": 1}, tmp_path / "dcp")
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = paths
    file.write_bytes(pickle.dumps(metadata))
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert done.exit_code == CORRUPT, done.output
    assert done.stderr.count("\n") == 1


def test_lists_keep_the_places_of_what_dcp_left_out(tmp_path: Path, same: Any) -> None:
    dcp_save({"l": [torch.ones(1), {}, {"x": 1}]}, tmp_path / "dcp")
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert done.exit_code == OK, done.output
    assert "places that DCP did not store became None (1): l[1]" in done.stdout
    same(adapter.load(tmp_path / "ours"), {"l": [torch.ones(1), None, {"x": 1}]})


def test_the_oldest_metadata_is_read(tmp_path: Path, same: Any) -> None:
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties

    write_chunks(tmp_path / "dcp", "w", torch.arange(4), [((0,), (4,))])
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["w"].properties = OldProperties(dtype=torch.int64)
    metadata.storage_meta = Path("/somewhere")
    metadata.planner_data = None
    file.write_bytes(pickle.dumps(metadata))
    assert convert(tmp_path / "dcp", tmp_path / "ours").exit_code == OK
    same(adapter.load(tmp_path / "ours"), {"w": torch.arange(4)})


class Custom:
    value = 3


def test_pickled_values_need_permission(tmp_path: Path) -> None:
    dcp_save({"w": torch.zeros(2), "it": Custom()}, tmp_path / "dcp")
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert done.exit_code == OTHER
    assert done.stderr.startswith("fp-multi: it (")
    assert "--allow-pickle" in done.stderr
    assert done.stderr.count("\n") == 1
    done = convert(tmp_path / "dcp", tmp_path / "ours", "--allow-pickle")
    assert done.exit_code == OK, done.output
    assert "pickles; loading them needs allow_pickle=True (1): it" in done.stdout
    assert adapter.load(tmp_path / "ours", allow_pickle=True)["it"].value == 3

    done = convert(tmp_path / "ours", tmp_path / "back", "--to", "dcp")
    assert done.exit_code == OTHER
    assert "it: this leaf is a pickled" in done.stderr
    assert convert(tmp_path / "ours", tmp_path / "back", "--to", "dcp", "--allow-pickle").exit_code == OK
    assert dcp_load(tmp_path / "back")["it"].value == 3


Pair = namedtuple("Pair", ("left", "right"))


def test_what_dcp_keeps_otherwise_is_told(tmp_path: Path, same: Any) -> None:
    w = torch.arange(4.0)
    model = OrderedDict(w=w, tied=w)
    model._metadata = {"version": 1}  # type: ignore[attr-defined]
    state = {
        "model": model,
        "optimizer": {0: {"m": torch.ones(2)}, 1: {"m": torch.zeros(2)}},
        "array": np.arange(3, dtype=">i2"),
        "pair": Pair(torch.ones(1), (Pair(1, 2),)),
        "empty": {},
        "param": torch.nn.Parameter(torch.ones(2)),
    }
    adapter.save(state, tmp_path / "ours", metadata={"run": "a"}, config=QUICK)
    done = convert(tmp_path / "ours", tmp_path / "dcp", "--to", "dcp")
    assert done.exit_code == OK, done.output
    lines = set(done.stdout.splitlines()[1:])
    assert lines == {
        "NumPy arrays became tensors (1): array",
        "parameters became plain tensors (1): param",
        "tied tensors were stored once more (1): model.tied",
        "attributes of an OrderedDict left out (1): model",
        "integer keys became strings (2): optimizer[0], optimizer[1]",
        "named tuples became plain tuples (2): pair, pair.right[0]",
        "empty dicts left out (1): empty",
        "metadata left out (1): run",
    }
    expected = {
        "model": {"w": w, "tied": w},
        "optimizer": {"0": {"m": torch.ones(2)}, "1": {"m": torch.zeros(2)}},
        "array": torch.arange(3, dtype=torch.int16),
        "pair": (torch.ones(1), ((1, 2),)),
        "param": torch.ones(2),
    }
    same(dcp_load(tmp_path / "dcp"), expected)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": {(1, 2): torch.ones(1)}}, "a['(1, 2)']"),
        ({"a": {1: torch.ones(1), "1": torch.ones(1)}}, "a['1']"),
        ([torch.ones(1)], "<root>"),
        ({"t": {"when": np.zeros(2, "M8[s]")}}, "t.when"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "a.b"),
        ({"t": [torch.zeros(2, dtype=torch.uint8).view(torch.bits8)]}, "t[0]"),
    ],
)
def test_what_dcp_cannot_hold_is_refused_by_path(tmp_path: Path, state: Any, place: str) -> None:
    adapter.save(state, tmp_path / "ours", config=QUICK)
    done = convert(tmp_path / "ours", tmp_path / "dcp", "--to", "dcp")
    assert done.exit_code == OTHER, done.output
    assert done.stderr.startswith(f"fp-multi: {place}")
    assert done.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]


def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter.save({"w": torch.zeros(1000)}, tmp_path / "ours", config=QUICK)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    for target in (("dcp", "--to", "dcp"), ("x.pt",)):
        done = convert(tmp_path / "ours", tmp_path / target[0], *target[1:])
        assert done.exit_code == OTHER
        assert "No space left" in done.stderr
        assert done.stderr.count("\n") == 1
        assert [p.name for p in tmp_path.iterdir()] == ["ours"]


def test_damage_found_while_writing_dcp(tmp_path: Path) -> None:
    adapter.save({"a": torch.zeros(5000), "b": torch.ones(5000)}, tmp_path / "ours", config=QUICK)
    piece = fp.read_manifest(tmp_path / "ours").tensors[1].pieces[0]
    with open(tmp_path / "ours" / "shard-00000-of-00001.safetensors", "r+b") as file:
        file.seek(piece.offset)
        file.write(b"\7")
    done = convert(tmp_path / "ours", tmp_path / "dcp", "--to", "dcp")
    assert done.exit_code == CORRUPT
    assert "tensor 'b', chunk 0" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]


def test_overwriting_replaces_only_its_own_kind(tmp_path: Path, same: Any) -> None:
    adapter.save({"w": torch.ones(3)}, tmp_path / "ours", config=QUICK)
    dcp_save({"old": torch.zeros(2), "older": torch.zeros(3)}, tmp_path / "dcp")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    done = convert(tmp_path / "ours", tmp_path / "dcp", "--to", "dcp")
    assert done.exit_code == OTHER
    assert "--overwrite" in done.stderr
    done = convert(tmp_path / "ours", tmp_path / "home", "--to", "dcp", "--overwrite")
    assert done.exit_code == OTHER
    assert "nothing is replaced" in done.stderr
    assert (tmp_path / "home" / "letter").exists()
    assert convert(tmp_path / "ours", tmp_path / "dcp", "--to", "dcp", "--overwrite").exit_code == OK
    same(dcp_load(tmp_path / "dcp"), {"w": torch.ones(3)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp", "home", "ours"]


_RANKS = """
import os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=int(sys.argv[2]), world_size=2)
mesh = DeviceMesh("cpu", [0, 1])
whole = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)
places = {"rows": [Shard(0)], "columns": [Shard(1)], "replicated": [Replicate()]}
state = {"d": {n: distribute_tensor(whole, mesh, p) for n, p in places.items()}, "plain": whole, "n": {"step": 3}}
dcp.save(state, checkpoint_id=f"{sys.argv[1]}/dcp")
dist.barrier()
os._exit(0)  # gloo may abort while it is taken down
"""


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks(tmp_path: Path, same: Any) -> None:
    ranks = [subprocess.Popen([sys.executable, "-c", _RANKS, tmp_path, str(rank)]) for rank in range(2)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    done = convert(tmp_path / "dcp", tmp_path / "ours")
    assert done.exit_code == OK, done.output
    whole = torch.arange(7 * 10, dtype=torch.float32).reshape(7, 10)
    loaded = adapter.load(tmp_path / "ours")
    same(loaded["d"], dict.fromkeys(loaded["d"], whole))
    assert loaded["d"].keys() == {"rows", "columns", "replicated"}
    same(loaded["plain"], whole)
    assert loaded["n"] == {"step": 3}


# .pt


def test_pt_to_ours_and_back(tmp_path: Path, same: Any) -> None:
    w = torch.randn(500, 300)
    state = {
        **a_state(),
        "tied": [w, w, w.view(300, 500)],
        "transposed": w.t(),
        "param": torch.nn.Parameter(torch.randn(200, 200)),
        3: {"int": torch.ones(1)},
    }
    torch.save(state, tmp_path / "a.pt")
    done = convert(tmp_path / "a.pt", tmp_path / "ours")
    assert (done.exit_code, done.stderr) == (OK, ""), done.output
    fp.verify(tmp_path / "ours")
    loaded = adapter.load(tmp_path / "ours")
    same(loaded, state)
    assert loaded["tied"][0] is loaded["tied"][1]
    assert convert(tmp_path / "ours", tmp_path / "b.pt").exit_code == OK
    same(torch.load(tmp_path / "b.pt"), state)


def test_the_old_form_of_pt_files(tmp_path: Path, same: Any) -> None:
    state = {"w": torch.randn(300, 300), "n": 1}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert convert(tmp_path / "a.pt", tmp_path / "ours").exit_code == OK
    same(adapter.load(tmp_path / "ours"), state)


def test_a_pt_file_within_itself(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(1), "l": []}
    state["l"].append(state["l"])
    torch.save(state, tmp_path / "a.pt")
    done = convert(tmp_path / "a.pt", tmp_path / "ours")
    assert done.exit_code == OTHER
    assert "within itself" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_pt_with_pickles_needs_permission(tmp_path: Path) -> None:
    torch.save({"it": Custom(), "w": torch.ones(2)}, tmp_path / "a.pt")
    done = convert(tmp_path / "a.pt", tmp_path / "ours")
    assert done.exit_code == OTHER
    assert "weights_only=True" in done.stderr
    assert "--allow-pickle" in done.stderr
    assert done.stderr.count("\n") == 1
    assert convert(tmp_path / "a.pt", tmp_path / "ours", "--allow-pickle").exit_code == OK
    assert adapter.load(tmp_path / "ours", allow_pickle=True)["it"].value == 3


def test_named_tuples_are_plain_in_a_pt_file(tmp_path: Path, same: Any) -> None:
    adapter.save({"pair": Pair(torch.ones(2), 3)}, tmp_path / "ours", config=QUICK)
    done = convert(tmp_path / "ours", tmp_path / "a.pt")
    assert done.exit_code == OK, done.output
    assert "named tuples became plain tuples (1): pair" in done.stdout
    same(torch.load(tmp_path / "a.pt"), {"pair": (torch.ones(2), 3)})


# memory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "to", "bound_mib"), [("dcp", "fp_multi", 64), ("pt", "fp_multi", 48), ("ours", "dcp", 128)]
)
def test_peak_memory_is_bounded(tmp_path: Path, source: str, to: str, bound_mib: int) -> None:
    state = {f"t{i}": torch.full((10, 1 << 18), float(i)) for i in range(20)}  # 200 MiB in 20 tensors
    paths = {"dcp": tmp_path / "big", "pt": tmp_path / "big.pt", "ours": tmp_path / "big_ours"}
    small = tmp_path / "small"
    dcp_save({"t": torch.zeros(10, 1 << 18)}, small)
    if source == "dcp":
        dcp_save(state, paths["dcp"])
    elif source == "pt":
        torch.save(state, paths["pt"])
    else:
        adapter.save(state, paths["ours"], config=QUICK)
    imports = ("torch.distributed.checkpoint", "fp_multi.adapters.torch.convert")
    assert growth_mib(paths[source], tmp_path / "target", small, to, *imports) < bound_mib
