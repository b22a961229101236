"""Which rank writes what: from the same description every rank computes the same plan, without a word between them.

FastPersist (arXiv 2406.13768) section 4.2: the bytes of replicas are divided evenly among the ranks that hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fp_multi import _engine
from fp_multi._boxes import Cut, cut_rule, merge, unit_boxes
from fp_multi._collector import collector_paused
from fp_multi._contents import Contents, narrowed, shard_name, whole_contents
from fp_multi._layout import I64
from fp_multi._partition import Items, Plan, plan
from fp_multi._types import Box, Described, LeafSource
from fp_multi.errors import FpMultiError, UnsupportedLeafError

UNIT_NBYTES = 1 << 20
"""A box is cut between units of at most so many bytes: a quarter of the imbalance that is allowed."""


@dataclass(frozen=True, slots=True)
class PartPlan:
    """One rank's share of a checkpoint."""

    contents: list[Contents]
    """The shards that it writes; none, if others have all of its bytes, too."""
    nbytes: int
    """Bytes of all tensors, whoever writes them."""
    loads: Sequence[int]
    """Bytes for each rank."""
    crc32c: int
    """Of what the plan was made from; the same on every rank, or the plans do not fit together."""


class TeamPlan(NamedTuple):
    """What a rank needs for its part of a save."""

    described: Described
    """The state of all ranks, with the bytes that this rank has."""
    part: PartPlan
    writers: tuple[int, ...]
    reason: str
    union: Any = None
    """Where the ranks have different trees: how they become one."""
    tree: Any = None
    """Then: this rank's own."""


def plan_part(
    described: Described,
    *,
    rank: int = 0,
    size: int = 1,
    writers: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
) -> PartPlan:
    """Divide a state among ranks.

    Args:
        described: the state as this rank has it. A tensor that is not :class:`Sharded` counts as whole on every rank.
        rank: of this process.
        size: number of ranks.
        writers: the ranks that write; None for all. Bytes that none of them has are written by those that have them.
        weights: of each rank: how much it writes in comparison.

    Raises:
        FpMultiError: this rank does not hold what its own description says.
    """
    if size == 1 and not any([source.sharded for source in described.sources]):
        contents = whole_contents(described)
        return PartPlan([contents], contents.nbytes, [contents.nbytes], 0)
    return divide(described, size=size, writers=writers, weights=weights).part(described, rank)


def divide(
    described: Described,
    *,
    size: int,
    writers: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    mark: int | None = None,
) -> Division:
    """The part of :func:`plan_part` that holds for every state with the same :func:`fingerprint`, and every rank.

    Args:
        described: as for :func:`plan_part`, like the following.
        size: number of ranks.
        writers: the ranks that write.
        weights: how much each of them does.
        mark: the fingerprint, if it is known.
    """
    if mark is None:
        mark = fingerprint(described)
    with collector_paused():
        _require_parts(described, size)
        boxes = _Boxes(described, size)
        divided = plan(boxes.items, boxes.groups, size=size, writers=writers, weights=weights)
        crc32c = _engine.crc32c(msgspec.msgpack.encode((mark, size, writers, weights)))
        return Division(boxes, divided, divided.loads.tolist(), crc32c)


class Division(NamedTuple):
    """A state divided among ranks."""

    boxes: _Boxes
    divided: Plan
    loads: list[int]
    crc32c: int

    def part(self, described: Described, rank: int) -> PartPlan:
        """A rank's share, with the bytes that it has now."""
        with collector_paused():
            contents = _contents(described, self.boxes, self.divided, rank)
        if not described.sources and rank == 0:
            contents = [whole_contents(described)]  # a checkpoint has at least one shard
        return PartPlan(contents, sum([source.nbytes for source in described.sources]), self.loads, self.crc32c)


def _require_parts(described: Described, size: int) -> None:
    """Refuse tensors whose other parts nobody here knows of."""
    for name, source in zip(described.names, described.sources, strict=True):
        sharded = source.sharded
        if sharded is None:
            continue
        here = sum([part.nbytes for _, part in sharded.local])
        if (size == 1 and here < source.nbytes) or (size > 1 and not sharded.holders):
            raise UnsupportedLeafError(
                f"{name}: only a part of this tensor is here, {here} of {source.nbytes} bytes; save with comm= on all "
                "ranks that have the others",
                name,
            )


