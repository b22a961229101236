"""Who writes what in a save of torch.distributed.checkpoint: the coordinator's orders to every rank. No I/O.

DCP gives a tensor that several ranks have to one of them. Here its bytes are divided among all of its holders
(FastPersist, arXiv 2406.13768, section 4.2). DCP removes duplicates before the coordinator's storage writer sees the
plans, so each rank's writer notes what its rank has in ``SavePlan.storage_data``, which DCP carries along.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from fp_multi import Box
from fp_multi.errors import ConfigError
from fp_multi.storage import UNIT_NBYTES, Cut, Items, chunk_nbytes_for, cut_rule, plan, unit_boxes

_FOREIGN_TOKEN = "0000000000000dc0"


@dataclasses.dataclass(frozen=True, slots=True)
class Holdings:
    """What a rank has, before duplicates are removed: in ``storage_data`` from each rank to the coordinator."""

    indices: frozenset[MetadataIndex]


class Job(NamedTuple):
    """Something that a rank writes."""

    item: WriteItem
    boxes: tuple[Box, ...] | None = None
    """Parts of the item's chunk, in the tensor's coordinates; None for all of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Orders:
    """What one rank does: in ``storage_data`` from the coordinator to each rank.

    With plan caching DCP hands a rank the orders of an earlier save again. So nothing in here may belong to one save:
    no path, no step. The token does not, either: it is only one half of the working directory's name, the other is the
    checkpoint's own, and it is the same on all ranks, because all of them get new orders or none does.
    """

    token: str
    """16 hexadecimal digits."""
    size: int
    """Number of ranks."""
    chunk_nbytes: int
    """Bytes that one checksum covers."""
    nbytes: int
    """Of all tensors, whoever writes them."""
    jobs: tuple[Job, ...]
    alone: bool = False
    """The rank saves for itself (``use_collectives=False``)."""


def note_holdings(local: SavePlan) -> SavePlan:
    """Let the coordinator know what this rank has; a plan that says "as last time" stays as it is."""
    if not getattr(local, "usable", True):
        return local
    return dataclasses.replace(local, storage_data=Holdings(frozenset([item.index for item in local.items])))


def cached_orders(chunk_bytes: int, *, alone: bool) -> list[Orders]:
    """The orders of earlier saves that DCP may hand to this rank again: those of the last save with each planner."""
    finals = SavePlanner._cached_final_save_plan.values()
    return [
        orders_of(final, chunk_bytes, alone=alone)
        for final in finals
        if not isinstance(final.storage_data, Orders) or final.storage_data.alone == alone
    ]


def orders_of(final: SavePlan, chunk_bytes: int, *, alone: bool) -> Orders:
    """A rank's orders; a plan of another storage writer, from DCP's cache, is carried out as it stands.

    Raises:
        ConfigError: they come from DCP's cache, and from a save of the other kind.
    """
    if isinstance(final.storage_data, Orders):
        if final.storage_data.alone != alone:
            raise ConfigError(
                "the planner's cached plan is of a save with the other use_collectives; save with one planner class "
                "for each, or without plan caching"
            )
        return final.storage_data
    jobs = [Job(item) for item in final.items if alone or not _is_empty(item) or _has_no_elements(item)]
    return Orders(_FOREIGN_TOKEN, 0, chunk_nbytes_for(1 << 62, chunk_bytes), 0, tuple(jobs), alone)


def order_all(local: SavePlan, *, token: str, chunk_bytes: int) -> SavePlan:
    """The orders of a rank that saves all that it has, for itself.

    Args:
        local: its plan; one that says "as last time" stays as it is.
        token: a new one.
        chunk_bytes: of the configuration.
    """
    if not getattr(local, "usable", True):
        return local
    nbytes = sum([_nbytes_of(item) for item in local.items])
    jobs = tuple([Job(item) for item in local.items])
    orders = Orders(token, 1, chunk_nbytes_for(nbytes, chunk_bytes), nbytes, jobs, alone=True)
    return dataclasses.replace(local, storage_data=orders)


