"""Made-up trainings on many ranks: their tensors, who holds which box of them, and what the planner needs of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp_multi._boxes import Cut, cut_rule
from fp_multi._partition import Items
from fp_multi._types import Box

I64 = npt.NDArray[np.int64]
UNIT_NBYTES = 1 << 20
COPIES = (("model", 2), ("master", 4), ("exp_avg", 4), ("exp_avg_sq", 4))
"""A bf16 weight and what AdamW keeps beside it, with their item sizes."""


class Row(NamedTuple):
    """One box of one tensor of a layer."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    box: Box
    groups: I64
    """Shape (layers,): who holds it in each layer."""


@dataclass(frozen=True)
class Cluster:
    """A training: ``layers`` times the same rows, and which ranks the groups are."""

    name: str
    size: int
    layers: int
    rows: Sequence[Row]
    holders: Callable[[], list[tuple[int, ...]]]

    @property
    def tensors(self) -> int:
        return self.layers * len({row.name for row in self.rows})

    def describe(self) -> tuple[Items, list[tuple[int, ...]]]:
        """What each rank hands to the planner; made anew in each call."""
        kinds: dict[tuple[tuple[int, ...], int], int] = {}
        which = [kinds.setdefault((row.box.length, row.itemsize), len(kinds)) for row in self.rows]
        cuts = [cut_rule(length, itemsize, UNIT_NBYTES) for length, itemsize in kinds]
        group = np.stack([row.groups for row in self.rows], axis=1).ravel()
        return Items.of(cuts, np.tile(np.array(which), self.layers), group), self.holders()

    def row(self, item: int) -> Row:
        return self.rows[item % len(self.rows)]

    def cut(self, item: int) -> Cut:
        row = self.row(item)
        return cut_rule(row.box.length, row.itemsize, UNIT_NBYTES)


def dense_layer(width: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Weights of a transformer block: shape, and the axis that tensor parallelism cuts."""
    return {
        "ln_1.weight": ((width,), None),
        "ln_1.bias": ((width,), None),
        "qkv.weight": ((3 * width, width), 0),
        "qkv.bias": ((3 * width,), 0),
        "proj.weight": ((width, width), 1),
        "proj.bias": ((width,), None),
        "ln_2.weight": ((width,), None),
        "ln_2.bias": ((width,), None),
        "up.weight": ((4 * width, width), 0),
        "up.bias": ((4 * width,), 0),
        "down.weight": ((width, 4 * width), 1),
        "down.bias": ((width,), None),
    }


def even_boxes(shape: tuple[int, ...], axis: int | None, parts: int) -> list[Box]:
    """A shape cut evenly along an axis."""
    if axis is None or parts == 1:
        return [Box((0,) * len(shape), shape)]
    step = shape[axis] // parts
    length = (*shape[:axis], step, *shape[axis + 1 :])
    return [Box(tuple(part * step if i == axis else 0 for i in range(len(shape))), length) for part in range(parts)]


def _rows(
    name: str, shape: tuple[int, ...], axis: int | None, parts: int, groups: Callable[[int, int], I64]
) -> list[Row]:
    """All copies of one weight; ``groups(copy, part)``."""
    return [
        Row(f"{copy}.{name}", shape, itemsize, box, groups(number, part))
        for number, (copy, itemsize) in enumerate(COPIES)
        for part, box in enumerate(even_boxes(shape, axis, parts))
    ]


def _tuples(ranks: I64) -> list[tuple[int, ...]]:
    """Sets of ranks, one for each row of the last axis."""
    return [tuple(who) for who in ranks.reshape(-1, ranks.shape[-1]).tolist()]


def data_parallel(layers: int, width: int, size: int) -> Cluster:
    """Everybody has everything."""
    everyone = np.zeros(layers, np.int64)
    rows = [
        row
        for name, (shape, _) in dense_layer(width).items()
        for row in _rows(name, shape, None, 1, lambda *_: everyone)
    ]
    return Cluster(f"DP {size}", size, layers, rows, lambda: [tuple(range(size))])


def sharded(layers: int, width: int, parts: int, replicas: int) -> Cluster:
    """Every tensor cut into rows over the ranks of a group (FSDP), and groups are replicas of each other."""
    size = parts * replicas
    rows = [
        row
        for name, (shape, _) in dense_layer(width).items()
        for row in _rows(name, shape, 0, parts, lambda _, part: np.full(layers, part))
    ]
    return Cluster(
        f"FSDP {parts} x DP {replicas}", size, layers, rows, lambda: _tuples(np.arange(size).reshape(replicas, parts).T)
    )


def three_d(layers: int, width: int, tp: int, pp: int, dp: int, *, zero: bool = False) -> Cluster:
    """Tensor x pipeline x data parallelism; ``zero``: of what AdamW keeps there is no replica."""
    size = tp * pp * dp
    stage = np.arange(layers) * pp // layers
    layer = np.arange(layers)
    ranks = np.arange(size).reshape(pp, dp, tp)

    def holders() -> list[tuple[int, ...]]:
        sets = _tuples(ranks.reshape(pp, dp * tp)) + _tuples(ranks.transpose(0, 2, 1))
        return sets + (_tuples(ranks.reshape(-1, 1)) if zero else [])

    rows: list[Row] = []
    for number, (name, (shape, axis)) in enumerate(dense_layer(width).items()):

        def groups(copy: int, part: int, number: int = number, axis: int | None = axis) -> I64:
            if zero and copy:
                # One rank has it all, and not everyone has as much.
                return pp + pp * tp + ranks[stage, (layer * 12 + number) % dp, part]
            return stage if axis is None else pp + stage * tp + part

        rows += _rows(name, shape, axis, tp, groups)
    return Cluster(f"TP {tp} x PP {pp} x DP {dp}{', ZeRO-1' if zero else ''}", size, layers, rows, holders)


def experts(layers: int, width: int, inner: int, tp: int, pp: int, dp: int, ep: int) -> Cluster:
    """The same with mixtures of ``ep`` experts: an expert is on every ``ep``-th of the data-parallel ranks.

    So groups are nested: an expert's ranks in a shard's, those in a stage's, those in all, who share a small table.
    """
    size = tp * pp * dp
    stage = np.arange(layers) * pp // layers
    ranks = np.arange(size).reshape(pp, dp, tp)
    shards, mixtures, everyone = pp, pp + pp * tp, pp + pp * tp + pp * tp * ep

    def holders() -> list[tuple[int, ...]]:
        sets = _tuples(ranks.reshape(pp, dp * tp)) + _tuples(ranks.transpose(0, 2, 1))
        return sets + _tuples(ranks.reshape(pp, dp // ep, ep, tp).transpose(0, 3, 2, 1)) + [tuple(range(size))]

    rows: list[Row] = []
    for name, (shape, axis) in dense_layer(width).items():
        whole = axis is None
        rows += _rows(
            name, shape, axis, tp, lambda _, part, whole=whole: stage if whole else shards + stage * tp + part
        )
    for expert in range(ep):
        for name, shape, axis in (("up", (inner, width), 0), ("gate", (inner, width), 0), ("down", (width, inner), 1)):
            rows += _rows(
                f"experts.{expert}.{name}.weight",
                shape,
                axis,
                tp,
                lambda _, part, expert=expert: mixtures + (stage * tp + part) * ep + expert,
            )
    rows += _rows("router_statistics", (ep,), None, 1, lambda *_: np.full(layers, everyone))
    return Cluster(f"TP {tp} x PP {pp} x DP {dp}, EP {ep}", size, layers, rows, holders)
