"""What conversions have in common: streamed tensors, recognizing formats, commits of foreign directories, the bar."""

from __future__ import annotations

import errno
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import assert_same, hidden_names, injected, random_bytes

import fp_multi as fp
from fp_multi import _engine
from fp_multi._commit_tree import TreeCommit
from fp_multi._streamed import StreamedTensor

pytest.importorskip("typer", reason="needs the extra cli: pip install 'fp_multi[cli]'")
pytest.importorskip("rich", reason="needs the extra cli: pip install 'fp_multi[cli]'")

from conversions import CORRUPT, OK, OTHER, QUICK, convert

from fp_multi._cli_formats import DCP, ORBAX, OURS, recognize

# streamed tensors


@pytest.mark.parametrize("block_bytes", [64 << 10, 1 << 20])
@pytest.mark.parametrize("edges", [[0, 1, 100_000, 3_000_000], [0, 3_000_000], [*range(0, 3_000_000, 999), 3_000_000]])
def test_every_band_is_read_once_in_order(tmp_path: Path, block_bytes: int, edges: list[int]) -> None:
    data = random_bytes(3_000_000)
    asked: list[int] = []
    moved: list[int] = []

    def read(number: int) -> Any:
        asked.append(number)
        return data[edges[number] : edges[number + 1]].copy()

    leaf = StreamedTensor("uint8", (3, 1_000_000), edges, read, moved=moved.append)
    config = fp.SaveConfig(durable=False, block_bytes=block_bytes)
    fp.save({"a": np.arange(3), "s": leaf, "again": leaf, "z": np.ones(5)}, tmp_path / "c", config=config)
    assert asked == list(range(len(edges) - 1))
    assert sum(moved) == data.nbytes
    loaded = fp.load(tmp_path / "c")
    assert_same(loaded["s"], data.reshape(3, 1_000_000))
    assert loaded["again"] is loaded["s"]
    fp.verify(tmp_path / "c")


def test_streamed_tensors_of_no_bytes_and_of_other_kinds(tmp_path: Path) -> None:
    empty = StreamedTensor("float32", (0, 3), [0], lambda _: np.empty(0, np.uint8))
    scalar = StreamedTensor("int16", (), [0, 2], lambda _: np.array([1, 2], np.uint8), kind="numpy.scalar")
    fp.save({"empty": empty, "scalar": scalar}, tmp_path / "c", config=QUICK)
    assert_same(fp.load(tmp_path / "c"), {"empty": np.zeros((0, 3), np.float32), "scalar": np.int16(0x201)})


def test_a_band_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(_: int) -> Any:
        raise OSError(5, "broken")

    def short(_: int) -> Any:
        return np.zeros(3, np.uint8)

    for read, text in ((fail, "broken"), (short, "expected 4 bytes, found 3")):
        leaf = StreamedTensor("uint8", (4,), [0, 4], read)
        with pytest.raises((OSError, fp.FpMultiError), match=text):
            fp.save({"x": np.ones(100_000), "leaf": leaf}, tmp_path / "c", config=QUICK)
        assert not list(tmp_path.iterdir())


# which format


def test_formats_are_recognized_by_their_marks(tmp_path: Path) -> None:
    fp.save({"w": np.ones(2)}, tmp_path / "ours", config=QUICK)
    assert recognize(tmp_path / "ours") == (OURS, tmp_path / "ours")
    for mark in (".metadata", "_METADATA"):  # written through our own adapters
        (tmp_path / "ours" / mark).touch()
    assert recognize(tmp_path / "ours") == (OURS, tmp_path / "ours")

    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    (tmp_path / "dcp" / "manifest.json").write_text("{}")  # somebody else's
    assert recognize(tmp_path / "dcp") == (DCP, tmp_path / "dcp")

    for item in (".", "default", "state", "params"):
        step = tmp_path / f"step_{item.strip('.')}"
        (step / item).mkdir(parents=True)
        (step / item / "_METADATA").touch()
        assert recognize(step) == (ORBAX, step / item)
    (step / "extra").mkdir()
    (step / "extra" / "_METADATA").touch()
    with pytest.raises(fp.errors.ConfigError, match=r"several checkpoints \(extra, params\); name one"):
        recognize(step)


