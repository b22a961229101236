"""Retired checkpoints as the next saves' files: safe at every point, unnoticed by anybody, never in the foreground."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    SMALL_BLOCK,
    assert_same,
    check_child,
    config,
    counted,
    hidden_names,
    injected,
    random_bytes,
    running,
)

import fp_multi as fp
from fp_multi import _engine, _recycle
from fp_multi.errors import StorageError

QUICK = config()
SHARD = "shard-00000-of-00001.safetensors"


def shard(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}" / SHARD


def inode(directory: Path, step: int) -> int:
    return shard(directory, step).stat().st_ino


def state_of(step: int, nbytes: int = 5 * SMALL_BLOCK + 100) -> dict[str, Any]:
    return {"step": step, "x": random_bytes(nbytes, step), "y": [np.arange(step, step + i) for i in range(5)]}


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[fp.Checkpointer]:
    with fp.Checkpointer(tmp_path, keep=2, config=QUICK) as ckpt:
        yield ckpt


def save(ckpt: fp.Checkpointer, step: int, **options: Any) -> fp.OverlapReport:
    pending = ckpt.save(step, state_of(step, **options))
    pending.wait()
    return pending.report


def check(ckpt: fp.Checkpointer, *steps: int) -> None:
    assert tuple(ckpt.steps()) == steps
    for step in steps:
        fp.verify(Path(ckpt.directory) / f"step_{step:08d}")


def test_files_go_round(tmp_path: Path, ckpt: fp.Checkpointer) -> None:
    reports, inodes = [], []
    for step in range(9):
        reports.append(save(ckpt, step))
        inodes.append(inode(tmp_path, step))
        assert_same(ckpt.restore()[1], state_of(step))
    assert [report.recycled for report in reports] == [False] * 3 + [True] * 6
    assert len(set(inodes)) == 3
    assert inodes[3:] == inodes[:-3]
    check(ckpt, 7, 8)
    assert len(hidden_names(tmp_path)) == 1  # the spare
    ckpt.close()
    assert hidden_names(tmp_path) == []


def test_two_at_once_have_two_spares(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, keep=1, max_in_flight=2, config=QUICK) as ckpt:
        reports = []
        for step in range(0, 12, 2):
            pending = [ckpt.save(step + i, state_of(step + i)) for i in (0, 1)]
            ckpt.wait()
            reports.extend(one.report for one in pending)
        assert sum(report.recycled for report in reports) >= 9
        assert ckpt.steps() == [11]
        assert_same(ckpt.restore()[1], state_of(11))
    assert hidden_names(tmp_path) == []


@pytest.mark.parametrize("settings", [{"recycle": False, "keep": 1}, {}])
def test_without_recycling_every_file_is_new(tmp_path: Path, settings: dict[str, Any]) -> None:
    with fp.Checkpointer(tmp_path, config=QUICK, **settings) as ckpt:
        assert not any([save(ckpt, step).recycled for step in range(4)])
        assert ckpt.steps() == ([3] if settings else [0, 1, 2, 3])
    assert hidden_names(tmp_path) == []


@pytest.mark.parametrize(
    "sizes",
    [[600_000] * 3 + [n] * 4 for n in (0, 1, 4096, 90_000, 700_000, 5_000_000)] + [[0, 5_000_000, 10, 3_000_000] * 3],
    ids=lambda sizes: "-".join(map(str, dict.fromkeys(sizes))),
)
def test_states_shrink_and_grow(tmp_path: Path, ckpt: fp.Checkpointer, sizes: list[int]) -> None:
    for step, nbytes in enumerate(sizes):
        report = save(ckpt, step, nbytes=nbytes)
        assert report.recycled == (step >= 3)
        fp.verify(tmp_path / f"step_{step:08d}")
        assert_same(ckpt.restore()[1], state_of(step, nbytes))
        shard_nbytes = fp.read_manifest(tmp_path / f"step_{step:08d}").shards[0].nbytes
        assert shard(tmp_path, step).stat().st_size == shard_nbytes


def test_a_hard_link_is_left_alone(tmp_path: Path, ckpt: fp.Checkpointer) -> None:
    for step in range(3):
        save(ckpt, step)
    os.link(shard(tmp_path, 1), tmp_path / "mine")
    shutil.copytree(tmp_path / "step_00000002", tmp_path / "backup", copy_function=os.link)
    reports = [save(ckpt, step) for step in range(3, 8)]
    # Steps 1 and 2 were retired by 3 and 4; neither is the next one's file.
    assert [report.recycled for report in reports] == [True, False, False, True, True]
    assert_same(fp.load(tmp_path / "backup"), state_of(2))
    assert (tmp_path / "mine").read_bytes().count(state_of(1)["x"].tobytes()) == 1
    check(ckpt, 6, 7)


def test_a_link_made_while_it_waits_is_left_alone(tmp_path: Path, ckpt: fp.Checkpointer) -> None:
    for step in range(3):
        save(ckpt, step)
    (hidden,) = hidden_names(tmp_path)
    os.link(tmp_path / hidden / SHARD, tmp_path / "mine")
    assert not save(ckpt, 3).recycled
    assert (tmp_path / "mine").read_bytes().count(state_of(0)["x"].tobytes()) == 1


def test_a_link_made_at_the_last_moment_is_left_alone(
    tmp_path: Path, ckpt: fp.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(3):
        save(ckpt, step)
    adopt = _recycle.adopt

    def late(path: str, target: str) -> bool:
        os.link(path, tmp_path / "mine")
        return adopt(path, target)

    monkeypatch.setattr(_recycle, "adopt", late)
    assert not save(ckpt, 3).recycled
    assert (tmp_path / "mine").read_bytes().count(state_of(0)["x"].tobytes()) == 1
    assert_same(ckpt.restore()[1], state_of(3))


def test_who_reads_a_file_goes_on_reading_it(tmp_path: Path, ckpt: fp.Checkpointer) -> None:
    save(ckpt, 0)
    save(ckpt, 1)
    with open(shard(tmp_path, 0), "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    opened = open(shard(tmp_path, 1), "rb")  # noqa: SIM115
    before = bytes(mapped)
    reports = [save(ckpt, step) for step in range(2, 6)]
    assert [report.recycled for report in reports] == [False, False, False, True]
    assert mapped[:] == before
    assert opened.read().count(state_of(1)["x"].tobytes()) == 1
    mapped.close()
    opened.close()
    assert save(ckpt, 6).recycled


READER = """
with open(sys.argv[1], "rb") as file:
    print("open", flush=True)
    sys.stdin.readline()
    sys.stdout.write(str(len(file.read())))
