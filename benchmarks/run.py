"""Run the benchmarks one after the other, and say how long each took.

Run: python benchmarks/run.py [NAME ...] [--more | --all] [--record] [--directory DIR]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from _catalog import BENCHMARKS, RESULTS, ROOT, Benchmark


def chosen(args: argparse.Namespace) -> list[Benchmark]:
    """Those that were named, or a group."""
    names = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    unknown = [name for name in args.names if name not in names]
    if unknown:
        raise SystemExit(f"no benchmark: {', '.join(unknown)}; there are {', '.join(names)}")
    if args.names:
        return [names[name] for name in args.names]
    return [benchmark for benchmark in BENCHMARKS if args.all or benchmark.more == args.more]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="result files; the first group unless given")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--more", action="store_true", help="the second group")
    group.add_argument("--all", action="store_true", help="both groups")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/, then run report.py")
    parser.add_argument("--directory", type=Path, help="a place on the drive to measure; the project unless given")
    args = parser.parse_args()
    failed = []
    for benchmark in chosen(args):
        if benchmark.missing():
            print(f"{benchmark.name}: not run: {', '.join(benchmark.missing())} is not installed")
            continue
        command = [sys.executable, f"benchmarks/{benchmark.script}", *benchmark.arguments]
        if args.record:
            # The file keeps its command, so this stays relative and short.
            command += ["--json", str((RESULTS / f"{benchmark.name}.json").relative_to(ROOT))]
        if args.directory:
            command += ["--directory", str(args.directory.absolute())]
        begin = time.monotonic()
        done = subprocess.run(command, cwd=ROOT)
        print(f"\n{benchmark.name}: {(time.monotonic() - begin) / 60:.1f} minutes", flush=True)
        if done.returncode:
            failed.append(benchmark.name)
    if args.record:
        subprocess.run([sys.executable, "benchmarks/report.py"], cwd=ROOT, check=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
