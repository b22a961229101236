"""Every result file: the command that makes it, its quick form, and what its goals mean."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
QUICK = RESULTS / "quick.json"
"""What check.py compares with. It is not one of the result files."""


class Benchmark(NamedTuple):
    """One result file."""

    name: str
    """Of the file in benchmarks/results, without .json."""
    script: str
    title: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None
    """Arguments of the form that takes seconds; None if there is none, or if its numbers are no ratios."""
    needs: tuple[str, ...] = ()
    """Modules without which it cannot run."""
    more: bool = False
    """Whether it is one of those that `make bench` leaves to `make bench-more`."""

    def missing(self) -> list[str]:
        """The modules that are not installed."""
        return [module for module in self.needs if not _installed(module)]

    @property
    def command(self) -> str:
        """What records the file, from the project's root."""
        json = ("--json", f"benchmarks/results/{self.name}.json")
        return shlex.join(["python", f"benchmarks/{self.script}", *self.arguments, *json])


SMALL = ("--size-mib", "128", "--rounds", "3")
TINY = ("--size-mib", "64", "--rounds", "2")
BENCHMARKS = (
    Benchmark("ceiling", "disk_ceiling.py", "The drive itself", ("--size-mib", "512", "--rounds", "2")),
    Benchmark("save", "save_throughput.py", "Save until durable", ("--rounds", "4"), quick=SMALL),
    Benchmark(
        "load", "load_throughput.py", "Load from a cold cache", ("--size-mib", "1100", "--rounds", "3"), quick=SMALL
    ),
    Benchmark(
        "save_many_leaves", "save_throughput.py", "Save 100,000 small tensors", ("--many-leaves", "--rounds", "2")
    ),
    Benchmark(
        "load_many_leaves", "load_throughput.py", "Load 100,000 small tensors", ("--many-leaves", "--rounds", "2")
    ),
    Benchmark(
        "stall",
        "stall_time.py",
        "Training with a checkpoint at every step",
        ("--steps", "6", "--rounds", "3"),
        quick=(
            *("--width", "512", "--layers", "4", "--forward-backward-s", "0.1"),
            *("--steps", "6", "--rounds", "2", "--call-size-mib", "64"),
        ),
    ),
    Benchmark("import", "import_cost.py", "What an import costs", quick=("--rounds", "7")),
    Benchmark(
        "parallel",
        "parallel_write.py",
        "Several writers of one checkpoint",
        ("--rounds", "3"),
        quick=(
            *("--size-mib", "128", "--rounds", "3"),
            *("--drive-mib-per-s", "100", "--throttled-size-mib", "96", "--throttled-rounds", "1"),
        ),
        more=True,
    ),
    Benchmark(
        "reshard",
        "reshard_load.py",
        "Read by other ranks than wrote it",
        ("--rounds", "3"),
        quick=("--size-mib", "64", "--rounds", "2"),
        more=True,
    ),
    Benchmark("partition", "partition_scale.py", "Who writes what among 10,000 ranks", more=True),
    Benchmark(
        "dcp",
        "dcp_throughput.py",
        "torch.distributed.checkpoint",
        ("--size-mib", "1400", "--rounds", "3"),
        TINY,
        more=True,
    ),
    Benchmark(
        "orbax",
        "orbax_throughput.py",
        "Orbax",
        ("--rounds", "2"),
        TINY,
        needs=("orbax.checkpoint",),
        more=True,
    ),
    Benchmark(
        "orbax_many_leaves",
        "orbax_throughput.py",
        "Orbax, 20,000 small arrays",
        ("--many-leaves", "--rounds", "2"),
        needs=("orbax.checkpoint",),
        more=True,
    ),
    Benchmark(
        "contenders",
        "contenders.py",
        "Who else",
        quick=("--size-mib", "128", "--rounds", "2", "--no-memory", "--only", "torch"),
        more=True,
    ),
    Benchmark(
        "workloads",
        "workloads.py",
        "States of real models, sizes, numbers of tensors",
        ("--rounds", "2"),
        quick=("--quick",),
        more=True,
    ),
)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


_GOAL = re.compile(r"(>=|<=)?\s*(\d[\d.]*)")


class Goal(NamedTuple):
    """A ratio's goal, as the scripts write it: ">= 0.95", "<= 5", "0"."""

    at_least: bool
    value: float

    def met(self, value: float) -> bool:
        """Whether a measured value reaches it."""
        return value >= self.value if self.at_least else value <= self.value


def goal_of(text: str) -> Goal:
    """Read a goal; a bare number is one that must not be exceeded."""
    found = _GOAL.match(text)
    if found is None:
        raise SystemExit(f'a goal reads ">= 0.95", "<= 5" or "0", not {text!r}')
    return Goal(found[1] == ">=", float(found[2]))
