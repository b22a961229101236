"""``fp-multi bench``: what a drive can do, and what a save and a load make of it."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.table import Table

import fp_multi as fp
from fp_multi._cli_text import count, out, say, shown, size, working
from fp_multi._types import Array
from fp_multi.errors import ConfigError

_ROUNDS = 3
_TENSOR_NBYTES = 16 << 20


def bench(directory: Path, size_mib: int) -> None:
    """Measure and print.

    Args:
        directory: where; a scratch folder in it is made and removed.
        size_mib: size of the state, in MiB.

    Raises:
        FpMultiError: what saving, loading and measuring raise.
    """
    nbytes = size_mib << 20
    with tempfile.TemporaryDirectory(dir=directory, prefix=".fp-multi-bench-") as scratch:
        with working("measuring the drive itself"):
            raw_write = _best(fp.measure_ceiling(scratch, nbytes))
            raw_read = _best(fp.measure_ceiling(scratch, nbytes, read=True))
        with working("saving and loading"):
            state = _state(nbytes)
            rounds = [_round(state, Path(scratch) / f"round_{i}") for i in range(_ROUNDS)]
    reports = [report for report, _ in rounds]
    saved = statistics.median(report.gbytes_per_s for report in reports)
    loaded = statistics.median(report.tensor_nbytes / 1e9 / s for report, s in rounds)
    report = reports[-1]

    say(
        out(),
        f"{shown(str(directory))}: {size(report.tensor_nbytes)} in {count(report.tensors, 'tensor')}; "
        f"saves and loads are the median of {_ROUNDS}, nothing is in the page cache",
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("GB/s", justify="right")
    table.add_column("")
    table.add_row("drive, write", f"{raw_write.gbytes_per_s:.2f}", _how(raw_write))
    table.add_row("save, durable", f"{saved:.2f}", f"{saved / raw_write.gbytes_per_s:.0%} of that")
    table.add_row("drive, read", f"{raw_read.gbytes_per_s:.2f}", _how(raw_read))
    table.add_row("load, verified", f"{loaded:.2f}", f"{loaded / raw_read.gbytes_per_s:.0%} of that")
    say(out(), table)
    say(out(), f"saved with {report.engine}, {'O_DIRECT' if report.direct else 'page cache'}")
    for reason in dict.fromkeys(report.reasons):
        say(out(), f"not used: {shown(reason)}")


def run_all(directory: Path) -> int:
    """Run the scripts in ``benchmarks/`` of the source tree that this package is run from.

    Args:
        directory: where they write.

    Returns:
        Their exit status.

    Raises:
        ConfigError: this is an installed package; the scripts, and the peers that they need, are not part of it.
    """
    script = Path(fp.__file__).resolve().parent.parent / "benchmarks" / "run.py"
    if not script.is_file():
        raise ConfigError(
            "--full runs the scripts of the source tree, and this is an installed package; run `make bench` and "
            "`make bench-more` there, or leave --full out"
        )
    return subprocess.run([sys.executable, str(script), "--all", "--directory", str(directory)]).returncode


def _best(results: list[fp.CeilingResult]) -> fp.CeilingResult:
    return max(results, key=lambda result: result.gbytes_per_s)


def _how(best: fp.CeilingResult) -> str:
    return f"best with {best.block_bytes >> 20} MiB x {best.queue_depth} in flight"


def _state(nbytes: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    # Random: a drive or a file system that compresses must not look faster than it is.
    return {
        f"layer_{i:04d}": rng.random(min(_TENSOR_NBYTES, nbytes - at) // 4, np.float32)
        for i, at in enumerate(range(0, nbytes, _TENSOR_NBYTES))
    }


def _round(state: dict[str, Array], path: Path) -> tuple[fp.SaveReport, float]:
    report = fp.save(state, path)
    for shard in path.iterdir():
        with open(shard, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.perf_counter()
    fp.load(path)
    elapsed_s = time.perf_counter() - begin
    for file_path in path.iterdir():
        file_path.unlink()  # the next round needs the room
    path.rmdir()
    return report, elapsed_s
