"""Orbax's CheckpointManager with StandardSave and with fp_multi's handler: save until durable, blocking part, restore.

Run: python benchmarks/orbax_throughput.py [--directory DIR] [--size-mib N] [--many-leaves] [--json FILE]
"""

from __future__ import annotations

import os

# Before JAX is imported: eight devices, for the restore into another sharding.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import gc
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import _harness as harness
import jax
import numpy as np
import orbax.checkpoint as ocp
from _drive import Direct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp_multi.adapters.orbax import FastPersistRestore, FastPersistSave

logging.getLogger("absl").setLevel(logging.ERROR)

SMALL_LEAVES = 20_000
OURS, STANDARD = "fp_multi", "StandardSave"


class Contender(NamedTuple):
    """A pair of arguments for the manager."""

    name: str
    save: Callable[[Any], Any]
    restore: Callable[[Any], Any]
    asynchronous: bool


CONTENDERS = [
    Contender(f"{OURS}, async", FastPersistSave, FastPersistRestore, True),
    Contender(f"{OURS}, sync", FastPersistSave, FastPersistRestore, False),
    Contender(f"{STANDARD}, async", ocp.args.StandardSave, ocp.args.StandardRestore, True),
    Contender(f"{STANDARD}, sync", ocp.args.StandardSave, ocp.args.StandardRestore, False),
]


class Samples(NamedTuple):
    """What one contender's rounds gave, in seconds."""

    save_s: list[float]
    blocking_s: list[float]
    restore_s: list[float]
    reshard_s: list[float]


def main() -> None:
    parser = harness.options(__doc__)
    harness.add_state_options(parser)
    args = parser.parse_args()
    arrays = harness.many_leaves(SMALL_LEAVES) if args.many_leaves else harness.transformer(args.size_mib)
    state = {name: jax.device_put(array) for name, array in arrays.items()}
    nbytes = sum([array.nbytes for array in arrays.values()])
    del arrays
    with harness.scratch_in(args.directory) as scratch:
        ceiling = None if args.many_leaves else Direct("the drive, new file", scratch, nbytes)
        samples = {contender.name: Samples([], [], [], []) for contender in CONTENDERS}
        for number in range(args.rounds + 1):
            if ceiling is not None:
                ceiling.measure()
            for contender in harness.rotated(CONTENDERS, number):
                measure(contender, state, scratch / "run", samples[contender.name], nbytes, args)
            if number == 0:
                samples = {name: Samples([], [], [], []) for name in samples}
            harness.progress(number, args.rounds)
    rows = [] if ceiling is None else [ceiling.row()]
    rows += [row(name, found, nbytes) for name, found in samples.items()]
    facts = {
        "state": f"{len(state)} jax.Array on the CPU, fp32, {nbytes / harness.MIB:.0f} MiB",
        "cache": "saves: new files, flushed (StandardSave: all files fsynced after it); restores: cold cache",
        "rounds": args.rounds,
        "rows": rows,
        "ratios": ratios(samples, rows, nbytes, args),
    }
    harness.finish("orbax_many_leaves" if args.many_leaves else "orbax", args, facts)


def measure(contender: Contender, state: Any, directory: Path, samples: Samples, nbytes: int, args: Any) -> None:
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=contender.asynchronous)
    gc.collect()
    harness.warm_memory(2 * nbytes)
    harness.use([np.asarray(array) for array in state.values()])
    with ocp.CheckpointManager(directory, options=options) as manager:
        begin = time.perf_counter()
        manager.save(0, args=contender.save(state))
        blocking_s = time.perf_counter() - begin
        manager.wait_until_finished()
        if contender.name.startswith(STANDARD):
            # Ours is durable when it says so; Orbax flushes nothing.
            for file in harness.files_of(directory):
                harness.fsync(file)
        harness.fsync(directory)
        samples.save_s.append(time.perf_counter() - begin)
        samples.blocking_s.append(blocking_s)
        whole = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in state.items()}
        samples.restore_s.append(restored_s(manager, contender, whole, directory, nbytes))
        if not args.many_leaves:
            samples.reshard_s.append(restored_s(manager, contender, spread(state), directory, nbytes))
    harness.remove(directory)


def restored_s(manager: Any, contender: Contender, target: Any, directory: Path, nbytes: int) -> float:
    gc.collect()
    harness.cool(directory)
    harness.warm_memory(2 * nbytes)
    begin = time.perf_counter()
    found = manager.restore(0, args=contender.restore(target))
    jax.block_until_ready(found)
    return time.perf_counter() - begin


def spread(state: Any) -> Any:
    """The same state over eight devices, by rows where they divide evenly."""
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def target(array: Any) -> Any:
        by_rows = array.ndim and array.shape[0] % 8 == 0
        sharding = NamedSharding(mesh, PartitionSpec("x") if by_rows else PartitionSpec())
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return {name: target(array) for name, array in state.items()}


def row(name: str, found: Samples, nbytes: int) -> dict[str, Any]:
    def rate(seconds: list[float]) -> float:
        return round(nbytes / 1e9 / statistics.median(seconds), 3)

    return harness.row(
        name,
        [nbytes / 1e9 / s for s in found.save_s],
        blocking_ms=round(statistics.median(found.blocking_s) * 1e3, 1),
        restore_gbytes_per_s=rate(found.restore_s),
        restore_on_8_devices_gbytes_per_s=rate(found.reshard_s) if found.reshard_s else None,
    )


def ratios(samples: dict[str, Samples], rows: list[dict[str, Any]], nbytes: int, args: Any) -> list[dict[str, Any]]:
    def median(name: str, what: str) -> float:
        return statistics.median(getattr(samples[name], what))

    least = 3 if args.many_leaves else 2
    found = []
    for kind in ("async", "sync"):
        ours, theirs = f"{OURS}, {kind}", f"{STANDARD}, {kind}"
        what = f"save / StandardSave, {kind}"
        found.append(harness.ratio(what, median(theirs, "save_s") / median(ours, "save_s"), f">= {least}"))
    restore = median(f"{STANDARD}, async", "restore_s") / median(f"{OURS}, async", "restore_s")
    found.append(harness.ratio("restore / StandardRestore, cold", restore, f">= {least}"))
    if args.many_leaves:
        return found
    raw = rows[0]["gbytes_per_s"]
    ours = nbytes / 1e9 / median(f"{OURS}, async", "save_s")
    blocking = median(f"{OURS}, async", "blocking_s") / median(f"{STANDARD}, async", "blocking_s")
    reshard = median(f"{STANDARD}, async", "reshard_s") / median(f"{OURS}, async", "reshard_s")
    return [
        *found,
        harness.ratio("restore on 8 devices / StandardRestore, cold", reshard, ">= 2"),
        harness.ratio("save, async / the drive, new file", ours / raw, ">= 0.9"),
        harness.ratio("blocking part of save / StandardSave's", blocking, "<= 1"),
    ]


if __name__ == "__main__":
    main()
