"""Layout and read plans, property by property: pure functions, so every property can be tried on made-up files."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp_multi import _layout
from fp_multi._layout import PAGE, chunk_count, chunk_sizes, lay_out, plan_reads, shared_runs, touched_chunks

BLOCK = 64 << 10
MEMORY = 1 << 30

# Lengths with a taste for the limits that the planner knows.
lengths = st.one_of(
    st.integers(1, 20),
    st.integers(1, 40).map(lambda pages: pages * PAGE),
    st.sampled_from([_layout.DIRECT_MIN_NBYTES + d for d in (-PAGE, -1, 0, 1, PAGE)]),
    st.sampled_from([_layout.BRIDGE_NBYTES + d for d in (-1, 0, 1)]),
    st.integers(1, 1 << 20),
)


@st.composite
def wanted(draw):
    """A file of pieces, some of them wanted whole or in part, with the checksum chunks of what is touched."""
    chunk_nbytes = draw(st.sampled_from([PAGE, 16 * PAGE, 1 << 20]))
    at = draw(st.sampled_from([0, PAGE, PAGE + 8]))
    segments, chunks = [], []
    memory = MEMORY
    for nbytes in draw(st.lists(lengths, min_size=1, max_size=12)):
        whole = draw(st.sampled_from(["no", "whole", "whole", "part"]))
        begin, end = at, at + nbytes
        if whole == "part":
            begin = at + draw(st.integers(0, nbytes - 1))
            end = begin + draw(st.integers(1, at + nbytes - begin))
        if whole != "no":
            memory = memory + draw(st.sampled_from([0, 0, 8]))
            segments.append((begin, end - begin, memory))
            memory = _layout.align_up(memory + end - begin)
            start = at
            for size in chunk_sizes(nbytes, chunk_nbytes):
                if start < end and begin < start + size:
                    chunks.append((start, size))
                start += size
        at += nbytes
    if not draw(st.booleans()):
        chunks = []
    file_nbytes = at + draw(st.sampled_from([0, 1, PAGE]))
    return np.array(segments, np.int64).reshape(-1, 3), np.array(chunks, np.int64).reshape(-1, 2), file_nbytes


@given(wanted())
@settings(max_examples=300, deadline=None)
def test_read_plans(case):
    segments, chunks, file_nbytes = case
    ops = plan_reads(segments, chunks, BLOCK, file_nbytes)
    offset, nbytes, address = ops.T
    assert (nbytes > 0).all()
    assert (nbytes <= BLOCK).all()
    assert (offset[1:] >= offset[:-1] + nbytes[:-1]).all(), "sorted and disjoint"
    assert (offset + nbytes <= file_nbytes).all()

    direct = address != 0
    assert (offset[direct] % PAGE == 0).all()
    assert (nbytes[direct] % PAGE == 0).all()
    assert (address[direct] % PAGE == 0).all()
    assert (offset[~direct] % PAGE == 0).all(), "the drive reads whole pages into a block"

    # Byte by byte: what each op brings, and where it goes.
    covered = np.zeros(file_nbytes, bool)
    home = np.zeros(file_nbytes, np.int64)
    for o, n, a in ops.tolist():
        covered[o : o + n] = True
        if a:
            home[o : o + n] = np.arange(a, a + n)
    for o, n in chunks.tolist():
        assert covered[o : o + n].all(), "every chunk is read completely"
    for o, n, a in segments.tolist():
        assert covered[o : o + n].all()
        straight = home[o : o + n]
        assert ((straight == 0) | (straight == np.arange(a, a + n))).all(), "direct bytes land where they are wanted"
        assert (straight == 0).all() or (straight != 0).all()
        home[o : o + n] = 0
    assert not home.any(), "nothing is written where nothing was wanted"


def test_large_aligned_tensors_are_read_straight_to_memory():
    n = _layout.DIRECT_MIN_NBYTES
    ops = plan_reads(np.array([[PAGE, n, MEMORY]]), np.array([[PAGE, n]]), BLOCK, PAGE + n)
    assert (ops[:, 2] == MEMORY + np.arange(0, n, BLOCK)).all()


def test_small_neighbours_share_a_request():
    segments = np.array([[PAGE + 100 * i, 100, MEMORY + 4096 * i] for i in range(600)], np.int64)
    ops = plan_reads(segments, np.empty((0, 2), np.int64), BLOCK, PAGE + 60_000)
    assert ops.tolist() == [[PAGE, 60_000, 0]]


def test_distant_parts_are_not_bridged():
    far = PAGE + _layout.BRIDGE_NBYTES + 2
    segments = np.array([[PAGE, 1, MEMORY], [far, 1, MEMORY + 1]], np.int64)
    ops = plan_reads(segments, np.empty((0, 2), np.int64), BLOCK, 10 * far)
    assert len(ops) == 2
    assert ops[:, 1].tolist() == [PAGE, PAGE]


def test_nothing_wanted_is_no_request():
    empty = plan_reads(np.empty((0, 3), np.int64), np.empty((0, 2), np.int64), BLOCK, 0)
    assert empty.shape == (0, 3)


def boxes(data, shape):
    start = [data.draw(st.integers(0, n - 1)) for n in shape]
    return start, [data.draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True)]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_shared_runs_are_numpy_slicing(data):
    outer = data.draw(st.lists(st.integers(1, 6), max_size=5))
    itemsize = data.draw(st.sampled_from([1, 2, 3, 16]))
    corner, inner = boxes(data, outer)
    start, length = boxes(data, inner)
    frames = [(outer, [a + b for a, b in zip(corner, start, strict=True)]), (inner, start)]
    found, run = shared_runs(length, frames, itemsize)
    for (shape, begin), offsets in zip(frames, found, strict=True):
        whole = np.arange(int(np.prod(shape, dtype=int)) * itemsize).reshape(*shape, itemsize)
        box = whole[tuple(slice(s, s + n) for s, n in zip(begin, length, strict=True))]
        assert (offsets[:, None] + np.arange(run)[None, :]).ravel().tolist() == box.ravel().tolist()


def test_shared_runs_are_as_long_as_can_be():
    (offsets,), run = shared_runs((3, 4, 4), [((8, 4, 4), (2, 0, 0))], 4)
    assert (offsets.tolist(), run) == ([2 * 64], 3 * 64)
    (offsets,), run = shared_runs((8, 2), [((8, 4), (0, 1))], 4)
    assert (len(offsets), run) == (8, 8)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_touched_chunks(data):
    chunk = data.draw(st.integers(1, 20))
    nbytes = data.draw(st.integers(1, 200))
    run = data.draw(st.integers(1, nbytes))
    offsets = data.draw(st.lists(st.integers(0, nbytes - run), min_size=1, max_size=10))
    wanted = sorted({at // chunk for offset in offsets for at in range(offset, offset + run)})
    assert touched_chunks(np.array(offsets, np.int64), run, chunk, nbytes).tolist() == wanted


@given(st.lists(st.one_of(st.just(0), st.integers(0, 3 * PAGE), st.integers(1, 4).map(lambda n: n * PAGE))))
def test_lay_out_packs_whole_pages_first(sizes):
    layout = lay_out(sizes)
    assert sorted(layout.order) == list(range(len(sizes)))
    ends = [begin + sizes[i] for i, begin in zip(layout.order, layout.begins, strict=True)]
    assert layout.begins == [0, *ends][: len(sizes)], "no gap and no overlap"
    assert layout.nbytes == sum(sizes)
    paged = [i for i in layout.order if sizes[i] and sizes[i] % PAGE == 0]
    assert layout.order[: len(paged)] == paged == sorted(paged)
    assert layout.order[len(paged) :] == sorted(layout.order[len(paged) :])
    assert all(layout.begins[k] % PAGE == 0 for k in range(len(paged)))


@given(st.integers(0, 1 << 40), st.sampled_from([4096, 12288, 1 << 20, 16 << 20]))
def test_chunks_cover_a_piece(nbytes, chunk_nbytes):
    count = chunk_count(nbytes, chunk_nbytes)
    assert (count - 1) * chunk_nbytes < nbytes <= count * chunk_nbytes or nbytes == count == 0
    if count < 1000:
        sizes = list(chunk_sizes(nbytes, chunk_nbytes))
        assert len(sizes) == count
        assert sum(sizes) == nbytes
        assert all(size == chunk_nbytes for size in sizes[:-1])


@pytest.mark.parametrize("unit", [1, 64, 4096, 2 << 20])
def test_alignment(unit):
    for value in (0, 1, unit - 1, unit, unit + 1, (1 << 62) - unit):
        low, high = _layout.align_down(value, unit), _layout.align_up(value, unit)
        assert low <= value <= high
        assert low % unit == high % unit == 0
        assert high - low in (0, unit)
