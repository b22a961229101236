"""One description of a state whose parts are on different ranks.

Where every rank has the same paths nothing has to be said. Where they differ (an optimizer of which each rank keeps the
states of its own parameters, tensors given as :class:`fp_multi.ShardOf`) the ranks' sketches are gathered once and made
into one: dicts are merged key by key, a tensor belongs to the ranks that have it, and boxes of one tensor are put
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from fp_multi._nodes import Cell, elements, readable
from fp_multi._tiling import tiles
from fp_multi._tree_encode import name_tensors
from fp_multi._types import Box, Described, LeafSource, Sharded
from fp_multi.errors import CommError, UnsupportedLeafError

_DICTS = ("dict", "ordereddict")


class SketchedTensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """What other ranks must know of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    itemsize: int
    kind: str
    attrs: dict[str, str]
    boxes: tuple[Box, ...] = ()
    """Empty for a tensor that is whole."""
    holders: tuple[tuple[int, ...], ...] = ()
    """Empty where only this rank's own box is known."""


class Sketch(msgspec.Struct, frozen=True):
    """A described state without its bytes."""

    tree: Any
    names: list[str]
    tensors: list[SketchedTensor]


def sketch(described: Described) -> Sketch:
    """What others must know of a state."""
    tensors = []
    for source in described.sources:
        sharded = source.sharded
        tensors.append(
            SketchedTensor(
                source.dtype,
                source.shape,
                source.nbytes,
                source.itemsize,
                source.kind,
                dict(source.attrs or {}),
                () if sharded is None else sharded.boxes,
                () if sharded is None else sharded.holders,
            )
        )
    return Sketch(described.tree, described.names, tensors)


class _Found:
    """One tensor of the union."""

    def __init__(self, first: SketchedTensor) -> None:
        self.first = first
        self.whole: list[int] = []
        self.boxes: dict[Box, list[int]] = {}
        self.known: tuple[tuple[Box, ...], tuple[tuple[int, ...], ...]] | None = None

    def add(self, tensor: SketchedTensor, rank: int, cell: Cell) -> None:
        first = self.first
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
            path = readable(cell)
            raise UnsupportedLeafError(
                f"{path}: rank {rank} has {tensor.dtype} of shape {tensor.shape}, another rank has {first.dtype} of "
                f"shape {first.shape} under the same path; give what belongs to one rank a key of its own, or say with "
                "ShardOf(array, shape=..., start=...) which part of a larger tensor it is",
                path,
            )
        if not tensor.boxes:
            self.whole.append(rank)
        elif tensor.holders:
            spread = tensor.boxes, tensor.holders
            if self.known is None:
                self.known = spread
            elif self.known != spread:
                self._refuse(cell)
        else:
            for box in tensor.boxes:
                self.boxes.setdefault(box, []).append(rank)

    @staticmethod
    def _refuse(cell: Cell) -> NoReturn:
        path = readable(cell)
        raise UnsupportedLeafError(
            f"{path}: the ranks have tensors under this path that are spread in different ways (over other ranks, or "
            "whole on some of them); give what is not one tensor keys of its own, by pipeline stage for example",
            path,
        )

    def sharding(self, size: int, cell: Cell) -> tuple[tuple[Box, ...], tuple[tuple[int, ...], ...]] | None:
        """Boxes and holders; None for a tensor that is whole on every rank."""
        if self.known is not None:
            if self.whole or self.boxes:
                self._refuse(cell)
            return self.known
        if self.boxes:
            boxes = sorted(self.boxes)
            fault = tiles(self.first.shape, boxes)
            if fault is not None:
                path = readable(cell)
                raise UnsupportedLeafError(f"{path}: the parts given with ShardOf do not make a tensor: {fault}", path)
            return tuple(boxes), tuple([tuple(sorted(self.boxes[box])) for box in boxes])
        if len(self.whole) == size:
            return None
        return (Box((0,) * len(self.first.shape), self.first.shape),), (tuple(sorted(self.whole)),)


