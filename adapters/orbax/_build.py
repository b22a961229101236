"""From wants to values: one read of exactly the boxes that this process needs, then arrays on their devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding, SingleDeviceSharding

from fp_multi import Box, CheckpointReader, ReadRequest, numpy_dtype
from fp_multi.errors import TargetMismatchError
from fp_multi.storage import stored_value

from ._arrays import require_jax_dtype
from ._cast import cast, scalar
from ._load import to_key
from ._spread import box_of
from ._stored import StoredLeaf, Tensor
from ._want import Want

_OPAQUE_KINDS = ("bytes", "bytearray", "pickle")
_Array = npt.NDArray[Any]
_Shape = tuple[int, ...]

_SMALL_NBYTES = 1 << 20
"""An array that goes to devices of this process only is cut up by JAX if it is no larger: one request and one call, not
one of each for each device."""


class _Part(NamedTuple):
    """A box of a wanted array, in the array's own terms."""

    box: Box
    places: tuple[Any, ...]
    """Where it goes: devices or a sharding; none for host memory."""


class Builder:
    """Makes the wanted values of one checkpoint.

    Args:
        reader: the checkpoint.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._tensors = reader.manifest.tensors
        self._spreads: dict[tuple[Any, ...], tuple[_Part, ...]] = {}
        self._requests: list[ReadRequest] = []
        self._numbers: dict[tuple[int, Box | None], int] = {}
        self._users: list[int] = []

    def build(self, wanted: Sequence[tuple[StoredLeaf, Want]]) -> list[Any]:
        """Read and make them.

        Args:
            wanted: places and what is wanted of them.

        Returns:
            The values in the same order. Places that share a tensor and want the same share the value, too.

        Raises:
            CorruptCheckpointError: stored bytes are not what was written.
            TargetMismatchError: shape or dtype do not fit.
            UnsupportedLeafError: this JAX has not the dtype.
        """
        distinct: dict[Any, int] = {}
        firsts = []
        jobs: list[_Job] = []
        for leaf, want in wanted:
            key = (leaf if leaf.tensor is None else leaf.tensor, want)
            number = distinct.setdefault(key, len(jobs))
            if number == len(jobs):
                jobs.append(self._job(leaf, want))
            firsts.append(number)
        data = self._reader.read(self._requests)
        values: list[Any] = [None] * len(jobs)
        pieces: list[_Array] = []
        places: list[Any] = []
        begins = []
        for number, job in enumerate(jobs):
            begins.append(len(pieces))
            if job.want.form != "jax":
                values[number] = self._on_host(job, data)
                continue
            for part, piece in zip(job.parts, self._pieces(job, data), strict=True):
                pieces += [piece] * len(part.places)
                places += part.places
        del data
        # All at once: a call for each of many small arrays costs more than its bytes.
        put = jax.device_put(pieces, places) if pieces else []
        del pieces
        begins.append(len(put))
        for number, job in enumerate(jobs):
            if job.want.form == "jax":
                values[number] = _assembled(job, put[begins[number] : begins[number + 1]])
        return [values[first] for first in firsts]

    def _job(self, leaf: StoredLeaf, want: Want) -> _Job:
        tensor = None if leaf.tensor is None else self._tensors[leaf.tensor]
        job = _Job(leaf, want, tensor)
        if want.shape is not None and want.shape != job.stored_shape:
            if want.strict or len(want.shape) != len(job.stored_shape):
                raise TargetMismatchError(
                    f"{leaf}: shape {want.shape} in target, {job.stored_shape} on disk; strict=False cuts off, or "
                    "fills up, an array of as many axes"
                )
            job.shape = want.shape
        if want.form in ("jax", "numpy") and tensor is not None and tensor.kind in _OPAQUE_KINDS:
            raise TargetMismatchError(f"{leaf}: an array in target, {tensor.kind} on disk")
        if want.form == "jax":
            require_jax_dtype(want.dtype or job.stored_dtype, str(leaf))
            job.parts = self._spread_parts(job.sharding, job.shape, job.stored_dtype.itemsize)
        else:
            job.parts = (_Part(Box((0,) * len(job.shape), job.shape), ()),)
        if leaf.tensor is not None:
            fits = job.shape == job.stored_shape
            job.insides = [part.box if fits else _clipped(part.box, job.stored_shape) for part in job.parts]
            job.reads = [self._ask(leaf.tensor, job, inside) for inside in job.insides]
        return job

    def _ask(self, tensor: int, job: _Job, inside: Box) -> int:
        wanted = None if inside.length == job.stored_shape else inside
        number = self._numbers.setdefault((tensor, wanted), len(self._requests))
        if number == len(self._requests):
            self._requests.append(ReadRequest(tensor, wanted))
            self._users.append(0)
        self._users[number] += 1
        return number

    def _spread_parts(self, sharding: Sharding, shape: _Shape, itemsize: int) -> tuple[_Part, ...]:
        key = (sharding, shape, itemsize)
        found = self._spreads.get(key)
        if found is not None:
            return found
        sharding.shard_shape(shape)  # raises if the axes do not divide evenly
        whole = math.prod(shape) * itemsize <= _SMALL_NBYTES and not isinstance(sharding, SingleDeviceSharding)
        if whole and sharding.is_fully_addressable:
            found = (_Part(Box((0,) * len(shape), shape), (sharding,)),)
        else:
            boxes: dict[Box, list[Any]] = {}
            for device, index in sharding.addressable_devices_indices_map(shape).items():
                box = box_of(index if index is not None else (slice(None),) * len(shape), shape)
                boxes.setdefault(box, []).append(_place(device, sharding))
            found = tuple([_Part(box, tuple(places)) for box, places in boxes.items()])
        self._spreads[key] = found
        return found

    def _pieces(self, job: _Job, data: list[npt.NDArray[np.uint8]]) -> list[_Array]:
        """The boxes of an array, of its dtype."""
        found: list[_Array]
        if job.plain is not None:
            found = [job.plain for _ in job.parts]
        else:
            found = []
            for part, inside, number in zip(job.parts, job.insides, job.reads, strict=True):
                flat = data[number]
                array = flat.view(job.stored_dtype) if flat.size else np.empty(0, job.stored_dtype)
                found.append(_filled_up(array.reshape(inside.length), part.box.length))
        want = job.want
        if want.dtype is not None:
            found = [cast(array, want.dtype, str(job.leaf), lossy=want.lossy) for array in found]
        return found

    def _on_host(self, job: _Job, data: list[npt.NDArray[np.uint8]]) -> Any:
        want, leaf = job.want, job.leaf
        if want.form == "stored":
            return self._as_saved(job, data)
        if want.form == "scalar":
            stored = leaf.value
            if job.tensor is not None:
                stored = stored_value(job.tensor, data[job.reads[0]], None)
            value = scalar(stored, want.kind or float, str(leaf), lossy=want.lossy)
            return _of_dtype(leaf, value, want.dtype)
        (array,) = self._pieces(job, data)
        if self._is_shared(job) and array.base is not None:
            array = array.copy()  # nobody else's memory: who gets it may write to it
        return array[()] if want.kind is np.generic else array

    def _as_saved(self, job: _Job, data: list[npt.NDArray[np.uint8]]) -> Any:
        """The value that the core would give."""
        want, tensor = job.want, job.tensor
        if tensor is None:
            return _of_dtype(job.leaf, job.leaf.value, want.dtype)
        flat = data[job.reads[0]]
        found = stored_value(tensor, flat.copy() if self._is_shared(job) else flat, None)
        if want.dtype is None or tensor.kind in _OPAQUE_KINDS:
            return found
        return cast(found, want.dtype, str(job.leaf), lossy=want.lossy)

    def _is_shared(self, job: _Job) -> bool:
        return any([self._users[number] > 1 for number in job.reads])


class _Job:
    """One distinct value on its way."""

    def __init__(self, leaf: StoredLeaf, want: Want, tensor: Tensor | None) -> None:
        self.leaf = leaf
        self.want = want
        self.tensor = tensor
        self.plain: _Array | None = None
        """A plain value that is to become an array."""
        if tensor is not None:
            self.stored_dtype = numpy_dtype(tensor.dtype)
            self.stored_shape: _Shape = tuple(tensor.shape)
        else:
            self.plain = None if want.form in ("stored", "scalar") else _as_array(leaf)
            self.stored_dtype = np.dtype(np.uint8) if self.plain is None else self.plain.dtype
            self.stored_shape = ()
        self.shape = self.stored_shape
        self.sharding: Any = want.sharding
        self.parts: tuple[_Part, ...] = ()
        self.insides: list[Box] = []
        """For each part what of it is on disk."""
        self.reads: list[int] = []


def _of_dtype(leaf: StoredLeaf, value: Any, dtype: np.dtype[Any] | None) -> Any:
    """A Python scalar, converted as a dtype says; strings have none."""
    if dtype is None or isinstance(value, str):
        return value
    try:
        return np.asarray(value).astype(dtype).item()
    except (OverflowError, TypeError, ValueError) as error:
        raise TargetMismatchError(f"{leaf}: {value!r:.80} on disk as {dtype}: {error}") from error


def _as_array(leaf: StoredLeaf) -> _Array:
    found = np.asarray(leaf.value)
    if found.dtype.kind not in "biufc":
        raise TargetMismatchError(f"{leaf}: an array in target, {type(leaf.value).__name__} {leaf.value!r:.80} on disk")
    return found


def _clipped(box: Box, shape: _Shape) -> Box:
    """The part of a box that is inside a shape; empty where there is none."""
    start = tuple([min(begin, extent) for begin, extent in zip(box.start, shape, strict=True)])
    ends = [min(begin + length, extent) for begin, length, extent in zip(*box, shape, strict=True)]
    return Box(start, tuple([end - begin for begin, end in zip(start, ends, strict=True)]))


def _filled_up(array: _Array, shape: _Shape) -> _Array:
    """The array with zeros behind it on every axis that is too short."""
    if array.shape == shape:
        return array
    whole = np.zeros(shape, array.dtype)
    whole[tuple([slice(length) for length in array.shape])] = array
    return whole


def _place(device: Any, sharding: Sharding) -> Any:
    kind = sharding.memory_kind
    if kind is None or kind == device.default_memory().kind:
        return device
    return SingleDeviceSharding(device, memory_kind=kind)


def _assembled(job: _Job, arrays: list[jax.Array]) -> jax.Array:
    want = job.want
    shape = job.shape
    array: jax.Array
    if len(arrays) == 1 and arrays[0].sharding == want.sharding:
        (array,) = arrays
    else:
        array = jax.make_array_from_single_device_arrays(shape, job.sharding, arrays)
    if want.key is not None:
        array = to_key(array, want.key, str(job.leaf))
    return array if want.layout is None else jax.device_put(array, want.layout)