def test_a_directory_of_nothing_is_told_so(tmp_path: Path) -> None:
    done = convert(tmp_path, tmp_path / "x")
    assert done.exit_code == OTHER
    assert "neither manifest.json (fp_multi), nor .metadata (DCP), nor _METADATA (Orbax)" in done.stderr
    (tmp_path / "__0.metadata").touch()
    done = convert(tmp_path, tmp_path / "x")
    assert done.exit_code == OTHER
    assert "use_collectives=False" in done.stderr
    assert done.stderr.count("\n") == 1


def test_directions_that_are_none(tmp_path: Path) -> None:
    fp.save({"w": np.ones(2)}, tmp_path / "ours", config=QUICK)
    fp.save_safetensors({"w": np.ones(2)}, tmp_path / "a.safetensors", config=QUICK)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    for args, text in (
        (("ours", "x", "--to", "fp_multi"), "ours already"),
        (("ours", "x", "--to", "npz"), "npz"),
        (("ours", "x"), "--to dcp or --to orbax"),
        (("dcp", "x", "--to", "orbax"), "one of the two must be a checkpoint of ours"),
        (("dcp", "x.pt"), "one of the two must be a checkpoint of ours"),
        (("a.safetensors", "x", "--to", "dcp"), "one of the two must be a checkpoint of ours"),
        (("a.safetensors", "x.pt"), "both files"),
    ):
        done = convert(*(tmp_path / arg if i < 2 else arg for i, arg in enumerate(args)))
        assert done.exit_code == OTHER, args
        assert text in done.stderr, args
    assert {p.name for p in tmp_path.iterdir()} == {"ours", "a.safetensors", "dcp"}


@pytest.mark.parametrize(("module", "to"), [("orbax", "orbax"), ("torch", "dcp")])
def test_a_missing_framework_is_told_in_one_line(tmp_path: Path, module: str, to: str) -> None:
    fp.save({"w": np.ones(2)}, tmp_path / "ours", config=QUICK)
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError('no {module}', name='{module}')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "from fp_multi.cli import main; main()", "convert", "ours", "x", "--to", to],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == OTHER
    assert f"pip install 'fp_multi[{module}]'" in done.stderr
    assert done.stderr.count("\n") == 1


# directories of other software


def fill(directory: str, text: str) -> None:
    os.makedirs(os.path.join(directory, "inner"))
    Path(directory, "inner", "file").write_text(text)


def test_a_tree_appears_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "a [1] name" / "tree"
    with TreeCommit(target, fp.SaveConfig(), replaceable=None, nbytes=10) as work:
        fill(work.path, "new")
        assert not target.exists()
        work.publish()
    assert (target / "inner" / "file").read_text() == "new"
    assert os.listdir(target.parent) == ["tree"]


