"""Boxes against NumPy's own indexing, element by element; tilings against counting."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp_multi._boxes import Cut, cut_rule, intersect, intersect_many, merge, unit_boxes, unit_offsets
from fp_multi._layout import PAGE
from fp_multi._tiling import tiles
from fp_multi._types import Box

MIB = 1 << 20

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


def slices(box):
    return tuple(slice(start, start + length) for start, length in zip(box.start, box.length, strict=True))


def elements(shape, box):
    """Numbers of a box's elements in C order."""
    return np.arange(math.prod(shape)).reshape(shape)[slices(box)].ravel()


# Cuts


@pytest.mark.parametrize(
    ("length", "itemsize", "expected"),
    [
        ((), 4, Cut(0, 1, 1, 1, 4, 4)),
        ((0, 7), 4, Cut(0, 1, 1, 1, 0, 0)),
        ((7, 0), 4, Cut(0, 7, 1, 1, 0, 0)),
        ((7,), 4, Cut(0, 7, 1, 1, 28, 28)),
        ((256, 1024), 4, Cut(0, 256, 1, 1, MIB, MIB)),
        ((257, 1024), 4, Cut(0, 256, 1, 2, MIB, 257 * 4096)),
        ((8, 4096, 14336), 2, Cut(1, 36, 8, 114, 36 * 28672, 4096 * 28672)),
        # rows that are no pages: as many as make whole pages
        ((100_003, 3072), 2, Cut(0, 170, 1, 589, 170 * 6144, 100_003 * 6144)),
        ((100_003, 1536), 2, Cut(0, 340, 1, 295, 340 * 3072, 100_003 * 3072)),
        # no number of rows in a unit makes whole pages
        ((4001, 1001), 1, Cut(0, 1047, 1, 4, 1047 * 1001, 4001 * 1001)),
        ((3 * MIB + 1,), 1, Cut(0, MIB, 1, 4, MIB, 3 * MIB + 1)),
        # an element longer than a unit
        ((3, 5), 2 * MIB, Cut(1, 1, 3, 5, 2 * MIB, 10 * MIB)),
        ((), 2 * MIB, Cut(0, 1, 1, 1, 2 * MIB, 2 * MIB)),
    ],
)
def test_where_a_box_is_cut(length, itemsize, expected):
    cut = cut_rule(length, itemsize, MIB)
    assert cut == expected
    assert cut.nbytes == math.prod(length) * itemsize
    assert cut.units >= 1


@given(shapes, st.sampled_from([1, 2, 3, 8]), st.integers(1, 300))
@settings(deadline=None)
def test_units_are_short_enough_and_cover_the_box(length, itemsize, unit_nbytes):
    cut = cut_rule(length, itemsize, unit_nbytes)
    offsets = unit_offsets(cut, np.arange(cut.units + 1))
    sizes = np.diff(offsets)
    assert offsets[0] == 0
    assert offsets[-1] == cut.nbytes == math.prod(length) * itemsize
    assert (sizes > 0).all()
    assert sizes.max() == cut.unit_nbytes <= max(unit_nbytes, itemsize)


@given(st.integers(1, 9000), st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None)
def test_units_are_pages_where_they_can_be(row, itemsize):
    unit_nbytes = 64 << 10
    cut = cut_rule((10**6, row), itemsize, unit_nbytes)
    if row * itemsize > unit_nbytes:
        row, itemsize = itemsize, 1  # cut inside of a row
    fitting = range(1, 1 + unit_nbytes // (row * itemsize))
    paged = [n for n in fitting if n * row * itemsize % PAGE == 0]
    assert cut.quantum == (paged or fitting)[-1]


@st.composite
def cut_ranges(draw):
    length = draw(shapes)
    cut = cut_rule(length, 1, draw(st.integers(1, 40)))
    begin = draw(st.integers(0, cut.units))
    return length, cut, begin, draw(st.integers(begin, cut.units))


def fewest(lengths, begin, end):
    """How few boxes that are contiguous in C order cover elements ``[begin, end)`` in order, by trying all."""
    best = {begin: 0}
    for at in range(begin, end):
        if at not in best:
            continue
        for axis in range(len(lengths)):
            step = math.prod(lengths[axis + 1 :])
            index = at // step % lengths[axis]
            if at % step:
                continue
            for count in range(1, lengths[axis] - index + 1):
                to = at + count * step
                if to <= end:
                    best[to] = min(best.get(to, 1 << 30), best[at] + 1)
    return best[end]


@given(cut_ranges())
@example(((3, 4, 5), cut_rule((3, 4, 5), 1, 5), 1, 11))
@settings(max_examples=200, deadline=None)
def test_boxes_of_units(case):
    length, cut, begin, end = case
    boxes = unit_boxes(length, cut, begin, end)
    first, last = unit_offsets(cut, np.array([begin, end])).tolist()
    covered = [elements(length, box) for box in boxes]
    for numbers in covered:
        assert (np.diff(numbers) == 1).all(), "contiguous in the box that is cut"
    assert np.concatenate([*covered, np.empty(0, int)]).tolist() == list(range(first, last))
    assert len(boxes) == (fewest(length, first, last) if length else end - begin)


def test_a_range_over_three_slabs_has_three_boxes():
    cut = cut_rule((8, 4096, 14336), 2, MIB)
    boxes = unit_boxes((8, 4096, 14336), cut, 113, 3 * 114 + 5)
    assert boxes == [
        Box((0, 113 * 36, 0), (1, 28, 14336)),
        Box((1, 0, 0), (2, 4096, 14336)),
        Box((3, 0, 0), (1, 180, 14336)),
    ]


def test_boxes_of_what_has_no_elements_or_no_axes():
    assert unit_boxes((), cut_rule((), 4, MIB), 0, 1) == [Box((), ())]
    assert unit_boxes((), cut_rule((), 4, MIB), 0, 0) == []
    assert unit_boxes((3, 0), cut_rule((3, 0), 4, MIB), 0, 1) == [Box((0, 0), (3, 0))]


# Merging


@st.composite
def tilings(draw, max_boxes=40):
    """Any tiling that comes of cutting a shape, then its parts, and so on: grids, bricks and worse."""
    shape = draw(shapes)
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, max_boxes - 1))):
        at = draw(st.integers(0, len(boxes) - 1))
        start, length = boxes[at]
        axes = [axis for axis, n in enumerate(length) if n > 1]
        if not axes:
            continue
        axis = draw(st.sampled_from(axes))
        n = draw(st.integers(1, length[axis] - 1))
        boxes[at] = Box(start, (*length[:axis], n, *length[axis + 1 :]))
        boxes.append(
            Box(
                (*start[:axis], start[axis] + n, *start[axis + 1 :]),
                (*length[:axis], length[axis] - n, *length[axis + 1 :]),
            )
        )
    return shape, draw(st.permutations(boxes))


