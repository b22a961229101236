"""Directories of torch.distributed.checkpoint's FileSystemWriter, read a few rows of a tensor at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.utils import _create_file_view

from fp_multi.errors import CorruptCheckpointError, UnsupportedLeafError
from fp_multi.storage import StreamedTensor

from . import _convert_tensors as tensors
from ._convert_metadata import Chunk, Contents, Item, StoredTensor, read_contents
from ._dtypes import CARRIERS, ELEMENTS

_ZIP = b"PK\x03\x04"
_MAX_GAP = 1 << 12
_NOTHING = object()

Moved = Callable[[int], None]
Bytes = npt.NDArray[np.uint8]


def open_dcp(directory: Path, moved: Moved, losses: Any, *, allow_pickle: bool) -> tuple[Any, int]:
    """A DCP directory as a state whose tensors are read when they are saved.

    In memory is one stored item at a time, and for a tensor that is cut otherwise than along its first axis the rows
    that share items. Values other than tensors are read at once.

    Args:
        directory: what ``FileSystemWriter`` wrote.
        moved: called with the bytes that have been read.
        losses: takes notes of what DCP has not kept.
        allow_pickle: let values that are more than plain data run their code.

    Returns:
        The state, nested as it was if the directory says how, and the bytes of its tensors.

    Raises:
        CorruptCheckpointError: the directory is damaged.
        PickleRefusedError: a value is more than plain data and tensors.
        UnsupportedLeafError: a tensor has no plain bytes.
    """
    contents = read_contents(directory)
    values: dict[str, Any] = {}
    total = 0
    for name, entry in contents.entries.items():
        if isinstance(entry, StoredTensor):
            values[name] = leaf = _streamed(name, entry, moved, allow_pickle)
            total += leaf.nbytes
        else:
            values[name] = _load_item(name, entry, allow_pickle)
    return _filled(_nest(contents, values, directory), (), losses), total


def _nest(contents: Contents, values: Mapping[str, Any], directory: Path) -> Any:
    """What DCP's own load without a template gives: a string is the key of a dict, a number a place in a list."""
    root: dict[Any, Any] = {}
    for name, value in values.items():
        path = contents.paths.get(name, (name,))
        at: Any = root
        for key, following in itertools.pairwise(path):
            at = _step(at, key, {} if isinstance(following, str) else [], name, directory, len(values))
        _step(at, path[-1], value, name, directory, len(values), last=True)
    return root


def _step(at: Any, key: str | int, value: Any, name: str, directory: Path, count: int, *, last: bool = False) -> Any:
    if isinstance(key, str):
        fits = isinstance(at, dict)
    else:
        fits = isinstance(at, list) and 0 <= key <= len(at) + max(count, _MAX_GAP)
    if fits and isinstance(key, int):
        # The empty dicts of a list are not stored, only that there was something.
        at.extend([_NOTHING] * (key + 1 - len(at)))
        there = at[key] is not _NOTHING
    else:
        there = fits and key in at
    if not fits or (there and last):
        raise CorruptCheckpointError(f"{directory}: {name!r} has no place in the state that the metadata describes")
    if not there:
        at[key] = value
    return at[key]


def _filled(value: Any, path: tuple[str | int, ...], losses: Any) -> Any:
    """The state with None where DCP stored nothing."""
    if value is _NOTHING:
        losses.add("places that DCP did not store became None", path)
        return None
    if type(value) is dict:
        for key, child in value.items():
            value[key] = _filled(child, (*path, key), losses)
    elif type(value) is list:
        value[:] = [_filled(child, (*path, i), losses) for i, child in enumerate(value)]
    return value


# A tensor, band by band


