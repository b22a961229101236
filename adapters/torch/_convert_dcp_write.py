"""Checkpoints of ours as directories of torch.distributed.checkpoint, written by its own FileSystemWriter."""

from __future__ import annotations

import dataclasses
import errno
import io
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult

from fp_multi import ReadRequest
from fp_multi.errors import FpMultiError, StorageError
from fp_multi.storage import groups

from . import _convert_tensors as tensors
from ._dtypes import CARRIERS

_GROUP_NBYTES = 64 << 20
"""Tensors that are in memory together; a larger one is alone."""

Moved = Callable[[int], None]
Bytes = npt.NDArray[np.uint8]


def plan_dcp(reader: Any, moved: Moved, losses: Any) -> Callable[[str], None]:
    """Prepare a checkpoint of ours to be written by ``FileSystemWriter``.

    Tensors are read as they are written, those of up to 64 MiB together and larger ones alone.

    Args:
        reader: a ``CheckpointReader``.
        moved: called with the bytes that have been read.
        losses: takes notes of what DCP keeps in another form, and refusals.

    Returns:
        The function that writes the directory whose path it is given.

    Raises:
        UnsupportedLeafError: a value or key has no place in a DCP checkpoint.
    """
    tensors.check(reader, losses, exact=False, fits=_fits)
    leaves = {index: _Leaf(index) for index in range(len(reader.manifest.tensors))}
    planner = _Planner(reader, moved)
    state = planner.hide(_Plain(losses).state(reader.build(leaves)))

    def write(directory: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is no process group is as it should be
                # Not flushed here: the commit flushes everything, names too.
                dcp_save(state, storage_writer=_Writer(directory, sync_files=False), planner=planner, no_dist=True)
        except CheckpointException as error:
            raise _cause(error, directory) from error

    return write


def _fits(dtype: torch.dtype) -> bool:
    """Whether DCP can tell the size of a type; of those that are shells for kernels it cannot."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return True
    try:
        return torch.iinfo(dtype).bits == 8 * dtype.itemsize
    except TypeError:
        return False


def _cause(error: CheckpointException, directory: str) -> BaseException:
    for cause, _ in error.failures.values():
        if isinstance(cause, OSError) and not isinstance(cause, FpMultiError):
            return StorageError(cause.errno or errno.EIO, "write", cause.filename or directory)
        if isinstance(cause, (FpMultiError, MemoryError, KeyboardInterrupt)):
            return cause
    return error


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Leaf:
    """A tensor's place in a state."""

    index: int


class _Plain:
    """Makes of a state what DCP takes apart: dicts with string keys, and lists. A tuple is pickled as it is."""

    def __init__(self, losses: Any) -> None:
        self._losses = losses
        self._names: set[str] = set()

    def state(self, value: Any) -> dict[str, Any]:
        """The whole state.

        Raises:
            UnsupportedLeafError: something of it has no place.
        """
        if not isinstance(value, dict):
            self._losses.refuse((), "DCP stores dicts only; put the value into one")
        return self._dict(value, ())

    def _value(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, dict):
            return self._dict(value, path)
        if isinstance(value, list) and value:
            return [self._value(child, (*path, i)) for i, child in enumerate(value)]
        name = ".".join(map(str, path))
        if name in self._names:
            self._losses.refuse(path, f"DCP would store two values under {name!r}; rename one")
        self._names.add(name)
        return tensors.without_classes(value, path, self._losses)

    def _dict(self, value: dict[Any, Any], path: tuple[Any, ...]) -> dict[str, Any]:
        if getattr(value, "__dict__", None):
            self._losses.add("attributes of an OrderedDict left out", path)
        if not value and path:
            self._losses.add("empty dicts left out", path)
        found: dict[str, Any] = {}
        for key, child in value.items():
            if type(key) is int:
                self._losses.add("integer keys became strings", (*path, key))
            elif type(key) is not str:
                self._losses.refuse((*path, key), "DCP has string keys only; rename it")
            found[str(key)] = self._value(child, (*path, key))
        return found


class _Planner(DefaultSavePlanner):
    """DCP's planner over a state of meta tensors; it reads a tensor when that is about to be written."""

    def __init__(self, reader: Any, moved: Moved) -> None:
        super().__init__()
        self._reader = reader
        self._moved = moved
        self._make = tensors.value_maker()
        self._hidden: dict[int, tuple[torch.Tensor, int]] = {}
        self._ahead: dict[int, Bytes] = {}

    def hide(self, value: Any) -> Any:
        """The state with a meta tensor for each tensor."""
        if isinstance(value, _Leaf):
            tensor = self._reader.manifest.tensors[value.index]
            if tensors.is_opaque(tensor):
                return value
            dtype = tensors.torch_dtype(tensor) or torch.uint8
            # By way of a plain type: making a tensor of some types warns.
            meta = torch.empty(tensor.shape, dtype=CARRIERS[dtype.itemsize], device="meta").view(dtype)
            self._hidden[id(meta)] = (meta, value.index)
            return meta
        return _mapped(value, self.hide)

    def _show(self, value: Any) -> Any:
        hidden = self._hidden.get(id(value))
        if hidden is not None:
            return self._value(hidden[1])
        return self._value(value.index) if isinstance(value, _Leaf) else _mapped(value, self._show)

    def _value(self, index: int) -> Any:
        data = self._ahead.pop(index, None)
        if data is None:
            data = self._reader.read([ReadRequest(index)])[0]
        self._moved(data.nbytes)
        return self._make(self._reader.manifest.tensors[index], data)

    def read_ahead(self, items: Sequence[WriteItem]) -> None:
        """Read the tensors of some items at once: one after the other they would take much longer."""
        hidden = [self._hidden.get(id(self.state_dict[item.index.fqn])) for item in items]
        wanted = list(dict.fromkeys(found[1] for found in hidden if found is not None))
        requests = [ReadRequest(index) for index in wanted]
        self._ahead = dict(zip(wanted, self._reader.read(requests), strict=True))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor or the bytes to write."""
        found = self._show(self.state_dict[write_item.index.fqn])
        data: torch.Tensor | io.BytesIO = self.transform_object(write_item, found)
        return data


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: change(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(child) for child in value)
    return value


class _Writer(FileSystemWriter):
    """DCP's writer. It keeps the tensors of a file until the file is complete, so it is given files of bounded size."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write the items in groups, each as another rank would."""
        results: list[WriteResult] = []
        for number, run in enumerate(groups([_nbytes(item) for item in plan.items], _GROUP_NBYTES)):
            items = plan.items[run.start : run.stop]
            prefix = dataclasses.replace(plan.storage_data, prefix=f"__{number}_")
            part = dataclasses.replace(plan, items=items, storage_data=prefix)
            if isinstance(planner, _Planner):
                planner.read_ahead(items)
            results.extend(super().write_data(part, planner).wait())
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.size) * data.properties.dtype.itemsize
