"""An unpickler for the ``.metadata`` of torch.distributed.checkpoint that makes stand-ins and calls nothing.

For each of the dataclasses that belong into such a file there is one here that only holds what it is given; every other
name is refused.
"""

from __future__ import annotations

import pickle
from typing import Any, BinaryIO

import torch


class _Record:
    """Stand-in for a dataclass: its pickled state becomes its attributes."""

    _fields: tuple[str, ...] = ()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == len(self._fields):
            state = dict(zip(self._fields, state, strict=True))
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f"not the state of a {type(self).__name__}")
        self.__dict__.update(state)


class Metadata(_Record):
    """What a directory holds."""


class TensorMetadata(_Record):
    """A tensor: its properties, its size and its chunks."""


class BytesMetadata(_Record):
    """A value that is no tensor."""


class ChunkMetadata(_Record):
    """A part of a tensor."""


class Properties(_Record):
    """The properties of a tensor."""

    _fields = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")


class Index(_Record):
    """The only one that is the key of a dict: equal as torch's is, by name and offset."""

    def _key(self) -> tuple[Any, Any]:
        return vars(self).get("fqn"), vars(self).get("offset")

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self._key() == other._key()


class StorageInfo(_Record):
    """Where an item is stored."""


class _Other(_Record):
    """What nothing is needed of, made of anything."""

    def __init__(self, *_: Any) -> None:
        pass


_DCP = "torch.distributed.checkpoint."
_KNOWN: dict[tuple[str, str], Any] = {
    (f"{_DCP}metadata", "Metadata"): Metadata,
    (f"{_DCP}metadata", "TensorStorageMetadata"): TensorMetadata,
    (f"{_DCP}metadata", "BytesStorageMetadata"): BytesMetadata,
    (f"{_DCP}metadata", "ChunkStorageMetadata"): ChunkMetadata,
    (f"{_DCP}metadata", "TensorProperties"): Properties,
    (f"{_DCP}metadata", "MetadataIndex"): Index,
    (f"{_DCP}metadata", "StorageMeta"): _Other,
    (f"{_DCP}metadata", "_MEM_FORMAT_ENCODING"): _Other,
    (f"{_DCP}filesystem", "_StorageInfo"): StorageInfo,
    # Before torch 2.3 the properties were those of sharded tensors.
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): Properties,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): _Other,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    **{
        (module, name): _Other
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if found is None and module == "torch":
            found = getattr(torch, name, None) if name.isidentifier() else None
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise ForeignName(f"{module}.{name}")
        return found


class ForeignName(Exception):
    """The pickle names something that does not belong into it."""


def unpickle(file: BinaryIO) -> Any:
    """What a file holds, in stand-ins.

    Raises:
        ForeignName: it names something that does not belong into it.
        Exception: it is damaged; a damaged pickle makes nearly every exception there is.
    """
    return _Unpickler(file).load()