class _Trees:
    """Trees of several ranks made into one. What stands for a tensor is the affair of those that inherit it."""

    def tensor(self, nodes: list[tuple[int, int]], cell: Cell) -> int:
        """The union's index of a tensor that ranks have under their own."""
        raise NotImplementedError

    def node(self, nodes: list[tuple[int, Any]], cell: Cell) -> Any:
        """One node of those that some ranks have at a place."""
        _, first = nodes[0]
        if type(first) is int:
            return self.tensor([(rank, node) for rank, node in nodes if type(node) is int], cell)
        tag = first[0] if type(first) is list and first else None
        alike = [(rank, node) for rank, node in nodes if type(node) is list and node and node[0] == tag]
        if tag in _DICTS:
            below: dict[bytes, tuple[Any, list[tuple[int, Any]]]] = {}
            for rank, node in alike:
                for key, child in zip(node[1], node[2], strict=True):
                    below.setdefault(msgspec.json.encode(key), (key, []))[1].append((rank, child))
            made = [self.node(children, (cell, key)) for key, children in below.values()]
            return [tag, [key for key, _ in below.values()], made, *self._attributes(alike, tag, cell)]
        if tag in ("list", "tuple", "namedtuple"):
            at = 3 if tag == "namedtuple" else 1
            children = [
                self.node([(rank, node[at][i]) for rank, node in alike if len(node[at]) > i], (cell, i))
                for i in range(len(first[at]))
            ]
            return [*first[:at], children]
        return first

    def _attributes(self, nodes: list[tuple[int, Any]], tag: str, cell: Cell) -> list[Any]:
        if tag != "ordereddict":
            return []
        having = [(rank, node[3]) for rank, node in nodes if node[3] is not None]
        return [self.node(having, (cell, ["attribute", "*"])) if having else None]


class _Merge(_Trees):
    """The first time: finds out which tensors there are."""

    def __init__(self, sketches: Sequence[Sketch]) -> None:
        self.sketches = sketches
        self.found: list[_Found] = []
        self.cells: list[Cell] = []
        self.known: dict[tuple[int, int], int] = {}
        """(rank, its index) -> index in the union."""

    def tensor(self, nodes: list[tuple[int, int]], cell: Cell) -> int:
        """See :class:`_Trees`."""
        seen = {self.known[place] for place in nodes if place in self.known}
        # Parts that a sharding describes may be told apart by memory that a rank without a part has not: then it is
        # the ranks with parts that know.
        apart = [(rank, number) for rank, number in nodes if seen and (rank, number) not in self.known]
        if len(seen) > 1 or not all([self.sketches[rank].tensors[number].holders for rank, number in apart]):
            path = readable(cell)
            raise UnsupportedLeafError(
                f"{path}: on some ranks this tensor is one with another of the state, on others it is not; tie it on "
                "all of them, or on none",
                path,
            )
        if seen:
            index = seen.pop()  # tied: met before
        else:
            rank, number = nodes[0]
            index = len(self.found)
            self.found.append(_Found(self.sketches[rank].tensors[number]))
            self.cells.append(cell)
        for rank, number in nodes:
            if (rank, number) not in self.known:
                self.known[rank, number] = index
                self.found[index].add(self.sketches[rank].tensors[number], rank, cell)
        return index


class Union(msgspec.Struct, frozen=True):
    """The state of all ranks, and where each rank's tensors stand in it."""

    sketch: Sketch
    indices: list[list[int]]
    """For each rank: for each of its tensors the index in the union."""


