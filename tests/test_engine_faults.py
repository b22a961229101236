"""Every system call and completion of a save and of a load fails once: the call says so, and nothing is left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import (
    SMALL_BLOCK,
    assert_same,
    config,
    counted,
    descriptor_count,
    hidden_names,
    injected,
    load_config,
    open_files,
    random_bytes,
    small_state,
    thread_count,
)

import fp_multi as fp
from fp_multi import _engine
from fp_multi.errors import CapabilityError, FpMultiError, StorageError

OLD, NEW = small_state(1), small_state(2)
WRITERS = [
    pytest.param({"io_uring": "auto", "direct": "auto"}, id="auto"),
    pytest.param({"io_uring": "off", "direct": "auto"}, id="threads"),
    pytest.param({"io_uring": "auto", "direct": "off"}, id="buffered"),
]
SAVE_POINTS = ("open", "statx", "fallocate", "ftruncate", "fdatasync", "fsync", "close", "mkdir", "rename", "pwrite")
COMPLETIONS = ("write_completion", "uring_enter")


def save(directory: Path, state: Any, mode: dict[str, str]) -> fp.SaveReport:
    return fp.save(state, directory / "ckpt", overwrite=True, config=config(durable=True, **mode))


@pytest.fixture(autouse=True, scope="module")
def engines_that_are_kept(tmp_path_factory):
    """Threads and rings of the process's engines exist before anything is counted."""
    directory = tmp_path_factory.mktemp("warm")
    for mode in ({"io_uring": "auto"}, {"io_uring": "off"}):
        save(directory, OLD, mode)
        fp.load(directory / "ckpt", config=load_config(**mode))


