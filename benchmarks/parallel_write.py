"""One checkpoint written by 1, 2 and 4 processes at once, against the raw rate of as many raw writers.

Run: python benchmarks/parallel_write.py [--directory DIR] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _harness as harness
import _throttled
from _harness import MIB
from _ranks import Ranks, join, serve, start

RANKS = 4
TENSORS = 64
WRITERS = (1, 2, 4)
DRIVES = (1, 2, 4)
RAW = ((MIB, 8), (MIB, 16), (2 * MIB, 8), (2 * MIB, 16))
"""Request size and depth of the raw writers; the best counts."""
THROTTLED_RAW = RAW[1:2]


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--size-mib", type=int, default=2048, help="size of the state that every process holds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drive-mib-per-s", type=int, default=200, help="rate of each throttled drive")
    parser.add_argument("--throttled-size-mib", type=int, default=512, help="MiB for each throttled drive")
    parser.add_argument("--throttled-rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates into FILE (PNG)")
    parser.add_argument("--rank", type=int, help="used by the benchmark itself")
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank)
        return
    with harness.scratch_in(args.directory) as scratch:
        with start(__file__, scratch, RANKS, args.size_mib) as team:
            one_drive = measure(team, scratch, WRITERS, RAW, args.rounds)
        throttled: dict[int, dict[str, list[float]]] = {}
        why = _throttled.why_not()
        if why is None:
            for drives in DRIVES:
                rate = args.drive_mib_per_s * MIB
                with _throttled.striped(scratch, drives, 2 * args.throttled_size_mib * MIB, rate) as mount:
                    with start(__file__, scratch, RANKS, drives * args.throttled_size_mib) as team:
                        found = measure(team, mount, (drives,), THROTTLED_RAW, args.throttled_rounds)
                    throttled[drives] = found[drives]
        facts = {
            "state": f"{args.size_mib} MiB fp32 in {TENSORS} tensors, held by each of {RANKS} processes; "
            f"{args.throttled_size_mib} MiB for each throttled drive",
            "cache": "new files each time; from the common start until all is durable and all processes know it",
            "rounds": args.rounds,
            "rows": rows(one_drive, throttled, why, args),
            "ratios": ratios(one_drive, throttled, args),
        }
        if args.plot:
            draw(one_drive, throttled, args)
        harness.finish("parallel", args, facts)


# The measured processes


def work(rank: int) -> None:
    """Save, or write raw bytes, when the parent asks for it."""
    import numpy as np
    import torch.distributed as dist

    import fp_multi as fp
    from fp_multi import _ceiling, _commit, _engines
    from fp_multi.adapters.torch.comm import TorchComm

    join(rank)
    comm = TorchComm(timeout_s=300)
    rng = np.random.default_rng(0)
    columns = int(os.environ["FP_SIZE_MIB"]) * MIB // TENSORS // 4 // 1024
    state = {f"layer_{i}": rng.random((1024, columns), dtype=np.float32) for i in range(TENSORS)}
    nbytes = sum([array.nbytes for array in state.values()])

    def save(task: dict[str, Any]) -> None:
        config = fp.SaveConfig(writers=tuple(range(task["writers"])))
        fp.save(state, task["path"], comm=comm, config=config)

    def raw(task: dict[str, Any]) -> dict[str, Any]:
        """What fp.measure_ceiling does, but no file goes before all are durable: the drive would work for that, too."""
        mine = _ceiling.align_up(nbytes // task["writers"])
        options = _engines.options(fp.SaveConfig(block_bytes=task["block"], queue_depth=task["depth"]))
        with _commit.FileCommit(os.path.join(task["path"], f".raw-{rank}"), fp.SaveConfig(), nbytes=mine) as scratch:
            dist.barrier()
            begin_s = end_s = time.perf_counter()
            if rank < task["writers"]:
                _ceiling._write(scratch.path, mine, options, reuse=False)
                end_s = time.perf_counter()
            dist.barrier()
        return {"begin_s": begin_s, "end_s": end_s}

    def use(task: dict[str, Any]) -> None:
        harness.use(state.values())

    acts: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {"save": save, "raw": raw, "use": use}
    serve(nbytes, lambda task: acts[task["what"]](task))


def measure(
    team: Ranks, directory: Path, writers: tuple[int, ...], settings: tuple[tuple[int, int], ...], rounds: int
) -> dict[int, dict[str, list[float]]]:
    """Rates of saves and of raw writes, in the same rounds; the first warms up."""
    found: dict[int, dict[str, list[float]]] = {count: {"save": [], "raw": []} for count in writers}
    raw: dict[int, dict[tuple[int, int], list[float]]] = {
        count: {setting: [] for setting in settings} for count in writers
    }
    for number in range(rounds + 1):
        for count in harness.rotated(writers, number):
            path = directory / "saved"
            team.tell(what="use")
            took_s, _ = team.begin(what="save", path=str(path), writers=count)
            found[count]["save"].append(team.nbytes / 1e9 / took_s)
            harness.remove(path)
            for block, depth in settings:
                ask = {"what": "raw", "path": str(directory), "writers": count, "block": block, "depth": depth}
                mine = team.tell(**ask)[:count]
                took_s = max(one["end_s"] for one in mine) - min(one["begin_s"] for one in mine)
                raw[count][block, depth].append(team.nbytes / 1e9 / took_s)
                os.sync()
                time.sleep(harness.SETTLE_S)
        harness.progress(number, rounds)
    for count in writers:
        found[count]["save"] = found[count]["save"][1:]
        kept = {setting: rates[1:] for setting, rates in raw[count].items()}
        found[count]["raw"] = kept[harness.best_median(kept)]
    return found


def rows(
    one_drive: dict[int, dict[str, list[float]]],
    throttled: dict[int, dict[str, list[float]]],
    why: str | None,
    args: Any,
) -> list[dict[str, Any]]:
    table = []
    for count, found in one_drive.items():
        table.append(harness.row(f"this drive, {count} writers, fp_multi", found["save"]))
        table.append(harness.row(f"this drive, {count} raw writers", found["raw"]))
    for drives, found in throttled.items():
        name = f"{drives} drives of {args.drive_mib_per_s} MiB/s, as many"
        table.append(harness.row(f"{name} writers, fp_multi", found["save"]))
        table.append(harness.row(f"{name} raw writers", found["raw"]))
    if why:
        table.append({"name": "throttled drives", "not_run": why})
    return table


def ratios(
    one_drive: dict[int, dict[str, list[float]]], throttled: dict[int, dict[str, list[float]]], args: Any
) -> list[dict[str, Any]]:
    def median(found: dict[str, list[float]], what: str) -> float:
        return statistics.median(found[what])

    table = [
        harness.ratio(f"{count} writers / {count} raw writers", median(found, "save") / median(found, "raw"), ">= 0.95")
        for count, found in one_drive.items()
    ]
    alone = median(one_drive[1], "save")
    table += [
        harness.ratio(f"{count} writers / 1 writer", median(found, "save") / alone, ">= 0.95")
        for count, found in one_drive.items()
        if count > 1
    ]
    for drives, found in throttled.items():
        together = drives * args.drive_mib_per_s * MIB / 1e9
        table.append(
            harness.ratio(
                f"{drives} throttled drives / sum of their rates", median(found, "save") / together, ">= 0.95"
            )
        )
    return table


def draw(one_drive: dict[int, dict[str, list[float]]], throttled: dict[int, dict[str, list[float]]], args: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for ax, found, what in ((axes[0], one_drive, "writers on this drive"), (axes[1], throttled, "throttled drives")):
        places = range(len(found))
        for shift, kind, color in ((-0.2, "save", "C0"), (0.2, "raw", "0.6")):
            rates = [statistics.median(one[kind]) for one in found.values()]
            ax.bar([place + shift for place in places], rates, 0.4, label=kind, color=color)
        ax.set(xlabel=what, ylabel="GB/s until durable", xticks=list(places), xticklabels=list(found))
        ax.legend(["fp_multi", "raw writers"])
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.plot, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
