"""Checkpoints of Orbax's Standard and PyTree handlers, read array by array through TensorStore."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from fp_multi import numpy_dtype
from fp_multi.errors import CorruptCheckpointError, ManifestError, UnsupportedLeafError
from fp_multi.storage import StreamedTensor

from ._arrays import KEY_ATTR
from ._convert_tree import EMPTY, METADATA, Entry, build, read_json, read_tree

STRINGS = "_strings.json"
CUSTOM_METADATA = "orbax_custom_metadata"
"""Under this name a checkpoint of ours keeps Orbax's custom metadata, if it is more than strings: as JSON."""

_ARRAYS = {"jax.Array": "jax", "np.ndarray": "numpy", "scalar": "numpy"}
_PYTHON_SCALARS = ("bool", "int64", "float64")
_BAND_NBYTES = 16 << 20
_INDEX_CACHE_NBYTES = 64 << 20
_THREADS = 1
_MAX_NBYTES = 1 << 48

Moved = Callable[[int], None]


def open_orbax(directory: Path, moved: Moved) -> tuple[Any, int, dict[str, str]]:
    """A checkpoint as a state whose arrays are read when they are saved.

    In memory is one band of one array at a time: whole rows of its chunks, and at least 16 MiB where chunks are small.
    Orbax stores each shard of an array as one chunk, unless it was told otherwise.

    Args:
        directory: the item's directory, the one that holds ``_METADATA``.
        moved: called with the bytes that have been read.

    Returns:
        The state, the bytes of its arrays, and the custom metadata as strings.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged, or Orbax has lost something of it.
        UnsupportedLeafError: a leaf is of a kind or dtype that only Orbax has.
    """
    metadata = read_json(directory / METADATA)
    entries, rich = read_tree(directory, metadata)
    store = _Store(directory, metadata, moved)
    leaves = dict(zip((entry.path for entry in entries), store.leaves(entries), strict=True))
    state = build(directory, entries, rich, leaves)
    return state, store.total, _strings_of(metadata.get("custom_metadata"))


def _strings_of(custom: Any) -> dict[str, str]:
    if not custom:
        return {}
    if isinstance(custom, dict) and all(isinstance(value, str) for value in custom.values()):
        return custom
    return {CUSTOM_METADATA: json.dumps(custom)}


