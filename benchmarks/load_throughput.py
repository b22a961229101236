"""How fast a saved state is back from a cold page cache: fp_multi (verifying), its peers, and the drive itself.

Run: python benchmarks/load_throughput.py [--directory DIR] [--size-mib N] [--many-leaves] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import _harness as harness
from _contenders import LOADERS, OURS, TOUCHED, Contender, State, both, named
from _drive import BufferedRead, Direct

DIRECT, BUFFERED = "the drive, direct", "the drive, buffered"


def main() -> None:
    parser = harness.options(__doc__)
    harness.add_state_options(parser)
    parser.add_argument("--memory-of", nargs=2, metavar=("NAME", "PATH"), help="used by the benchmark itself")
    args = parser.parse_args()
    if args.memory_of:
        name, path = args.memory_of
        harness.cool(Path(path))
        print(json.dumps(harness.peak_memory(lambda: loader_of(named(LOADERS, name))(Path(path)))))
        return
    contenders = [c for c in LOADERS if not (args.many_leaves and c.name == "torch DCP")]
    with harness.scratch_in(args.directory) as scratch:
        harness.finish("load", args, measure(args, both(harness.state_of(args)), contenders, scratch))


def loader_of(contender: Contender) -> Any:
    if contender.load is None:
        raise SystemExit(f"{contender.name} has no loader")
    return contender.load


def measure(args: Any, state: State, contenders: list[Contender], scratch: Path) -> dict[str, Any]:
    nbytes = sum(array.nbytes for array in state.arrays.values())
    paths = {}
    for number, contender in enumerate(contenders):
        paths[contender.name] = scratch / f"saved_{number}"
        contender.save(state, paths[contender.name])
    count = len(state.arrays)
    del state

    peak = {}
    for name, path in paths.items():
        peak[name] = harness.in_fresh_process(__file__, [*sys.argv[1:], "--memory-of", name, str(path)])

    samples: dict[str, list[harness.Sample]] = {contender.name: [] for contender in contenders}
    ceilings: list[Direct | BufferedRead] = []
    if not args.many_leaves:
        ceilings = [Direct(DIRECT, scratch, nbytes, read=True), BufferedRead(BUFFERED, scratch, nbytes)]
    for number in range(args.rounds + 1):
        for ceiling in ceilings:
            ceiling.measure()
        for contender in harness.in_round(contenders, number, lambda one: one.is_ours):
            path = paths[contender.name]
            how = harness.cool(path)
            samples[contender.name].append(harness.timed(partial(loader_of(contender), path), 2 * nbytes))
        harness.progress(number, args.rounds)
    # The first round warms up imports and staging memory; the page cache is cold each time.
    samples = {name: taken[1:] for name, taken in samples.items()}

    rows = [ceiling.row() for ceiling in ceilings]
    for contender in contenders:
        taken = samples[contender.name]
        rows.append(
            harness.row(
                contender.name,
                [nbytes / 1e9 / sample.elapsed_s for sample in taken],
                ms=round(statistics.median(sample.elapsed_s for sample in taken) * 1e3, 1),
                cpu_s_per_gb=round(statistics.median(sample.cpu_s for sample in taken) * 1e9 / nbytes, 3),
                memory_beyond_state_mib=round((peak[contender.name] - nbytes) / harness.MIB, 1),
            )
        )
    return {
        "state": f"{count} fp32 tensors, {nbytes / harness.MIB:.0f} MiB, into host memory",
        "cache": f"cold: {how} before each load",
        "rounds": args.rounds,
        "rows": rows,
        "ratios": ratios({row["name"]: row["gbytes_per_s"] for row in rows}, many_leaves=args.many_leaves),
    }


def ratios(rate: dict[str, float], *, many_leaves: bool) -> list[dict[str, Any]]:
    touched = harness.ratio(f"load / {TOUCHED}", rate[OURS] / rate[TOUCHED], ">= 1.5" if many_leaves else ">= 1.3")
    if many_leaves:
        return [touched]
    return [
        harness.ratio(f"load / {DIRECT}", rate[OURS] / rate[DIRECT], ">= 0.95"),
        harness.ratio(f"load / {BUFFERED}", rate[OURS] / rate[BUFFERED], ">= 0.95"),
        touched,
    ]


if __name__ == "__main__":
    main()