@pytest.fixture(params=[True, False], ids=["exchange", "two steps"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A file system with renameat2's flags, and one without."""
    real = _engine.rename

    def no_flags(source: str, target: str, mode: int = 0) -> int:
        return errno.EINVAL if mode else real(source, target)

    if not request.param:
        monkeypatch.setattr(_engine, "rename", no_flags)
    return bool(request.param)


def test_a_tree_is_replaced_only_if_it_may_be(tmp_path: Path, exchange: bool) -> None:
    target = tmp_path / "tree"
    fill(str(target), "old")
    with pytest.raises(fp.errors.CheckpointExistsError, match="nothing is replaced"):
        TreeCommit(target, QUICK, replaceable=None, nbytes=0).__enter__()
    with pytest.raises(fp.errors.CheckpointExistsError, match="nothing is replaced"):
        TreeCommit(target, QUICK, replaceable=lambda path: False, nbytes=0).__enter__()
    with TreeCommit(target, fp.SaveConfig(), replaceable=lambda path: True, nbytes=0) as work:
        fill(work.path, "new")
        work.publish()
    assert (target / "inner" / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["tree"]


def test_an_empty_directory_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    with TreeCommit(tmp_path / "tree", fp.SaveConfig(), replaceable=None, nbytes=0) as work:
        fill(work.path, "new")
        work.publish()
    assert (tmp_path / "tree" / "inner" / "file").exists()
    assert os.listdir(tmp_path) == ["tree"]


def test_a_flush_that_fails_puts_back_what_was_there(tmp_path: Path, exchange: bool) -> None:
    target = tmp_path / "tree"
    for old in (None, "old"):
        if old:
            fill(str(target), old)
        with TreeCommit(target, fp.SaveConfig(), replaceable=lambda path: True, nbytes=0) as work:
            fill(work.path, "new")
            # file, inner, tree, and the parent last
            with injected("fsync", at=4, error=errno.EIO), pytest.raises(fp.errors.StorageError):
                work.publish()
        assert os.listdir(tmp_path) == ([] if old is None else ["tree"])
    assert (target / "inner" / "file").read_text() == "old"


def test_a_tree_whose_swap_is_interrupted_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an exchange there is a moment with nothing under the name; the next save puts the old one back."""
    fill(str(tmp_path / "tree"), "old")
    real = _engine.rename

    def stopped(source: str, target: str, mode: int = 0) -> int:
        if mode:
            return errno.EINVAL
        return real(source, target) if "-old-" in target else errno.EIO  # nor is there a way back, as after a kill

    monkeypatch.setattr(_engine, "rename", stopped)
    with TreeCommit(tmp_path / "tree", QUICK, replaceable=lambda path: True, nbytes=0) as work:
        fill(work.path, "new")
        with pytest.raises(fp.errors.StorageError):
            work.publish()
    monkeypatch.undo()
    assert not (tmp_path / "tree").exists()
    with pytest.raises(fp.errors.CheckpointExistsError):
        TreeCommit(tmp_path / "tree", QUICK, replaceable=None, nbytes=0).__enter__()
    assert (tmp_path / "tree" / "inner" / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["tree"]


def test_a_tree_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with TreeCommit(tmp_path / "tree", fp.SaveConfig(), replaceable=None, nbytes=0) as work:
        fill(work.path, "new")
    assert not list(tmp_path.iterdir())
    with pytest.raises(fp.errors.NoSpaceError):
        TreeCommit(tmp_path / "tree", fp.SaveConfig(), replaceable=None, nbytes=1 << 60).__enter__()
    assert not list(tmp_path.iterdir())


# safetensors


def test_safetensors_files_go_through_in_bands(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        "big": random_bytes(20 << 20).view(np.float32).reshape(-1, 1024),
        "empty": np.zeros((0, 2), np.int8),
        "half": np.arange(7, dtype=np.uint16).view(fp.numpy_dtype("bfloat16")),
        "one": np.array(3.5),
    }
    fp.save_safetensors(tensors, tmp_path / "a.safetensors", config=QUICK)
    assert convert(tmp_path / "a.safetensors", tmp_path / "ours").exit_code == OK
    fp.verify(tmp_path / "ours")
    loaded = fp.load(tmp_path / "ours")
    for name, tensor in tensors.items():
        assert_same(loaded[name], tensor)
    assert convert(tmp_path / "ours", tmp_path / "b.safetensors").exit_code == OK
    back = fp.load_safetensors(tmp_path / "b.safetensors")
    assert list(back) == list(fp.load_safetensors(tmp_path / "a.safetensors"))
    for name, tensor in tensors.items():
        assert_same(back[name], tensor)


def test_damage_in_a_checkpoint_is_found_on_the_way(tmp_path: Path) -> None:
    fp.save({"a": np.ones(10), "w": np.zeros(5000)}, tmp_path / "ours", config=QUICK)
    piece = fp.read_manifest(tmp_path / "ours").tensors[1].pieces[0]
    with open(tmp_path / "ours" / "shard-00000-of-00001.safetensors", "r+b") as file:
        file.seek(piece.offset)
        file.write(b"\7")
    done = convert(tmp_path / "ours", tmp_path / "x.safetensors")
    assert done.exit_code == CORRUPT
    assert "tensor 'w', chunk 0" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]


def test_a_cut_safetensors_file_leaves_nothing(tmp_path: Path) -> None:
    fp.save_safetensors({"w": np.ones(100_000)}, tmp_path / "a.safetensors", config=QUICK)
    os.truncate(tmp_path / "a.safetensors", 100_000)
    done = convert(tmp_path / "a.safetensors", tmp_path / "ours")
    assert done.exit_code == CORRUPT
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    assert not hidden_names(tmp_path)


# the bar


def test_a_conversion_shows_a_bar_on_a_terminal(tmp_path: Path) -> None:
    fp.save({"w": np.ones(10_000)}, tmp_path / "ours", config=QUICK)
    master, slave = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", "from fp_multi.cli import main; main()", "convert", "ours", "x.safetensors"],
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(slave)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert done.returncode == OK
    assert "convert ours" in shown
    assert "80.0/80.0 kB" in shown
    assert "\x1b" not in done.stdout
