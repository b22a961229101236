"""Names of steps, which are complete, which retention lets go, and who is kept from it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import config, hidden_names, running

import fp_multi as fp
from fp_multi import _hidden, _recycle
from fp_multi._steps import Retention, complete_steps, retired_steps, step_path
from fp_multi.errors import CheckpointNotFoundError, StorageError

STEPS = st.sets(st.integers(0, 60), max_size=12)


def save_steps(directory: Path, *steps: int) -> None:
    for step in steps:
        fp.save({"step": step, "w": np.full(1000, step)}, step_path(str(directory), step), config=config())


def retention(directory: Path, keep: int | None = 1, keep_every: int | None = None, spares: int = 0) -> Retention:
    return Retention(str(directory), keep=keep, keep_every=keep_every, spares=spares, durable=False)


def apply(kept: Retention, *busy: int) -> None:
    for retired in kept.apply(busy):
        retired.remove()


@given(STEPS, st.integers(1, 5), st.none() | st.integers(1, 7), STEPS)
def test_retention_keeps_what_it_must(steps: set[int], keep: int, keep_every: int | None, in_use: set[int]) -> None:
    gone = retired_steps(steps, keep=keep, keep_every=keep_every, in_use=in_use)
    assert gone == sorted(gone)
    left = steps - set(gone)
    assert set(gone) <= steps - in_use
    assert set(sorted(steps)[-keep:]) <= left
    if keep_every is not None:
        assert {step for step in steps if step % keep_every == 0} <= left
    # Nothing stays without a reason.
    for step in left - in_use - set(sorted(steps)[-keep:]):
        assert keep_every is not None
        assert step % keep_every == 0


@given(STEPS)
def test_without_keep_everything_stays(steps: set[int]) -> None:
    assert retired_steps(steps, keep=None, keep_every=3) == []


def test_only_our_own_complete_names_are_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, 3, 20, 123_456_789)
    for name in ("step_1", "step_000000004", "step_00000005x", "xstep_00000006", "step_-0000007", "step_00000008"):
        os.mkdir(tmp_path / name)
    for name in ("step_1", "step_000000004", "step_00000005x"):
        (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "step_00000009").write_text("a file")
    assert list(complete_steps(str(tmp_path))) == [3, 20, 123_456_789]
    assert complete_steps(str(tmp_path))[20] == str(tmp_path / "step_00000020")


def test_no_directory_has_no_steps(tmp_path: Path) -> None:
    assert complete_steps(str(tmp_path / "none")) == {}


def test_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        complete_steps(str(tmp_path / "file"))


def test_steps_go_and_stay(tmp_path: Path) -> None:
    save_steps(tmp_path, *range(10))
    apply(retention(tmp_path, keep=2, keep_every=4))
    assert list(complete_steps(str(tmp_path))) == [0, 4, 8, 9]
    assert hidden_names(tmp_path) == []
    apply(retention(tmp_path, keep=1))
    assert list(complete_steps(str(tmp_path))) == [9]
    apply(retention(tmp_path, keep=1))
    assert list(complete_steps(str(tmp_path))) == [9]


def test_an_old_step_that_cannot_be_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bad sector, another user's directory: the others can be listed, restored and retired all the same."""
    save_steps(tmp_path, 1, 2, 3)
    real, bad = _hidden.is_checkpoint, [step_path(str(tmp_path), 1)]

    def is_checkpoint(path: str) -> bool:
        if path in bad:
            raise StorageError(errno.EIO, "read", path)
        return real(path)

    monkeypatch.setattr(_hidden, "is_checkpoint", is_checkpoint)
    assert list(complete_steps(str(tmp_path))) == [2, 3]
    assert "step 1 is left out" in caplog.text
    kept = retention(tmp_path, keep=1)
    with kept.reading(2) as (step, _):
        assert step == 2
    with pytest.raises(StorageError, match="step_00000001"), kept.reading(1):
        pass
    apply(kept)
    assert sorted(os.listdir(tmp_path)) == ["step_00000001", "step_00000003"]
    # Nobody goes on from an older step because the newest could not be seen.
    bad[:] = [step_path(str(tmp_path), 3)]
    with pytest.raises(StorageError, match="step_00000003"):
        complete_steps(str(tmp_path))


