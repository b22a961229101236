"""Files of ``torch.save`` and checkpoints of ours, each made of the other."""

from __future__ import annotations

import ctypes
import functools
import mmap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from fp_multi import ReadRequest
from fp_multi.errors import ConfigError, UnsupportedLeafError
from fp_multi.storage import StreamedTensor, groups

from . import _convert_tensors as tensors
from ._describe import describe

_BAND_NBYTES = 8 << 20
_GROUP_NBYTES = 64 << 20
_MIN_NBYTES = 64 << 10
"""Smaller tensors are read where they are mapped: nothing is won by giving their pages back."""
_MADV_PAGEOUT = 21

Moved = Callable[[int], None]


def open_pt(source: Path, moved: Moved, *, allow_pickle: bool) -> tuple[Any, int]:
    """A file of ``torch.save`` as a state whose tensors stay in the file until they are saved.

    The file is mapped. What has been read is given back to the system at once, so that memory holds one band of a
    tensor; the old form of such files, from before torch 1.6, has to be read as a whole.

    Args:
        source: the file.
        moved: called with the bytes that have been read.
        allow_pickle: let values that are more than plain data run their code.

    Returns:
        The state, and the bytes that ``moved`` will tell of.

    Raises:
        ConfigError: it is no such file, or damaged.
        PickleRefusedError: it holds more than tensors and plain values.
    """
    mapped_form = zipfile.is_zipfile(source)
    state = tensors.load(source, str(source), allow_pickle=allow_pickle, mmap=mapped_form, damaged=ConfigError)
    mapped = _Mapped(moved)
    return mapped.stream(state), mapped.nbytes


class _Mapped:
    """Replaces the tensors of a loaded state by ones that are streamed out of their mapping."""

    def __init__(self, moved: Moved) -> None:
        self.nbytes = 0
        self._moved = moved
        self._streams: dict[Any, StreamedTensor] = {}
        self._last = (0, 0)

    def stream(self, value: Any) -> Any:
        """The same state with streamed tensors; containers that can be changed are changed in place."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            for key, child in value.items():
                value[key] = self.stream(child)
            for name, child in getattr(value, "__dict__", {}).items():
                vars(value)[name] = self.stream(child)
        elif type(value) is list:
            value[:] = [self.stream(child) for child in value]
        elif type(value) is tuple:
            return tuple([self.stream(child) for child in value])
        return value

    def _tensor(self, tensor: torch.Tensor) -> Any:
        try:
            source = describe(tensor, "")
        except UnsupportedLeafError:
            return tensor  # saving refuses it, and knows its place
        if source.strides is not None or source.address == 0 or source.nbytes < _MIN_NBYTES:
            return tensor
        # Two names of one tensor stay one tensor.
        attrs = tuple(sorted((source.attrs or {}).items()))
        key = (source.address, source.shape, source.dtype, source.kind, attrs)
        found = self._streams.get(key)
        if found is None:
            found = self._streams[key] = StreamedTensor(
                source.dtype,
                source.shape,
                [*range(0, source.nbytes, _BAND_NBYTES), source.nbytes],
                self._reader(tensors.bits(tensor)),
                kind=source.kind,
                attrs=source.attrs,
                moved=self._moved,
            )
            self.nbytes += source.nbytes
        return found

    def _reader(self, flat: npt.NDArray[np.uint8]) -> Callable[[int], npt.NDArray[np.uint8]]:
        address = flat.__array_interface__["data"][0]

        def read(number: int) -> npt.NDArray[np.uint8]:
            begin = number * _BAND_NBYTES
            end = min(begin + _BAND_NBYTES, flat.nbytes)
            _page_out(*self._last)
            self._last = (address + begin, address + end)
            return flat[begin:end]

        return read


@functools.cache
def _madvise() -> Any:
    return ctypes.CDLL(None).madvise


def _page_out(begin: int, end: int) -> None:
    """Ask the system to take back the memory of a mapping that has been read; it may refuse, nothing depends on it."""
    page = mmap.PAGESIZE
    first, last = begin // page * page, end // page * page
    if first < last:
        _madvise()(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_PAGEOUT)


def plan_pt(reader: Any, moved: Moved, losses: Any) -> Callable[[BinaryIO], None]:
    """Prepare a checkpoint of ours to be written by ``torch.save``, which wants the whole state in memory.

    Args:
        reader: a ``CheckpointReader``.
        moved: called with the bytes that have been read.
        losses: takes notes of what becomes something else, and refusals.

    Returns:
        The function that reads the state and writes it to an open file.

    Raises:
        UnsupportedLeafError: torch does not have the dtype of a tensor.
    """
    tensors.check(reader, losses, exact=True)
    make = tensors.value_maker()

    def write(file: BinaryIO) -> None:
        values = {}
        entries = reader.manifest.tensors
        # Group by group for the sake of the bar only: at the end all of it is in memory.
        for run in groups([sum(piece.nbytes for piece in entry.pieces) for entry in entries], _GROUP_NBYTES):
            for index, data in zip(run, reader.read([ReadRequest(index) for index in run]), strict=True):
                moved(data.nbytes)
                values[index] = make(entries[index], data)
        torch.save(tensors.without_classes(reader.build(values), (), losses), file)

    return write