def _streamed(name: str, stored: StoredTensor, moved: Moved, allow_pickle: bool) -> StreamedTensor:
    element = ELEMENTS.get(stored.dtype)
    if element is None:
        raise UnsupportedLeafError(f"{name}: cannot store elements of {stored.dtype}", name)
    nbytes = math.prod(stored.shape) * element.itemsize
    if not nbytes:
        return StreamedTensor(element.name, stored.shape, [0], _no_band, kind="torch", attrs=element.attrs)
    bands = _bands(name, stored)
    row_nbytes = nbytes // stored.shape[0] if stored.shape else nbytes
    edges = [0, *(end * row_nbytes for _, end, _ in bands)]

    def read(number: int) -> Bytes:
        begin, end, chunks = bands[number]
        if len(chunks) == 1:
            return tensors.bits(_load_chunk(name, stored, chunks[0], allow_pickle))
        band = torch.empty((end - begin, *stored.shape[1:]), dtype=CARRIERS[element.itemsize])
        for chunk in chunks:
            starts = (chunk.start[0] - begin, *chunk.start[1:])
            where = tuple(slice(s, s + n) for s, n in zip(starts, chunk.length, strict=True))
            part = tensors.bits(_load_chunk(name, stored, chunk, allow_pickle))
            band[where] = torch.from_numpy(part).view(band.dtype).view(chunk.length)
            del part  # before the next one is loaded
        return tensors.bits(band)

    return StreamedTensor(element.name, stored.shape, edges, read, kind="torch", attrs=element.attrs, moved=moved)


def _no_band(_: int) -> Bytes:
    return np.empty(0, np.uint8)


def _bands(name: str, stored: StoredTensor) -> list[tuple[int, int, list[Chunk]]]:
    """Rows that share chunks: first, behind the last, and the chunks, which tile them exactly.

    Raises:
        CorruptCheckpointError: the chunks do not tile the tensor.
    """
    if not stored.shape:
        if len(stored.chunks) != 1:
            raise CorruptCheckpointError(f"{name}: expected one chunk, found {len(stored.chunks)}", tensor=name)
        return [(0, 1, stored.chunks)]
    bands: list[tuple[int, int, list[Chunk]]] = []
    reached = 0
    for chunk in stored.chunks:  # ascending by their first row
        begin, end = chunk.start[0], chunk.start[0] + chunk.length[0]
        if begin == reached:
            bands.append((begin, end, [chunk]))
            reached = end
        elif begin < reached:
            first, last, chunks = bands[-1]
            chunks.append(chunk)
            reached = max(last, end)
            bands[-1] = (first, reached, chunks)
        else:
            break
    if reached != stored.shape[0] or not all(_tiles(stored.shape, *band) for band in bands):
        raise CorruptCheckpointError(f"{name}: its chunks do not tile the shape {stored.shape}", tensor=name)
    return bands


def _tiles(shape: tuple[int, ...], begin: int, end: int, chunks: list[Chunk]) -> bool:
    volume = sum(math.prod(chunk.length) for chunk in chunks)
    if volume != (end - begin) * math.prod(shape[1:]):
        return False
    if len(chunks) == 1:
        return True
    # The volume is right: so they tile if no two overlap.
    starts = np.array([chunk.start for chunk in chunks])
    ends = starts + np.array([chunk.length for chunk in chunks])
    return not any(
        ((starts[i] < ends[i + 1 :]) & (starts[i + 1 :] < ends[i])).all(axis=1).any() for i in range(len(chunks))
    )


def _load_chunk(name: str, stored: StoredTensor, chunk: Chunk, allow_pickle: bool) -> torch.Tensor:
    found = _load_item(name, chunk.item, allow_pickle)
    if not isinstance(found, torch.Tensor):
        raise CorruptCheckpointError(
            f"{_where(name, chunk.item)}: expected a tensor, found a {type(found).__name__}", tensor=name
        )
    if found.layout != torch.strided or found.dtype != stored.dtype or tuple(found.shape) != chunk.length:
        # DCP can write such files: its cached plans do not look at dtypes.
        raise CorruptCheckpointError(
            f"{_where(name, chunk.item)}: expected {stored.dtype} {list(chunk.length)} as the metadata says, "
            f"found {found.dtype} {list(found.shape)} ({found.layout})",
            tensor=name,
        )
    return found


def _load_item(name: str, item: Item, allow_pickle: bool) -> Any:
    with open(item.path, "rb") as file:
        view = _create_file_view(file, item.offset, item.nbytes)
        if view.read(len(_ZIP)) != _ZIP:
            raise CorruptCheckpointError(f"{_where(name, item)}: expected a file of torch.save, found other bytes")
        view.seek(0)
        return tensors.load(view, _where(name, item), allow_pickle=allow_pickle)


def _where(name: str, item: Item) -> str:
    return f"{name} ({item.path}, offset {item.offset}, {item.nbytes} bytes)"
