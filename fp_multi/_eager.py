"""Copies of what may change before the fence: made at once, in the call of save."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from fp_multi._tree import select
from fp_multi._types import Described, LeafSource, Selection


def copied(source: LeafSource) -> LeafSource:
    """The same tensor with its bytes in memory of our own."""
    if not source.nbytes:
        return source
    buffer = np.empty(source.nbytes, np.uint8)
    address = int(buffer.__array_interface__["data"][0])
    if source.fetch is not None:
        source.fetch(address, 0, source.nbytes)()
    else:
        np.copyto(buffer, _bytes_of(source))
    return source._replace(address=address, strides=None, keepalive=buffer, fetch=None, pin=None)


class _Memory:
    """Foreign memory for NumPy: the interface alone does not keep it alive, the source does."""

    def __init__(self, source: LeafSource) -> None:
        # As raw items of the right size, whatever the dtype: only bytes move.
        self.source = source
        self.__array_interface__ = {
            "version": 3,
            "data": (source.address, True),
            "typestr": f"|V{source.itemsize}",
            "shape": source.shape,
            "strides": source.strides,
        }


def _bytes_of(source: LeafSource) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    items = np.ascontiguousarray(np.asarray(_Memory(source)))
    return items.reshape(-1).view(np.uint8)


def copy_indices(described: Described, indices: Collection[int]) -> tuple[Described, int]:
    """Copy some tensors now.

    Returns:
        The state with copies in their place, and the bytes copied.
    """
    sources = list(described.sources)
    for index in indices:
        sources[index] = copied(sources[index])
    nbytes = sum(described.sources[index].nbytes for index in indices)
    return Described(described.tree, described.names, sources), nbytes


def copy_selected(described: Described, selection: Selection) -> tuple[Described, int]:
    """Copy the tensors of some subtrees now; see :meth:`fp_multi.Checkpointer.save`.

    Raises:
        KeyNotFoundError: a path is not in the state.
    """
    if not selection:
        return described, 0
    return copy_indices(described, select(described.tree, selection)[1])
