"""Run the quick forms of the benchmarks and say which ratios are worse than the recorded ones; exit status 1 then.

Run: python benchmarks/check.py [NAME ...] [--record] [--directory DIR]

Only ratios are compared, never times: a time is the machine's, a ratio within one run is the software's. A quick form's
ratios are not those of the full one (small states, few rounds), so they have a record of their own, with a tolerance
for each ratio: twice what its recorded runs differed by, and never less than a fifth. What seems worse is measured once
more, and counts only if it is worse again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from _catalog import BENCHMARKS, QUICK, ROOT, Benchmark, goal_of

LEAST_TOLERANCE = 0.2
SAFETY = 2.0
"""The tolerance is so many times what the recorded runs were away from their median."""
RUNS = 3
"""Of each benchmark, for a record."""
PREMISES = ("forward and backward / write",)
"""Ratios that say under which conditions the others were measured."""
Ratios = dict[str, dict[str, Any]]


class Worse(NamedTuple):
    """A ratio beyond its tolerance."""

    what: str
    recorded: float
    limit: float
    found: float | None
    """None: it is not measured any more."""

    def line(self) -> str:
        """For people."""
        found = "not measured any more" if self.found is None else f"{self.found:.3f}"
        return f"{self.what}: {found}, recorded {self.recorded:.3f}, limit {self.limit:.3f}"


def is_ratio(what: str) -> bool:
    """Whether a line of a result's ratios is one: some are milliseconds, bytes or counts."""
    return (" / " in what or what.startswith("speed of training")) and what not in PREMISES


def ratios_of(result: dict[str, Any]) -> Ratios:
    """What is compared, by its name."""
    return {one["what"]: one for one in result.get("ratios", ()) if is_ratio(one["what"])}


def recorded(runs: list[Ratios]) -> Ratios:
    """The record of some runs: median and tolerance of each ratio."""
    record: Ratios = {}
    for what, one in runs[0].items():
        values = [run[what]["value"] for run in runs if what in run]
        middle = statistics.median(values)
        apart = max(max(values) / middle, middle / max(min(values), 1e-9)) - 1 if middle else 0.0
        tolerance = round(max(LEAST_TOLERANCE, SAFETY * apart), 2)
        record[what] = {"value": middle, "tolerance": tolerance, "goal": one["goal"], "runs": values}
    return record


def worse(record: Ratios, found: Ratios) -> list[Worse]:
    """The ratios that are beyond their tolerances: a factor, down for those to be great, up for those to be small."""
    beyond = []
    for what, one in record.items():
        value, factor = one["value"], 1 + one["tolerance"]
        at_least = goal_of(one["goal"]).at_least
        limit = value / factor if at_least else value * factor
        now = found[what]["value"] if what in found else None
        if now is None or (now < limit if at_least else now > limit):
            beyond.append(Worse(what, value, limit, now))
    return beyond


def run(benchmark: Benchmark, directory: Path) -> dict[str, Any]:
    """The result of a benchmark's quick form."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [
            *(sys.executable, str(ROOT / "benchmarks" / benchmark.script), *(benchmark.quick or ())),
            *("--directory", str(directory), "--json", file.name),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{benchmark.name}: {benchmark.script} failed:\n{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads(Path(file.name).read_text())
    return result


def chosen(names: list[str]) -> list[Benchmark]:
    """The quick ones, or those that were asked for."""
    quick = {benchmark.name: benchmark for benchmark in BENCHMARKS if benchmark.quick is not None}
    unknown = [name for name in names if name not in quick]
    if unknown:
        raise SystemExit(f"no quick form: {', '.join(unknown)}; there are {', '.join(quick)}")
    found = []
    for name in names or quick:
        if quick[name].missing():
            print(f"{name}: not run: {', '.join(quick[name].missing())} is not installed")
        else:
            found.append(quick[name])
    return found


def compare(benchmark: Benchmark, record: Ratios, directory: Path) -> list[Worse]:
    """Measure, and once more if something seems worse; prints every ratio."""
    found = ratios_of(run(benchmark, directory))
    bad = worse(record, found)
    for what, one in found.items():
        known = f"recorded {record[what]['value']:.3f}" if what in record else "not recorded"
        print(f"  {what}: {one['value']:.3f}, {known}")
    if not bad:
        return []
    print(f"  {len(bad)} beyond their tolerance; once more")
    again = {one.what: one for one in worse(record, ratios_of(run(benchmark, directory)))}
    return [again[one.what] for one in bad if one.what in again]


def record(benchmarks: list[Benchmark], directory: Path) -> None:
    """Renew the record of these benchmarks; that of others stays."""
    import _harness as harness

    kept = json.loads(QUICK.read_text()) if QUICK.exists() else {"ratios": {}}
    for benchmark in benchmarks:
        print(f"{benchmark.name}: {RUNS} runs of {benchmark.script} {' '.join(benchmark.quick or ())}", flush=True)
        kept["ratios"][benchmark.name] = recorded([ratios_of(run(benchmark, directory)) for _ in range(RUNS)])
        # Kept after each one: an interrupted record is not lost.
        facts = {"date": datetime.date.today().isoformat(), "machine": harness.machine(directory)}
        QUICK.write_text(json.dumps(facts | {"ratios": kept["ratios"]}, indent=1) + "\n")
    print(f"written to {QUICK}")


def check(benchmarks: list[Benchmark], directory: Path) -> int:
    """Compare; returns how many ratios got worse."""
    if not QUICK.exists():
        raise SystemExit(f"{QUICK} is not there: run python benchmarks/check.py --record first")
    known = json.loads(QUICK.read_text())
    print(f"compared with {known['date']}, {known['machine']['cpu']}, {known['machine']['cpus']} CPUs")
    bad: dict[str, list[Worse]] = {}
    for benchmark in benchmarks:
        ratios = known["ratios"].get(benchmark.name)
        if ratios is None:
            print(f"{benchmark.name}: no record: run python benchmarks/check.py {benchmark.name} --record")
            continue
        print(f"{benchmark.name}:", flush=True)
        bad[benchmark.name] = compare(benchmark, ratios, directory)
    lines = [f"  {name}: {one.line()}" for name, found in bad.items() for one in found]
    print("\nworse, twice:\n" + "\n".join(lines) if lines else "\nnothing got worse")
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="result files; all with a quick form unless given")
    parser.add_argument("--record", action="store_true", help="record this machine's ratios to compare with")
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the drive to measure")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.record:
        record(chosen(args.names), args.directory)
    elif check(chosen(args.names), args.directory):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
