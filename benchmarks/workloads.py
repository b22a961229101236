"""States of real models, of many sizes, and of many numbers of tensors: fp_multi, torch.save, safetensors.

Run: python benchmarks/workloads.py [--directory DIR] [--limit-mib N] [--quick] [--json FILE]
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _harness as harness
import torch
from _contenders import (
    SAFETENSORS,
    SAVERS,
    TORCH,
    Contender,
    State,
    load_safetensors_copied,
    named,
    save_ours,
)
from _models import MODELS, Spec, even, filled, nbytes_of

from fp_multi.adapters import torch as fp_torch

OURS = "fp_multi"
CONTENDERS = (
    Contender(OURS, save_ours, lambda path: fp_torch.load(path), takes_memory=False),
    Contender("torch.save", named(SAVERS, TORCH).save, lambda path: torch.load(path, weights_only=True)),
    Contender("safetensors", named(SAVERS, SAFETENSORS).save, load_safetensors_copied),
)
SIZES_MIB = (100, 200, 500, 1000, 2000, 4000, 8000)
LEAVES = (10, 100, 1000, 10_000, 100_000)
LEAVES_MIB = 100
TENSORS = 180
"""Of the states of many sizes."""
MEMORY_SHARE, DISK_SHARE = 5, 4
"""A state takes at most this part of the memory and of the free disk: torch.load and the page cache want more of it."""


class Case(NamedTuple):
    """A state; several may share a name, and lie on one line then."""

    name: str
    spec: Spec


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--limit-mib", type=int, default=1500, help="greatest state of a model, and of the sizes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two rounds of small states only")
    args = parser.parse_args()
    rounds = 2 if args.quick else args.rounds
    limit_mib, room = (128 if args.quick else args.limit_mib), room_mib(args.directory)
    cut = min(limit_mib, room) * harness.MIB
    rows: list[dict[str, Any]] = []
    everything = list(cases(cut, quick=args.quick))
    with harness.scratch_in(args.directory) as scratch:
        for number, case in enumerate(everything):
            rows += measure(case, scratch, rounds)
            harness.progress(number + 1, len(everything))
    facts = {
        "state": (
            f"torch tensors in host memory, at most {cut // harness.MIB} MiB"
            + (f" (asked for {limit_mib}, there is room for {room})" if room < limit_mib else "")
            + f"; sizes: {TENSORS} tensors each; leaves: {LEAVES_MIB} MiB each"
        ),
        "cache": "saves: new files, until durable; loads: cold, into memory of their own",
        "rounds": rounds,
        "rows": rows,
        "ratios": ratios(rows),
    }
    harness.finish("workloads", args, facts)


def room_mib(directory: Path) -> int:
    """MiB of a state that memory and disk have room for."""
    memory = Path("/proc/meminfo").read_text().split()
    available = int(memory[memory.index("MemAvailable:") + 1]) * 1024
    directory.mkdir(parents=True, exist_ok=True)
    return min(available // MEMORY_SHARE, shutil.disk_usage(directory).free // DISK_SHARE) // harness.MIB


def cases(cut: int, *, quick: bool) -> Iterator[Case]:
    """Models first, then the two scales."""
    for model in MODELS:
        yield Case(*model.cut_to(cut))
    sizes = SIZES_MIB[:1] if quick else SIZES_MIB
    for mib in sizes:
        if mib * harness.MIB <= max(cut, SIZES_MIB[0] * harness.MIB):
            yield Case("size", even(mib * harness.MIB, TENSORS))
    for leaves in LEAVES[1:4] if quick else LEAVES:
        yield Case("leaves", even(LEAVES_MIB * harness.MIB, leaves))


def measure(case: Case, scratch: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each contender; the first round warms up."""
    nbytes = nbytes_of(case.spec)
    state = State({}, filled(case.spec))
    arrays = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in state.tensors.values()]
    saves: dict[str, list[harness.Sample]] = {contender.name: [] for contender in CONTENDERS}
    loads: dict[str, list[harness.Sample]] = {contender.name: [] for contender in CONTENDERS}
    for number in range(rounds + 1):
        for contender in harness.rotated(CONTENDERS, number):
            path = scratch / f"saved_{number}"
            save = partial(contender.save, state, path)
            saves[contender.name].append(harness.timed(save, contender.save_memory(nbytes), arrays))
            if contender.load is not None:
                harness.cool(path)
                loads[contender.name].append(harness.timed(partial(contender.load, path), 2 * nbytes))
            harness.remove(path)
    return [
        row(case, contender.name, nbytes, saves[contender.name][1:], loads[contender.name][1:])
        for contender in CONTENDERS
    ]


def row(case: Case, name: str, nbytes: int, saves: list[harness.Sample], loads: list[harness.Sample]) -> dict[str, Any]:
    back = [nbytes / 1e9 / sample.elapsed_s for sample in loads]
    return harness.row(
        f"{case.name}: {name}",
        [nbytes / 1e9 / sample.elapsed_s for sample in saves],
        load_gbytes_per_s=round(statistics.median(back), 3),
        rounds_load_gbytes_per_s=[round(rate, 3) for rate in back],
        mib=round(nbytes / harness.MIB),
        tensors=len(case.spec),
        cpu_s_per_gb=round(statistics.median(sample.cpu_s for sample in saves) * 1e9 / nbytes, 3),
    )


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times as fast as the better of the others, in the worst case of each kind."""
    least: dict[str, float] = {}
    for at in range(0, len(rows), len(CONTENDERS)):
        ours, *others = rows[at : at + len(CONTENDERS)]
        kind = ours["name"].partition(": ")[0]
        kind = kind if kind in ("size", "leaves") else "models"
        for what, key in (("save", "gbytes_per_s"), ("load", "load_gbytes_per_s")):
            times = ours[key] / max(other[key] for other in others)
            least[f"{kind}: {what} / best of the others, least"] = min(
                times, least.get(f"{kind}: {what} / best of the others, least", times)
            )
    return [harness.ratio(what, value, ">= 1.3") for what, value in least.items()]


if __name__ == "__main__":
    main()
