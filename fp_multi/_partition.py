"""Which rank writes which bytes of replicated data: balanced, exact, and the same on every rank without a word. Pure.

FastPersist (arXiv 2406.13768), section 4.2, divides one replica's bytes among the ranks that hold it. Here tensors may
have different holders (tensor, pipeline and expert parallelism): boxes with the same writers form a line of bytes that
is cut into one range for each writer. Lines with few writers come first; each next one fills up those of its writers
that have least so far, as water finds its level. All arithmetic is in integers: every machine makes the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from fp_multi._boxes import I64, Cut
from fp_multi.errors import ConfigError

_WEIGHT_BITS = 20


@dataclass(frozen=True, slots=True)
class Items:
    """What is to be written: a row for each box of each tensor, in tree order, the same on every rank.

    All arrays have shape (n,). All but ``nbytes`` and ``group`` are those of :class:`fp_multi._boxes.Cut`.
    """

    nbytes: I64
    group: I64
    """Index of the ranks that hold it."""
    slabs: I64
    units_a_slab: I64
    unit_nbytes: I64
    slab_nbytes: I64

    @classmethod
    def of(cls, cuts: Sequence[Cut], which: I64, group: I64) -> Items:
        """Make the rows of few different cuts.

        Args:
            cuts: the different ones.
            which: shape (n,), for each box the index of its cut.
            group: shape (n,), for each box the index of its holders.
        """
        table = np.array([(cut.nbytes, *cut[2:]) for cut in cuts], np.int64).reshape(-1, 5)
        nbytes, *rest = (column[which] for column in table.T.copy())
        return cls(nbytes, group, *rest)


@dataclass(frozen=True, slots=True)
class Plan:
    """Who writes what."""

    loads: I64
    """Shape (size,): bytes of each rank."""
    ideal: I64
    """Shape (size,): what they were if a box could be cut at any byte."""
    counts: I64
    """Shape (size,): number of rows that :meth:`of` gives for each rank."""
    writers: tuple[int, ...]
    """The ranks that write anything (if only a box without bytes), ascending."""
    drafted: tuple[int, ...]
    """Those of them that were not asked to, but nobody who was holds what they write."""
    depth: int
    """The longest chain of lines through shared ranks, each with several writers. 1 is plain data parallelism."""
    _items: Items
    _order: I64
    """Items with bytes, line by line."""
    _ranges: I64
    """Shape (m, 5): rank; begin of its range as position in ``_order`` and unit of that item; end likewise."""
    _empty: I64
    """Shape (k, 2): items without bytes, and the rank that writes each."""

    @property
    def imbalance_nbytes(self) -> int:
        """How far the rank that is farthest from its ideal is from it.

        It is at most ``depth`` times the longest unit (and as many bytes, of rounding) if all weights are equal, or
        ``depth`` is 1: a cut is at most half a unit from where it should be, a range has two ends, and a line levels
        out what those before it left uneven, or hands it on. In deeper plans weights multiply the bound by greatest /
        smallest weight.
        """
        return int(np.abs(self.loads - self.ideal).max(initial=0))

    def of(self, rank: int) -> I64:
        """What a rank writes.

        Returns:
            Shape (m, 3): item, its first unit, and the unit behind its last one; ordered by item, each at most once.
        """
        items = self._items
        parts = []
        for _, first, unit, last, end in self._ranges[self._ranges[:, 0] == rank].tolist():
            if (first, unit) == (last, end):
                continue
            mine = self._order[first : last + (end > 0)]
            part = np.column_stack([mine, np.zeros_like(mine), items.slabs[mine] * items.units_a_slab[mine]])
            part[0, 1] = unit
            if end:
                part[-1, 2] = end
            parts.append(part)
        empty = self._empty[self._empty[:, 1] == rank, 0]
        parts.append(np.column_stack([empty, np.zeros_like(empty), np.ones_like(empty)]))
        rows = np.concatenate(parts)
        return rows[np.argsort(rows[:, 0], kind="stable")]


def plan(
    items: Items,
    groups: Sequence[tuple[int, ...]],
    *,
    size: int,
    writers: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
) -> Plan:
    """Divide boxes among the ranks that hold them.

    Every byte is given to exactly one rank, even if none of the writers holds it: then all of its holders write. If of
    any two groups one is part of the other or they have no rank in common, as data, tensor, pipeline and expert
    parallelism make them, no division has a lower maximum than :attr:`Plan.ideal`.

    Args:
        items: the boxes.
        groups: for each group the ranks that hold its items' bytes, ascending.
        size: number of ranks.
        writers: ranks that may write; None for all.
        weights: of each rank; one with half the weight gets half the bytes, where groups leave the choice.

    Raises:
        ConfigError: a rank is not in ``range(size)``, a group is empty or not ascending, a weight is not positive, an
            item's group does not exist, or there are 2^62 bytes or more.

    Example:
        >>> import numpy as np
        >>> from fp_multi._boxes import cut_rule
        >>> weight, bias = cut_rule((4096, 1024), 4, 1 << 20), cut_rule((4096,), 4, 1 << 20)
        >>> items = Items.of([weight, bias], np.array([0, 1]), np.array([0, 0]))
        >>> divided = plan(items, [(0, 1)], size=2)
        >>> divided.of(1).tolist(), divided.loads.tolist()
        ([[0, 8, 16], [1, 0, 1]], [8388608, 8404992])
    """
    shares = _shares(weights, size)
    writing, line_of_group = _writing(groups, size, writers)
    if len(items.group) and not 0 <= items.group.min() <= items.group.max() < len(groups):
        raise ConfigError(f"items: expected groups below {len(groups)}, found {items.group.max()}")
    if items.nbytes.sum(dtype=np.float64) >= 2.0**62:
        raise ConfigError("items: expected less than 2^62 bytes in total")
    # There may be millions of items: few passes, and small integers, which are sorted without comparisons.
    line = line_of_group.astype(np.min_scalar_type(len(writing)))[items.group]
    order = np.argsort(line, kind="stable")
    sizes = items.nbytes[order]
    nothing = np.flatnonzero(items.nbytes == 0)
    if len(nothing):
        order, sizes = order[sizes > 0], sizes[sizes > 0]
    number = np.bincount(line, minlength=len(writing)) - np.bincount(line[nothing], minlength=len(writing))
    places = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=places[1:])
    begins = places[np.concatenate([np.zeros(1, np.int64), np.cumsum(number)])].tolist()
    lines = [_Line(who, *ends) for who, ends in zip(writing, pairwise(begins), strict=True)]
    rounds, depth = _rounds(lines, size)
    water = _Water([0] * size, [0] * size, shares)
    ranges = [np.empty((0, 5), np.int64)]
    for disjoint in rounds:
        ranks, cuts, left = water.pour(disjoint)
        position, unit, at = _nearest(items, order, places, cuts)
        right = left + 1
        ranges.append(np.column_stack([ranks, position[left], unit[left], position[right], unit[right]]))
        water.settle(ranks, at[right] - at[left])

    firsts = np.array([who[0] for who in writing], np.int64)
    empty = np.column_stack([nothing, firsts[line[nothing]]])
    table = np.concatenate(ranges)
    counts = _counts(table, empty, size)
    busy = np.flatnonzero(counts).tolist()
    return Plan(
        np.array(water.loads, np.int64),
        np.array(water.ideal, np.int64),
        counts,
        tuple(busy),
        () if writers is None else tuple(sorted({*busy} - {*writers})),
        depth,
        items,
        order,
        table,
        empty,
    )


class _Line(NamedTuple):
    """All bytes that the same ranks may write."""

    ranks: tuple[int, ...]
    begin: int
    end: int


@dataclass(slots=True)
class _Water:
    """How full the ranks are while lines are poured over them."""

    loads: list[int]
    ideal: list[int]
    shares: list[int] | None

    def pour(self, lines: Sequence[_Line]) -> tuple[list[int], I64, I64]:
        """Say where lines, of which no two have a rank in common, are best cut.

        Returns:
            The ranks of all lines; the places of cuts, one more than ranks for each line; and for each rank which
            cut its range begins at.
        """
        ranks: list[int] = []
        cuts: list[int] = []
        left: list[int] = []
        for who, begin, end in lines:
            had = [self.loads[rank] for rank in who]
            wished = [self.ideal[rank] for rank in who]
            shares = None if self.shares is None else [self.shares[rank] for rank in who]
            gets = _fill(had, shares, end - begin)
            for rank, more in zip(who, gets if had == wished else _fill(wished, shares, end - begin), strict=True):
                self.ideal[rank] += more
            left += range(len(cuts), len(cuts) + len(who))
            ranks += who
            cuts += accumulate(gets, initial=begin)
        return ranks, np.array(cuts, np.int64), np.array(left, np.int64)

    def settle(self, ranks: Sequence[int], nbytes: I64) -> None:
        """Take note of what the ranks got in the end."""
        for rank, more in zip(ranks, nbytes.tolist(), strict=True):
            self.loads[rank] += more


def _shares(weights: Sequence[float] | None, size: int) -> list[int] | None:
    """Weights as integers; None if they are all the same."""
    if weights is None:
        return None
    if len(weights) != size or not all([math.isfinite(weight) and weight > 0 for weight in weights]):
        raise ConfigError(f"weights: expected a positive number for each of {size} ranks, found {list(weights)[:8]}")
    greatest = max(weights)
    shares = [max(round(weight / greatest * (1 << _WEIGHT_BITS)), 1) for weight in weights]
    return None if min(shares) == max(shares) else shares


def _writing(
    groups: Sequence[tuple[int, ...]], size: int, writers: Sequence[int] | None
) -> tuple[list[tuple[int, ...]], I64]:
    """The different sets of ranks that write something, and for each group the index of its own."""
    allowed = None if writers is None else frozenset(writers)
    if allowed is not None and not all([0 <= rank < size for rank in allowed]):
        raise ConfigError(f"writers: expected ranks below {size}, found {sorted(allowed)[:8]}")
    found: dict[tuple[int, ...], int] = {}
    numbers = []
    for group in groups:
        if not group or group[0] < 0 or group[-1] >= size or not all([a < b for a, b in pairwise(group)]):
            raise ConfigError(f"holders: expected ascending ranks below {size}, found {list(group)[:8]}")
        who = group if allowed is None else tuple([rank for rank in group if rank in allowed]) or group
        numbers.append(found.setdefault(who, len(found)))
    return list(found), np.array(numbers, np.int64)


def _rounds(lines: Sequence[_Line], size: int) -> tuple[list[list[_Line]], int]:
    """Order lines from few ranks to many, in rounds in which no rank is in two; and the plan's depth."""
    rounds: list[list[_Line]] = []
    turns, chains = [0] * size, [0] * size
    for line in sorted(lines, key=lambda line: len(line.ranks)):
        if line.begin == line.end:
            continue
        turn = max([turns[rank] for rank in line.ranks])
        chain = max([chains[rank] for rank in line.ranks]) + (len(line.ranks) > 1)
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(line)
        for rank in line.ranks:
            turns[rank], chains[rank] = turn + 1, chain
    return rounds, max(chains, default=0)


