"""The planner of parallel writes: exact, balanced, the same for everybody; and clusters of thousands of ranks."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import random
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp_multi._boxes import cut_rule, unit_offsets
from fp_multi._partition import Items, _fill, plan
from fp_multi.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20


def items_of(cuts, group):
    return Items.of(cuts, np.arange(len(cuts)), np.array(group, np.int64))


# Lines of bytes: odd shapes, with a small unit so that there is something to cut.
lengths = st.one_of(
    st.just(()),
    st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple),
    st.sampled_from([(997,), (1,), (3, 331), (2, 3, 61), (5000,), (0, 7)]),
)
UNIT = 64


@st.composite
def laminar_groups(draw, size):
    """Sets of ranks, any two of them disjoint or nested."""
    groups = []

    def divide(ranks):
        if draw(st.booleans()) or not groups:
            groups.append(tuple(sorted(ranks)))
        if len(ranks) > 1 and draw(st.booleans()):
            cut = draw(st.integers(1, len(ranks) - 1))
            divide(ranks[:cut])
            divide(ranks[cut:])

    divide(draw(st.permutations(range(size))))
    return draw(st.permutations(groups))


@st.composite
def any_groups(draw, size):
    sets = st.sets(st.integers(0, size - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    return draw(st.lists(sets, min_size=1, max_size=5))


@st.composite
def cases(draw, groups=None, weighted=True):
    size = draw(st.integers(1, 9))
    sets = draw((groups or (lambda n: st.one_of(laminar_groups(n), any_groups(n))))(size))
    boxes = draw(st.lists(st.tuples(lengths, st.sampled_from([1, 2, 100])), max_size=12))
    cuts = [cut_rule(length, itemsize, UNIT) for length, itemsize in boxes]
    group = [draw(st.integers(0, len(sets) - 1)) for _ in cuts]
    writers = draw(st.none() | st.lists(st.integers(0, size - 1), max_size=size))
    weight = st.floats(0.01, 100) | st.sampled_from([1, 0.5])
    weights = draw(st.none() | st.lists(weight, min_size=size, max_size=size)) if weighted else None
    return cuts, group, sets, size, writers, weights


def planned(case):
    cuts, group, sets, size, writers, weights = case
    return plan(items_of(cuts, group), sets, size=size, writers=writers, weights=weights)


def writing(group, writers):
    """Who of a group writes."""
    return [rank for rank in group if writers is None or rank in writers] or list(group)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_every_unit_is_written_once_by_somebody_who_has_it(case):
    cuts, group, sets, size, writers, _ = case
    divided = planned(case)
    owners = [[[] for _ in range(cut.units)] for cut in cuts]
    loads = np.zeros(size, int)
    for rank in range(size):
        rows = divided.of(rank)
        assert rows.dtype == np.int64
        assert rows.shape == (divided.counts[rank], 3)
        assert (np.diff(rows[:, 0]) > 0).all(), "in item order, each at most once"
        for item, begin, end in rows.tolist():
            assert 0 <= begin < end <= cuts[item].units
            first, last = unit_offsets(cuts[item], np.array([begin, end])).tolist()
            loads[rank] += last - first
            for unit in range(begin, end):
                owners[item][unit].append(rank)
    for item, units in enumerate(owners):
        able = writing(sets[group[item]], writers)
        for owner in units:
            assert len(owner) == 1
            assert owner[0] in able
        if cuts[item].nbytes == 0:
            assert units == [[able[0]]]
        assert units == sorted(units), "ranges follow the order of ranks"
    assert loads.tolist() == divided.loads.tolist()
    assert divided.loads.sum() == divided.ideal.sum() == sum(cut.nbytes for cut in cuts)
    assert divided.writers == tuple(np.flatnonzero(divided.counts).tolist())
    assert set(divided.drafted) == (set() if writers is None else set(divided.writers) - set(writers))


@given(cases())
@settings(max_examples=100, deadline=None)
def test_a_group_is_one_line(case):
    """A rank's part of what its line holds is one range of bytes."""
    cuts, group, sets, _, writers, _ = case
    divided = planned(case)
    for line in {tuple(writing(one, writers)) for one in sets}:
        members = [i for i, g in enumerate(group) if tuple(writing(sets[g], writers)) == line and cuts[i].nbytes]
        begins = dict(zip(members, np.cumsum([0] + [cuts[i].nbytes for i in members]).tolist(), strict=False))
        at = 0
        for rank in line:
            for item, begin, end in divided.of(rank).tolist():
                if item in begins:
                    first, last = (unit_offsets(cuts[item], np.array([begin, end])) + begins[item]).tolist()
                    assert first == at
                    at = last