def test_busy_steps_stay(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    apply(retention(tmp_path), 1)
    assert list(complete_steps(str(tmp_path))) == [1, 3]


def test_a_step_that_is_read_stays(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    kept = retention(tmp_path)
    with kept.reading(1) as (step, path), kept.reading(1):
        assert (step, path) == (1, step_path(str(tmp_path), 1))
        apply(kept)
        assert list(complete_steps(str(tmp_path))) == [1, 3]
        # Another Checkpointer, perhaps of another process, is held off by the lock.
        apply(retention(tmp_path))
        assert list(complete_steps(str(tmp_path))) == [1, 3]
    apply(kept)
    assert list(complete_steps(str(tmp_path))) == [3]


def test_without_locks_the_own_process_is_held_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(38, "no locks here")

    save_steps(tmp_path, 1, 2)
    monkeypatch.setattr(fcntl, "flock", flock)
    kept = retention(tmp_path)
    with kept.reading(1):
        apply(kept)
        assert list(complete_steps(str(tmp_path))) == [1, 2]
    apply(kept)
    assert list(complete_steps(str(tmp_path))) == [2]


READER = """
from fp_multi._steps import Retention
kept = Retention(sys.argv[1], keep=1, keep_every=None, spares=0, durable=False)
with kept.reading(1):
    print("reading", flush=True)
    sys.stdin.readline()
print("done", flush=True)
"""


def test_a_step_that_another_process_reads_stays(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    with running(READER, tmp_path) as reader:
        assert reader.stdout is not None
        assert reader.stdin is not None
        assert reader.stdout.readline() == "reading\n"
        apply(retention(tmp_path))
        assert list(complete_steps(str(tmp_path))) == [1, 2]
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "done\n"
    apply(retention(tmp_path))
    assert list(complete_steps(str(tmp_path))) == [2]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    kept = retention(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match="no complete step"), kept.reading(None):
        pass
    save_steps(tmp_path, 3, 5)
    with pytest.raises(CheckpointNotFoundError, match="step 4 is not here; there are 3, 5") as caught, kept.reading(4):
        pass
    assert caught.value.filename == step_path(str(tmp_path), 4)
    with kept.reading(None) as (step, _):
        assert step == 5


def test_a_step_just_being_published_is_waited_for(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    lock = os.open(step_path(str(tmp_path), 1), os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    release = threading.Timer(0.1, os.close, (lock,))
    release.start()
    with retention(tmp_path).reading(None) as (step, _):
        assert step == 1
    release.join()


def test_spares_are_few_and_end_with_their_owner(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    kept = retention(tmp_path, spares=2)
    apply(kept)
    assert list(complete_steps(str(tmp_path))) == [4]
    assert len(hidden_names(tmp_path)) == 2
    spare = kept.take()
    assert spare is not None
    assert list(spare.shards()) == ["shard-00000-of-00001.safetensors"]
    spare.remove()
    spare.remove()
    assert len(hidden_names(tmp_path)) == 1
    kept.end()
    assert hidden_names(tmp_path) == []


def test_after_close_no_spare_is_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    kept = retention(tmp_path, spares=1)
    assert kept.close() == []
    apply(kept)
    assert hidden_names(tmp_path) == []
    assert kept.take() is None


def test_retiring_what_is_gone_or_a_link_does_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path / "real", 1)
    assert _recycle.retire(str(tmp_path / "none"), durable=True) is None
    os.symlink(tmp_path / "real" / "step_00000001", tmp_path / "step_00000001")
    assert _recycle.retire(str(tmp_path / "step_00000001"), durable=True) is None
    fp.verify(tmp_path / "real" / "step_00000001")
