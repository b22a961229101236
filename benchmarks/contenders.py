"""Who else: many ways to keep one state, each until it is handed back and until it is durable, then loaded cold.

Run: python benchmarks/contenders.py [--directory DIR] [--size-mib N] [--only WORD] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import _harness as harness
from _contenders import State, _flush, both
from _drive import Direct
from _others import WAYS, Opened, Way

OURS = "fp_multi"
RAW_WRITE, RAW_READ = "the drive, new file", "the drive, direct"


class Samples(NamedTuple):
    """What one way's rounds gave."""

    handed_back_s: list[float]
    saves: list[harness.Sample]
    loads: list[harness.Sample]


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--size-mib", type=int, default=512, help="size of the state (the shapes come near it)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="those whose name has this word")
    parser.add_argument("--no-memory", action="store_true", help="no peak memory: saves a process for each")
    parser.add_argument("--memory-of", metavar="NAME", help="used by the benchmark itself, in a process of its own")
    args = parser.parse_args()
    state = both(harness.transformer(args.size_mib))
    with harness.scratch_in(args.directory) as scratch:
        if args.memory_of:
            (way,) = [way for way in WAYS if way.name == args.memory_of]
            found = way.opened(state)
            print(json.dumps(harness.peak_memory(lambda: save(found, scratch / "saved"))))
            found.close()
            return
        ways = [way for way in WAYS if not args.only or args.only in way.name or way.name == OURS]
        harness.finish("contenders", args, measure(args, state, ways, scratch))


def save(found: Opened, path: Path) -> float:
    """Save until durable; returns the seconds until the caller had the state back."""
    begin = perf_counter()
    wait = found.save(path)
    handed_back_s = perf_counter() - begin
    if wait is not None:
        wait()
    _flush(path)
    return handed_back_s


def opened(ways: list[Way], state: State, scratch: Path) -> tuple[dict[str, Opened], dict[str, str]]:
    """Those that work here, and for the others why not: each saves and loads once, which warms it up, too."""
    found, why_not = {}, {}
    path = scratch / "first"
    for way in ways:
        try:
            one = way.opened(state)
            save(one, path)
            if one.load is not None:
                one.load(path)
            found[way.name] = one
        except ImportError as error:
            why_not[way.name] = f"not installed: {error.name or error}"
        except Exception as error:
            # Whatever a library that is not ours raises: the table says it, the others go on.
            why_not[way.name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
        finally:
            harness.remove(path)
    return found, why_not


def measure(args: Any, state: State, ways: list[Way], scratch: Path) -> dict[str, Any]:
    nbytes = sum(array.nbytes for array in state.arrays.values())
    found, why_not = opened(ways, state, scratch)
    able = [way for way in ways if way.name in found]
    extra = {}
    if not args.no_memory:
        for way in able:
            arguments = [*sys.argv[1:], "--memory-of", way.name]
            extra[way.name] = round(harness.in_fresh_process(__file__, arguments) / harness.MIB, 1)
    samples = {way.name: Samples([], [], []) for way in able}
    disk: dict[str, tuple[int, float]] = {}
    ceilings = [Direct(RAW_WRITE, scratch, nbytes), Direct(RAW_READ, scratch, nbytes, read=True)]
    for number in range(args.rounds + 1):
        for ceiling in ceilings:
            ceiling.measure()
        for way in harness.rotated(able, number):
            path = scratch / f"saved_{number}"
            one, taken = found[way.name], samples[way.name]
            handed: list[float] = []
            action = partial(_noting, one, path, handed)
            warm_nbytes = 2 * nbytes if way.takes_memory else 0
            taken.saves.append(harness.timed(action, warm_nbytes, state.arrays.values()))
            taken.handed_back_s.append(handed[0])
            files = harness.files_of(path)
            disk[way.name] = len(files), sum(file.stat().st_blocks * 512 for file in files) / nbytes
            if one.load is not None:
                how = harness.cool(path)
                taken.loads.append(harness.timed(partial(one.load, path), 2 * nbytes))
            harness.remove(path)
        harness.progress(number, args.rounds)
    for one in found.values():
        one.close()
    # The first round warms up.
    samples = {name: Samples(*(values[1:] for values in taken)) for name, taken in samples.items()}
    rows = [ceilings[0].row(), _as_load(ceilings[1].row())]
    rows += [_row(way, samples[way.name], nbytes, disk[way.name], extra.get(way.name)) for way in able]
    rows += [{"name": name, "not_run": why} for name, why in why_not.items()]
    return {
        "state": f"{len(state.arrays)} fp32 tensors, {nbytes / harness.MIB:.0f} MiB, in host memory",
        "cache": f"saves: new files, all fsynced; loads: cold, {how}",
        "rounds": args.rounds,
        "rows": rows,
        "ratios": ratios(rows),
    }


def _noting(found: Opened, path: Path, handed: list[float]) -> None:
    handed.append(save(found, path))


def _as_load(row: dict[str, Any]) -> dict[str, Any]:
    """The drive's read rate stands in the column of the loads."""
    return {
        "name": row["name"],
        "load_gbytes_per_s": row["gbytes_per_s"],
        "rounds_load_gbytes_per_s": row["rounds_gbytes_per_s"],
        "setting": row["setting"],
    }


def _row(way: Way, taken: Samples, nbytes: int, disk: tuple[int, float], extra: float | None) -> dict[str, Any]:
    loads = [nbytes / 1e9 / sample.elapsed_s for sample in taken.loads]
    return harness.row(
        way.name,
        [nbytes / 1e9 / sample.elapsed_s for sample in taken.saves],
        handed_back_ms=round(statistics.median(taken.handed_back_s) * 1e3, 1),
        load_gbytes_per_s=round(statistics.median(loads), 3) if loads else None,
        rounds_load_gbytes_per_s=[round(rate, 3) for rate in loads],
        cpu_s_per_gb=round(statistics.median(sample.cpu_s for sample in taken.saves) * 1e9 / nbytes, 3),
        extra_memory_mib=extra,
        files=disk[0],
        bytes_on_disk_per_byte=round(disk[1], 3),
        setting=way.setting(),
    )


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rates = {row["name"]: row for row in rows if "not_run" not in row}
    ours = rates[OURS]
    table = [
        harness.ratio(f"save / {RAW_WRITE}", ours["gbytes_per_s"] / rates[RAW_WRITE]["gbytes_per_s"], ">= 0.9"),
        harness.ratio(f"load / {RAW_READ}", ours["load_gbytes_per_s"] / rates[RAW_READ]["load_gbytes_per_s"], ">= 0.9"),
    ]
    for what, key in (("save", "gbytes_per_s"), ("load", "load_gbytes_per_s")):
        others = {
            name: row[key] for name, row in rates.items() if key in row and not name.startswith((OURS, "the drive"))
        }
        if others:
            table.append(harness.ratio(f"{what} / best of the others", ours[key] / max(others.values()), ">= 1.3"))
    return table


if __name__ == "__main__":
    main()
