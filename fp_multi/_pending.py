"""One save of a Checkpointer, from the call to the commit."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from fp_multi._save import Saving
from fp_multi._types import SaveReport

_log = logging.getLogger("fp_multi")


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """What a save cost the training loop, and where its bytes came from."""

    step: int
    save: SaveReport | None
    """How it was written; None before it is complete, or if it failed."""
    stall_save_s: float
    """The call of ``save`` itself, without the wait for an earlier save."""
    stall_queue_s: float
    """Waiting in ``save`` for an earlier save: training is faster than the drive."""
    stall_fence_s: float
    """Waiting at the fence until the state might change."""
    borrowed_nbytes: int
    """Written from the state's own memory."""
    copied_nbytes: int
    """Copied at the fence, and written from the copy."""
    eager_nbytes: int
    """Copied in the call of ``save``."""

    @property
    def stall_s(self) -> float:
        """All that the training loop waited for this save."""
        return self.stall_save_s + self.stall_queue_s + self.stall_fence_s


class PendingSave:
    """A save that goes on in the background.

    Made by :meth:`fp_multi.Checkpointer.save`; thread-safe.
    """

    def __init__(
        self, step: int, saving: Saving, report: OverlapReport, finished: Callable[[PendingSave], None]
    ) -> None:
        self.step = step
        self._saving = saving
        self._report = report
        self._finished = finished
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"fp_multi-save-{step}")
        self._thread.start()

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
        return not self._thread.is_alive()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes on the drive, and bytes in all."""
        return self._saving.job.moved_nbytes, self._saving.nbytes

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is complete; whether it is.

        Raises:
            FpMultiError: what went wrong in the background.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def join(self) -> None:
        """Wait until it is complete or has failed, without raising."""
        self._thread.join()

    def fence(self, spill_nbytes: int) -> None:
        """Wait until the state may change; called by the Checkpointer.

        Args:
            spill_nbytes: at most so much is copied; what is more waits for the drive.
        """
        job = self._saving.job
        if job.done or job.staged_nbytes >= self._saving.nbytes:
            return
        begin_s = time.perf_counter()
        job.fence(spill_nbytes)
        while not job.wait_staged(self._saving.nbytes, 0.1):
            pass  # lets Python handle signals
        self._add(stall_fence_s=time.perf_counter() - begin_s)

    def _add(self, **seconds: float) -> None:
        with self._lock:
            self._report = replace(
                self._report, **{name: getattr(self._report, name) + more for name, more in seconds.items()}
            )

    def _run(self) -> None:
        try:
            save = self._saving.finish()
            copied = self._saving.job.stats["copied_nbytes"]
            with self._lock:
                borrowed = save.tensor_nbytes - copied - self._report.eager_nbytes
                self._report = replace(self._report, save=save, copied_nbytes=copied, borrowed_nbytes=max(borrowed, 0))
        except BaseException as error:
            self._error = error
            _log.error("the save of step %d failed: %s", self.step, error)
        self._finished(self)
