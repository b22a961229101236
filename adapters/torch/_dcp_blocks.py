"""How what several ranks of a host want is cut into blocks, and who reads each. No I/O.

A block is read by one of the ranks that want it, into memory that the others see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np

from fp_multi import Box
from fp_multi.storage import UNIT_NBYTES, Manifest, cut_rule, itemsize, unit_boxes, unit_offsets

BLOCK_NBYTES = 16 << 20
LEAST_NBYTES = 1 << 20
"""Less than that is read faster than ranks meet."""
BEGIN_NBYTES = 64
"""Where a block begins in its slot: beside a page, so that the engine reads into its own huge pages and copies from
there. Shared memory consists of small pages; the drive reads straight into those in many short requests, at half the
rate."""
_PAGE = 4096
_LINE = 64


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive bytes of a box."""

    box: int
    """Its number."""
    first: int
    last: int
    """The units of the box (:func:`fp_multi.storage.cut_rule`) that it consists of."""
    begin: int
    """Where it begins in the bytes of the box."""
    nbytes: int
    at: int
    """Where it stands in the block."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """What is read and handed on at once."""

    reader: int
    """The rank that reads it."""
    turn: int
    """How many blocks this rank reads before."""
    takers: tuple[int, ...]
    """The ranks that want it, ascending; the reader is one of them."""
    parts: list[Part]


class HostPlan(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks of one host read together."""

    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    """Index of the tensor, start, length."""
    blocks: list[Block]
    """In the order in which everybody takes them."""
    slot_nbytes: int
    """Room for the longest block, from ``BEGIN_NBYTES`` on."""

    def box(self, number: int) -> tuple[int, Box]:
        """Tensor and box, by the box's number."""
        tensor, start, length = self.boxes[number]
        return tensor, Box(start, length)

    def boxes_of(self, part: Part, manifest: Manifest) -> Iterator[tuple[int, Box, int]]:
        """The tensor's index, boxes of it, and bytes of each, that follow each other in a part."""
        tensor, (start, length) = self.box(part.box)
        nbytes = itemsize(manifest.tensors[tensor].dtype)
        cut = cut_rule(length, nbytes, UNIT_NBYTES)
        for box in unit_boxes(length, cut, part.first, part.last):
            yield tensor, Box(plus(start, box.start), box.length), nbytes * prod(box.length)


class Shared(NamedTuple):
    """A box that several ranks want."""

    tensor: int
    box: Box
    itemsize: int
    takers: tuple[int, ...]


def divide(shared: Sequence[Shared]) -> HostPlan | None:
    """Deal out what is shared: in the order of the tensors, evenly; None if it is too little."""
    if sum([one.itemsize * prod(one.box.length) for one in shared]) < LEAST_NBYTES:
        return None
    dealer = _Dealer()
    for one in sorted(shared, key=lambda one: (one.tensor, one.box.start)):
        dealer.add(one)
    return HostPlan(dealer.boxes, dealer.blocks, dealer.slot_nbytes)


class _Dealer:
    def __init__(self) -> None:
        self.boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self.blocks: list[Block] = []
        self.slot_nbytes = 0
        self._open: dict[tuple[int, ...], Block] = {}
        """By takers the block that is being filled."""
        self._filled: dict[tuple[int, ...], int] = {}
        self._load: Counter[int] = Counter()
        self._turns: Counter[int] = Counter()

    def add(self, one: Shared) -> None:
        cut = cut_rule(one.box.length, one.itemsize, UNIT_NBYTES)
        # What fits into one block is not cut: the checksum chunk that a cut goes through is read twice.
        is_cut = cut.nbytes > BLOCK_NBYTES
        first = 0
        if is_cut:
            self._filled.pop(one.takers, None)  # so that it is cut at round places, as checksum chunks often are
        while first < cut.units:
            block, at = self._block_for(one.takers, cut.unit_nbytes if is_cut else cut.nbytes)
            last, begin, end = cut.units, 0, cut.nbytes
            if is_cut:
                last = min(first + (BLOCK_NBYTES - at) // cut.unit_nbytes, cut.units)
                begin, end = unit_offsets(cut, np.array([first, last], np.int64)).tolist()
            block.parts.append(Part(len(self.boxes), first, last, begin, end - begin, at))
            self._filled[one.takers] = at + end - begin
            self.slot_nbytes = max(self.slot_nbytes, _up(BEGIN_NBYTES + at + end - begin, _PAGE))
            self._load[block.reader] += end - begin
            first = last
        self.boxes.append((one.tensor, one.box.start, one.box.length))

    def _block_for(self, takers: tuple[int, ...], nbytes: int) -> tuple[Block, int]:
        """A block with room, and where it begins."""
        at = _up(self._filled.get(takers, BLOCK_NBYTES), _LINE)
        if at + nbytes <= BLOCK_NBYTES:
            return self._open[takers], at
        reader = min(takers, key=self._load.__getitem__)
        block = self._open[takers] = Block(reader, self._turns[reader], takers, [])
        self._turns[reader] += 1
        self.blocks.append(block)
        return block, 0


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


def plus(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    """Sum, axis by axis."""
    return tuple([x + y for x, y in zip(a, b, strict=True)])
