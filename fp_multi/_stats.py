"""Sums and samples over a Checkpointer's saves."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Mapping

from fp_multi._advice import Advice
from fp_multi._pending import OverlapReport, PendingSave
from fp_multi.errors import ConfigError

_STALLS = ("stall_save_s", "stall_queue_s", "stall_fence_s")
_BYTES = ("borrowed_nbytes", "copied_nbytes", "eager_nbytes")
_SAMPLES = 64
"""Medians are over so many of the newest: a run's pace changes."""


class Stats:
    """How many saves, what they cost, and the last one's report; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves = self._failures = self._recycled = 0
        self._last: PendingSave | None = None
        self._sums: dict[str, float] = dict.fromkeys((*_STALLS, *_BYTES), 0.0)
        self._asked: tuple[int, float, float] | None = None
        self._step_stall_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=_SAMPLES)
        self._between_saves_s: deque[float] = deque(maxlen=_SAMPLES)
        self._windows_s: deque[float] = deque(maxlen=_SAMPLES)
        self._rates: deque[float] = deque(maxlen=_SAMPLES)
        self._stalls_s: deque[float] = deque(maxlen=_SAMPLES)

    # What is counted

    def asked(self, step: int, begin_s: float) -> None:
        """A save was asked for."""
        with self._lock:
            stalled_s = self._stalled_s()
            if self._asked is not None:
                last, last_s, last_stalled_s = self._asked
                if step > last:
                    # Waits for saves are no part of a step.
                    took_s = begin_s - last_s - (stalled_s - last_stalled_s)
                    self._between_saves_s.append(max(took_s, 0.0) / (step - last))
            self._asked = (step, begin_s, stalled_s)
            self._stalls_s.append(0.0)

    def stalled(self, **seconds: float) -> None:
        """Training waited: ``stall_save_s``, ``stall_queue_s``, ``stall_fence_s``."""
        with self._lock:
            for name, more_s in seconds.items():
                self._sums[name] += more_s
                if name != "stall_queue_s" and self._stalls_s:
                    self._stalls_s[-1] += more_s

    def window(self, seconds: float) -> None:
        """There was so much time between a save and its fence: forward and backward."""
        with self._lock:
            self._windows_s.append(seconds)

    def stepped(self, seconds: float) -> None:
        """A training step took so long, waits for saves included."""
        with self._lock:
            stalled_s = self._stalled_s()
            self._steps_s.append(max(seconds - (stalled_s - self._step_stall_s), 0.0))
            self._step_stall_s = stalled_s

    def completed(self, pending: PendingSave) -> None:
        """A save is on the drive."""
        report = pending.report
        with self._lock:
            self._saves += 1
            self._recycled += report.recycled
            self._last = pending
            for name in _BYTES:
                self._sums[name] += getattr(report, name)
            save = report.save
            if save is not None and save.write_s + save.fsync_s > 0:
                self._rates.append(save.tensor_nbytes / (save.write_s + save.fsync_s))

    def failed(self) -> None:
        """A save was given up."""
        with self._lock:
            self._failures += 1

    def _stalled_s(self) -> float:
        return sum(self._sums[name] for name in _STALLS)

    # What can be asked

    @property
    def saves(self) -> int:
        """Completed saves."""
        return self._saves

    @property
    def failures(self) -> int:
        """Saves that failed in the background."""
        return self._failures

    @property
    def last(self) -> OverlapReport | None:
        """The report of the save that was completed last."""
        last = self._last
        return None if last is None else last.report

    @property
    def step_s(self) -> float | None:
        """Median time of a training step without waits: as an optimizer's hook saw it, else from save to save."""
        return self._median(self._steps_s) or self._median(self._between_saves_s)

    @property
    def forward_backward_s(self) -> float | None:
        """Median time from a save to its fence, in which a save costs nothing."""
        return self._median(self._windows_s)

    @property
    def bytes_per_s(self) -> float | None:
        """Median rate of writing and flushing, beside the training."""
        return self._median(self._rates)

    @property
    def stall_s(self) -> float | None:
        """Median wait for a save in the call of ``save`` and at its fence, without waits for earlier saves."""
        return self._median(self._stalls_s)

    def _median(self, samples: deque[float]) -> float | None:
        with self._lock:
            return statistics.median(samples) if samples else None

    def advise(self, mtbf_s: float, overhead: float, given: Mapping[str, float | None]) -> Advice:
        """See :meth:`fp_multi.Checkpointer.advise`; what is None in ``given`` is taken from here."""
        last = self.last
        step_s = self.step_s if given["step_s"] is None else given["step_s"]
        measured = {
            "step_s": step_s,
            "forward_backward_s": self.forward_backward_s or step_s,
            "nbytes": None if last is None or last.save is None else last.save.tensor_nbytes,
            "bytes_per_s": self.bytes_per_s,
            "stall_s": self.stall_s,
        }
        known = {name: measured[name] if value is None else value for name, value in given.items()}
        missing = [name for name, value in known.items() if value is None]
        if missing:
            raise ConfigError(f"not measured yet: {', '.join(missing)}; pass them, or save a few steps first")
        return Advice(mtbf_s=mtbf_s, overhead=overhead, **known)  # type: ignore[arg-type]

    def scalars(self, prefix: str = "checkpoint/") -> dict[str, float]:
        """Numbers for a logger such as TensorBoard: totals, and the last save's rates and times.

        Args:
            prefix: stands before every name.
        """
        with self._lock:
            out = {f"{prefix}{name}_total": value for name, value in self._sums.items()}
            out[f"{prefix}saves"] = float(self._saves)
            out[f"{prefix}failures"] = float(self._failures)
            out[f"{prefix}recycled"] = float(self._recycled)
        last = self.last
        if last is not None and last.save is not None:
            out[f"{prefix}step"] = float(last.step)
            for name in ("stall_s", *_STALLS, *_BYTES):
                out[f"{prefix}{name}"] = float(getattr(last, name))
            for name in ("write_s", "fsync_s", "commit_s", "gbytes_per_s"):
                out[f"{prefix}{name}"] = getattr(last.save, name)
        return out
