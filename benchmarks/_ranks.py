"""Measured processes that the parent gives one task after the other."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Ranks:
    """The processes, as the parent sees them; each answers a line of JSON with one."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes
        self.nbytes: int = self._answers("nbytes")[0]

    def ask(self, **task: Any) -> float:
        """Let all do something; the seconds of the slowest."""
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.write(json.dumps(task) + "\n")
                process.stdin.flush()
        return float(max(self._answers("elapsed_s")))

    def _answers(self, key: str) -> list[Any]:
        found = []
        for process in self.processes:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                raise SystemExit("a measured process has died; see its message above")
            found.append(json.loads(line)[key])
        return found


@contextlib.contextmanager
def start(script: str, scratch: Path, count: int, size_mib: int) -> Iterator[Ranks]:
    """Start a script's processes, with ``--rank``; its environment says the rest.

    Args:
        script: the path of the benchmark.
        scratch: for their store.
        count: how many.
        size_mib: size of the state that each makes.
    """
    env = {
        **os.environ,
        "FP_STORE": str(scratch / f"store_{time.monotonic_ns()}"),
        "FP_RANKS": str(count),
        "FP_SIZE_MIB": str(size_mib),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, script, "--rank", str(rank)],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(count)
    ]
    try:
        yield Ranks(processes)
    finally:
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(60)