@given(tilings(), st.data())
@settings(max_examples=200, deadline=None)
def test_merged_boxes_are_stored_as_one(tiling, data):
    shape, boxes = tiling
    held = [box for box in boxes if data.draw(st.booleans())]
    runs = merge(held)
    assert sorted(itertools.chain(*runs)) == list(range(len(held)))
    corners = [held[run[0]].start for run in runs]
    assert corners == sorted(corners)
    for run in runs:
        parts = [elements(shape, held[number]) for number in run]
        first, last = held[run[0]], held[run[-1]]
        ends = [start + length for start, length in zip(last.start, last.length, strict=True)]
        union = Box(first.start, tuple(end - start for start, end in zip(first.start, ends, strict=True)))
        assert np.concatenate(parts).tolist() == elements(shape, union).tolist()


@given(cut_ranges())
@settings(deadline=None)
def test_what_units_form_can_be_merged_back(case):
    length, cut, _, _ = case
    singles = [box for unit in range(cut.units) for box in unit_boxes(length, cut, unit, unit + 1)]
    assert merge(singles[::-1]) == [list(reversed(range(cut.units)))]


def test_merging_is_deterministic_and_knows_its_limits():
    rows = [Box((6, 0), (2, 8)), Box((0, 0), (4, 8)), Box((4, 0), (2, 8)), Box((9, 0), (1, 8))]
    assert merge(rows) == [[1, 2, 0], [3]]
    assert merge([Box((0, 0), (2, 4)), Box((0, 4), (2, 4))]) == [[0], [1]], "columns are interleaved"
    assert merge([Box((0, 0), (1, 4)), Box((0, 4), (1, 4)), Box((1, 0), (3, 8))]) == [[0, 1, 2]]
    assert merge([Box((0, 0), (2, 4)), Box((2, 0), (2, 5))]) == [[0], [1]]
    columns = [Box((row, column), (2, 4)) for row in (0, 2) for column in (0, 4)]
    assert merge(columns) == [[0, 2], [1, 3]]
    assert merge([]) == []
    assert merge([Box((), ())]) == [[0]]


# Intersections


@st.composite
def box_pairs(draw):
    shape = draw(shapes)

    def box():
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        return Box(start, tuple(draw(st.integers(0, n - s)) for n, s in zip(shape, start, strict=True)))

    return shape, box(), box()


@given(box_pairs())
@settings(max_examples=200, deadline=None)
def test_intersections(case):
    shape, a, b = case
    masks = []
    for box in (a, b):
        masks.append(np.zeros(shape, bool))
        masks[-1][slices(box)] = True
    both = np.argwhere(masks[0] & masks[1])
    found = intersect(a, b)
    assert found == intersect(b, a)
    if len(both) == 0:
        assert found is None
    else:
        assert found.start == tuple(both.min(axis=0).tolist())
        assert found.length == tuple((both.max(axis=0) - both.min(axis=0) + 1).tolist())


