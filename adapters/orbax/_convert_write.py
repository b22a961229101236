"""A checkpoint of ours as one of Orbax's PyTree handler, written by Orbax itself, a few arrays at a time."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

from fp_multi import ReadRequest, numpy_dtype
from fp_multi.errors import FpMultiError, StorageError
from fp_multi.storage import groups

from ._arrays import KEY_ATTR
from ._convert_plan import ArrayPlace, JaxPlace, NumpyPlace, Plan
from ._convert_read import CUSTOM_METADATA

_GROUP_NBYTES = 16 << 20
"""Arrays that are in memory together; a larger one is alone."""

Moved = Callable[[int], None]


def plan_orbax(reader: Any, moved: Moved, losses: Any) -> Callable[[str], None]:
    """Prepare a checkpoint of ours to be written by Orbax.

    What was a JAX array becomes one, on the CPU; all other tensors become NumPy arrays.

    Args:
        reader: a ``CheckpointReader``.
        moved: called with the bytes that have been read.
        losses: takes notes of what Orbax keeps in another form, and refusals.

    Returns:
        The function that writes the directory whose path it is given.

    Raises:
        UnsupportedLeafError: a value or key has no place in an Orbax checkpoint.
    """
    plan = Plan(reader, losses)
    item = plan.item()
    custom = _custom_metadata(reader.manifest.metadata)

    def write(directory: str) -> None:
        read = _Arrays(reader, moved).read
        handlers = [
            (NumpyPlace, _Handler("np.ndarray", type_handlers.NumpyHandler(deepcopy_host_arrays=False), read, _same)),
            (JaxPlace, _Handler("jax.Array", type_handlers.get_type_handler(jax.Array), read, _to_jax)),
            *((kind, type_handlers.get_type_handler(kind)) for kind in (int, float, str, np.ndarray, jax.Array)),
        ]
        registry = type_handlers.create_type_handler_registry(*handlers)
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        try:
            with _quiet(), _plain_path(directory) as path, ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(path, args=ocp.args.PyTreeSave(item, custom_metadata=custom))
        except (FpMultiError, MemoryError):
            raise
        except OSError as error:
            raise StorageError(error.errno or errno.EIO, "write", error.filename or directory) from error
        except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
            # TensorStore's errors are of these types, whatever went wrong.
            reason = str(error).partition("\n")[0]
            raise StorageError(errno.EIO, "write", directory, hint=f"Orbax failed: {reason}") from error

    return write


def _custom_metadata(metadata: dict[str, str]) -> Any:
    if set(metadata) == {CUSTOM_METADATA}:
        try:
            return json.loads(metadata[CUSTOM_METADATA])
        except ValueError:
            pass
    return dict(metadata) or None


@contextlib.contextmanager
def _plain_path(directory: str) -> Iterator[str]:
    """A path to the same place that is no pattern: Orbax globs for its parts, and finds none below ``a[1]``."""
    if glob.escape(directory) == directory:
        yield directory
        return
    parent, name = os.path.split(directory)
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax tells its progress as warnings, of two kinds."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class _Arrays:
    """Reads what Orbax is about to write."""

    def __init__(self, reader: Any, moved: Moved) -> None:
        self._reader = reader
        self._moved = moved

    def read(self, leaves: Sequence[ArrayPlace]) -> Iterator[tuple[Any, Any]]:
        """For each leaf its entry in the manifest, and the array."""
        found = self._reader.read([ReadRequest(leaf.index) for leaf in leaves])
        for leaf, data in zip(leaves, found, strict=True):
            entry = self._reader.manifest.tensors[leaf.index]
            self._moved(data.nbytes)
            yield entry, data.view(numpy_dtype(entry.dtype)).reshape(entry.shape)


def _same(entry: Any, array: Any) -> Any:
    return array


def _to_jax(entry: Any, array: Any) -> Any:
    with jax.enable_x64(True):
        placed = jax.device_put(array, jax.local_devices(backend="cpu")[0])
        impl = entry.attrs.get(KEY_ATTR)
        return placed if impl is None else jax.random.wrap_key_data(placed, impl=impl)


class _Handler(type_handlers.TypeHandler):  # type: ignore[misc]
    """Lets one of Orbax's own handlers write leaves that are not in memory, group by group."""

    def __init__(self, typestr: str, inner: Any, read: Callable[..., Any], make: Callable[[Any, Any], Any]) -> None:
        self._typestr = typestr
        self._inner = inner
        self._read = read
        self._make = make

    def typestr(self) -> str:
        """What the metadata calls the values: the same as the inner handler's."""
        return self._typestr

    async def metadata(self, infos: Any) -> NoReturn:
        """Not for reading."""
        raise NotImplementedError

    async def deserialize(self, infos: Any, args: Any = None) -> NoReturn:
        """Not for reading."""
        raise NotImplementedError

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
        """Write all values; nothing is left to wait for."""
        args = args or [type_handlers.SaveArgs()] * len(values)
        for run in groups([value.nbytes for value in values], _GROUP_NBYTES):
            part = slice(run.start, run.stop)
            arrays = [self._make(entry, array) for entry, array in self._read(values[part])]
            for future in await self._inner.serialize(arrays, infos[part], args[part]):
                future.result()
        return []