def _fill(had: Sequence[int], shares: Sequence[int] | None, nbytes: int) -> list[int]:
    """Pour bytes over ranks so that those that had least come to one level, in proportion to their shares.

    Args:
        had: bytes of each rank.
        shares: at most ``2**_WEIGHT_BITS``, for each rank; None if they are equal.
        nbytes: to pour.

    Returns:
        What each rank gets; the sum is ``nbytes``.
    """
    if len(had) == 1:
        return [nbytes]
    # With shares a level is so many bytes for each unit of share: parts of bytes are needed to compare levels.
    bits = 0 if shares is None else _WEIGHT_BITS
    shares = [1] * len(had) if shares is None else shares
    water = nbytes << bits
    heights = [have << bits for have in had]
    # A rank gets something if the level, a whole number, is above this.
    floors = [height // share for height, share in zip(heights, shares, strict=True)]
    order = sorted(range(len(had)), key=floors.__getitem__)
    width = volume = wet = 0
    for i in order:
        if floors[i] * width - volume > water:
            break
        width += shares[i]
        volume += heights[i]
        wet += 1
    level = (water + volume) // width
    gets = [0] * len(had)
    for i in order[:wet]:
        gets[i] = max(shares[i] * level - heights[i], 0)
    rest = water - sum(gets)
    before = 0
    for i in order[:wet]:
        after = before + shares[i]
        gets[i] += rest * after // width - rest * before // width
        before = after
    if not bits:
        return gets
    ends = [end >> bits for end in accumulate(gets, initial=0)]
    return [end - begin for begin, end in pairwise(ends)]


def _nearest(items: Items, order: I64, places: I64, cuts: I64) -> tuple[I64, I64, I64]:
    """The unit that begins nearest to each cut: position of its item in ``order``, its number, and where it begins."""
    position = np.searchsorted(places, cuts, side="right") - 1
    item = order[np.minimum(position, len(order) - 1)]  # the end of everything is at no item, and 0 bytes behind it
    unit_nbytes, slab_nbytes = items.unit_nbytes[item], items.slab_nbytes[item]
    slab = (cuts - places[position]) // slab_nbytes
    begin = places[position] + slab * slab_nbytes
    behind = cuts - begin
    unit = behind // unit_nbytes
    low = unit * unit_nbytes
    high = np.minimum(low + unit_nbytes, slab_nbytes)
    up = behind - low > high - behind
    number = slab * items.units_a_slab[item] + unit + up
    at = begin + np.where(up, high, low)
    whole = number == items.slabs[item] * items.units_a_slab[item]
    return position + whole, np.where(whole, 0, number), at


def _counts(ranges: I64, empty: I64, size: int) -> I64:
    """How many items each rank has at least a part of."""
    rank, first, unit, last, end = ranges.T
    rows = last - first + (end > 0)
    rows[(first == last) & (unit == end)] = 0
    counts = np.bincount(empty[:, 1], minlength=size).astype(np.int64)
    np.add.at(counts, rank, rows)
    return counts
