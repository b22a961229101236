"""Copies of what may change before the fence: made at once, in the call of save."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fp_multi._contents import ShardLayout
from fp_multi._engine import address_of
from fp_multi._tree import select
from fp_multi._types import Described, LeafSource, Selection, Sharded

MOST_NBYTES = 64 << 20
"""More than that is left to the engine's threads: they copy at memory speed, into memory that is used again."""
_SMALL_NBYTES = 4096
"""Copied while the interpreter is held: giving it away costs more, most of all if other Python threads want it."""
_STEADY_KINDS = {"numpy.scalar", "bytes", "pickle"}


class Copy:
    """What keeps a copy's memory: tells a copied source from a borrowed one."""

    __slots__ = ("memory",)

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory


class _Memory:
    """Foreign memory for NumPy: the interface alone does not keep it alive, the source does."""

    def __init__(self, source: LeafSource) -> None:
        # As raw items, whatever the dtype: only bytes move. An item size matters only where there are strides.
        contiguous = source.strides is None
        self.source = source
        self.__array_interface__ = {
            "version": 3,
            "data": (source.address, True),
            "typestr": f"|V{1 if contiguous else source.itemsize}",
            "shape": (source.nbytes,) if contiguous else source.shape,
            "strides": source.strides,
        }


def _bytes_of(source: LeafSource) -> npt.NDArray[np.uint8]:
    items = np.ascontiguousarray(np.asarray(_Memory(source)))
    return items.reshape(-1).view(np.uint8)


def selected(described: Described, selection: Selection) -> set[int]:
    """The tensors of some subtrees, by index.

    Raises:
        KeyNotFoundError: a path is not in the state.
    """
    return select(described.tree, selection, argument="copy", where="the state")[1] if selection else set()


def plain_values(sources: Sequence[LeafSource]) -> Iterator[int]:
    """Scalars and byte arrays, by index: Python code changes them in passing, and they are small."""
    for index, source in enumerate(sources):
        if source.kind == "bytearray" or not (source.shape or source.fetch or source.kind in _STEADY_KINDS):
            yield index


def nbytes_of(described: Described, indices: Collection[int]) -> int:
    """How much there is to copy."""
    return sum([local_nbytes(described.sources[index]) for index in indices])


def local_nbytes(source: LeafSource) -> int:
    """Bytes of a tensor that are on this rank."""
    return source.nbytes if source.sharded is None else sum([part.nbytes for _, part in source.sharded.local])


def copy_indices(described: Described, indices: Set[int]) -> Described:
    """The state with copies in the place of some tensors."""
    sources = list(described.sources)
    arriving = []
    small: list[int] = []
    for index in sorted(indices):
        source = sources[index]
        if not source.nbytes:
            continue
        if source.sharded is not None:
            sources[index] = _copy_boxes(source, source.sharded)
            continue
        if source.fetch is None and source.strides is None and source.nbytes <= _SMALL_NBYTES:
            small.append(index)
            continue
        buffer = np.empty(source.nbytes, np.uint8)
        if source.fetch is not None:
            arriving.append(source.fetch(address_of(buffer), 0, source.nbytes))
        else:
            np.copyto(buffer, _bytes_of(source))
        sources[index] = _moved(source, Copy(buffer), 0)
    _copy_small(sources, small)
    # All on their way before the first is waited for.
    for finish in arriving:
        finish()
    return Described(described.tree, described.names, sources)


def _copy_boxes(source: LeafSource, sharded: Sharded) -> LeafSource:
    parts = Described(None, [], [part for _, part in sharded.local])
    copies = copy_indices(parts, set(range(len(parts.sources)))).sources
    local = tuple([(number, copy) for (number, _), copy in zip(sharded.local, copies, strict=True)])
    return source._replace(keepalive=copies, sharded=replace(sharded, local=local))


def _copy_small(sources: list[LeafSource], indices: list[int]) -> None:
    if not indices:
        return
    parts = [ctypes.string_at(sources[index].address, sources[index].nbytes) for index in indices]
    copy = Copy(np.frombuffer(b"".join(parts), np.uint8))
    at = 0
    for index in indices:
        sources[index] = _moved(sources[index], copy, at)
        at += sources[index].nbytes


def _moved(source: LeafSource, copy: Copy, begin: int) -> LeafSource:
    address = address_of(copy.memory) + begin
    return source._replace(address=address, strides=None, keepalive=copy, fetch=None, pin=None)


def copied_at_fence(shard: ShardLayout, copied_nbytes: int) -> int:
    """How many of the bytes that a fence copied were the state's own.

    Args:
        shard: a shard that is complete.
        copied_nbytes: what the engine copied: the end of the file, in which the header and what had been copied before
            do not count.
    """
    begin = max(shard.data.nbytes - copied_nbytes, 0)
    total = shard.data.nbytes - begin if copied_nbytes else 0
    if total:
        sources = shard.contents.sources
        for index, at in zip(shard.data.order, shard.data.begins, strict=True):
            if isinstance(sources[index].keepalive, Copy):
                total -= max(at + sources[index].nbytes - max(at, begin), 0)
    return total
