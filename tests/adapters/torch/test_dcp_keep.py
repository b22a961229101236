"""What else lies in the directory that dcp.save goes to."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from multiprocess import die, run_plain  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

import fp_multi as fp  # noqa: E402
from fp_multi import _engine  # noqa: E402
from fp_multi.adapters.torch import _dcp_keep  # noqa: E402
from fp_multi.adapters.torch._dcp_keep import Keeper  # noqa: E402
from fp_multi.adapters.torch.dcp import StorageReader, StorageWriter  # noqa: E402

NUMBERS = torch.arange(1000.0)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    _engine.clear_faults()


def save(path: Path, step: int = 1, **how: Any) -> None:
    planner = how.pop("planner", None)
    writer = StorageWriter(config=fp.SaveConfig(durable=False), **how)
    dcp.save({"w": NUMBERS + step, "step": step}, checkpoint_id=path, storage_writer=writer, planner=planner)


def step_of(path: Path) -> int:
    found = {"w": torch.zeros(1000), "step": 0}
    dcp.load(found, checkpoint_id=path, storage_reader=StorageReader())
    assert torch.equal(found["w"], NUMBERS + found["step"])
    return found["step"]


def hidden_in(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".")]


def test_other_files_stay(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o750)
    path.chmod(0o750)
    (path / "config.json").write_text("{}")
    (path / "link").symlink_to("nowhere")
    with (path / "log").open("a") as log:
        log.write("before\n")
        log.flush()
        before = (path / "log").stat()
        for step in (1, 2):
            save(path, step)
            assert step_of(path) == step
        log.write("after\n")
    assert os.path.samestat((path / "log").stat(), before)
    assert (path / "log").read_text() == "before\nafter\n"
    assert (path / "config.json").read_text() == "{}"
    assert os.readlink(path / "link") == "nowhere"
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert sorted(os.listdir(path)) == sorted(["config.json", "link", "log", "manifest.json", *shards_of(path)])
    assert not hidden_in(tmp_path)
    fp.verify(path)


def shards_of(path: Path) -> list[str]:
    return [shard.file for shard in fp.read_manifest(path).shards]


def test_nothing_of_the_old_checkpoint_stays(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(path)
    (path / "shard-00007-of-00008.safetensors").write_bytes(b"of a checkpoint of more ranks")
    save(path, 2)
    assert sorted(os.listdir(path)) == ["manifest.json", *shards_of(path)]


class Meanwhile(dcp.DefaultSavePlanner):
    """Somebody puts a file into the directory while the checkpoint is written beside it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def finish_plan(self, new_plan: Any) -> Any:
        (self._path / "meanwhile").write_text("new")
        return super().finish_plan(new_plan)


def test_files_that_come_meanwhile_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    save(path)
    save(path, 2, planner=Meanwhile(path))
    assert (path / "meanwhile").read_text() == "new"
    linked = Keeper.keep

    def then_another(this: Keeper, directory: str, new: str, *, is_early: bool = False) -> bool:
        found = linked(this, directory, new, is_early=is_early)
        if not is_early and directory == str(path):
            (path / "last").write_text("after the links, before the rename")
            (path / "other").write_text("newer")
            (path / "other").rename(path / "meanwhile")
        return found

    monkeypatch.setattr(Keeper, "keep", then_another)
    save(path, 3)
    assert step_of(path) == 3
    assert (path / "last").read_text() == "after the links, before the rename"
    assert (path / "meanwhile").read_text() == "newer"
    assert not (path / "other").exists()
    assert not hidden_in(tmp_path)


