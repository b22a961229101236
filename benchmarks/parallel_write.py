"""One checkpoint written by 1, 2 and 4 processes at once, against the raw rate of as many raw writers.

Run: python benchmarks/parallel_write.py [--directory DIR] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import _harness as harness
import _throttled
from _harness import MIB
from _ranks import Ranks, start

RANKS = 4
WRITERS = (1, 2, 4)
DRIVES = (1, 2, 4)
RAW_BLOCKS = (MIB, 2 * MIB)
RAW_DEPTHS = (8, 16)


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--size-mib", type=int, default=1024, help="size of the state that every process holds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drive-mib-per-s", type=int, default=200, help="rate of each throttled drive")
    parser.add_argument("--throttled-size-mib", type=int, default=192, help="bytes for each throttled drive")
    parser.add_argument("--throttled-rounds", type=int, default=2)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rates into FILE (PNG)")
    parser.add_argument("--rank", type=int, help="used by the benchmark itself")
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank)
        return
    with harness.scratch_in(args.directory) as scratch:
        with start(__file__, scratch, RANKS, args.size_mib) as team:
            one_drive = measure(team, scratch, WRITERS, args.rounds)
        throttled: dict[int, dict[str, list[float]]] = {}
        why = _throttled.why_not()
        if why is None:
            for drives in DRIVES:
                rate = args.drive_mib_per_s * MIB
                with _throttled.striped(scratch, drives, 2 * args.throttled_size_mib * MIB, rate) as mount:
                    with start(__file__, scratch, RANKS, drives * args.throttled_size_mib) as team:
                        found = measure(team, mount, (drives,), args.throttled_rounds)
                    throttled[drives] = found[drives]
        facts = {
            "state": f"{args.size_mib} MiB fp32 in 64 tensors, held by each of {RANKS} processes",
            "cache": "new files each time, until durable",
            "rounds": args.rounds,
            "rows": rows(one_drive, throttled, why, args),
            "ratios": ratios(one_drive, throttled, args),
        }
        if args.plot:
            draw(one_drive, throttled, args)
        harness.finish("parallel", args, facts)


# The measured processes


def work(rank: int) -> None:
    """Do what the parent asks for on standard input, one line of JSON at a time."""
    import numpy as np
    import torch.distributed as dist

    import fp_multi as fp
    from fp_multi._team import team_of
    from fp_multi.adapters.torch.comm import TorchComm

    store = dist.FileStore(os.environ["FP_STORE"], RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    comm = TorchComm(timeout_s=300)
    rng = np.random.default_rng(0)
    columns = int(os.environ["FP_SIZE_MIB"]) * MIB // 64 // 4 // 1024
    state = {f"layer_{i}": rng.random((1024, columns), dtype=np.float32) for i in range(64)}
    nbytes = sum([array.nbytes for array in state.values()])
    print(json.dumps({"nbytes": nbytes}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        writers = task["writers"]
        # All begin together.
        with team_of(comm).round(f"begin {task}") as round_:
            round_.exchange("ready", b"")
        if task["what"] == "save":
            config = fp.SaveConfig(writers=tuple(range(writers)))
            report = fp.save(state, task["path"], comm=comm, config=config)
            elapsed_s = report.elapsed_s
        elif rank < writers:
            (result,) = fp.measure_ceiling(
                task["path"], nbytes // writers, block_bytes=[task["block"]], queue_depth=[task["depth"]]
            )
            elapsed_s = nbytes // writers / 1e9 / result.gbytes_per_s
        else:
            elapsed_s = 0.0
        print(json.dumps({"elapsed_s": elapsed_s}), flush=True)
    os._exit(0)


def measure(team: Ranks, directory: Path, writers: tuple[int, ...], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Rates of saves and of raw writes, in the same rounds; the first warms up."""
    found: dict[int, dict[str, list[float]]] = {count: {"save": [], "raw": []} for count in writers}
    settings = [(block, depth) for block in RAW_BLOCKS for depth in RAW_DEPTHS]
    raw: dict[int, dict[tuple[int, int], list[float]]] = {
        count: {setting: [] for setting in settings} for count in writers
    }
    for number in range(rounds + 1):
        for count in harness.rotated(writers, number):
            path = directory / "saved"
            took_s = team.ask(what="save", path=str(path), writers=count)
            found[count]["save"].append(team.nbytes / 1e9 / took_s)
            harness.remove(path)
            for block, depth in settings:
                took_s = team.ask(what="raw", path=str(directory), writers=count, block=block, depth=depth)
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
