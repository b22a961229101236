"""The ``.metadata`` of a directory of torch.distributed.checkpoint: what it says, checked before it is used."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fp_multi.errors import (
    CorruptCheckpointError,
    FpMultiError,
    MissingShardError,
    PickleRefusedError,
    UnsupportedLeafError,
)

from ._convert_unpickle import (
    BytesMetadata,
    ForeignName,
    Index,
    Metadata,
    Properties,
    StorageInfo,
    TensorMetadata,
    unpickle,
)

METADATA = ".metadata"
_MAX_NBYTES = 1 << 31


class Item(NamedTuple):
    """A stored object: one ``torch.save`` file inside a file."""

    path: Path
    offset: int
    nbytes: int


class Chunk(NamedTuple):
    """A part of a tensor."""

    start: tuple[int, ...]
    length: tuple[int, ...]
    item: Item


class StoredTensor(NamedTuple):
    """A tensor, in parts that tile it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]


class Contents(NamedTuple):
    """What a directory holds, by flat name."""

    entries: dict[str, StoredTensor | Item]
    """Tensors, and other values as the item they are in."""
    paths: dict[str, tuple[str | int, ...]]
    """Where an entry stands in the nested state; what is missing stands under its name."""


def read_contents(directory: Path) -> Contents:
    """Read and check what a directory holds.

    Args:
        directory: a checkpoint of ``torch.distributed.checkpoint``'s FileSystemWriter.

    Raises:
        CorruptCheckpointError: the metadata is damaged, or says what cannot be. A file that it names may be missing
            (MissingShardError).
        PickleRefusedError: the pickle names something that does not belong into it.
        UnsupportedLeafError: a tensor is of a kind that has no plain bytes.
    """
    path = directory / METADATA
    if path.stat().st_size > _MAX_NBYTES:
        raise CorruptCheckpointError(f"{path}: expected at most {_MAX_NBYTES} bytes, found {path.stat().st_size}")
    try:
        with open(path, "rb") as file:
            metadata = unpickle(file)
    except ForeignName as error:
        raise PickleRefusedError(
            f"{path}: it names {error}, which is no part of DCP's metadata and could run code; if you trust the "
            "checkpoint, load it with torch.distributed.checkpoint and save it with fp_multi.adapters.torch.save"
        ) from error
    except MemoryError:
        raise
    except Exception as error:
        # A damaged pickle makes nearly every exception there is.
        raise CorruptCheckpointError(f"{path}: not readable: {error}") from error
    try:
        return _Reader(directory, metadata).contents()
    except FpMultiError:
        raise
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise CorruptCheckpointError(f"{path}: not the metadata of a checkpoint: {error}") from error


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _axes(value: Any) -> tuple[int, ...]:
    _require(type(value) is tuple and all(type(n) is int and 0 <= n < 1 << 62 for n in value), "not a size")
    return tuple(value)


class _Reader:
    def __init__(self, directory: Path, metadata: Any) -> None:
        _require(type(metadata) is Metadata, "the pickle holds something else")
        self._directory = directory
        self._entries = metadata.state_dict_metadata
        self._storage = metadata.storage_data
        self._planner_data = metadata.planner_data
        _require(type(self._entries) is dict and type(self._storage) is dict, "no tables")
        self._sizes: dict[str, int] = {}

    def contents(self) -> Contents:
        entries: dict[str, StoredTensor | Item] = {}
        for name, entry in self._entries.items():
            _require(type(name) is str, "a name is no string")
            entries[name] = self._tensor(name, entry) if type(entry) is TensorMetadata else self._bytes(name, entry)
        paths = self._planner_data if type(self._planner_data) is dict else {}
        for name, path in paths.items():
            plain = type(path) is tuple and bool(path) and all(type(key) in (str, int) for key in path)
            _require(type(name) is str and plain and type(path[0]) is str, f"{name!r} has no place")
        return Contents(entries, {name: paths[name] for name in entries if name in paths})

    def _bytes(self, name: str, entry: Any) -> Item:
        _require(type(entry) is BytesMetadata, f"{name} is of no known kind")
        return self._item(name, None)

    def _tensor(self, name: str, entry: Any) -> StoredTensor:
        properties: Any = entry.properties
        known = type(properties) is Properties
        _require(known and isinstance(getattr(properties, "dtype", None), torch.dtype), f"{name} has no dtype")
        layout = getattr(properties, "layout", "torch.strided")
        if layout != "torch.strided":
            raise UnsupportedLeafError(f"{name}: a tensor of layout {layout} has no plain bytes", name)
        shape = _axes(entry.size)
        chunks: dict[tuple[int, ...], Chunk] = {}
        for chunk in entry.chunks:
            start, length = _axes(chunk.offsets), _axes(chunk.sizes)
            inside = len(start) == len(length) == len(shape)
            inside = inside and all(s + n <= extent for s, n, extent in zip(start, length, shape, strict=True))
            _require(inside, f"{name} has a chunk at {start} of {length} outside its shape {shape}")
            if 0 not in length:
                chunks[start] = found = Chunk(start, length, self._item(name, start))
                # So the memory that is made for chunks is never more than what lies in the files.
                nbytes = math.prod(length) * properties.dtype.itemsize
                _require(nbytes <= found.item.nbytes, f"{name} has a chunk of {nbytes} bytes in {found.item.nbytes}")
        return StoredTensor(properties.dtype, shape, [chunks[start] for start in sorted(chunks)])

    def _item(self, name: str, offset: tuple[int, ...] | None) -> Item:
        key = Index()
        key.__setstate__({"fqn": name, "offset": offset})
        info = self._storage.get(key)
        where = name if offset is None else f"{name} at {offset}"
        _require(type(info) is StorageInfo, f"{where} is nowhere in its files")
        transforms = vars(info).get("transform_descriptors")
        if transforms:
            raise UnsupportedLeafError(
                f"{where}: stored through an extension ({', '.join(map(str, transforms))}); load it with "
                "torch.distributed.checkpoint and save it with fp_multi.adapters.torch.save",
                name,
            )
        file, begin, nbytes = info.relative_path, info.offset, info.length
        # A name with a slash could lead anywhere.
        plain = type(file) is str and file not in ("", ".", "..") and "/" not in file and "\0" not in file
        _require(plain, f"{where} is in {file!r}, which names no file of the directory")
        size = self._size_of(file)
        fits = type(begin) is int and type(nbytes) is int and 0 <= begin <= begin + nbytes <= size
        _require(fits, f"{where} is outside of {file} of {size} bytes (offset {begin}, {nbytes} bytes)")
        return Item(self._directory / file, begin, nbytes)

    def _size_of(self, file: str) -> int:
        size = self._sizes.get(file)
        if size is None:
            try:
                size = self._sizes[file] = os.stat(self._directory / file).st_size
            except FileNotFoundError as error:
                raise MissingShardError(f"{self._directory / file}: the file is missing", shard=file) from error
        return size
