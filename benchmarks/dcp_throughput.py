"""torch.distributed.checkpoint on its own storage and on fp_multi's: save, async_save, cold load; 1 and 2 ranks.

Run: python benchmarks/dcp_throughput.py [--directory DIR] [--size-mib N] [--json FILE]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import _harness as harness
from _drive import Direct
from _ranks import Ranks, start

RANKS = (1, 2)
THREADS = (1, 2, 4)
OURS, THEIRS = "fp_multi", "FileSystemWriter"
MODES = ("borrow", "hybrid", "snapshot")
KEPT = "kept"
"""DCP's DefaultStager, made once, which keeps the memory of its copies, too."""


def main() -> None:
    parser = harness.options(__doc__)
    harness.add_state_options(parser)
    parser.add_argument("--rank", type=int, help="used by the benchmark itself")
    args = parser.parse_args()
    if args.rank is not None:
        work(args.rank)
        return
    found: dict[int, dict[str, dict[str, list[float]]]] = {}
    with harness.scratch_in(args.directory) as scratch:
        for count in RANKS:
            with start(__file__, scratch, count, args.size_mib) as ranks:
                ceiling = Direct("the drive, new file", scratch, ranks.nbytes)
                found[count] = measure(ranks, scratch, args.rounds, ceiling)
    facts = {
        "state": f"{args.size_mib} MiB fp32 (180 tensors), the same on every rank",
        "cache": "saves: new files, flushed; loads: cold cache, into tensors that exist",
        "rounds": args.rounds,
        "rows": [row(count, name, one, ranks.nbytes) for count in RANKS for name, one in found[count].items()],
        "ratios": [one for count in RANKS for one in ratios(count, found[count])],
    }
    harness.finish("dcp", args, facts)


def measure(ranks: Ranks, scratch: Path, rounds: int, ceiling: Direct) -> dict[str, dict[str, list[float]]]:
    contenders = [("ours", OURS), *[(f"theirs {n}", f"{THEIRS}, {n} threads") for n in THREADS]]
    found: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": []} for _, name in contenders}
    stalls: dict[str, list[float]] = {f"async_save, {what}": [] for what in ("theirs", KEPT, *MODES)}
    for number in range(rounds + 1):
        ceiling.measure()
        for what, name in harness.in_round(contenders, number, lambda one: one[1] == OURS):
            path = scratch / "saved"
            found[name]["save"].append(ranks.ask(what=what, do="save", path=str(path)))
            harness.cool(path)
            found[name]["load"].append(ranks.ask(what=what, do="load", path=str(path)))
            harness.remove(path)
        for key, taken in stalls.items() if harness.with_peers(number) else ():
            path = scratch / "saved"
            taken.append(ranks.ask(what=key.rpartition(" ")[2], do="async", path=str(path)))
            harness.remove(path)
        harness.progress(number, rounds)
    kept = {name: {key: times[1:] for key, times in one.items()} for name, one in found.items()}
    kept |= {name: {"blocking": taken[1:]} for name, taken in stalls.items()}
    raw = ceiling.row()
    kept[raw["name"]] = {"save": [ranks.nbytes / 1e9 / rate for rate in raw["rounds_gbytes_per_s"]]}
    return kept


def row(count: int, name: str, one: dict[str, list[float]], nbytes: int) -> dict[str, Any]:
    line: dict[str, Any] = {"name": f"{count} ranks: {name}"}
    if "save" in one:
        line["gbytes_per_s"] = round(nbytes / 1e9 / statistics.median(one["save"]), 3)
        line["rounds_gbytes_per_s"] = [round(nbytes / 1e9 / s, 3) for s in one["save"]]
    if "load" in one:
        line["load_gbytes_per_s"] = round(nbytes / 1e9 / statistics.median(one["load"]), 3)
    if "blocking" in one:
        line["blocking_ms"] = round(statistics.median(one["blocking"]) * 1e3, 2)
    return line


