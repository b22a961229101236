"""How fast a state is on the drive, durable: fp_multi, its peers, and the drive itself, in the same rounds.

Run: python benchmarks/save_throughput.py [--directory DIR] [--size-mib N] [--many-leaves] [--json FILE]
"""

from __future__ import annotations

import json
import mmap
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import _harness as harness
import numpy as np
from _contenders import DCP1, DCP2, OURS, RECYCLED, SAFETENSORS, SAVERS, TORCH, Contender, State, both, named
from _drive import Direct

RAW = "the drive, new file"
COPY = "only a copy in memory, NumPy"
PIECE_NBYTES, BUFFER_NBYTES = harness.MIB // 2, 33 * harness.MIB // 2
"""A request and the staging memory of fp_multi's defaults."""
GOALS = {
    "big": {
        "raw": ">= 0.95",
        "torch": ">= 2.5",
        "peers": ">= 1.5",
        "cpu": "<= 0.15",
        "memory": "<= 64",
    },
    "many leaves": {"torch": ">= 3", "safetensors": ">= 2.5"},
}


def main() -> None:
    parser = harness.options(__doc__)
    harness.add_state_options(parser)
    parser.add_argument("--memory-of", metavar="NAME", help="used by the benchmark itself, in a process of its own")
    args = parser.parse_args()
    # With very many tensors the question is what each one costs; peers that are slower by orders are left out.
    left_out = (DCP1, DCP2, RECYCLED) if args.many_leaves else ()
    contenders = [contender for contender in SAVERS if contender.name not in left_out]
    state = both(harness.state_of(args))
    with harness.scratch_in(args.directory) as scratch:
        if args.memory_of:
            contender = named(SAVERS, args.memory_of)
            print(json.dumps(harness.peak_memory(lambda: contender.save(state, scratch / "saved"))))
            return
        harness.finish("save", args, measure(args, state, contenders, scratch))


def measure(args: Any, state: State, contenders: list[Contender], scratch: Path) -> dict[str, Any]:
    nbytes = sum(array.nbytes for array in state.arrays.values())
    extra = {}
    for contender in contenders:
        if contender.prepared:
            continue  # earlier saves have their memory already
        arguments = [*sys.argv[1:], "--memory-of", contender.name]
        extra[contender.name] = round(harness.in_fresh_process(__file__, arguments) / harness.MIB, 1)

    buffer = harness.huge_pages(BUFFER_NBYTES)
    samples: dict[str, list[harness.Sample]] = {contender.name: [] for contender in contenders}
    samples[COPY] = []
    ceilings = []
    if not args.many_leaves:
        ceilings = [Direct(RAW, scratch, nbytes), Direct("the drive, recycled file", scratch, nbytes, reuse=True)]
    for number in range(args.rounds + 1):
        for ceiling in ceilings:
            ceiling.measure()
        samples[COPY].append(harness.timed(partial(copy_through, state, buffer), 0, state.arrays.values()))
        for contender in harness.in_round(contenders, number, lambda one: one.is_ours):
            path = scratch / f"saved_{number}"
            with contender.ready(state, path) as save:
                samples[contender.name].append(
                    harness.timed(save, contender.save_memory(nbytes), state.arrays.values())
                )
            harness.remove(path)
        harness.progress(number, args.rounds)
    # The first round warms up: page cache, staging memory, imports.
    samples = {name: taken[1:] for name, taken in samples.items()}

    rows = [ceiling.row() for ceiling in ceilings]
    for name, taken in samples.items():
        rows.append(
            harness.row(
                name,
                [nbytes / 1e9 / sample.elapsed_s for sample in taken],
                ms=round(statistics.median(sample.elapsed_s for sample in taken) * 1e3, 1),
                cpu_s_per_gb=round(statistics.median(sample.cpu_s for sample in taken) * 1e9 / nbytes, 3),
                extra_memory_mib=extra.get(name),
            )
        )
    return {
        "state": f"{len(state.arrays)} fp32 tensors, {nbytes / harness.MIB:.0f} MiB, in host memory",
        "cache": "new files each time; memory warm",
        "rounds": args.rounds,
        "rows": rows,
        "ratios": ratios({row["name"]: row for row in rows}, many_leaves=args.many_leaves),
    }


def copy_through(state: State, buffer: mmap.mmap) -> None:
    """Copy every byte once, piece by piece, into a buffer of the size that saves go through.

    That is the least CPU time that a write from memory of one's own can take.
    """
    into = np.frombuffer(buffer, np.uint8)
    at = 0
    for array in state.arrays.values():
        flat = array.reshape(-1).view(np.uint8)
        for begin in range(0, flat.nbytes, PIECE_NBYTES):
            piece = flat[begin : begin + PIECE_NBYTES]
            into[at : at + piece.nbytes] = piece
            at = (at + PIECE_NBYTES) % BUFFER_NBYTES


def ratios(rows: dict[str, dict[str, Any]], *, many_leaves: bool) -> list[dict[str, Any]]:
    rate = {name: row["gbytes_per_s"] for name, row in rows.items()}
    goals = GOALS["many leaves" if many_leaves else "big"]
    found = [harness.ratio("save / torch.save + fsync", rate[OURS] / rate[TORCH], goals["torch"])]
    if many_leaves:
        found.append(harness.ratio("save / safetensors + fsync", rate[OURS] / rate[SAFETENSORS], goals["safetensors"]))
        return found
    best = max(rate[name] for name in (SAFETENSORS, DCP1, DCP2))
    return [
        harness.ratio(f"save / {RAW}", rate[OURS] / rate[RAW], goals["raw"]),
        *found,
        harness.ratio("save / best of safetensors and DCP", rate[OURS] / best, goals["peers"]),
        harness.ratio("CPU seconds for a GB", rows[OURS]["cpu_s_per_gb"], goals["cpu"]),
        harness.ratio("extra memory, MiB", rows[OURS]["extra_memory_mib"], goals["memory"]),
    ]


if __name__ == "__main__":
    main()
