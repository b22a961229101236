"""A timeline in Chrome's trace format: chrome://tracing and Perfetto show it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

_MOST_EVENTS = 100_000
"""The oldest are forgotten: a run of weeks must not grow."""


class Trace:
    """Collects spans of several lanes; times are ``time.perf_counter()`` seconds."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, str, float, float, Mapping[str, Any]]] = deque(maxlen=_MOST_EVENTS)
        self._lock = threading.Lock()

    def span(self, lane: str, name: str, begin_s: float, end_s: float, **facts: Any) -> None:
        """Record that something took from ``begin_s`` to ``end_s``."""
        with self._lock:
            self._events.append((lane, name, begin_s, end_s, facts))

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write what was recorded as a JSON object of trace events."""
        with self._lock:
            events = list(self._events)
        lanes = {lane: i for i, lane in enumerate(dict.fromkeys(event[0] for event in events))}
        pid = os.getpid()
        named: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
            for lane, tid in lanes.items()
        ]
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
        with open(path, "wb") as file:
            file.write(msgspec.json.encode({"traceEvents": named + spans, "displayTimeUnit": "ms"}))