def ratios(count: int, found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    def median(name: str, what: str) -> float:
        return statistics.median(found[name][what])

    theirs = [f"{THEIRS}, {n} threads" for n in THREADS]
    own_staging = median("async_save, theirs", "blocking")
    return [
        harness.ratio(
            f"{count} ranks: dcp.save / best of FileSystemWriter",
            min(median(name, "save") for name in theirs) / median(OURS, "save"),
            ">= 1.5",
        ),
        harness.ratio(
            f"{count} ranks: dcp.save / the drive, new file",
            median("the drive, new file", "save") / median(OURS, "save"),
            ">= 0.9",
        ),
        harness.ratio(
            f"{count} ranks: dcp.load, cold / best of FileSystemReader",
            min(median(name, "load") for name in theirs) / median(OURS, "load"),
            ">= 1.5",
        ),
        *(
            harness.ratio(
                f"{count} ranks: blocking time of dcp.async_save, {mode} / DCP's own staging",
                median(f"async_save, {mode}", "blocking") / own_staging,
                "<= 1" if mode == "snapshot" else "<= 0.1",
            )
            for mode in MODES
        ),
    ]


# The measured processes


def work(rank: int) -> None:
    """Do what the parent asks for on standard input, one line of JSON at a time."""
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore", module="torch.distributed")
    size = int(os.environ["FP_RANKS"])
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["FP_STORE"], size), rank=rank, world_size=size)
    arrays = harness.transformer(int(os.environ["FP_SIZE_MIB"]))
    state = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in arrays.items()}
    optimizer = torch.optim.SGD(state.values(), lr=0.1)
    nbytes = sum([array.nbytes for array in arrays.values()])
    print(json.dumps({"nbytes": nbytes}), flush=True)
    stagers: dict[str, Any] = {}
    for line in sys.stdin:
        task = json.loads(line)
        if task["do"] == "load" or task["what"] != "ours":
            # Our saves take none; the system is busy for a while with what is freed.
            harness.warm_memory(2 * nbytes // size)
        if task["do"] != "load":
            harness.use(arrays.values())
        dist.barrier()
        begin = time.perf_counter()
        if task["do"] == "async":
            elapsed_s = _async_s(task["what"], state, optimizer, task["path"], stagers)
        else:
            _act(task, state)
            elapsed_s = time.perf_counter() - begin
        print(json.dumps({"elapsed_s": elapsed_s}), flush=True)
    os._exit(0)


def _act(task: dict[str, str], state: Any) -> None:
    import torch.distributed.checkpoint as dcp

    from fp_multi.adapters.torch.dcp import StorageReader, StorageWriter

    path, what = task["path"], task["what"]
    if task["do"] == "load":
        values = {name: parameter.detach() for name, parameter in state.items()}
        dcp.load(values, storage_reader=StorageReader(path) if what == "ours" else dcp.FileSystemReader(path))
        return
    if what == "ours":
        dcp.save(state, storage_writer=StorageWriter(path))
        return
    threads = int(what.split()[1])
    writer = dcp.FileSystemWriter(path, single_file_per_rank=threads == 1, sync_files=True, thread_count=threads)
    dcp.save(state, storage_writer=writer)
    harness.fsync(Path(path))
    harness.fsync(Path(path).parent)


def _async_s(what: str, state: Any, optimizer: Any, path: str, stagers: dict[str, Any]) -> float:
    """How long dcp.async_save keeps its caller, with the wait for staging where there is one.

    A training loop makes a stager once, so ours stay; DCP's own default is made by each call.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    from fp_multi.adapters.torch.dcp import AsyncStager, StorageWriter

    if what in MODES and what not in stagers:
        stagers[what] = AsyncStager(overlap=what)  # type: ignore[arg-type]
        stagers[what].attach(optimizer)  # only what an attached optimizer changes is read from where it is
    elif what == KEPT and what not in stagers:
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        stagers[what] = DefaultStager(options)
    writer = StorageWriter(path) if what in MODES else dcp.FileSystemWriter(path)
    begin = time.perf_counter()
    future = dcp.async_save(state, storage_writer=writer, async_stager=stagers.get(what))
    elapsed_s = time.perf_counter() - begin
    (future if hasattr(future, "result") else future.upload_completion).result()
    return elapsed_s


if __name__ == "__main__":
    main()
