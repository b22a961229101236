"""Which parts of a DCP load several ranks of one host want, and who reads them for all of them. No I/O.

DCP lets every rank read all that it needs; what is replicated would leave the drive once for each. The coordinator sees
what all want (each rank's reader notes it in ``LoadPlan.storage_data``), and has what is wanted more than once read in
blocks, by one rank for all (_dcp_blocks.py). _dcp_shared_read.py carries that out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress

import msgspec
import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from fp_multi import Box
from fp_multi.storage import itemsize

from ._dcp_blocks import Shared, divide, plus
from ._dcp_metadata import Catalog

_Key = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Wishes:
    """What a rank wants: in ``storage_data`` from each rank to the coordinator."""

    host: str
    """Ranks with the same text can reach each other."""
    address: bytes
    """Where this rank can be reached."""
    keys: _Key
    """For each item of the plan a number: the same for the same part of the same tensor, 0 for what is not shared."""


@dataclasses.dataclass(frozen=True, slots=True)
class Orders:
    """What a rank does: in ``storage_data`` from the coordinator to each rank."""

    token: bytes
    """16 bytes, of this load."""
    rank: int
    addresses: Mapping[int, bytes]
    """Of the ranks on this host."""
    plan: bytes
    """A :class:`~_dcp_blocks.HostPlan`, encoded once for all of them."""


def place_of(item: ReadItem, tensor: int) -> tuple[int, Box]:
    """Index and box of the part of a tensor that an item wants."""
    length = tuple(item.lengths)
    corner = item.storage_index.offset or (0,) * len(length)
    return tensor, Box(plus(corner, item.storage_offsets), length)


def keys_of(items: Sequence[ReadItem], catalog: Catalog) -> _Key:
    """For each item a number, see :class:`Wishes`; by chance two different parts never get the same."""
    facts: dict[int, int] = {}
    keys = np.zeros(len(items), np.int64)
    for number, item in enumerate(items):
        entry = catalog.entries.get(item.storage_index.fqn)
        if item.type == LoadItemType.BYTE_IO or entry is None or not entry.is_tensor or 0 in item.lengths:
            continue
        tensor, (start, length) = place_of(item, entry.node)
        if tensor not in facts:
            # With the checksums: a rank that opened the checkpoint when it had been replaced shares nothing.
            pieces = catalog.manifest.tensors[tensor].pieces
            facts[tensor] = hash(tuple([(piece.shard, piece.offset, tuple(piece.crc32c)) for piece in pieces]))
        keys[number] = hash((tensor, start, length, facts[tensor]))
    return keys


def give_orders(plans: Sequence[LoadPlan], catalog: Catalog, token: bytes) -> list[LoadPlan]:
    """Let the ranks of a host share the reading of what several of them want.

    Args:
        plans: by rank, with their wishes; a rank that has none reads alone.
        catalog: the checkpoint.
        token: 16 random bytes.

    Returns:
        The plans, with orders where there is something to share.
    """
    hosts: dict[str, dict[int, Wishes]] = {}
    found = list(plans)
    for rank, plan in enumerate(plans):
        wishes = plan.storage_data
        if isinstance(wishes, Wishes):
            found[rank] = dataclasses.replace(plan, storage_data=None)
            if len(wishes.keys) == len(plan.items):  # otherwise a planner changed the plan meanwhile
                hosts.setdefault(wishes.host, {})[rank] = wishes
    for wishes_of in hosts.values():
        host_plan = divide(list(_shared(plans, wishes_of, catalog))) if len(wishes_of) > 1 else None
        if host_plan is not None:
            encoded = msgspec.msgpack.encode(host_plan)
            addresses = {rank: wishes.address for rank, wishes in wishes_of.items()}
            for rank in addresses:
                found[rank].storage_data = Orders(token, rank, addresses, encoded)
    return found


def _shared(plans: Sequence[LoadPlan], wishes_of: Mapping[int, Wishes], catalog: Catalog) -> Iterator[Shared]:
    """What the ranks of a host want more than once."""
    firsts = {rank: np.unique(wishes.keys, return_index=True) for rank, wishes in wishes_of.items()}
    keys = np.concatenate([found for found, _ in firsts.values()])
    ranks = np.concatenate([np.full(len(found), rank) for rank, (found, _) in firsts.items()])
    items = np.concatenate([index for _, index in firsts.values()])
    order = np.argsort(keys, kind="stable")  # keeps the ranks ascending
    keys, ranks, items = keys[order], ranks[order], items[order]
    begins = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)])
    ends = np.append(begins[1:], len(keys))
    several = (ends - begins > 1) & (keys[begins] != 0)
    runs = list(zip(begins[several].tolist(), ends[several].tolist(), strict=True))
    wanted = [plans[int(ranks[begin])].items[int(items[begin])] for begin, _ in runs]
    # The coordinator's own checkpoint must be theirs, too.
    known = keys_of(wanted, catalog) == keys[begins[several]]
    for item, (begin, end) in compress(zip(wanted, runs, strict=True), known):
        tensor, box = place_of(item, catalog.entries[item.storage_index.fqn].node)
        size = itemsize(catalog.manifest.tensors[tensor].dtype)
        yield Shared(tensor, box, size, tuple(ranks[begin:end].tolist()))