class Household:
    """What must be the same before and after a failed call."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = open_files()
        self.descriptors = descriptor_count()
        self.threads = thread_count()

    def check(self) -> None:
        assert hidden_names(self.directory) == []
        assert open_files() == self.files
        # A broken ring is closed, and the next job opens another.
        assert descriptor_count() <= self.descriptors
        assert thread_count() <= self.threads


def calls_of_a_save(directory: Path, mode: dict[str, str]) -> dict[str, int]:
    save(directory, OLD, mode)
    with counted() as counts:
        save(directory, OLD, mode)
    return counts


def fail_at(directory: Path, mode: dict[str, str], point: str, at: int, code: int) -> FpMultiError | None:
    """One save with one failure; checks what has to hold whatever it was. Returns the error."""
    save(directory, OLD, mode)
    household = Household(directory)
    error: FpMultiError | None = None
    with injected(point, at=at, error=code):
        try:
            save(directory, NEW, mode)
        except FpMultiError as raised:
            error = raised
        happened = dict(_engine.fault_counts())[point] >= at
    # The second look after a clean save: what a failed one threw away is made again.
    assert_same(fp.load(directory / "ckpt"), NEW if error is None else OLD)
    fp.verify(directory / "ckpt")
    assert hidden_names(directory) == []
    save(directory, NEW, mode)
    household.check()
    assert_same(fp.load(directory / "ckpt"), NEW)
    if error is not None:
        assert happened
        assert isinstance(error, StorageError), error
        assert error.errno == code
        assert str(directory) in str(error.filename)
        assert os.strerror(code) in str(error)
    return error


@pytest.mark.parametrize("mode", WRITERS)
@pytest.mark.parametrize("point", SAVE_POINTS)
def test_each_call_of_a_save_fails(tmp_path, mode, point):
    calls = calls_of_a_save(tmp_path, mode)
    direct = fp.capabilities(tmp_path)["direct"] and mode["direct"] == "auto"
    harmless = {"statx": {1}, "open": {2} if direct else set()}.get(point, set())
    for at in range(1, calls[point] + 1):
        error = fail_at(tmp_path, mode, point, at, errno.EIO)
        assert (error is None) == (at in harmless), f"{point} {at}: {error!r}"


@pytest.mark.parametrize("mode", WRITERS)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("point", COMPLETIONS)
def test_each_completion_of_a_save_fails(tmp_path, mode, point, code):
    calls = calls_of_a_save(tmp_path, mode)[point]
    step = 1 if code == errno.EIO and calls < 50 else max(1, calls // 8)
    for at in range(1, calls + 1, step):
        error = fail_at(tmp_path, mode, point, at, code)
        if point == "write_completion":
            assert error is not None
            assert error.op == "write"
            assert error.offset is not None
            assert error.nbytes is not None
            assert 0 < error.nbytes <= SMALL_BLOCK


@pytest.mark.parametrize("mode", WRITERS)
@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_transient_completions_are_tried_again(tmp_path, mode, code):
    for at, times in ((1, 1), (3, 1), (1, 7)):
        with injected("write_completion", at=at, times=times, error=code):
            save(tmp_path, NEW, mode)
        with injected("read_completion", at=1, times=times, error=code):
            assert_same(fp.load(tmp_path / "ckpt", config=load_config(**mode)), NEW)


def test_the_kernel_may_be_short_of_something_for_a_while(tmp_path):
    with injected("uring_enter", at=4, times=6, error=errno.EAGAIN):
        save(tmp_path, NEW, {})
    with injected("uring_enter", at=4, times=6, error=errno.EBUSY):
        assert_same(fp.load(tmp_path / "ckpt", config=load_config(direct="auto")), NEW)


def test_what_never_gets_better_is_given_up(tmp_path):
    with (
        injected("write_completion", at=1, times=1 << 40, error=errno.EAGAIN),
        pytest.raises(StorageError) as caught,
    ):
        save(tmp_path, NEW, {})
    assert caught.value.errno == errno.EAGAIN
    assert hidden_names(tmp_path) == []


@pytest.mark.parametrize("mode", WRITERS)
@pytest.mark.parametrize("nbytes", [1, 511, 4096, 4097])
def test_short_completions_are_resumed(tmp_path, mode, nbytes):
    calls = calls_of_a_save(tmp_path, mode)["write_completion"]
    for at in range(1, calls + 1, max(1, calls // 6)):
        with injected("write_completion", at=at, short_nbytes=nbytes):
            save(tmp_path, NEW, mode)
        fp.verify(tmp_path / "ckpt")
    many = 10_000 if nbytes >= 4096 else 40
    with injected("write_completion", at=1, times=many, short_nbytes=nbytes):
        save(tmp_path, NEW, mode)
    fp.verify(tmp_path / "ckpt")
    reader = load_config(**mode)
    with counted() as counts:
        assert_same(fp.load(tmp_path / "ckpt", config=reader), NEW)
    for at in range(1, counts["read_completion"] + 1):
        with injected("read_completion", at=at, short_nbytes=nbytes):
            assert_same(fp.load(tmp_path / "ckpt", config=reader), NEW)
    with injected("read_completion", at=1, times=many, short_nbytes=nbytes):
        assert_same(fp.load(tmp_path / "ckpt", config=reader), NEW)


@pytest.mark.parametrize("mode", WRITERS)
def test_a_write_that_moves_nothing_is_an_error(tmp_path, mode):
    save(tmp_path, OLD, mode)
    household = Household(tmp_path)
    with injected("write_completion", at=2, short_nbytes=0), pytest.raises(StorageError) as caught:
        save(tmp_path, NEW, mode)
    assert caught.value.errno == errno.EIO
    assert_same(fp.load(tmp_path / "ckpt"), OLD)
    household.check()


def need_direct(directory: Path) -> None:
    if not fp.capabilities(directory)["direct"]:
        pytest.skip(f"no O_DIRECT in {directory}")


@pytest.mark.parametrize("ring", ["auto", "off"])
def test_a_direct_write_refused_retreats_or_says_so(tmp_path, ring):
    need_direct(tmp_path)
    for at in (1, 4):
        with injected("write_completion", at=at, error=errno.EINVAL):
            report = save(tmp_path, NEW, {"io_uring": ring, "direct": "auto"})
        assert not report.direct
        assert any("direct" in reason and "Invalid" in reason for reason in report.reasons)
        fp.verify(tmp_path / "ckpt")
    with (
        injected("write_completion", at=4, error=errno.EINVAL),
        pytest.raises(CapabilityError, match="O_DIRECT"),
    ):
        save(tmp_path, OLD, {"io_uring": ring, "direct": "on"})
    assert_same(fp.load(tmp_path / "ckpt"), NEW)
    assert hidden_names(tmp_path) == []


def test_a_direct_read_refused_retreats_or_says_so(tmp_path):
    need_direct(tmp_path)
    save(tmp_path, NEW, {})
    with injected("read_completion", error=errno.EINVAL):
        assert_same(fp.load(tmp_path / "ckpt", config=load_config(direct="auto")), NEW)
    with (
        injected("read_completion", error=errno.EINVAL),
        pytest.raises(CapabilityError, match="O_DIRECT"),
    ):
        fp.load(tmp_path / "ckpt", config=load_config(direct="on"))


@pytest.mark.parametrize("ring", ["auto", "off"])
@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_dontcache_refused_retreats_or_says_so(tmp_path, ring, code):
    mode = {"io_uring": ring, "direct": "off"}
    with injected("write_completion", at=2, error=code):
        report = save(tmp_path, NEW, mode)
    assert any("dontcache" in reason for reason in report.reasons)
    fp.verify(tmp_path / "ckpt")
    with injected("write_completion", at=2, error=code), pytest.raises(CapabilityError, match="DONTCACHE"):
        save(tmp_path, OLD, {**mode, "dontcache": "on"})
    assert_same(fp.load(tmp_path / "ckpt"), NEW)


def test_dontcache_switched_on_is_used_instead_of_direct(tmp_path):
    with injected("write_completion", error=errno.EOPNOTSUPP), pytest.raises(CapabilityError, match="DONTCACHE"):
        save(tmp_path, NEW, {"dontcache": "on"})


@pytest.mark.parametrize("mode", WRITERS)
@pytest.mark.parametrize("point", ["open", "statx", "close", "pread", "read_completion", "uring_enter"])
def test_each_call_of_a_load_fails(tmp_path, mode, point):
    save(tmp_path, NEW, mode)
    reader = load_config(**mode)
    load = fp.load
    assert_same(load(tmp_path / "ckpt", config=reader), NEW)
    household = Household(tmp_path)
    with counted() as counts:
        load(tmp_path / "ckpt", config=reader)
    for at in range(1, counts[point] + 1):
        error: StorageError | None = None
        with injected(point, at=at, error=errno.EIO):
            try:
                assert_same(load(tmp_path / "ckpt", config=reader), NEW)
            except StorageError as raised:
                error = raised
        assert_same(load(tmp_path / "ckpt", config=reader), NEW)
        household.check()
        must_fail = {"read_completion": True, "open": at == 1, "close": False, "statx": False}.get(point)
        assert must_fail is None or must_fail == (error is not None), f"{point} {at}: {error!r}"
        if error is not None:
            assert error.errno == errno.EIO
            assert str(tmp_path / "ckpt") in str(error.filename)
        if point == "read_completion":
            assert error is not None
            assert error.op == "read"
            assert error.offset is not None
            assert error.nbytes


@pytest.mark.parametrize("mode", WRITERS)
def test_a_file_that_ends_early_is_an_error(tmp_path, mode):
    save(tmp_path, NEW, mode)
    with injected("read_completion", short_nbytes=0), pytest.raises(StorageError, match="past the end") as caught:
        fp.load(tmp_path / "ckpt", config=load_config(**mode))
    assert caught.value.errno == errno.ENODATA


def fresh_job(path: Path, **mode: Any) -> Any:
    """The first job of a new engine, finished: ring and staging memory are made for it."""
    engine = _engine.Engine()
    data = random_bytes(3 * SMALL_BLOCK)
    options = {"io_uring": "auto", "direct": "auto", "dontcache": "auto", **mode}
    job = engine.submit_write(
        str(path),
        np.array([[data.__array_interface__["data"][0], data.nbytes, 0]], np.uint64),
        np.array([data.nbytes], np.uint64),
        [],
        block_bytes=SMALL_BLOCK,
        queue_depth=2,
        copy_threads=1,
        **options,
    )
    job.wait()
    engine.close()
    if job.error is None:
        assert path.read_bytes() == data.tobytes()
    return job


def test_no_memory_for_staging(tmp_path):
    with injected("mmap", error=errno.ENOMEM):
        job = fresh_job(tmp_path / "f")
    assert job.error[:3] == (errno.ENOMEM, "staging memory", str(tmp_path / "f"))


def test_no_memory_for_loaded_tensors(tmp_path):
    fp.save({"big": np.zeros(2 << 20, np.uint8)}, tmp_path / "ckpt", config=config())
    with injected("mmap", error=errno.ENOMEM), pytest.raises(MemoryError):
        fp.load(tmp_path / "ckpt")
    assert fp.load(tmp_path / "ckpt")["big"].nbytes == 2 << 20


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOMEM, errno.EMFILE])
def test_no_ring_to_be_had(tmp_path, code):
    with injected("uring_setup", times=9, error=code):
        job = fresh_job(tmp_path / "a")
        assert job.error is None
        assert job.stats["engine"] == "threads"
        assert job.stats["reasons"][0] == f"io_uring: io_uring_setup: {os.strerror(code)}"
        job = fresh_job(tmp_path / "b", io_uring="on")
        assert job.error[0] == code
        assert job.error[5], "a capability that is switched on"
    assert not (tmp_path / "b").exists()


def test_a_ring_that_cannot_be_entered(tmp_path):
    with injected("uring_enter", times=9, error=errno.EPERM):
        job = fresh_job(tmp_path / "f")
    assert job.error is None
    assert job.stats["engine"] == "threads"
    assert "io_uring_enter" in job.stats["reasons"][0]


def test_old_kernels_without_deferred_completions(tmp_path):
    with injected("uring_setup", times=1, error=errno.EINVAL):
        job = fresh_job(tmp_path / "f", io_uring="on")
    assert job.error is None
    assert job.stats["engine"] == "io_uring"


def test_preallocation_that_the_file_system_does_not_know(tmp_path):
    for code in (errno.EOPNOTSUPP, errno.ENOSYS):
        with injected("fallocate", times=9, error=code):
            report = save(tmp_path, NEW, {})
        assert any("preallocation" in reason for reason in report.reasons)
        fp.verify(tmp_path / "ckpt")


def test_an_error_survives_pickling(tmp_path):
    import pickle

    with injected("write_completion", error=errno.EIO), pytest.raises(StorageError) as caught:
        save(tmp_path, NEW, {})
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.errno, again.filename, again.op, again.offset) == (
        caught.value.errno,
        caught.value.filename,
        caught.value.op,
        caught.value.offset,
    )