@pytest.mark.parametrize("name", [".metadata", "__0.metadata", "__3_1.distcp"])
def test_a_checkpoint_of_dcp_is_not_mixed_up(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointException, match="a checkpoint of DCP's own storage"):
        save(tmp_path)
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("is_there", [False, True])
def test_other_directories_are_refused(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "run"
    if is_there:
        save(path)
    save(path / "step_1", 5)
    with pytest.raises(CheckpointException, match=r"holds other directories \(step_1\)"):
        save(path, 2)
    assert step_of(path / "step_1") == 5
    assert not is_there or step_of(path) == 1
    assert not hidden_in(tmp_path)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    with pytest.raises(CheckpointException, match="is no directory"):
        save(tmp_path / "f")
    assert (tmp_path / "f").read_text() == "mine"


def test_a_name_that_the_checkpoint_needs(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.mkdir()
    (path / "shard-00000-of-00001.safetensors").write_text("mine")
    with pytest.raises(CheckpointException, match="is in the way"):
        save(path)
    assert os.listdir(path) == ["shard-00000-of-00001.safetensors"]
    assert not hidden_in(tmp_path)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("at", [1, 2])  # where nothing may be replaced, and then with an exchange
def test_a_failed_rename_changes_nothing(tmp_path: Path, first: bool, at: int) -> None:
    path = tmp_path / "c"
    path.mkdir()
    if not first:
        save(path)
    (path / "mine").write_text("mine")
    there = sorted(os.listdir(path))
    _engine.inject_fault("rename", at=at, error=errno.EIO)
    with pytest.raises(CheckpointException, match="Input/output error"):
        save(path, 2)
    _engine.clear_faults()
    assert sorted(os.listdir(path)) == there
    assert (path / "mine").read_text() == "mine"
    assert first or step_of(path) == 1
    assert not hidden_in(tmp_path)


class Unreached(dcp.DefaultSavePlanner):
    """Not to be asked for data."""

    def resolve_data(self, write_item: Any) -> Any:
        raise AssertionError("something was written")


def test_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found out before anything is written."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine").write_text("mine")

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(CheckpointException, match="it could not stay"):
        save(tmp_path / "c", planner=Unreached())
    assert os.listdir(tmp_path / "c") == ["mine"]
    assert not hidden_in(tmp_path)


# What others do between the three times that the files are linked


def between(monkeypatch: pytest.MonkeyPatch, moment: str, act: Callable[[Path], None]) -> None:
    """Do something in the directory after it was linked: before anything is written, or before or after the rename."""
    linked = Keeper.keep
    calls: list[str] = []

    def acting(this: Keeper, directory: str, new: str, *, is_early: bool = False) -> bool:
        calls.append(new)
        if (moment, len(calls)) == ("after the rename", 3):
            act(Path(new))
        found = linked(this, directory, new, is_early=is_early)
        if (moment, len(calls)) in (("at the beginning", 1), ("before the rename", 2)):
            act(Path(directory))
        return found

    monkeypatch.setattr(Keeper, "keep", acting)


MOMENTS = ["at the beginning", "before the rename", "after the rename"]


@pytest.fixture
def three(tmp_path: Path) -> Path:
    path = tmp_path / "c"
    save(path)
    for name in ("changed", "gone", "stays"):
        (path / name).write_text("old")
    return path


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_others_change_meanwhile(three: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(directory: Path) -> None:
        (directory / "other").write_text("new")
        (directory / "other").rename(directory / "changed")
        (directory / "gone").unlink()
        (directory / "came").write_text("new")

    between(monkeypatch, moment, act)
    save(three, 2)
    assert step_of(three) == 2
    mine = {name: (three / name).read_text() for name in os.listdir(three) if "shard-" not in name}
    del mine["manifest.json"]
    assert mine == {"changed": "new", "came": "new", "stays": "old"}
    assert not hidden_in(three.parent)


def test_what_both_have_changed(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the rename and after it: what was done last counts."""

    def put(directory: Path, text: str) -> None:
        for name in ("changed", "gone", "came"):
            (directory / "other").write_text(text)
            (directory / "other").rename(directory / name)

    between(monkeypatch, "before the rename", lambda directory: put(directory, "first"))

    def put_last(directory: Path) -> None:
        put(directory, "last")
        (directory / "gone").unlink()

    between(monkeypatch, "after the rename", put_last)
    save(three, 2)
    assert (three / "changed").read_text() == (three / "came").read_text() == "last"
    assert not (three / "gone").exists()


def test_a_file_is_there_at_every_moment(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(directory: Path) -> None:
        (directory / "other").write_text("new")
        (directory / "other").rename(directory / "changed")

    between(monkeypatch, "before the rename", act)
    replace, seen = os.replace, []

    def looking(old: str, new: str) -> None:
        seen.append((three / "changed").read_text())
        replace(old, new)
        seen.append((three / "changed").read_text())

    monkeypatch.setattr(_dcp_keep.os, "replace", looking)
    save(three, 2)
    assert seen == ["old", "new"]
    assert not [name for name in os.listdir(three) if name.startswith(".")]


def test_a_directory_that_is_removed_meanwhile(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    between(monkeypatch, "at the beginning", shutil.rmtree)
    save(three, 2)
    assert sorted(os.listdir(three)) == ["manifest.json", *shards_of(three)]


def test_what_a_checkpoint_may_need_is_not_written_through(tmp_path: Path) -> None:
    """A file with a name like a shard's that no shard has stays as it is, too."""
    path = tmp_path / "c"
    path.mkdir()
    (path / "shard-00003-of-00004.safetensors").write_text("mine")
    save(path)
    assert (path / "shard-00003-of-00004.safetensors").read_text() == "mine"
    assert step_of(path) == 1


def test_what_nfs_keeps_is_left_behind(three: Path) -> None:
    (three / ".nfs000000000001a2b300000001").write_text("removed, but open")
    save(three, 2)
    assert not [name for name in os.listdir(three) if name.startswith(".")]


def test_permissions_that_cannot_be_given(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(_dcp_keep.os, "chmod", refused)
    monkeypatch.setattr(_dcp_keep.os, "chown", refused)
    save(three, 2)
    assert step_of(three) == 2


def check_killed(path: Path, moment: str) -> None:
    warnings.simplefilter("ignore")
    linked = Keeper.keep
    calls: list[str] = []

    def killed(this: Keeper, directory: str, new: str, *, is_early: bool = False) -> bool:
        calls.append(directory)
        if (moment, len(calls)) == ("after the rename", 3):
            die()
        found = linked(this, directory, new, is_early=is_early)
        if (moment, len(calls)) in (("at the beginning", 1), ("before the rename", 2)):
            die()
        return found

    Keeper.keep = killed  # type: ignore[method-assign]
    save(path, 2)


@pytest.mark.parametrize("moment", ["at the beginning", "before the rename", "after the rename"])
def test_killed(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "c"
    save(path)
    (path / "mine").write_text("mine")
    job = run_plain(check_killed, 1, path, moment, dies=(0,))
    assert job.codes == [-9], job.outputs[0]
    assert step_of(path) == (2 if moment == "after the rename" else 1)
    assert (path / "mine").read_text() == "mine"
    save(path, 3)
    assert (path / "mine").read_text() == "mine"
    assert not hidden_in(tmp_path)
