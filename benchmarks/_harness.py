"""What the benchmarks share: the state, cold caches, counters, the machine's description, tables and result files."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import json
import mmap
import os
import platform
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

import fp_multi as fp

MIB = 1 << 20
PACKAGES = ("fp_multi", "numpy", "torch", "safetensors", "msgspec")
SETTLE_S = 0.3
"""Pause after files were removed, so that the removal's own journal and discard work is not billed to the next."""

T = TypeVar("T")
K = TypeVar("K")
Arrays = dict[str, "np.ndarray[Any, Any]"]


# The state


def transformer(size_mib: int) -> Arrays:
    """Weights and both AdamW moments of a GPT-2-like model: 180 fp32 arrays, near the wanted size.

    1754 MiB are the shapes of GPT-2 medium (width 1024) with 8 blocks.
    """

    def shapes(width: int) -> dict[str, tuple[int, ...]]:
        blocks = {
            "ln_1.weight": (width,),
            "attn.weight": (3 * width, width),
            "attn.bias": (3 * width,),
            "proj.weight": (width, width),
            "ln_2.weight": (width,),
            "mlp_in.weight": (4 * width, width),
            "mlp_out.weight": (width, 4 * width),
        }
        rest = {"wte": (49 * width + 81, width), "wpe": (width, width), "ln_f.weight": (width,), "ln_f.bias": (width,)}
        return {f"h.{i}.{name}": shape for i in range(8) for name, shape in blocks.items()} | rest

    def nbytes(width: int) -> int:
        return 12 * sum(int(np.prod(shape)) for shape in shapes(width).values())

    width = min(range(64, 16384, 64), key=lambda w: abs(nbytes(w) - size_mib * MIB))
    rng = np.random.default_rng(0)
    return {
        f"{part}.{name}": rng.random(shape, dtype=np.float32)
        for part in ("model", "exp_avg", "exp_avg_sq")
        for name, shape in shapes(width).items()
    }


def many_leaves(count: int = 100_000) -> Arrays:
    """Arrays of 1 KiB each."""
    rng = np.random.default_rng(0)
    return {f"group_{i // 100}.leaf_{i % 100}": rng.random(256, dtype=np.float32) for i in range(count)}


# Files and caches


def fsync(path: Path) -> None:
    """Flush a file or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def files_of(path: Path) -> list[Path]:
    """A file itself, or all files below a directory."""
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def remove(path: Path) -> None:
    """Remove a file or a directory, and let the file system finish with it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    settle()


def settle() -> None:
    """Let the file system finish with what has been removed, and take the memory that became free."""
    os.sync()
    _spare.take()
    time.sleep(SETTLE_S)


def cool(path: Path) -> str:
    """Take a path's bytes out of the page cache; returns how."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
        how = "drop_caches"
    except OSError:
        for file in files_of(path):
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        how = "posix_fadvise(DONTNEED)"
    _spare.take()
    return how


@contextlib.contextmanager
def scratch_in(directory: Path) -> Iterator[Path]:
    """A folder for files, removed at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fp_multi-bench-", dir=directory) as name:
        yield Path(name)


# Counters