"""


def test_another_process_that_reads_goes_on(tmp_path: Path, ckpt: fp.Checkpointer) -> None:
    save(ckpt, 0)
    with running(READER, shard(tmp_path, 0)) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        assert not any([save(ckpt, step).recycled for step in range(1, 4)])
        output, _ = reader.communicate("\n")
    assert int(output) > 0


def test_without_leases_links_are_still_seen(
    tmp_path: Path, ckpt: fp.Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_leases(fd: int, command: int, *args: Any) -> int:
        raise OSError(errno.EINVAL, "no leases here")

    monkeypatch.setattr(fcntl, "fcntl", no_leases)
    for step in range(4):
        save(ckpt, step)
    os.link(shard(tmp_path, 2), tmp_path / "mine")
    assert [save(ckpt, step).recycled for step in range(4, 7)] == [True, False, True]


@pytest.mark.parametrize("what", ["file", "directory", "symlink", "fifo"])
def test_a_checkpoint_with_other_things_in_it_is_not_reused(tmp_path: Path, ckpt: fp.Checkpointer, what: str) -> None:
    save(ckpt, 0)
    path = tmp_path / "step_00000000"
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    if what == "file":
        (path / "marker").write_text("x")
    elif what == "directory":
        (path / "more").mkdir()
    else:
        os.rename(path / SHARD, tmp_path / "moved")
        if what == "symlink":
            os.symlink(outside, path / SHARD)
        else:
            os.mkfifo(path / SHARD)
    reports = [save(ckpt, step) for step in range(1, 5)]
    assert [report.recycled for report in reports] == [False, False, False, True]
    assert outside.read_text() == "untouched"
    ckpt.close()
    assert hidden_names(tmp_path) == []


def test_a_file_that_cannot_be_moved_is_not_reused(tmp_path: Path, ckpt: fp.Checkpointer) -> None:
    for step in range(3):
        save(ckpt, step)
    # The first rename of a save takes the spare's file.
    with injected("rename", error=errno.EXDEV):
        assert not save(ckpt, 3).recycled
    check(ckpt, 2, 3)
    assert_same(ckpt.restore()[1], state_of(3))
    assert save(ckpt, 4).recycled


@pytest.mark.parametrize(
    ("point", "code"), [("fallocate", errno.ENOSPC), ("ftruncate", errno.EIO), ("open", errno.EMFILE)]
)
def test_a_save_into_a_used_file_that_fails(tmp_path: Path, ckpt: fp.Checkpointer, point: str, code: int) -> None:
    for step in range(3):
        save(ckpt, step)
    with injected(point, error=code):
        pending = ckpt.save(3, state_of(3, 1000))
        with pytest.raises(StorageError) as caught:
            pending.wait()
    assert caught.value.errno == code
    check(ckpt, 1, 2)
    assert hidden_names(tmp_path) == []
    assert not save(ckpt, 4).recycled  # its file went down with the failed one
    assert save(ckpt, 5).recycled
    check(ckpt, 4, 5)


def test_no_room(tmp_path: Path, ckpt: fp.Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(3):
        save(ckpt, step)
    statvfs = os.statvfs

    def full(path: Any) -> Any:
        found = statvfs(path)

        class Full:
            f_bavail = f_bfree = 0
            f_frsize = found.f_frsize

        return Full

    monkeypatch.setattr(os, "statvfs", full)
    # What the used file has already need not be free.
    assert save(ckpt, 3).recycled
    pending = ckpt.save(4, state_of(4, 3_000_000))
    with pytest.raises(fp.errors.NoSpaceError):
        pending.wait()
    check(ckpt, 2, 3)


@pytest.mark.parametrize("code", [errno.EIO, errno.EPERM])
def test_a_checkpoint_that_cannot_be_retired_stays(
    tmp_path: Path, ckpt: fp.Checkpointer, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    save(ckpt, 0)
    save(ckpt, 1)
    # The first rename publishes, the second retires.
    with injected("rename", at=2, error=code):
        save(ckpt, 2)
    assert "cannot retire" in caplog.text
    check(ckpt, 0, 1, 2)
    save(ckpt, 3)  # tries again
    check(ckpt, 2, 3)


def test_what_may_come_back_is_not_overwritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # If the rename cannot be made durable, a power cut may bring the old name back: its bytes must be whole then.
    with fp.Checkpointer(tmp_path, keep=1, config=config(durable=True)) as ckpt:
        save(ckpt, 0)
        with counted() as counts:
            save(ckpt, 1)
        with injected("fsync", at=counts["fsync"], error=errno.EIO):
            save(ckpt, 2)
        assert "cannot flush" in caplog.text
        hidden = [name for name in hidden_names(tmp_path) if (tmp_path / name / "manifest.json").exists()]
        assert len(hidden) == 1
        assert_same(fp.load(tmp_path / hidden[0]), state_of(1))
        save(ckpt, 3)  # sweeps it
        check(ckpt, 3)
        assert not (tmp_path / hidden[0]).exists()


# Nothing is removed where training waits


def test_nothing_is_removed_in_a_call_that_training_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: Counter[tuple[str, str]] = Counter()

    def watched(module: Any, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            removed[name, threading.current_thread().name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    for module, names in ((os, ("unlink", "rmdir", "rename", "mkdir", "listdir")), (shutil, ("rmtree",))):
        for name in names:
            watched(module, name)
    for name in ("unlink", "rename", "mkdir", "fsync_path"):
        watched(_engine, name)
    for recycle in (True, False):
        directory = tmp_path / str(recycle)
        with fp.Checkpointer(directory, keep=1, recycle=recycle, config=config(durable=True)) as ckpt:
            os.makedirs(directory / ".step_00000000.fp_multi-tmp-0123456789abcdef" / "left")
            removed.clear()
            for step in range(5):
                ckpt.save(step, state_of(step))
                ckpt.wait_for_staging()
            ckpt.wait()
            assert any(name == "unlink" for name, _ in removed)
            assert not {key: n for key, n in removed.items() if key[1] == threading.current_thread().name}
            if recycle:
                # In steady state only manifests and empty directories go.
                removed.clear()
                ckpt.save(5, state_of(5)).wait()
                assert sum(n for (name, _), n in removed.items() if name == "unlink") == 1
                assert not any(name == "rmtree" for name, _ in removed)
            removed.clear()
        # close() waits for it, and does none of it.
        assert not {key: n for key, n in removed.items() if key[1] == threading.current_thread().name}
        assert hidden_names(directory) == []


# A process killed anywhere

KILLED = """
def state_of(step):
    return {"step": step, "x": random_bytes(300_000, step), "y": [np.arange(step, step + i) for i in range(5)]}

