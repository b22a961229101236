"""Sums over a Checkpointer's saves."""

from __future__ import annotations

import threading

from fp_multi._pending import OverlapReport

_SUMS = ("stall_save_s", "stall_queue_s", "stall_fence_s", "borrowed_nbytes", "copied_nbytes", "eager_nbytes")


class Stats:
    """How many saves, what they cost, and the last one's report; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.saves = 0
        self.last: OverlapReport | None = None
        self._sums: dict[str, float] = dict.fromkeys(_SUMS, 0.0)

    def add(self, report: OverlapReport) -> None:
        """Count a completed save."""
        with self._lock:
            self.saves += 1
            self.last = report
            for name in _SUMS:
                self._sums[name] += getattr(report, name)

    def scalars(self, prefix: str = "checkpoint/") -> dict[str, float]:
        """Numbers for a logger such as TensorBoard: totals, and the last save's rates and times.

        Args:
            prefix: stands before every name.
        """
        with self._lock:
            out = {f"{prefix}{name}_total": value for name, value in self._sums.items()}
            out[f"{prefix}saves"] = float(self.saves)
            last = self.last
        if last is not None and last.save is not None:
            out[f"{prefix}stall_s"] = last.stall_s
            out[f"{prefix}write_s"] = last.save.write_s
            out[f"{prefix}fsync_s"] = last.save.fsync_s
            out[f"{prefix}commit_s"] = last.save.commit_s
            out[f"{prefix}gbytes_per_s"] = last.save.gbytes_per_s
        return out
