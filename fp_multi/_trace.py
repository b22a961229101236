"""A timeline in Chrome's trace format: chrome://tracing and Perfetto show it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from fp_multi._hidden import translated
from fp_multi._pending import PendingSave

_MOST_EVENTS = 50_000
"""The oldest are forgotten: a run of weeks must not grow."""


class Trace:
    """Collects spans of several lanes; times are ``time.perf_counter()`` seconds; thread-safe."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, str, float, float, Mapping[str, Any]]] = deque(maxlen=_MOST_EVENTS)
        self._lock = threading.Lock()

    def span(self, lane: str, name: str, begin_s: float, end_s: float, **facts: Any) -> None:
        """Record that something took from ``begin_s`` to ``end_s``."""
        with self._lock:
            self._events.append((lane, name, begin_s, end_s, facts))

    def save(self, pending: PendingSave) -> None:
        """Record what the background did for a completed save."""
        report = pending.report
        save = report.save
        if save is None:
            return
        end_s = save.begin_s + save.elapsed_s
        commit_s = end_s - save.commit_s
        flush_s = commit_s - save.fsync_s
        write_s = flush_s - save.write_s
        # The engine reads ahead of the drive by a few blocks only: without a fence the two end together.
        staged_s = flush_s if pending.staged_s is None else max(min(pending.staged_s, flush_s), write_s)
        step = report.step
        # Saves that overlap need lanes of their own: spans of a lane must not cross.
        which = f" {pending.slot + 1}" if pending.slot else ""
        self.span(
            f"staging{which}",
            f"stage {step}",
            write_s,
            staged_s,
            borrowed_nbytes=report.borrowed_nbytes,
            copied_nbytes=report.copied_nbytes,
        )
        facts = {"nbytes": save.tensor_nbytes, "GB/s": round(save.gbytes_per_s, 3), "recycled": report.recycled}
        self.span(f"writing{which}", f"write {step}", write_s, flush_s, **facts)
        self.span(f"fsync{which}", f"fsync {step}", flush_s, commit_s)
        self.span(f"commit{which}", f"commit {step}", commit_s, end_s)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write what was recorded as a JSON object of trace events.

        Raises:
            StorageError: the file cannot be written.
        """
        with self._lock:
            events = list(self._events)
        lanes = {lane: i for i, lane in enumerate(dict.fromkeys(event[0] for event in events))}
        pid = os.getpid()
        named: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "fp_multi"}}
        ]
        for lane, tid in lanes.items():
            named.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
        spans = [
            {
                "ph": "X",
                "name": name,
                "pid": pid,
                "tid": lanes[lane],
                "ts": begin_s * 1e6,
                "dur": max(end_s - begin_s, 0.0) * 1e6,
                "args": dict(facts),
            }
            for lane, name, begin_s, end_s, facts in events
        ]
        with translated("write", os.fsdecode(path)), open(path, "wb") as file:
            file.write(msgspec.json.encode({"traceEvents": named + spans, "displayTimeUnit": "ms"}))
