"""The process's engines: made on first use, closed at exit, made anew in a forked child.

Saving and loading have an engine each, so that a load does not queue behind a save that runs in the background.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Literal, TypedDict, TypeVar

from fp_multi import _engine
from fp_multi.config import IOConfig
from fp_multi.errors import CapabilityError, EngineClosedError, StorageError

Role = Literal["write", "read"]
Job = TypeVar("Job", _engine.WriteJob, _engine.ReadJob)

_CPUS_A_COPY_THREAD = 8
_TICK_S = 0.1

_lock = threading.Lock()
_engines: dict[tuple[int, Role, int], _engine.Engine] = {}
_exiting = False


def engine(role: Role, slot: int = 0) -> _engine.Engine:
    """This process's engine for a role; one engine runs one job after another, so parallel jobs take slots.

    Raises:
        EngineClosedError: the interpreter is exiting.
        StorageError: the system has no thread for it.
    """
    key = (os.getpid(), role, slot)
    found = _engines.get(key)
    if found is None or not found.usable:
        with _lock:
            found = _engines.get(key)
            if _exiting:
                # A daemon thread that goes on saving: a new engine would outlive the interpreter.
                raise EngineClosedError("the interpreter is exiting: nothing is saved or loaded any more")
            if found is None or not found.usable:
                try:
                    found = _engines[key] = _engine.Engine()
                except RuntimeError as error:
                    raise StorageError(errno.EAGAIN, "start the engine's thread", "", hint=str(error)) from error
    return found


def release_memory() -> None:
    """Give back what fences copied into, as soon as no job uses it; the next fence asks for it again."""
    for (pid, role, _), one in list(_engines.items()):
        if pid == os.getpid() and role == "write":
            one.release_memory()


def _close_all() -> None:
    global _exiting
    with _lock:
        _exiting = True
    # Before the interpreter frees the arrays that a running job reads from.
    for (pid, _, _), one in list(_engines.items()):
        if pid == os.getpid():
            one.close()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)


class Options(TypedDict):
    """The engine's keyword arguments."""

    block_bytes: int
    queue_depth: int
    copy_threads: int
    io_uring: str
    direct: str
    dontcache: str


def options(config: IOConfig) -> Options:
    """The engine's keyword arguments for a configuration."""
    threads = config.copy_threads or max(1, min(4, len(os.sched_getaffinity(0)) // _CPUS_A_COPY_THREAD))
    return {
        "block_bytes": config.block_bytes,
        "queue_depth": config.queue_depth,
        "copy_threads": threads,
        "io_uring": config.io_uring,
        "direct": config.direct,
        "dontcache": config.dontcache,
    }


def wait(job: Job, on_tick: Callable[[Job], None] | None = None) -> Job:
    """Wait for a job, letting Python handle signals meanwhile.

    Args:
        job: a submitted job.
        on_tick: called about ten times a second.

    Raises:
        StorageError: the first system call that failed, with errno, file, offset and length.
        CapabilityError: a capability that is switched on is not available.
    """
    return _wait(job, job.wait, on_tick)


def wait_staged(
    job: _engine.WriteJob, nbytes: int, on_tick: Callable[[_engine.WriteJob], None] | None = None
) -> _engine.WriteJob:
    """The same until the first ``nbytes`` of its sources have been read: their checksums are known then."""
    return _wait(job, partial(job.wait_staged, nbytes), on_tick)


def _wait(job: Job, wait_s: Callable[[float], bool], on_tick: Callable[[Job], None] | None) -> Job:
    try:
        while not wait_s(_TICK_S):
            if on_tick is not None:
                on_tick(job)
    except BaseException:
        # The memory that the job uses is the caller's: it must be left alone before the caller gets control.
        job.cancel()
        job.wait()
        raise
    if job.done and job.error is not None:
        code, op, path, offset, nbytes, capability = job.error
        if capability:
            raise CapabilityError(
                f"{op}: {os.strerror(code)}, but the capability is switched on"
                f'{f" (file {path})" if path else ""}; use "auto" to fall back'
            )
        raise StorageError(code, op, path, offset, nbytes)
    return job