class _Store:
    def __init__(self, directory: Path, metadata: Mapping[str, Any], moved: Moved) -> None:
        self._directory = directory
        self._moved = moved
        self._driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        ocdbt = metadata.get("use_ocdbt")
        self._ocdbt = (directory / "manifest.ocdbt").exists() if ocdbt is None else bool(ocdbt)
        self._complete = bool(metadata.get("store_array_data_equal_to_fill_value"))
        self._context = ts.Context(
            {
                # One index serves all arrays: without a cache it is read and decoded for each of them.
                "cache_pool#ocdbt": {"total_bytes_limit": _INDEX_CACHE_NBYTES},
                # Each thread would keep the memory of the largest chunk it has seen.
                "data_copy_concurrency": {"limit": _THREADS},
                "file_io_concurrency": {"limit": _THREADS},
            }
        )
        self._strings = read_json(directory / STRINGS) if (directory / STRINGS).exists() else {}
        self._keys = dict(_key_impls(directory))
        self.total = 0

    def leaves(self, entries: list[Entry]) -> Iterator[Any]:
        arrays = {entry.path: self._open(entry) for entry in entries if entry.value_type in _ARRAYS}
        for entry in entries:
            if entry.path in arrays:
                yield self._array(entry, arrays[entry.path])
            elif entry.value_type in EMPTY:
                yield EMPTY[entry.value_type]()
            elif entry.value_type == "string":
                yield self._string(entry)
            else:
                raise UnsupportedLeafError(
                    f"{entry.name}: a value of Orbax's type {entry.value_type!r}; restore it with Orbax and save it "
                    "with fp_multi",
                    entry.name,
                )

    def _open(self, entry: Entry) -> Any:
        base = f"{self._directory.absolute()}{os.sep}"
        kvstore: dict[str, Any]
        if self._ocdbt:
            files = {"driver": "file", "path": base}
            kvstore = {"driver": "ocdbt", "base": files, "path": f"{entry.name}/", "cache_pool": "cache_pool#ocdbt"}
        else:
            if ".." in entry.name.split("/"):
                raise CorruptCheckpointError(f"{self._directory}: {entry.name!r} is not the name of a directory in it")
            kvstore = {"driver": "file", "path": f"{base}{entry.name}/"}
        spec: dict[str, Any] = {"driver": self._driver, "kvstore": kvstore}
        if self._complete:
            spec["fill_missing_data_reads"] = False  # what is missing is lost, not zero
        return ts.open(spec, open=True, read=True, context=self._context)

    def _array(self, entry: Entry, opening: Any) -> Any:
        array = self._done(entry.name, opening)
        dtype = _dtype_name(entry.name, array.dtype)
        if entry.value_type == "scalar":
            value = self._done(entry.name, array.read())[()]
            # A Python number was stored as one of these types; another type was NumPy's.
            return value.item() if dtype in _PYTHON_SCALARS else value
        shape = tuple(array.shape)
        itemsize = numpy_dtype(dtype).itemsize
        impl = self._keys.get(entry.name) if entry.value_type == "jax.Array" else None
        rows = _band_rows(array, shape, itemsize)
        row_nbytes = math.prod(shape[1:]) * itemsize
        nbytes = row_nbytes * (shape[0] if shape else 1)
        if nbytes > _MAX_NBYTES:
            raise CorruptCheckpointError(f"{self._directory}: {entry.name}: it cannot have {nbytes} bytes")
        edges = [*(row * row_nbytes for row in range(0, shape[0], rows)), nbytes] if shape and nbytes else [0, nbytes]

        def read(number: int) -> npt.NDArray[np.uint8]:
            part = array[number * rows : min((number + 1) * rows, shape[0])] if shape else array
            values = self._done(entry.name, part.read(order="C"))
            return np.ascontiguousarray(values).reshape(-1).view(np.uint8)

        self.total += nbytes
        return StreamedTensor(
            dtype,
            shape,
            edges if nbytes else [0],
            read,
            kind=_ARRAYS[entry.value_type],
            attrs=None if impl is None else {KEY_ATTR: impl},
            moved=self._moved,
        )

    def _string(self, entry: Entry) -> str:
        found = self._strings
        try:
            for part in entry.name.split("/"):  # the name is a JSON pointer
                found = found[part.replace("~1", "/").replace("~0", "~")]
        except (KeyError, TypeError) as error:
            raise CorruptCheckpointError(f"{self._directory / STRINGS}: {entry.name!r} is missing") from error
        return str(found)

    def _done(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except (ValueError, RuntimeError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0]
            raise CorruptCheckpointError(f"{self._directory}: {name}: cannot be read: {reason}", tensor=name) from error


def _dtype_name(name: str, dtype: Any) -> str:
    plain = dtype.numpy_dtype
    try:
        if numpy_dtype(plain.name) == plain:
            return str(plain.name)
    except ManifestError:
        pass
    raise UnsupportedLeafError(f"{name}: cannot store elements of {dtype.name}", name)


def _band_rows(array: Any, shape: tuple[int, ...], itemsize: int) -> int:
    """Rows of a band: as few whole rows of chunks as make a band worth reading."""
    if not shape or not array.size:
        return 1
    chunk_rows = int(array.chunk_layout.read_chunk.shape[0] or 1)
    nbytes = chunk_rows * math.prod(shape[1:]) * itemsize
    return chunk_rows * max(1, _BAND_NBYTES // nbytes)


def _key_impls(directory: Path) -> Iterator[tuple[str, str]]:
    """By parameter: the implementation of typed random keys."""
    for path in sorted((directory / "array_metadatas").glob("process_*")):
        for found in read_json(path).get("array_metadatas", ()):
            array = found["array_metadata"]
            impl = (array.get("ext_metadata") or {}).get("random_key_impl")
            if impl is not None:
                yield array["param_name"], impl