def longest_unit(cuts):
    return max([cut.unit_nbytes for cut in cuts], default=0)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_no_rank_is_farther_from_its_ideal_than_was_promised(case):
    cuts, _, _, size, _, weights = case
    divided = planned(case)
    skew = Fraction(1)
    if weights is not None and divided.depth > 1:
        skew = Fraction(max(weights)) / Fraction(min(weights)) * Fraction(101, 100)  # weights are rounded
    assert divided.imbalance_nbytes <= divided.depth * skew * (longest_unit(cuts) + 2)
    assert divided.imbalance_nbytes == max(abs(int(n)) for n in divided.loads - divided.ideal)
    assert len(divided.loads) == len(divided.ideal) == size


@given(cases(groups=laminar_groups, weighted=False))
@settings(max_examples=150, deadline=None)
def test_nothing_has_a_lower_maximum_than_the_ideal(case):
    """What must be written inside a set of ranks cannot be less than shared evenly among them."""
    cuts, group, sets, _, writers, _ = case
    divided = planned(case)
    lines = [frozenset(writing(one, writers)) for one in sets]
    nbytes = [0] * len(sets)
    for cut, number in zip(cuts, group, strict=True):
        nbytes[number] += cut.nbytes
    within = [sum(n for line, n in zip(lines, nbytes, strict=True) if line <= outer) for outer in lines]
    bound = max(Fraction(n, len(outer)) for n, outer in zip(within, lines, strict=True))
    # A byte for each level of nesting: they are not divided.
    assert bound <= divided.ideal.max() <= bound + max(divided.depth, 1)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_plans_are_the_same_again(case):
    a, b = planned(case), planned(case)
    assert a.writers == b.writers
    assert a.loads.tolist() == b.loads.tolist()
    for rank in range(case[3]):
        assert a.of(rank).tolist() == b.of(rank).tolist()


def drawn_plan():
    """What a plan says, of a case that is drawn in the same way everywhere."""
    draw = random.Random(0)
    cuts = [cut_rule((1 + draw.getrandbits(8), 1 + draw.getrandbits(8)), 4, 4096) for _ in range(200)]
    groups = [tuple(sorted({draw.getrandbits(5) for _ in range(8)})) for _ in range(20)]
    group = [draw.getrandbits(16) % 20 for _ in cuts]
    weights = [(1 + draw.getrandbits(8)) / 256 for _ in range(32)]
    divided = plan(items_of(cuts, group), groups, size=32, weights=weights)
    return repr([divided.of(rank).tolist() for rank in range(32)])


def test_plans_are_the_same_on_every_machine():
    # Written down, so that other processors, systems and versions of NumPy are compared with this.
    assert hashlib.sha256(drawn_plan().encode()).hexdigest()[:16] == "fb4eb536b7ca852e"


# Water


def slow_fill(had, shares, nbytes):
    """Exact fractions: the level at which the ranks below it take so many bytes, by trying each set of lowest ranks."""
    by_level = sorted((Fraction(h, s), h, s) for h, s in zip(had, shares, strict=True))
    for count in range(1, len(had) + 1):
        wet = by_level[:count]
        level = Fraction(nbytes + sum(h for _, h, _ in wet), sum(s for _, _, s in wet))
        if count == len(had) or level <= by_level[count][0]:
            return [max(s * level - h, Fraction(0)) for h, s in zip(had, shares, strict=True)]
    raise AssertionError


levels = st.one_of(st.integers(0, 20), st.integers(0, 1 << 40), st.just(0))


