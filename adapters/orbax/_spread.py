"""Which boxes an array's sharding cuts it into, and which processes have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from fp_multi import Box

_MOST_KNOWN = 1 << 14

_processes: ContextVar[tuple[int, ...] | None] = ContextVar("processes", default=None)


class Spread(NamedTuple):
    """How one sharding cuts one shape."""

    boxes: tuple[Box, ...]
    """All of them, of all processes, in ascending order."""
    holders: tuple[tuple[int, ...], ...]
    """For each box the ranks that have it, ascending."""
    local: tuple[tuple[int, int], ...]
    """For each distinct box that is here: its number, and that of a shard of ``addressable_data`` that has it."""


_known: dict[tuple[Any, ...], Spread] = {}


@contextmanager
def saving_together(processes: Sequence[int]) -> Iterator[None]:
    """Describe arrays for a save by these processes: the ranks are their places in this list.

    Without it they are JAX's process indices for arrays that several processes have, and 0 for all others.

    Args:
        processes: JAX's process indices, ascending.
    """
    token = _processes.set(tuple(processes))
    try:
        yield
    finally:
        _processes.reset(token)


def is_on_all(array: jax.Array) -> bool:
    """Whether every process of the save has the whole array on each of its devices."""
    if not array.is_fully_replicated:
        return False
    if array.is_fully_addressable:
        # In a job of several processes it is local to this one; the others have one of their own in its place.
        return True
    return len(spread_of(array).holders[0]) == len(_processes.get() or range(jax.process_count()))


def spread_of(array: jax.Array) -> Spread:
    """The boxes of an array that has elements."""
    processes = _processes.get()
    key = (array.sharding, array.shape, processes)
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[key] = _spread(array, processes)
    return found


def box_of(index: tuple[slice, ...], shape: Sequence[int]) -> Box:
    """The box that an index of JAX's selects."""
    corners = [part.indices(extent) for part, extent in zip(index, shape, strict=True)]
    return Box(tuple([begin for begin, _, _ in corners]), tuple([end - begin for begin, end, _ in corners]))


def _spread(array: jax.Array, processes: tuple[int, ...] | None) -> Spread:
    shape = array.shape
    everyone: tuple[int, ...] | None = None
    if array.is_fully_addressable:
        everyone = tuple(range(len(processes))) if processes else (0,)
    ranks = {process: rank for rank, process in enumerate(processes or range(jax.process_count()))}
    holders: dict[Box, set[int]] = {}
    indices: dict[Any, Any] = dict(array.sharding.devices_indices_map(shape))
    for device, index in indices.items():
        having = holders.setdefault(box_of(index, shape), set())
        if everyone is not None:
            having.update(everyone)
        elif device.process_index in ranks:
            having.add(ranks[device.process_index])
    boxes = sorted(holders)
    numbers = {box: number for number, box in enumerate(boxes)}
    local: dict[int, int] = {}
    for position, shard in enumerate(array.addressable_shards):
        local.setdefault(numbers[box_of(shard.index, shape)], position)
    return Spread(tuple(boxes), tuple([tuple(sorted(holders[box])) for box in boxes]), tuple(sorted(local.items())))
