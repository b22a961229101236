"""What an item of a DCP save plan is: bytes, and their place in a tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from fp_multi import Box, LeafSource
from fp_multi.errors import UnsupportedLeafError
from fp_multi.storage import describe as describe_state

from ._dcp_values import Path
from ._describe import describe


class OwnPart(NamedTuple):
    """A part of a tensor, in a checkpoint that does not have the rest."""

    source: LeafSource
    path: Path
    start: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole."""


def own_part_of(planner: SavePlanner, item: WriteItem, path: Path) -> OwnPart | None:
    """What a rank that saves for itself has of a tensor; None if that is all of it.

    Args:
        planner: gives the data.
        item: the tensor's.
        path: where it stands in the state.

    Raises:
        UnsupportedLeafError: it cannot be stored.
    """
    source, chunk, shape = source_of(planner, item)
    return None if chunk.length == shape else OwnPart(source, path, chunk.start, shape)


def source_of(planner: SavePlanner, item: WriteItem) -> tuple[LeafSource, Box, tuple[int, ...]]:
    """The bytes of an item, the box that they are, and the shape of the tensor that it is a box of.

    Args:
        planner: gives the data.
        item: a tensor's.

    Raises:
        UnsupportedLeafError: it cannot be stored.
    """
    data = item.tensor_data
    fqn = item.index.fqn
    tensor = planner.resolve_data(item)
    if data is None or not isinstance(tensor, torch.Tensor):
        raise UnsupportedLeafError(f"{fqn}: the planner gives no tensor, but a {type(tensor).__qualname__}", fqn)
    # The dtype is that of the tensor: plans may come from a cache that does not look at dtypes.
    source = describe(tensor.detach(), fqn)
    chunk = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    shape = tuple(data.size)
    if source.shape != chunk.length:
        raise UnsupportedLeafError(
            f"{fqn}: the plan says shape {chunk.length}, the tensor has {source.shape}; a planner must not change it",
            fqn,
        )
    if 0 in shape:
        source = source._replace(shape=shape)
        chunk = Box((0,) * len(shape), shape)
    return source, chunk, shape


def name_of(fqn: str, path: Path) -> str:
    """docs/format.md section 3.4. DCP's own names are those, but for a few that are reserved."""
    if fqn and fqn[0] not in "~_" and fqn.isascii():
        return fqn
    state: Any = b""
    for key in reversed(path):
        state = {key: state}
    return describe_state(state).names[0]