@given(st.lists(levels, min_size=1, max_size=12), st.one_of(st.integers(0, 50), st.integers(0, 1 << 42)))
@settings(max_examples=300, deadline=None)
def test_water_finds_its_level(had, nbytes):
    gets = _fill(had, None, nbytes)
    assert sum(gets) == nbytes
    assert min(gets) >= 0
    for got, exact in zip(gets, slow_fill(had, [1] * len(had), nbytes), strict=True):
        assert abs(got - exact) <= 1
    for have, got in zip(had, gets, strict=True):
        # Nobody gets anything while another stands lower at the end.
        assert not got or have + got <= min(h + g for h, g in zip(had, gets, strict=True)) + 1


@given(
    st.lists(st.tuples(levels, st.integers(1, 1 << 20)), min_size=1, max_size=12),
    st.one_of(st.integers(0, 50), st.integers(0, 1 << 42)),
)
@settings(max_examples=300, deadline=None)
def test_water_in_proportion_to_shares(ranks, nbytes):
    had, shares = [have for have, _ in ranks], [share for _, share in ranks]
    gets = _fill(had, shares, nbytes)
    assert sum(gets) == nbytes
    assert min(gets) >= 0
    for got, exact in zip(gets, slow_fill(had, shares, nbytes), strict=True):
        assert abs(got - exact) <= 2 + len(had)


# Cases that are easy to get wrong


def cut_all(shapes, itemsize=4):
    return [cut_rule(shape, itemsize, MIB) for shape in shapes]


def test_nothing_to_write():
    divided = plan(items_of([], []), [], size=3)
    assert divided.loads.tolist() == [0, 0, 0]
    assert divided.writers == divided.drafted == ()
    assert divided.of(1).shape == (0, 3)
    assert divided.imbalance_nbytes == divided.depth == 0


def test_what_has_no_bytes_is_still_written():
    divided = plan(items_of(cut_all([(0,), (3, 0), (7,), ()]), [0, 1, 0, 0]), [(0, 1, 2), (1, 2)], size=3)
    rows = {rank: divided.of(rank).tolist() for rank in range(3)}
    assert [0, 0, 1] in rows[0]
    assert [1, 0, 1] in rows[1]
    assert sum(map(len, rows.values())) == 4


def test_one_huge_tensor_with_a_prime_number_of_rows():
    size = 128
    cut = cut_rule((1_000_003, 4096), 2, MIB)
    divided = plan(items_of([cut], [0]), [tuple(range(size))], size=size)
    assert divided.depth == 1
    assert divided.imbalance_nbytes <= MIB
    assert (divided.counts == 1).all()
    assert divided.loads.sum() == 1_000_003 * 8192


def test_more_ranks_than_rows():
    divided = plan(items_of(cut_all([(3, MIB)]), [0]), [tuple(range(64))], size=64)
    assert sorted(divided.loads.tolist())[-12:] == [MIB] * 12
    assert len(divided.writers) == 12
    rows = plan(items_of([cut_rule((3, 5), 2 * MIB, MIB)], [0]), [tuple(range(64))], size=64)
    assert len(rows.writers) == 15


def test_ten_thousand_tiny_tensors():
    rng = np.random.default_rng(0)
    cuts = cut_all([(n,) for n in rng.integers(1, 2000, 10_000).tolist()])
    divided = plan(items_of(cuts, [0] * 10_000), [tuple(range(7))], size=7)
    assert divided.imbalance_nbytes <= 8000
    assert divided.counts.sum() == 10_000, "none is cut"


def test_single_holders_are_levelled_by_what_all_hold():
    cuts = cut_all([(MIB,), (5 * MIB,), (24 * MIB,)], 1)
    divided = plan(items_of(cuts, [0, 1, 2]), [(0,), (1,), (0, 1, 2)], size=3)
    assert divided.loads.tolist() == divided.ideal.tolist() == [10 * MIB] * 3
    assert divided.depth == 1