def train(path, first, last):
    with fp.Checkpointer(path, keep=2, config=config(durable=True, queue_depth=2)) as ckpt:
        for step in range(first, last):
            ckpt.save(step, state_of(step)).wait()
            if step == 4:  # everything goes round now
                arm()

def in_child(action):
    # The parent never has a thread, so that forking it is safe.
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(99)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

POINTS = ("open", "mkdir", "rename", "unlink", "fsync", "fdatasync", "fallocate", "ftruncate", "close", "pwrite",
          "write_completion", "uring_enter")
path = sys.argv[1]

def count():
    global arm
    def arm():
        _engine.count_faults()
    train(f"{path}/count", 0, 6)
    counts = dict(_engine.fault_counts())
    print(*(f"{name}:{counts[name]}" for name in POINTS), file=open(f"{path}/counts", "w"))

assert in_child(count) == 0
counts = dict(pair.split(":") for pair in open(f"{path}/counts").read().split())
killed = 0
for point in POINTS:
    for at in range(1, int(counts[point]) + 1):
        where = f"{path}/{point}-{at}"
        def arm():
            _engine.inject_fault(point, at=at, kill=True)
        status = in_child(lambda: train(where, 0, 6))
        # How often the ring is entered depends on how completions bunch: the last calls counted may not come again.
        survived = point == "uring_enter" and status == 0
        assert status == signal.SIGKILL or survived, (point, at, status)
        def look():
            with fp.Checkpointer(where, keep=2) as ckpt:
                steps = ckpt.steps()
                # Step 4 was waited for; 5 may be there, and 3 may be retired already.
                assert steps in ([3, 4], [3, 4, 5], [4, 5]), steps
                for step in steps:
                    fp.verify(f"{where}/step_{step:08d}")
                    assert_same(ckpt.restore(step)[1], state_of(step))
        assert in_child(look) == 0, (point, at)
        def go_on():
            train(where, 6, 9)
            assert hidden_names(where) == [], hidden_names(where)
            with fp.Checkpointer(where) as ckpt:
                assert ckpt.steps() == [7, 8], ckpt.steps()
                assert_same(ckpt.restore()[1], state_of(8))
        arm = lambda: None
        if at == 1:
            assert in_child(go_on) == 0, (point, at)
        import shutil
        shutil.rmtree(where)
        killed += not survived
print(killed)
"""


def test_a_process_killed_anywhere_leaves_whole_steps(tmp_path: Path) -> None:
    killed = int(check_child(KILLED, tmp_path, timeout_s=180))
    assert killed > 25
