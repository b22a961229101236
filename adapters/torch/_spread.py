"""Which boxes a mesh of ranks cuts a tensor into; imports nothing of torch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fp_multi import Box

_Runs: TypeAlias = list[tuple[int, int]]
"""First index and length of runs of indices on an axis, ascending."""


class Split(NamedTuple):
    """One axis of a mesh cuts one axis of a tensor."""

    mesh_axis: int
    axis: int
    factor: int = 1
    """The axis is first cut in so many, and each of them among the ranks (``_StridedShard``)."""


class Spread(NamedTuple):
    """How a tensor lies over the ranks of a job."""

    boxes: tuple[Box, ...]
    """They tile the tensor, in ascending order; none is empty."""
    holders: tuple[tuple[int, ...], ...]
    """For each box the ranks that have it, ascending."""


def spread(shape: Sequence[int], ranks: npt.NDArray[np.int64], splits: Sequence[Split]) -> Spread:
    """All boxes of a tensor.

    Args:
        shape: of the tensor; it has elements.
        ranks: the mesh.
        splits: which of its axes cut the tensor, in their order; along the others the ranks are replicas.

    Returns:
        Boxes and holders.

    Example:
        >>> spread((3, 4), np.array([[0, 1], [2, 3]]), [Split(0, 0)]).holders
        ((0, 1), (2, 3))
    """
    cutting = [split.mesh_axis for split in splits]
    others = [axis for axis in range(ranks.ndim) if axis not in cutting]
    grouped = ranks.transpose(*cutting, *others)
    found: dict[Box, tuple[int, ...]] = {}
    for place in np.ndindex(grouped.shape[: len(cutting)]):
        holders = tuple(sorted(grouped[place].ravel().tolist()))
        coordinate = [0] * ranks.ndim
        for axis, index in zip(cutting, place, strict=True):
            coordinate[axis] = index
        for box, _ in boxes_at(shape, ranks.shape, splits, coordinate):
            found[box] = holders
    boxes = sorted(found)
    return Spread(tuple(boxes), tuple([found[box] for box in boxes]))


def boxes_at(
    shape: Sequence[int], mesh_shape: Sequence[int], splits: Sequence[Split], coordinate: Sequence[int]
) -> list[tuple[Box, Box]]:
    """The boxes of a tensor at one place of a mesh.

    Args:
        shape: of the tensor.
        mesh_shape: of the mesh.
        splits: see :func:`spread`.
        coordinate: the place.

    Returns:
        Boxes of the tensor, and the same boxes in the local tensor; none if that has no elements.

    Example:
        >>> [[tuple(box) for box in pair] for pair in boxes_at((5, 2), (3,), [Split(0, 0)], (2,))]
        [[((4, 0), (1, 2)), ((0, 0), (1, 2))]]
    """
    axes: list[_Runs] = [[(0, length)] if length else [] for length in shape]
    for mesh_axis, axis, factor in splits:
        axes[axis] = _part(axes[axis], factor, mesh_shape[mesh_axis], coordinate[mesh_axis])
    found = []
    for parts in itertools.product(*[list(_with_places(runs)) for runs in axes]):
        length = tuple([length for _, length, _ in parts])
        found.append(
            (Box(tuple([start for start, _, _ in parts]), length), Box(tuple([at for *_, at in parts]), length))
        )
    return found


def local_shape(
    shape: Sequence[int], mesh_shape: Sequence[int], splits: Sequence[Split], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """The shape of the local tensor at one place of a mesh; the arguments are those of :func:`boxes_at`."""
    lengths = list(shape)
    for mesh_axis, axis, factor in splits:
        runs = _part([(0, lengths[axis])], factor, mesh_shape[mesh_axis], coordinate[mesh_axis])
        lengths[axis] = sum([length for _, length in runs])
    return tuple(lengths)


def _chunk(length: int, count: int, index: int) -> tuple[int, int]:
    """Begin and end of one of ``count`` chunks, as ``torch.chunk`` cuts: the last ones may be short or empty."""
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)


def _part(runs: _Runs, factor: int, count: int, index: int) -> _Runs:
    total = sum([length for _, length in runs])
    found: _Runs = []
    for piece in range(factor):
        begin, end = _chunk(total, factor, piece)
        first, last = _chunk(end - begin, count, index)
        for start, length in _between(runs, begin + first, begin + last):
            if found and sum(found[-1]) == start:
                found[-1] = (found[-1][0], found[-1][1] + length)
            else:
                found.append((start, length))
    return found


def _between(runs: _Runs, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """What of some runs lies between two positions, counted over all of them."""
    at = 0
    for start, length in runs:
        first, last = max(begin, at), min(end, at + length)
        if first < last:
            yield start + first - at, last - first
        at += length


def _with_places(runs: _Runs) -> Iterator[tuple[int, int, int]]:
    """Runs with their places behind each other."""
    at = 0
    for start, length in runs:
        yield start, length, at
        at += length


def is_distributed(tensor: object) -> bool:
    """Whether a tensor is a DTensor; without importing them, which takes seconds, where there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(tensor) is module.DTensor
