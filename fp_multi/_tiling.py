"""Whether boxes tile a shape: every element in exactly one of them. Pure, and safe for hostile boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_GROWTH = 16
"""Corners that are looked at for each box of a tiling: enough for any that is cut on four axes."""
_SHOWN = 200


def tiles(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str | None:
    """Whether boxes tile a shape: every element is in exactly one of them (docs/format.md rule P1).

    Any tiling will do. Time and memory are proportional to the number of boxes, whatever they are: boxes that meet in
    so irregular a way that more would be needed are refused. Tilings that are cut on up to four axes never are.

    Args:
        shape: of the tensor; one without elements is tiled by one box, itself.
        boxes: start and length on each axis; they may be hostile.

    Returns:
        None if they do, else what is wrong.

    Example:
        >>> tiles((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 3))])
        'index [2, 3] lies in no box'
    """
    if 0 in shape:
        if len(boxes) == 1 and not any(boxes[0][0]) and list(boxes[0][1]) == list(shape):
            return None
        return f"expected one box, all of shape {_text(shape)}, for a tensor without elements"
    for number, (start, length) in enumerate(boxes):
        if len(start) != len(shape) or len(length) != len(shape):
            return f"expected {len(shape)} axes, found box {number}: {_text((start, length))}"
        for first, count, extent in zip(start, length, shape, strict=True):
            if first < 0 or count < 1 or first + count > extent:
                return f"box {number} is empty or reaches out of shape {_text(shape)}: {_text((start, length))}"
    axes = [axis for axis, extent in enumerate(shape) if any([length[axis] != extent for _, length in boxes])]
    found = _first_uneven(shape, boxes, axes, _GROWTH * len(boxes) + 64)
    if found is None:
        return None
    corner, times = found
    if times < 0:
        return f"expected boxes in rows and columns, found {len(boxes)} that meet in too irregular a way to be checked"
    index = [0] * len(shape)
    for axis, place in zip(axes, corner, strict=True):
        index[axis] = place
    return f"index {_text(index)} lies in {f'{times} boxes' if times else 'no box'}"


def _first_uneven(
    shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]], axes: Sequence[int], limit: int
) -> tuple[tuple[int, ...], int] | None:
    """Find the first element that is not in exactly one box.

    How many boxes an element lies in, less one, is a function of its place. It is zero if and only if its differences
    along all axes are, and those are zero but at corners of boxes, where neighbours cancel out. At the first corner
    that is left, all places before it are even, so what is left is the function itself.

    All boxes are whole on other axes than ``axes``. At most ``limit`` corners are looked at.

    Returns:
        The place on ``axes``, and in how many boxes it lies, or -1 if there are too many corners. None if all
        elements are even.
    """
    # On axes that are still to come a key has (begin, end), on those that are done a place.
    counts: dict[tuple[Any, ...], int] = {tuple([(0, shape[axis]) for axis in axes]): -1}
    for start, length in boxes:
        key = tuple([(start[axis], start[axis] + length[axis]) for axis in axes])
        counts[key] = counts.get(key, 0) + 1
    for at in range(len(axes)):
        corners: dict[tuple[Any, ...], int] = {}
        for key, count in counts.items():
            begin, end = key[at]
            for place, change in ((begin, count), (end, -count)):
                corner = (*key[:at], place, *key[at + 1 :])
                corners[corner] = corners.get(corner, 0) + change
        counts = {key: count for key, count in corners.items() if count}
        if len(counts) > limit:
            return (), -1
    counts = {key: count for key, count in counts.items() if count}
    if not counts:
        return None
    first = min(counts)
    return first, counts[first] + 1


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