def test_a_rank_that_has_too_much_gets_nothing_more():
    cuts = cut_all([(50 * MIB,), (20 * MIB,)], 1)
    divided = plan(items_of(cuts, [0, 1]), [(1,), (0, 1, 2)], size=3)
    assert divided.loads.tolist() == [10 * MIB, 50 * MIB, 10 * MIB]


def test_weights_are_shares():
    divided = plan(items_of(cut_all([(70 * MIB,)], 1), [0]), [(0, 1, 2, 3)], size=4, weights=[1, 0.5, 1, 1])
    assert divided.loads.tolist() == [20 * MIB, 10 * MIB, 20 * MIB, 20 * MIB]


def test_equal_weights_are_no_weights():
    cuts = cut_all([(1013, 1009), (17,)])
    plain = plan(items_of(cuts, [0, 0]), [(0, 1, 2)], size=3)
    equal = plan(items_of(cuts, [0, 0]), [(0, 1, 2)], size=3, weights=[0.1, 0.1, 0.1])
    assert [plain.of(rank).tolist() for rank in range(3)] == [equal.of(rank).tolist() for rank in range(3)]


def test_only_writers_write_what_they_hold():
    cuts = cut_all([(8 * MIB,), (6 * MIB,)], 1)
    divided = plan(items_of(cuts, [0, 1]), [(0, 1, 2, 3), (4, 5)], size=6, writers=[1, 3])
    assert divided.loads.tolist() == [0, 4 * MIB, 0, 4 * MIB, 3 * MIB, 3 * MIB]
    assert divided.writers == (1, 3, 4, 5)
    assert divided.drafted == (4, 5)


def test_an_idle_writer_is_none():
    divided = plan(items_of(cut_all([(7,)]), [0]), [(0, 1)], size=3, writers=[1, 2])
    assert divided.writers == (1,)
    assert divided.drafted == ()


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([()], {}, "ascending"),
        ([(1, 0)], {}, "ascending"),
        ([(0, 0)], {}, "ascending"),
        ([(0, 3)], {}, "below 3"),
        ([(-1, 0)], {}, "below 3"),
        ([(0, 1)], {"writers": [3]}, "writers"),
        ([(0, 1)], {"weights": [1, 1]}, "weights"),
        ([(0, 1)], {"weights": [1, 1, 0]}, "weights"),
        ([(0, 1)], {"weights": [1, 1, math.inf]}, "weights"),
        ([(0, 1)], {"weights": [1, 1, math.nan]}, "weights"),
        ([], {}, "groups below 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(groups, options, message):
    with pytest.raises(ConfigError, match=message):
        plan(items_of(cut_all([(7,)]), [0]), groups, size=3, **options)


def test_too_many_bytes_are_refused():
    cuts = [cut_rule((1 << 31, 1 << 30), 1, MIB)] * 2
    with pytest.raises(ConfigError, match="2\\^62"):
        plan(items_of(cuts, [0, 0]), [(0, 1)], size=2)


# Clusters


def load_clusters() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_clusters", ROOT / "benchmarks" / "_clusters.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


clusters = load_clusters()


@pytest.mark.parametrize(
    ("cluster", "depth"),
    [
        (clusters.data_parallel(2084, 1024, 10_000), 1),
        (clusters.three_d(2084, 4096, 8, 16, 80), 2),
        (clusters.three_d(64, 1024, 8, 4, 32, zero=True), 2),
        (clusters.experts(123, 2048, 1408, 2, 16, 320, 64), 4),
        (clusters.sharded(24, 512, 16, 64), 1),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_cluster_is_balanced(cluster, depth):
    items, groups = cluster.describe()
    divided = plan(items, groups, size=cluster.size)
    assert divided.imbalance_nbytes <= 4 * MIB
    assert divided.depth == depth
    assert divided.imbalance_nbytes <= depth * (MIB + 1)
    assert divided.loads.sum() == items.nbytes.sum()
    assert divided.drafted == ()
    for rank in random.Random(0).sample(range(cluster.size), 20):
        rows = divided.of(rank)
        held = [rank in groups[group] for group in items.group[rows[:, 0]].tolist()]
        assert all(held)
