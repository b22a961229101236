"""Who would write what in trainings of 10,000 ranks: planning time on each rank, balance, pieces, size of the manifest.

Nothing is written: the planner is pure, so one process plans as every rank of a cluster would.

Run: python benchmarks/partition_scale.py [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import _harness as harness
import msgspec
import numpy as np
from _clusters import Cluster, data_parallel, experts, sharded, three_d

from fp_multi._boxes import unit_boxes
from fp_multi._layout import chunk_count, chunk_nbytes_for
from fp_multi._manifest import Piece, Shard, Tensor
from fp_multi._partition import Plan, plan

RANKS_A_NODE = 8
RANKS_A_DRIVE = 4
LOOKED_AT = 16
"""Ranks for which ``of`` is timed and pieces are encoded."""


class Case(NamedTuple):
    cluster: Cluster
    one_writer_a_node: bool = False


def cases() -> list[Case]:
    big = data_parallel(2084, 1024, 10_000)
    return [
        Case(data_parallel(24, 1024, 8)),
        Case(three_d(48, 4096, 4, 4, 64)),
        Case(big),
        Case(big, one_writer_a_node=True),
        Case(three_d(2084, 4096, 8, 16, 80)),
        Case(three_d(2084, 4096, 8, 16, 80, zero=True)),
        Case(experts(123, 2048, 1408, 2, 16, 320, 64)),
        Case(sharded(2084, 1024, 64, 160)),
    ]


class Round(NamedTuple):
    describe_s: float
    plan_s: float
    of_s: float


def one_round(cluster: Cluster, writers: Sequence[int] | None, rank: int) -> tuple[Round, Plan]:
    """What one rank does before it writes."""
    begin = time.perf_counter()
    items, groups = cluster.describe()
    described = time.perf_counter()
    divided = plan(items, groups, size=cluster.size, writers=writers)
    planned = time.perf_counter()
    divided.of(rank)
    return Round(described - begin, planned - described, time.perf_counter() - planned), divided


def manifest_nbytes(cluster: Cluster, divided: Plan) -> tuple[int, int]:
    """Pieces and bytes of the manifest: some ranks' pieces are made and encoded, and count for all."""
    chunk_nbytes = chunk_nbytes_for(int(divided.loads.sum()), 0)
    encoder = msgspec.json.Encoder()
    rows = pieces = nbytes = 0
    for rank in divided.writers[:: max(len(divided.writers) // LOOKED_AT, 1)]:
        at = 4096
        for item, begin, end in divided.of(rank).tolist():
            row = cluster.row(item)
            rows += 1
            for box in unit_boxes(row.box.length, cluster.cut(item), begin, end):
                size = row.itemsize * int(np.prod(box.length, dtype=np.int64))
                whole = box.length == row.shape
                start = [a + b for a, b in zip(row.box.start, box.start, strict=True)]
                crcs = [0xFEDCBA98] * chunk_count(size, chunk_nbytes)
                piece = Piece(at, size, crcs, rank, None if whole else (start, list(box.length)))
                nbytes += len(encoder.encode(piece)) + 1
                pieces += 1
                at += size
    share = int(divided.counts.sum()) / rows
    shard = Shard(f"shard-{0:05d}-of-{0:05d}.safetensors", 1 << 36, 1 << 14, 1 << 31, 1)
    heads = 0
    for row in {row.name: row for row in cluster.rows}.values():
        name = f"layers.1000.{row.name}"
        head = Tensor(name, "bfloat16", list(row.shape), [], "torch.parameter")
        # In the tree there are a key and a number for each.
        heads += len(encoder.encode(head)) + len(name) + len(',"",100000,')
    fixed = len(divided.writers) * len(encoder.encode(shard)) + cluster.layers * heads
    return round(pieces * share), round(nbytes * share) + fixed


def spread(nbytes: Any) -> str:
    """Least, median and greatest, in MB."""
    return " / ".join(f"{value / 1e6:.1f}" for value in (nbytes.min(), np.median(nbytes), nbytes.max()))


def measure(case: Case, rounds: int) -> tuple[dict[str, Any], float, int]:
    """A table row, the seconds that one rank plans, and the imbalance."""
    cluster = case.cluster
    writers = range(0, cluster.size, RANKS_A_NODE) if case.one_writer_a_node else None
    ranks = np.linspace(0, cluster.size - 1, rounds + 1).astype(int).tolist()
    one_round(cluster, writers, ranks[0])
    taken = []
    for rank in ranks[1:]:
        sample, divided = one_round(cluster, writers, rank)
        taken.append(sample)
    pieces, nbytes = manifest_nbytes(cluster, divided)
    loads = divided.loads[list(divided.writers)]
    drives = np.add.reduceat(divided.loads, np.arange(0, cluster.size, RANKS_A_DRIVE))
    total_s = [sum(sample) for sample in taken]
    row = {
        "name": cluster.name + (", one writer a node" if case.one_writer_a_node else ""),
        "ranks": cluster.size,
        "tensors": cluster.tensors,
        "boxes": len(divided._items.nbytes),
        "TB": round(int(divided.loads.sum()) / 1e12, 3),
        "describe_ms": round(statistics.median(sample.describe_s for sample in taken) * 1e3, 1),
        "plan_ms": round(statistics.median(sample.plan_s for sample in taken) * 1e3, 1),
        "own_pieces_ms": round(statistics.median(sample.of_s for sample in taken) * 1e3, 2),
        "imbalance_mib": round(divided.imbalance_nbytes / harness.MIB, 3),
        "levels": divided.depth,
        "writer_mb": spread(loads),
        "drive_mb": spread(drives[drives > 0]),
        "pieces": pieces,
        "manifest_mib": round(nbytes / harness.MIB, 1),
        "rounds_s": [round(seconds, 4) for seconds in total_s],
    }
    return row, statistics.median(total_s), divided.imbalance_nbytes


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    measured = []
    everything = cases()
    for number, case in enumerate(everything):
        measured.append(measure(case, args.rounds))
        harness.progress(number + 1, len(everything))
    rows, seconds, imbalances = zip(*measured, strict=True)
    facts = {
        "state": (
            "transformer blocks, bf16 weights with fp32 AdamW; units of at most 1 MiB; a rank describes (vectorised), "
            "plans, and lists its own pieces; pieces and manifest are extrapolated from "
            f"{LOOKED_AT} writers' encoded pieces; {RANKS_A_NODE} ranks a node, {RANKS_A_DRIVE} a drive"
        ),
        "rounds": args.rounds,
        "rows": list(rows),
        "ratios": [
            harness.ratio("greatest imbalance, MiB", max(imbalances) / harness.MIB, "<= 4"),
            harness.ratio("slowest planning on one rank, s", max(seconds), "<= 1"),
        ],
    }
    harness.finish("partition", args, facts)


if __name__ == "__main__":
    main()