class Sample(NamedTuple):
    """One timed call."""

    elapsed_s: float
    cpu_s: float


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class _Spare:
    """Memory that is kept in use between the measurements and given free for those that need some.

    A virtual machine hands freed memory back to its host within seconds, and whoever uses it next waits for the host:
    seconds for each GB. That would be a lottery between the contenders. Memory that was freed a moment ago is still
    there, so it is taken at once when a file or the page cache has been dropped.
    """

    def __init__(self) -> None:
        self._wanted = 0
        self._memory: mmap.mmap | None = None

    def take(self) -> None:
        """Use as much memory as was last wanted."""
        if self._memory is None and self._wanted:
            self._memory = huge_pages(self._wanted)
            np.frombuffer(self._memory, np.uint8)[::4096] = 1

    def give(self, nbytes: int) -> None:
        """Make so much memory free that the machine really has."""
        available = Path("/proc/meminfo").read_text().split()
        held = len(self._memory) if self._memory is not None else 0
        free = int(available[available.index("MemAvailable:") + 1]) * 1024 + held
        nbytes = max(min(nbytes, free // 2), MIB)
        if held < nbytes:
            self._wanted = nbytes
            self.drop()
            self.take()
        self.drop()

    def drop(self) -> None:
        """Free it."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None


_spare = _Spare()


def warm_memory(nbytes: int) -> None:
    """Make so much memory free that a virtual machine has already got from its host."""
    _spare.give(nbytes)


def huge_pages(nbytes: int) -> mmap.mmap:
    """Anonymous memory, in huge pages where there are some."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def use(state: Iterable[np.ndarray[Any, Any]]) -> None:
    """Read all of a state, as the training step in front of a save has.

    Memory that nobody has touched for seconds is not what is saved in training: the system may have taken it for cold
    (DAMON does on some machines), and the first to read it pays up to four times as much.
    """
    for array in state:
        array.reshape(-1).view(np.uint8).sum()


def timed(action: Callable[[], object], warm_nbytes: int, state: Iterable[np.ndarray[Any, Any]] = ()) -> Sample:
    """Time a call that takes about so much memory; what it returns is dropped behind the clock.

    Args:
        action: what is timed.
        warm_nbytes: see :func:`warm_memory`; 0 for who needs none.
        state: what is saved, see :func:`use`.
    """
    gc.collect()
    if warm_nbytes:
        warm_memory(warm_nbytes)
    use(state)
    cpu = _cpu_s()
    begin = time.perf_counter()
    result = action()
    sample = Sample(time.perf_counter() - begin, _cpu_s() - cpu)
    del result
    return sample


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def peak_memory(action: Callable[[], object]) -> int:
    """How many bytes the resident memory rises above what it is now while the call runs."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = _status("VmRSS")
    result = action()
    peak = _status("VmHWM") - before
    del result
    return peak


def in_fresh_process(script: str, arguments: Sequence[str]) -> Any:
    """Run a benchmark script with hidden arguments and return the JSON that it prints."""
    done = subprocess.run([sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# Rows, ratios, files


def best_median(rates: Mapping[K, Sequence[float]]) -> K:
    """The setting whose median is highest."""
    return max(rates, key=lambda key: statistics.median(rates[key]))


def row(name: str, rates: Sequence[float], **more: Any) -> dict[str, Any]:
    """One line of a table: the median rate and all single ones."""
    return {
        "name": name,
        "gbytes_per_s": round(statistics.median(rates), 3),
        "rounds_gbytes_per_s": [round(rate, 3) for rate in rates],
        **{key: value for key, value in more.items() if value is not None},
    }


def ratio(what: str, value: float, goal: str) -> dict[str, Any]:
    """One number that the project has set itself a goal for."""
    return {"what": what, "value": round(value, 3), "goal": goal}


def machine(directory: Path) -> dict[str, Any]:
    """What the numbers depend on."""
    info = Path("/proc/cpuinfo").read_text()
    models = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    meminfo = Path("/proc/meminfo").read_text().split()
    return {
        "cpu": models[0] if models else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(meminfo[meminfo.index("MemTotal:") + 1]) / MIB, 1),
        "kernel": platform.release(),
        **_mount(directory),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "capabilities": fp.capabilities(directory),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _mount(directory: Path) -> dict[str, str]:
    where = os.path.realpath(directory)
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    device, point, kind, options, *_ = max(
        (m for m in mounts if os.path.commonpath([where, m[1]]) == m[1]), key=lambda m: len(m[1])
    )
    return {"device": device, "mount": point, "file_system": kind, "mount_options": options}


def options(description: str | None) -> argparse.ArgumentParser:
    """The command line that all benchmarks have."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the drive to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, rows and ratios to FILE")
    return parser


def add_state_options(parser: argparse.ArgumentParser) -> None:
    """Which state, and how often."""
    parser.add_argument("--size-mib", type=int, default=1730, help="size of the state (the shapes come near it)")
    parser.add_argument("--many-leaves", action="store_true", help="100,000 tensors of 1 KiB in place of big ones")
    parser.add_argument("--rounds", type=int, default=5)


def state_of(args: argparse.Namespace) -> Arrays:
    """The state that was asked for."""
    return many_leaves() if args.many_leaves else transformer(args.size_mib)


def rotated(contenders: Sequence[T], number: int) -> list[T]:
    """Another order in each round, so that nobody always follows the same one."""
    at = number % len(contenders)
    return [*contenders[at:], *contenders[:at]]


def with_peers(number: int) -> bool:
    """Whether a round has the peers, too: the first two and every second.

    They are slower by far more than the noise. The time is better spent on more rounds of those that the goals compare:
    fp_multi and the drive.
    """
    return number == 0 or number % 2 == 1


def in_round(contenders: Sequence[T], number: int, is_ours: Callable[[T], bool]) -> list[T]:
    """Those that a round has, in its order: see :func:`rotated` and :func:`with_peers`."""
    return [one for one in rotated(contenders, number) if with_peers(number) or is_ours(one)]


def progress(number: int, last: int) -> None:
    """Tell on standard error which round is done."""
    print(f"round {number} of {last} done", file=sys.stderr, flush=True)


def finish(benchmark: str, args: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Print the tables, and write the result file if one was asked for."""
    result = {
        "benchmark": benchmark,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(args.directory),
        **facts,
    }
    print(f"\n{benchmark}: {result['command']}")
    for key in ("state", "cache", "rounds"):
        if key in result:
            print(f"  {key}: {result[key]}")
    for key, value in result["machine"].items():
        print(f"  {key}: {value}")
    print()
    print(table(result["rows"]))
    if result.get("ratios"):
        print()
        print(table(result["ratios"]))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwritten to {args.json}")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; lists of single rounds are left to the result file."""
    columns = list(dict.fromkeys(key for one in rows for key in one if not key.startswith("rounds_")))
    cells = [columns, *([str(one.get(column, "")) for column in columns] for one in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])