def unite(sketches: Sequence[Sketch]) -> Union:
    """Merge what all ranks have.

    Args:
        sketches: by rank. Where plain values differ, or lists have different lengths, the lowest rank's count.

    Raises:
        UnsupportedLeafError: tensors of different shape or dtype under one path, or parts that do not fit together.
        CommError: a tensor that one rank has in no place that the others know.
    """
    merge = _Merge(sketches)
    tree = merge.node([(rank, one.tree) for rank, one in enumerate(sketches)], None)
    tensors = []
    for found, cell in zip(merge.found, merge.cells, strict=True):
        sharding = found.sharding(len(sketches), cell)
        boxes, holders = sharding or ((), ())
        tensors.append(msgspec.structs.replace(found.first, boxes=boxes, holders=holders))
    names = name_tensors([(_plain_name(cell), cell) for cell in merge.cells])
    indices = []
    for rank, one in enumerate(sketches):
        for number, name in enumerate(one.names):
            if (rank, number) not in merge.known:
                raise CommError(
                    f"rank {rank} has a tensor {name!r} where other ranks have something else; nest what belongs to "
                    "one rank under a key of its own"
                )
        indices.append([merge.known[rank, number] for number in range(len(one.names))])
    return Union(Sketch(tree, names, tensors), indices)


class _Again(_Trees):
    """Later: plain values and keys may have changed, the tensors are known."""

    def __init__(self, indices: Sequence[Sequence[int]]) -> None:
        self.indices = indices

    def tensor(self, nodes: list[tuple[int, int]], cell: Cell) -> int:
        """See :class:`_Trees`."""
        rank, number = nodes[0]
        return self.indices[rank][number]


def merged_tree(trees: Sequence[Any], union: Union) -> Any:
    """The tree of all ranks, with the plain values that they have now.

    Args:
        trees: by rank, of the structure that the union was made of.
        union: what :func:`unite` gave.
    """
    return _Again(union.indices).node(list(enumerate(trees)), None)


def skeleton(node: Any) -> Any:
    """A tree without its plain values: containers and keys, which have to be the same on ranks that say nothing."""
    tag = node[0] if type(node) is list and node else None
    if tag == "dict":
        return [node[1], [skeleton(child) for child in node[2]]]
    if tag == "ordereddict":
        return [node[1], [skeleton(child) for child in node[2]], skeleton(node[3])]
    if tag in ("list", "tuple"):
        return [skeleton(child) for child in node[1]]
    if tag == "namedtuple":
        return [node[2], [skeleton(child) for child in node[3]]]
    return 0 if type(node) is int else None


def _plain_name(cell: Cell) -> str | None:
    path = elements(cell)
    return ".".join(map(str, path)) if all([type(element) in (str, int) for element in path]) else None


def in_union(described: Described, union: Union, rank: int) -> Described:
    """The union as one rank has it: its own tensors with their bytes, those of others without."""
    mine = {index: source for index, source in zip(union.indices[rank], described.sources, strict=True)}
    sources = []
    numbered: dict[int, dict[Box, int]] = {}
    for index, tensor in enumerate(union.sketch.tensors):
        source = mine.get(index)
        if not tensor.boxes:
            if source is None:
                raise CommError(f"{union.sketch.names[index]}: every rank is said to have it, but this one has not")
            sources.append(source)
            continue
        local: tuple[tuple[int, LeafSource], ...] = ()
        if source is not None and source.sharded is None:
            local = ((0, source),)
        elif source is not None and source.sharded is not None:
            places = numbered.get(id(tensor.boxes))
            if places is None:
                places = numbered[id(tensor.boxes)] = {box: number for number, box in enumerate(tensor.boxes)}
            local = tuple([(places[source.sharded.boxes[i]], part) for i, part in source.sharded.local])
        sources.append(
            LeafSource(
                tensor.dtype,
                tensor.shape,
                tensor.nbytes,
                0,
                source,
                tensor.kind,
                None,
                tensor.attrs or None,
                None,
                tensor.itemsize,
                sharded=Sharded(tensor.boxes, tensor.holders, local),
            )
        )
    return Described(union.sketch.tree, union.sketch.names, sources)