@given(tilings(), st.data())
@settings(deadline=None)
def test_many_intersections_are_single_ones(tiling, data):
    shape, boxes = tiling
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(start, tuple(data.draw(st.integers(0, n - s)) for n, s in zip(shape, start, strict=True)))
    array = np.array(boxes, np.int64).reshape(len(boxes), 2, len(shape))
    found, starts, lengths = intersect_many(array[:, 0], array[:, 1], box)
    expected = [(number, intersect(one, box)) for number, one in enumerate(boxes)]
    expected = [(number, both) for number, both in expected if both is not None]
    assert found.tolist() == [number for number, _ in expected]
    assert [Box(tuple(s), tuple(n)) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)] == [
        both for _, both in expected
    ]


# Tilings


def counted(shape, boxes):
    times = np.zeros(shape, int)
    for box in boxes:
        times[slices(box)] += 1
    return times


@given(tilings(max_boxes=12))
@settings(max_examples=200, deadline=None)
def test_tilings_are_tilings(tiling):
    shape, boxes = tiling
    assert (counted(shape, boxes) == 1).all()
    assert tiles(shape, boxes) is None


@given(tilings(max_boxes=8), st.data())
@settings(max_examples=200, deadline=None)
def test_what_is_not_a_tiling_is_found(tiling, data):
    shape, boxes = tiling
    boxes = list(boxes)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(boxes) - 1))
        if data.draw(st.booleans()):
            boxes.append(boxes[at])
        elif shape:
            axis = data.draw(st.integers(0, len(shape) - 1))
            start, length = (list(one) for one in boxes[at])
            start[axis] = data.draw(st.integers(0, shape[axis] - 1))
            length[axis] = data.draw(st.integers(1, shape[axis] - start[axis]))
            boxes[at] = Box(tuple(start), tuple(length))
    times = counted(shape, boxes)
    message = tiles(shape, boxes)
    if (times == 1).all():
        assert message is None
    else:
        index = np.argwhere(times != 1)[0].tolist()
        n = times[tuple(index)]
        assert message == f"index {index} lies in {f'{n} boxes' if n else 'no box'}"


@pytest.mark.parametrize(
    ("shape", "boxes", "message"),
    [
        ((4,), [], "no box"),
        ((), [], "no box"),
        ((), [((), ()), ((), ())], "2 boxes"),
        ((4,), [((0,), (4,)), ((0,), (4,))], "2 boxes"),
        ((4, 4), [((0, 0), (4, 5))], "reaches out"),
        ((4, 4), [((-1, 0), (5, 4))], "reaches out"),
        ((4,), [((0,), (4,)), ((2,), (0,))], "is empty"),
        ((4, 4), [((0,), (4,))], "2 axes"),
        ((4, 4), [((0, 0), (4,))], "2 axes"),
        ((0, 4), [((0, 0), (0, 3))], "without elements"),
        ((0, 4), [((0, 0), (0, 4)), ((0, 0), (0, 4))], "without elements"),
        ((0, 4), [], "without elements"),
        ((1 << 62,), [((0,), (1 << 62,)), ((1 << 62,), (1 << 62,))], "reaches out"),
    ],
)
def test_what_is_wrong_is_said(shape, boxes, message):
    assert message in tiles(shape, boxes)


def test_tilings_without_elements_or_axes():
    assert tiles((0, 4), [Box((0, 0), (0, 4))]) is None
    assert tiles((0, 4), [([0, 0], [0, 4])]) is None
    assert tiles((), [Box((), ())]) is None


def test_bricks():
    boxes = [((0, 0), (3, 5)), ((3, 0), (7, 5)), ((0, 5), (8, 2)), ((8, 5), (2, 2))]
    assert tiles((10, 7), boxes) is None
    assert tiles((10, 7), boxes[:-1]) == "index [8, 5] lies in no box"


def test_a_hundred_thousand_boxes():
    boxes = [((row, 8 * column), (1, 8)) for row in range(12_500) for column in range(8)]
    assert tiles((12_500, 64), boxes) is None
    assert tiles((12_500, 64), boxes[:-1]) == "index [12499, 56] lies in no box"


def pinwheels(axes, count):
    """Boxes whose corners nowhere cancel out."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, 1 << 40, (count, axes))
    return list(zip(start.tolist(), rng.integers(1, 1 << 40, (count, axes)).tolist(), strict=True))


@pytest.mark.parametrize(("axes", "count"), [(4, 10_000), (24, 64), (64, 4), (64, 2000)])
def test_hostile_boxes_cost_little(axes, count):
    # Without a limit 64 axes would take 2^64 corners; the time only has to be far from that.
    begin = time.process_time()
    message = tiles((1 << 41,) * axes, pinwheels(axes, count))
    assert message is not None
    assert "no box" in message or "irregular" in message
    assert time.process_time() - begin < 60


def test_the_limit_is_said():
    assert "lies in no box" in tiles((1 << 41,) * 4, pinwheels(4, 100))
    assert "irregular" in tiles((1 << 41,) * 5, pinwheels(5, 100))
    assert "irregular" in tiles((1 << 41,) * 24, pinwheels(24, 64))
    assert len(tiles((1 << 62,) * 64, [((1 << 62,) * 64, (1 << 62,) * 64)])) < 1000
