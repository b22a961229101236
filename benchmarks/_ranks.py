"""Measured processes that the parent gives one task after the other."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LEAD_S = 0.05
"""From the parent's word to the common start: enough for all processes to hear it."""


class Ranks:
    """The processes, as the parent sees them; each answers a line of JSON with one."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes
        self.nbytes: int = self._answers()[0]["nbytes"]

    def ask(self, **task: Any) -> float:
        """Let all do something; the seconds of the slowest."""
        return max(float(answer["elapsed_s"]) for answer in self.tell(**task))

    def tell(self, **task: Any) -> list[Any]:
        """Let all do something; what they answer."""
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.write(json.dumps(task) + "\n")
                process.stdin.flush()
        return self._answers()

    def begin(self, **task: Any) -> tuple[float, list[Any]]:
        """Let all begin at one moment.

        Returns:
            The seconds from that moment until the last has done its part, and all answers.
        """
        at_s = time.perf_counter() + LEAD_S  # CLOCK_MONOTONIC: one clock for all processes
        answers = self.tell(at_s=at_s, **task)
        return max(float(answer["end_s"]) for answer in answers) - at_s, answers

    def _answers(self) -> list[Any]:
        found = []
        for process in self.processes:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                raise SystemExit("a measured process has died; see its message above")
            found.append(json.loads(line))
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "FP_STORE": str(scratch / f"store_{time.monotonic_ns()}"),
        "FP_PORT": str(port),
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


# In a measured process


def join(rank: int) -> int:
    """Set torch.distributed up as torchrun does, with a TCPStore; returns the number of ranks."""
    import torch.distributed as dist

    size = int(os.environ["FP_RANKS"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["FP_PORT"]), size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return size


def serve(nbytes: int, act: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Do what the parent asks for until it asks for nothing more.

    Args:
        nbytes: size of the state, for the parent.
        act: called with each task, which has to say when to begin (``at_s``) if it is to be timed: at that moment then.
            What it returns goes to the parent, with ``end_s``, the moment when it returned, unless it has that.
    """
    print(json.dumps({"nbytes": nbytes}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if "at_s" in task:
            time.sleep(max(0.0, task["at_s"] - time.perf_counter()))
        answer = act(task)
        end_s = time.perf_counter()
        print(json.dumps({"end_s": end_s, **(answer or {})}), flush=True)
    os._exit(0)  # destroying the process group would wait for what nobody needs any more
