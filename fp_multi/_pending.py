"""One save of a Checkpointer as its caller sees it: a handle for waiting, for the fence and for the report."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp_multi import _engine
from fp_multi._crew import Latch
from fp_multi._together import Together
from fp_multi._types import Described, SaveReport
from fp_multi.errors import EngineClosedError

_TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """What a save cost the training loop, and where its bytes came from."""

    step: int
    save: SaveReport | None
    """How it was written; None before it is complete, or if it failed. Its clock starts when the save got its turn,
    behind earlier ones."""
    stall_save_s: float
    """The call of ``save`` itself, without the wait for an earlier save."""
    stall_queue_s: float
    """Waiting in ``save`` for an earlier save: training is faster than the drive."""
    stall_fence_s: float
    """Waiting at the fence until the state might change."""
    borrowed_nbytes: int
    """Written from the state's own memory. With the two below: all bytes of tensors that this process wrote."""
    copied_nbytes: int
    """Copied at a fence, and written from the copy."""
    eager_nbytes: int
    """Copied in the call of ``save``."""
    recycled: bool = False
    """Whether a retired checkpoint's file was overwritten; otherwise a new one was made."""

    @property
    def stall_s(self) -> float:
        """All that the training loop waited for this save."""
        return self.stall_save_s + self.stall_queue_s + self.stall_fence_s


class Work(NamedTuple):
    """What the background thread needs."""

    described: Described
    path: str
    metadata: Mapping[str, str]
    overwrite: bool
    begin_s: float
    team: Together | None = None
    """With whom it is saved."""


class PendingSave:
    """A save that goes on in the background.

    Made by :meth:`fp_multi.Checkpointer.save`; thread-safe. When the save is over it holds nothing of the state.
    """

    def __init__(self, step: int, number: int, slot: int, work: Work, raised: Callable[[PendingSave], object]) -> None:
        self.step = step
        self.path = work.path
        """The checkpoint directory."""
        self.number = number
        """Counts the saves of a Checkpointer in the order in which they were asked for."""
        self.slot = slot
        """Saves in different slots are under way at the same time."""
        self.staged_s: float | None = None
        """By when the state had been read at the latest, if a fence asked."""
        self.saved_s: float | None = None
        """When the call of ``save`` ended; None once a fence has come."""
        self._pid = os.getpid()
        self._raised: Callable[[PendingSave], object] | None = raised
        self._lock = threading.Lock()
        self._begun = Latch()  # the engine has the job, or will never have it
        self._over = Latch()
        self._work: Work | None = work
        self._jobs: Sequence[_engine.WriteJob] = ()
        self._sizes: Sequence[int] = ()
        self._spill_nbytes: int | None = None
        self._nbytes = sum([source.nbytes for source in work.described.sources])
        self._moved_nbytes = 0
        self._report = OverlapReport(step, None, 0.0, 0.0, 0.0, 0, 0, 0)
        self._error: BaseException | None = None

    # For everybody

    @property
    def report(self) -> OverlapReport:
        """What is known so far."""
        with self._lock:
            return self._report

    @property
    def error(self) -> BaseException | None:
        """What went wrong, None so far or for good."""
        return self._error

    @property
    def done(self) -> bool:
        """Whether it is complete, or has failed."""
        return self._over.is_set()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes given to the drive, and bytes in all (of the shards, once their headers are known)."""
        with self._lock:
            return self._moved_nbytes + sum([job.moved_nbytes for job in self._jobs]), self._nbytes

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is complete; whether it is.

        Raises:
            FpMultiError: what went wrong in the background. This handle raises it whenever it is asked; the
                Checkpointer's own calls do not raise it any more then.
        """
        if not self.wait_over(timeout_s):
            return False
        if self._error is not None:
            if self._raised is not None:
                self._raised(self)
            raise self._error
        return True

    def join(self) -> None:
        """Wait until it is complete or has failed, without raising what went wrong.

        Raises:
            EngineClosedError: this is a forked child; the save goes on in its parent.
        """
        self.wait_over(None)

    def wait_over(self, timeout_s: float | None) -> bool:
        if os.getpid() != self._pid:
            raise EngineClosedError(f"step {self.step} is being saved by the process that this one was forked from")
        return self._over.wait(timeout_s)

    # For the Checkpointer, in the caller's thread

    def withdraw(self) -> bool:
        """Nobody will do it; False if somebody has begun."""
        if self.take(begin=False) is None:
            return False
        self.settle(None)
        return True

    def let_go(self, spill_nbytes: int) -> None:
        """Ask for the state's memory; :meth:`wait_staged` tells when it may change.

        Args:
            spill_nbytes: at most so much is copied; what is more waits for the drive.
        """
        with self._lock:
            self._spill_nbytes = spill_nbytes
            self._ask()

    def _ask(self) -> None:
        left = self._spill_nbytes
        for job, nbytes in zip(self._jobs, self._sizes, strict=True):
            if left is not None:
                job.fence(left)
                left = max(left - nbytes, 0)

    @property
    def staged(self) -> bool:
        """Whether the state may change."""
        with self._lock:
            jobs, sizes = self._jobs, self._sizes
        return self._begun.is_set() and all(
            [job.done or job.staged_nbytes >= nbytes for job, nbytes in zip(jobs, sizes, strict=True)]
        )

    def wait_staged(self) -> None:
        """Wait until the state may change."""
        self._begun.wait()
        with self._lock:
            jobs, sizes = self._jobs, self._sizes
        for job, nbytes in zip(jobs, sizes, strict=True):
            while not job.wait_staged(nbytes, _TICK_S):
                pass  # lets Python handle signals
        if self.staged_s is None:
            self.staged_s = time.perf_counter()

    def add(self, **amounts: float) -> None:
        """Add to what the report counts."""
        with self._lock:
            now = {name: getattr(self._report, name) + more for name, more in amounts.items()}
            self._report = replace(self._report, **now)

    # For the Checkpointer, in the background

    def take(self, *, begin: bool = True) -> Work | None:
        """Begin (or make sure that nobody does); None if it was withdrawn, or somebody has."""
        with self._lock:
            work, self._work = self._work, None
            if begin and work is not None and work.team is not None:
                work.team.taken = True
        return work

    def started(self, jobs: Sequence[_engine.WriteJob], sizes: Sequence[int]) -> None:
        """The engine has the jobs, one for each shard of a length: fences that came before are for them, too."""
        with self._lock:
            self._jobs, self._sizes = jobs, sizes
            self._nbytes = sum(sizes)
            self._ask()
        self._begun.set()

    def complete(self, save: SaveReport, *, nbytes: int, copied_nbytes: int, recycled: bool) -> None:
        """It is on the drive; ``nbytes`` of its tensors this process has written."""
        with self._lock:
            borrowed = nbytes - copied_nbytes - self._report.eager_nbytes
            self._report = replace(
                self._report, save=save, borrowed_nbytes=borrowed, copied_nbytes=copied_nbytes, recycled=recycled
            )

    def settle(self, error: BaseException | None) -> None:
        """It is over; who waits may go on."""
        with self._lock:
            jobs, self._jobs, self._sizes = self._jobs, (), ()
            self._moved_nbytes = sum([job.moved_nbytes for job in jobs])
        self._error = error
        if error is None:
            self._raised = None  # statistics keep the last save: not to be a cycle
        self._begun.set()
        self._over.set()