class _Boxes:
    """The boxes of all tensors, one behind the other, as the planner wants them."""

    def __init__(self, described: Described, size: int) -> None:
        everyone = tuple(range(size))
        groups = {everyone: 0}
        self.cuts: list[Cut] = []
        known_cuts: dict[tuple[tuple[int, ...], int], int] = {}
        # Many tensors are alike: their rows are made once.
        rows: dict[tuple[Any, ...], tuple[I64, I64]] = {}
        which, group = [], []
        for source in described.sources:
            sharded = source.sharded
            key = source.shape, source.itemsize, id(sharded and sharded.boxes), id(sharded and sharded.holders)
            found = rows.get(key)
            if found is None:
                lengths = [source.shape] if sharded is None else [box.length for box in sharded.boxes]
                # One process has all there is, whatever the numbers of the ranks were.
                holders = [everyone] * len(lengths) if sharded is None or size == 1 else sharded.holders
                cuts = [self._cut(length, source.itemsize, known_cuts) for length in lengths]
                numbers = [groups.setdefault(who, len(groups)) for who in holders]
                found = rows[key] = np.array(cuts, np.int64), np.array(numbers, np.int64)
            which.append(found[0])
            group.append(found[1])
        self.groups = list(groups)
        self.first = np.concatenate([[0], np.cumsum([len(one) for one in which])])
        """For each tensor the number of its first box; and of the box behind the last."""
        self.which = np.concatenate([np.empty(0, np.int64), *which])
        self.items = Items.of(self.cuts, self.which, np.concatenate([np.empty(0, np.int64), *group]))

    def _cut(self, length: tuple[int, ...], itemsize: int, known: dict[tuple[tuple[int, ...], int], int]) -> int:
        number = known.get((length, itemsize))
        if number is None:
            number = known[length, itemsize] = len(self.cuts)
            self.cuts.append(cut_rule(length, itemsize, UNIT_NBYTES))
        return number

    def of(self, item: int) -> tuple[int, int, Cut]:
        """A box's tensor, which of the tensor's boxes it is, and how it is cut."""
        tensor = int(np.searchsorted(self.first, item, side="right")) - 1
        return tensor, item - int(self.first[tensor]), self.cuts[self.which[item]]


def fingerprint(described: Described) -> int:
    """Of what a plan depends on: names, dtypes, shapes and shardings."""
    specs: list[Any] = []
    shardings: dict[Any, int] = {}
    numbers: dict[tuple[int, int], int] = {}
    for source in described.sources:
        sharded = source.sharded
        if sharded is None:
            specs.append((source.dtype, source.shape))
            continue
        # Many tensors share a sharding: it is hashed once for each object.
        objects = id(sharded.boxes), id(sharded.holders)
        number = numbers.get(objects)
        if number is None:
            number = shardings.setdefault((sharded.boxes, sharded.holders), len(shardings))
            numbers[objects] = number
        specs.append((source.dtype, source.shape, number))
    return _engine.crc32c(msgspec.msgpack.encode((described.names, specs, list(shardings))))


def _contents(described: Described, boxes: _Boxes, divided: Plan, rank: int) -> list[Contents]:
    pieces: dict[int, list[tuple[Box, LeafSource]]] = {}
    for item, begin, end in divided.of(rank).tolist():
        tensor, number, cut = boxes.of(item)
        whole, source = _local(described, tensor, number)
        mine = pieces.setdefault(tensor, [])
        if begin == 0 and end == cut.units:
            mine.append((whole, source))
            continue
        for box in unit_boxes(whole.length, cut, begin, end):
            start = tuple([a + b for a, b in zip(whole.start, box.start, strict=True)])
            mine.append((Box(start, box.length), narrowed(source, box)))
    writers = divided.writers
    return shards_of(described, pieces, lambda plane: shard_name(writers.index(rank), len(writers), plane))


def shards_of(
    described: Described, pieces: Mapping[int, Sequence[tuple[Box, LeafSource]]], file_of: Callable[[int], str]
) -> list[Contents]:
    """Put a writer's boxes into shards: those that are a box together as one piece, others in further shards.

    Args:
        described: names and whole shapes of the tensors.
        pieces: for each tensor's index the boxes to write, and their bytes.
        file_of: the name of the first shard, the second, and so on.
    """
    planes: list[_Plane] = []
    for tensor in sorted(pieces):
        mine = pieces[tensor]
        runs = merge([box for box, _ in mine]) if len(mine) > 1 else [[0]]
        for number, run in enumerate(runs):
            if number == len(planes):
                planes.append(_Plane())
            planes[number].add(described, tensor, [mine[i] for i in run])
    return [plane.contents(file_of(i)) for i, plane in enumerate(planes)]


def _local(described: Described, tensor: int, number: int) -> tuple[Box, LeafSource]:
    source = described.sources[tensor]
    if source.sharded is None:
        return Box((0,) * len(source.shape), source.shape), source
    for found, local in source.sharded.local:
        if found == number:
            return source.sharded.boxes[number], local
    raise FpMultiError(
        f"{described.names[tensor]}: box {source.sharded.boxes[number]} is said to be here, but is not; the "
        "description of its sharding is wrong"
    )


class _Plane:
    """A shard being filled: at most one piece of each tensor."""

    def __init__(self) -> None:
        self.tensors: list[int] = []
        self.names: list[str] = []
        self.sources: list[LeafSource] = []
        self.boxes: dict[int, Box] = {}
        self.joined: dict[int, Sequence[LeafSource]] = {}

    def add(self, described: Described, tensor: int, parts: list[tuple[Box, LeafSource]]) -> None:
        """Put in one piece, of one source or of several that follow each other."""
        number = len(self.tensors)
        first, source = parts[0]
        last = parts[-1][0]
        ends = [start + length for start, length in zip(last.start, last.length, strict=True)]
        length = tuple([end - start for start, end in zip(first.start, ends, strict=True)])
        if len(parts) > 1:
            self.joined[number] = [part for _, part in parts]
            source = source._replace(shape=length, nbytes=sum([part.nbytes for _, part in parts]))
        if length != described.sources[tensor].shape:
            self.boxes[number] = Box(first.start, length)
        self.tensors.append(tensor)
        self.names.append(described.names[tensor])
        self.sources.append(source)

    def contents(self, file: str) -> Contents:
        return Contents(file, self.tensors, self.names, self.sources, self.boxes, self.joined)
