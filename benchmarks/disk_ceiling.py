"""What the drive itself can do: fio where it is installed, and our own engine with nothing to copy and check.

Run: python benchmarks/disk_ceiling.py [--directory DIR] [--size-mib N] [--json FILE]
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import _harness as harness
from _drive import BufferedRead, Direct

FIO_SETTINGS = tuple((block_mib, depth) for block_mib in (1, 4, 8) for depth in (4, 8))
Rates = dict[tuple[int, int], float]


def fio_rates(fio: str, directory: Path, nbytes: int, *, read: bool) -> Rates:
    """GB/s by setting, with fio: O_DIRECT, io_uring, huge-page-sized requests, flushed at the end."""
    rates: Rates = {}
    file = directory / "fio"
    for block_mib, depth in FIO_SETTINGS:
        if not read:
            harness.remove(file)
        command = [
            fio,
            "--name=ceiling",
            f"--filename={file}",
            f"--size={nbytes}",
            f"--rw={'read' if read else 'write'}",
            f"--bs={block_mib}M",
            f"--iodepth={depth}",
            "--ioengine=io_uring",
            "--direct=1",
            "--end_fsync=1",
            "--fallocate=posix",
            "--output-format=json",
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        job = json.loads(done.stdout)["jobs"][0]
        # job_runtime counts to the end of the flush, unlike the bandwidth that fio prints.
        rates[block_mib, depth] = nbytes / 1e6 / job["job_runtime"]
    return rates


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--size-mib", type=int, default=1730)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    nbytes = args.size_mib * harness.MIB // (8 * harness.MIB) * (8 * harness.MIB)
    fio = shutil.which("fio")
    fio_rounds: dict[str, list[dict[tuple[int, int], float]]] = {
        "write, new file, fio": [],
        "read, direct, cold, fio": [],
    }
    with harness.scratch_in(args.directory) as scratch:
        ceilings: list[Direct | BufferedRead] = [
            Direct("write, new file", scratch, nbytes),
            Direct("write, recycled file", scratch, nbytes, reuse=True),
            Direct("read, direct, cold", scratch, nbytes, read=True),
            BufferedRead("read, buffered, cold", scratch, nbytes),
        ]
        for number in range(args.rounds + 1):
            for ceiling in ceilings:
                ceiling.measure()
            for name, rounds in fio_rounds.items() if fio else ():
                rounds.append(fio_rates(str(fio), scratch, nbytes, read="read" in name))
            harness.progress(number, args.rounds)
    rows: list[dict[str, Any]] = [ceiling.row() for ceiling in ceilings]
    for name, rounds in fio_rounds.items() if fio else ():
        rates = {setting: [one[setting] for one in rounds[1:]] for setting in FIO_SETTINGS}
        best = harness.best_median(rates)
        rows.append(harness.row(name, rates[best], setting=f"io_uring, direct, {best[0]} MiB x {best[1]}"))
    facts = {
        "state": f"one file of {nbytes / harness.MIB:.0f} MiB; the best setting of each kind, by its median",
        "rounds": args.rounds,
        "rows": rows,
        "fio": "used" if fio else "not installed",
    }
    harness.finish("ceiling", args, facts)


if __name__ == "__main__":
    main()
