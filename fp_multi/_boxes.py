"""Axis-aligned boxes of a tensor: where they may be cut, how they meet, and whether they tile a shape. Pure.

A box's bytes are always meant in the box's own C order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp_multi._layout import PAGE, align_down
from fp_multi._types import Box

I64 = npt.NDArray[np.int64]


class Cut(NamedTuple):
    """How a box may be divided into units: blocks of indices of one axis, inside one index of each axis before it."""

    axis: int
    quantum: int
    """Indices of ``axis`` in a unit; the last unit of a slab may have fewer."""
    slabs: int
    """Product of the lengths before ``axis``; a slab's bytes follow each other."""
    units_a_slab: int
    unit_nbytes: int
    """Bytes of a unit that is not short."""
    slab_nbytes: int

    @property
    def units(self) -> int:
        """Number of units of the box, at least one."""
        return self.slabs * self.units_a_slab

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.slabs * self.slab_nbytes


def cut_rule(length: Sequence[int], itemsize: int, unit_nbytes: int) -> Cut:
    """Say where a box may be cut.

    The first axis is cut of which one index is at most a unit; so a stack of large matrices is cut inside the matrices.
    Units are whole pages where rows allow it, so that a piece can be read straight into page-aligned memory. A box
    of at most one unit, an empty one, and one of 0 axes are not cut. Only an element longer than a unit makes a longer
    unit.

    Args:
        length: indices on each axis.
        itemsize: bytes of an element.
        unit_nbytes: wanted bytes of a unit.

    Example:
        >>> cut_rule((8, 4096, 14336), 2, 1 << 20)
        Cut(axis=1, quantum=36, slabs=8, units_a_slab=114, unit_nbytes=1032192, slab_nbytes=117440512)
    """
    nbytes = itemsize * prod(length)
    if not length or nbytes <= unit_nbytes:
        return Cut(0, max(length[0], 1) if length else 1, 1, 1, nbytes, nbytes)
    axis, slabs = 0, 1
    index_nbytes = nbytes // length[0]
    while index_nbytes > unit_nbytes and axis + 1 < len(length):
        slabs *= length[axis]
        axis += 1
        index_nbytes //= length[axis]
    quantum = max(unit_nbytes // index_nbytes, 1)
    paged = align_down(quantum, PAGE // gcd(index_nbytes, PAGE))
    quantum = paged or quantum
    return Cut(axis, quantum, slabs, -(-length[axis] // quantum), quantum * index_nbytes, length[axis] * index_nbytes)


def unit_offsets(cut: Cut, units: I64) -> I64:
    """Where units begin in their box's bytes.

    Args:
        cut: of the box.
        units: their numbers, from 0 to ``cut.units``; the latter gives the end of the box.
    """
    slab, unit = np.divmod(units, cut.units_a_slab)
    offsets: I64 = slab * cut.slab_nbytes + unit * cut.unit_nbytes
    return offsets


def unit_boxes(length: Sequence[int], cut: Cut, begin: int, end: int) -> list[Box]:
    """The boxes that consecutive units form, in C order, as few as possible.

    Args:
        length: of the box that is cut.
        cut: what :func:`cut_rule` gave for it.
        begin: number of the first unit.
        end: number behind the last one.

    Returns:
        Boxes relative to the corner of the box that is cut; the bytes of each follow each other in it, and those of all
        are the units' bytes.

    Example:
        >>> cut = cut_rule((3, 4), 1, 1)
        >>> [tuple(box) for box in unit_boxes((3, 4), cut, 3, 9)]
        [((0, 3), (1, 1)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if begin >= end:
        return []
    if end - begin == cut.units:
        return [Box((0,) * len(length), tuple(length))]
    rows, behind = length[cut.axis], tuple(length[cut.axis + 1 :])
    slab, unit = divmod(begin, cut.units_a_slab)
    first = slab * rows + unit * cut.quantum
    slab, unit = divmod(end, cut.units_a_slab)
    last = slab * rows + unit * cut.quantum
    return [
        Box((*start, *(0,) * len(behind)), (*shape, *behind))
        for start, shape in _runs(length[: cut.axis + 1], first, last)
    ]


def _runs(lengths: Sequence[int], begin: int, end: int) -> Iterator[tuple[list[int], list[int]]]:
    """Boxes of which elements ``[begin, end)`` of an array, numbered in C order, consist."""
    steps = [prod(lengths[axis + 1 :]) for axis in range(len(lengths))]
    while begin < end:
        # The outermost axis of which a whole index begins here and fits gives the longest box.
        axis = next(axis for axis, step in enumerate(steps) if begin % step == 0 and begin + step <= end)
        start = [begin // step % length for step, length in zip(steps, lengths, strict=True)]
        count = min(lengths[axis] - start[axis], (end - begin) // steps[axis])
        yield start, [1] * axis + [count, *lengths[axis + 1 :]]
        begin += count * steps[axis]


def merge(boxes: Sequence[Box]) -> list[list[int]]:
    """Find boxes of a tensor that can be stored as one.

    Args:
        boxes: disjoint, in any order, none of them empty unless it is the only one.

    Returns:
        Lists of positions in ``boxes``. The boxes of a list form a box, and their bytes one after the other are its
        bytes. Lists are in the order of their corners.

    Example:
        >>> merge([Box((4, 0), (2, 8)), Box((0, 0), (4, 8)), Box((9, 0), (1, 8))])
        [[1, 0], [2]]
    """
    runs = [(box, [number]) for number, box in enumerate(boxes)]
    if len(runs) < 2:
        return [numbers for _, numbers in runs]
    for axis in reversed(range(len(boxes[0].start))):
        runs.sort(key=partial(_along, axis=axis))
        joined = runs[:1]
        for box, numbers in runs[1:]:
            before, others = joined[-1]
            if _follows(before, box, axis):
                length = list(before.length)
                length[axis] += box.length[axis]
                joined[-1] = (Box(before.start, tuple(length)), others + numbers)
            else:
                joined.append((box, numbers))
        runs = joined
    return [numbers for _, numbers in sorted(runs)]


def _along(run: tuple[Box, list[int]], axis: int) -> tuple[tuple[int, ...], ...]:
    """Brings boxes that can follow each other along an axis next to each other."""
    start, length = run[0]
    return start[:axis], start[axis + 1 :], length[axis + 1 :], start[axis : axis + 1]


def _follows(before: Box, box: Box, axis: int) -> bool:
    behind = axis + 1
    return (
        before.start[axis] + before.length[axis] == box.start[axis]
        and before.start[:axis] == box.start[:axis]
        and before.start[behind:] == box.start[behind:]
        and before.length[behind:] == box.length[behind:]
        and all([length == 1 for length in before.length[:axis] + box.length[:axis]])
    )


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes of a tensor have in common; None if nothing.

    Example:
        >>> tuple(intersect(Box((0, 2), (4, 4)), Box((3, 0), (9, 3))))
        ((3, 2), (1, 1))
    """
    start = tuple([max(pair) for pair in zip(a.start, b.start, strict=True)])
    length = tuple(
        [min(p + m, q + n) - s for p, m, q, n, s in zip(a.start, a.length, b.start, b.length, start, strict=True)]
    )
    return Box(start, length) if all([n > 0 for n in length]) else None


def intersect_many(starts: I64, lengths: I64, box: Box) -> tuple[npt.NDArray[np.intp], I64, I64]:
    """What many boxes of a tensor have in common with one.

    Args:
        starts: shape (n, axes), the first indices of each box.
        lengths: shape (n, axes).
        box: the one.

    Returns:
        Positions of those of the n boxes that have anything in common with it, ascending; starts and lengths of what
        they have.
    """
    corner, size = np.array(box.start, np.int64), np.array(box.length, np.int64)
    start = np.maximum(starts, corner)
    length = np.minimum(starts + lengths, corner + size) - start
    found = np.flatnonzero((length > 0).all(axis=1))
    return found, start[found], length[found]