def give_orders(plans: Sequence[SavePlan], *, token: str, chunk_bytes: int, writers: Sequence[int] | None) -> list[Any]:
    """Turn the plans of all ranks, without duplicates, into orders.

    Args:
        plans: by rank. Those of unchanged ranks may be missing (``usable`` is False, plan caching): if all are, every
            rank does what it did before; if some are, they are looked up, because a change on one rank may change what
            the others write.
        token: a new one.
        chunk_bytes: of the configuration.
        writers: the ranks that write what several have; None for all.

    Returns:
        The plans with their orders.

    Raises:
        ConfigError: a planner with a cache of its own left out a plan.
    """
    usable = [getattr(one, "usable", True) for one in plans]
    if not any(usable):
        return list(plans)
    whole = plans if all(usable) else _complete(plans)
    jobs, nbytes = _share_out(whole, writers)
    chunk_nbytes = chunk_nbytes_for(nbytes, chunk_bytes)
    return [
        dataclasses.replace(one, storage_data=Orders(token, len(whole), chunk_nbytes, nbytes, tuple(mine)))
        for one, mine in zip(whole, jobs, strict=True)
    ]


def _complete(plans: Sequence[SavePlan]) -> Sequence[SavePlan]:
    """The plans of all ranks, of which DCP passes on only those that changed."""
    for cached in SavePlanner._cached_global_plan.values():
        if len(cached) == len(plans) and all(
            [one is known for one, known in zip(plans, cached, strict=True) if one.usable]
        ):
            return cached
    raise ConfigError(
        "some ranks' plans are cached and others are new, and the planner keeps them in a place of its own; turn its "
        "plan caching off"
    )


def _share_out(plans: Sequence[SavePlan], writers: Sequence[int] | None) -> tuple[list[list[Job]], int]:
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, one in enumerate(plans):
        if isinstance(one.storage_data, Holdings):
            for index in one.storage_data.indices:
                holders.setdefault(index, []).append(rank)
    jobs: list[list[Job]] = [[] for _ in plans]
    items: list[WriteItem] = []
    cuts: list[Cut] = []
    group: list[int] = []
    groups: dict[tuple[int, ...], int] = {}
    empty: set[str] = set()
    for owner, one in enumerate(plans):
        for item in one.items:
            if item.tensor_data is None or item.type == WriteItemType.BYTE_IO:
                jobs[owner].append(Job(item))
            elif _is_empty(item):
                # A tensor without elements is written once; an empty chunk of another one never.
                if _has_no_elements(item) and item.index.fqn not in empty:
                    empty.add(item.index.fqn)
                    jobs[owner].append(Job(item))
            else:
                data = item.tensor_data
                items.append(item)
                cuts.append(cut_rule(tuple(data.chunk.sizes), data.properties.dtype.itemsize, UNIT_NBYTES))
                who = tuple(holders.get(item.index, ())) or (owner,)
                group.append(groups.setdefault(who, len(groups)))
    if not items:
        return jobs, 0
    divided = plan(
        Items.of(cuts, np.arange(len(cuts)), np.array(group, np.int64)), list(groups), size=len(plans), writers=writers
    )
    for rank in range(len(plans)):
        for number, begin, end in divided.of(rank).tolist():
            jobs[rank].append(_job(items[number], cuts[number], begin, end))
    return jobs, sum([cut.nbytes for cut in cuts])


def _job(item: WriteItem, cut: Cut, begin: int, end: int) -> Job:
    if (begin, end) == (0, cut.units) or item.tensor_data is None:
        return Job(item)
    chunk = item.tensor_data.chunk
    boxes = unit_boxes(tuple(chunk.sizes), cut, begin, end)
    return Job(item, tuple([Box(_shifted(box.start, chunk.offsets), box.length) for box in boxes]))


def _shifted(start: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    return tuple([a + b for a, b in zip(start, by, strict=True)])


def _nbytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _is_empty(item: WriteItem) -> bool:
    return item.tensor_data is not None and 0 in item.tensor_data.chunk.sizes


def _has_no_elements(item: WriteItem) -> bool:
    return item.tensor_data is not None and 0 in item.tensor_data.size
