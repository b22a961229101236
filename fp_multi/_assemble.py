"""From a checked manifest to values: memory, read plan, checksums, NumPy arrays or framework tensors."""

from __future__ import annotations

import errno
import os
import pickle
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fp_multi import _reader
from fp_multi._collector import collector_paused
from fp_multi._dtypes import numpy_dtype
from fp_multi._format import Manifest, Tensor
from fp_multi._hidden import translated
from fp_multi._ranges import Request as Request
from fp_multi._ranges import ShardChunks, plan_ranges
from fp_multi._types import HostTensor, TensorBuilder
from fp_multi.config import LoadConfig
from fp_multi.errors import (
    ChecksumError,
    CorruptCheckpointError,
    MissingShardError,
    PickleRefusedError,
    StorageError,
    TruncatedShardError,
)

Buffer = npt.NDArray[np.uint8]
Reading: TypeAlias = Callable[[str, Manifest, Mapping[int, int], LoadConfig, object], None]
"""``read(directory, manifest, where, config, keepalive)`` fills the memory of tensors, see :func:`fetch`."""
_PLAIN_KINDS = frozenset(("numpy", "numpy.scalar", "bytes", "bytearray", "pickle"))


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a whole tensor."""
    pieces = tensor.pieces
    return pieces[0].nbytes if len(pieces) == 1 else sum(piece.nbytes for piece in pieces)


def shard_faults(directory: str, manifest: Manifest) -> list[CorruptCheckpointError]:
    """What can be said of the shards without reading them: each is there and has its length."""
    faults: list[CorruptCheckpointError] = []
    for shard in manifest.shards:
        path = os.path.join(directory, shard.file)
        try:
            with translated("stat", path):
                found = os.stat(path).st_size
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            faults.append(MissingShardError(f"{path}: the shard is missing", shard=shard.file))
            continue
        if found != shard.nbytes:
            faults.append(
                TruncatedShardError(
                    f"{path}: expected {shard.nbytes} bytes, found {found}: the shard was cut off or written to",
                    shard=shard.file,
                )
            )
    return faults


def raise_faults(faults: Sequence[CorruptCheckpointError], path: str) -> None:
    """Raise what was found: a single fault as itself, several as one error that holds all."""
    if len(faults) == 1:
        raise faults[0]
    if faults:
        shown = "\n".join(f"  {fault}" for fault in faults[:20])
        more = f"\n  ... and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise CorruptCheckpointError(
            f"{path}: {len(faults)} faults\n{shown}{more}",
            tensor=faults[0].tensor,
            shard=faults[0].shard,
            chunk=faults[0].chunk,
            faults=faults,
        )


def refuse_pickle(manifest: Manifest, wanted: Sequence[int], *, allow_pickle: bool) -> None:
    """Refuse before anything is read.

    Raises:
        PickleRefusedError: a wanted leaf is pickled and the caller did not allow that.
    """
    if allow_pickle:
        return
    for index in wanted:
        tensor = manifest.tensors[index]
        if tensor.kind == "pickle":
            raise PickleRefusedError(
                f"{tensor.name}: this leaf is a pickled Python object, which can run code when it is loaded; "
                "pass allow_pickle=True if you trust the checkpoint, or leave it out with only="
            )


def fetch(
    directory: str,
    manifest: Manifest,
    requests: Sequence[Request],
    config: LoadConfig,
    keepalive: object,
) -> tuple[list[CorruptCheckpointError], int]:
    """Read tensors, or boxes of them, into memory and compare the checksum of every chunk touched.

    Args:
        directory: the checkpoint.
        manifest: its checked manifest.
        requests: what to read, and where to; no byte of the checkpoint twice.
        config: how to read.
        keepalive: what owns the memory.

    Returns:
        The chunks whose bytes are not what was written; empty if all is well. And how many bytes the drive gave.
    """
    faults: list[CorruptCheckpointError] = []
    drive_nbytes = 0
    with collector_paused():
        plans = plan_ranges(manifest, requests, verify=config.verify)
    begun: deque[tuple[str, ShardChunks, _reader.RangesRead]] = deque()

    def finish_first() -> int:
        file, chunks, reading = begun[0]
        crcs, moved = reading.finish()
        begun.popleft()
        for i in np.flatnonzero(crcs != chunks.expected).tolist():
            offset, nbytes = chunks.places[i].tolist()
            faults.append(
                chunk_fault(
                    directory,
                    file,
                    manifest.tensors[int(chunks.tensors[i])].name,
                    int(chunks.numbers[i]),
                    offset,
                    nbytes,
                    int(chunks.expected[i]),
                    int(crcs[i]),
                )
            )
        return moved

    try:
        for number, plan in sorted(plans.items()):
            shard = manifest.shards[number]
            with collector_paused():
                chunks, segments = plan.chunks(), np.concatenate(plan.segments)
            path = os.path.join(directory, shard.file)
            reading = _reader.RangesRead(path, shard.nbytes, segments, chunks.places, config, keepalive)
            begun.append((shard.file, chunks, reading))
            # The next shard is planned, and begins, while the drive still works for the last one.
            if len(begun) > 1:
                drive_nbytes += finish_first()
        while begun:
            drive_nbytes += finish_first()
    except BaseException:
        # The memory is the caller's: nothing may write into it any more.
        for _, _, reading in begun:
            reading.cancel()  # all before the first wait, which another interrupt may end
        for _, _, reading in begun:
            reading.abandon()
        raise
    return faults, drive_nbytes


def chunk_fault(
    directory: str,
    file: str,
    tensor: str | None,
    chunk: int | None,
    offset: int,
    nbytes: int,
    expected: int,
    found: int,
) -> ChecksumError:
    """The error for one chunk (or, without a tensor, the header) whose CRC differs."""
    what = "the header" if tensor is None else f"tensor {tensor!r}, chunk {chunk}"
    return ChecksumError(
        f"{os.path.join(directory, file)}: {what} (offset {offset}, {nbytes} bytes): "
        f"expected CRC-32C {expected:08x}, found {found:08x}; the bytes changed since they were written",
        tensor=tensor,
        shard=file,
        chunk=chunk,
    )


def value(tensor: Tensor, data: Buffer, builder: TensorBuilder | None) -> Any:
    """The value of a leaf, made of its bytes.

    Args:
        tensor: its entry in the manifest.
        data: its bytes; the value takes them over.
        builder: for framework tensors; without it they become NumPy arrays.
    """
    kind = tensor.kind
    if kind == "numpy" and not tensor.attrs:
        return _array(tensor, data)
    if builder is not None and kind not in _PLAIN_KINDS:
        return builder(HostTensor(tensor.dtype, tuple(tensor.shape), data, kind, tensor.attrs, tensor.name))
    if kind == "bytes":
        return data.tobytes()
    if kind == "bytearray":
        return bytearray(data)
    if kind == "pickle":
        return pickle.loads(data.data)
    array = _array(tensor, data)
    if tensor.attrs.get("byteorder") == "big":
        array = array.astype(array.dtype.newbyteorder(">"))
    if tensor.attrs.get("order") == "F":
        array = np.asfortranarray(array)
    return array[()] if kind == "numpy.scalar" else array


def _array(tensor: Tensor, data: Buffer) -> npt.NDArray[Any]:
    dtype = numpy_dtype(tensor.dtype)
    if data.size == 0:
        return np.empty(tensor.shape, dtype)
    return data.view(dtype).reshape(tensor.shape)


def _read_all(
    directory: str, manifest: Manifest, where: Mapping[int, int], config: LoadConfig, keepalive: object
) -> None:
    requests = [Request(i, address) for i, address in where.items()]
    raise_faults(fetch(directory, manifest, requests, config, keepalive)[0], directory)


def load_values(
    directory: str,
    manifest: Manifest,
    wanted: Sequence[int],
    config: LoadConfig,
    builder: TensorBuilder | None,
    into: Mapping[int, int] | None = None,
    plain: Collection[int] = (),
    keepalive: object = None,
    read: Reading | None = None,
) -> dict[int, Any]:
    """Read the wanted tensors and make their values.

    Args:
        directory: the checkpoint.
        manifest: its checked manifest.
        wanted: tensor indices.
        config: how to read.
        builder: for framework tensors.
        into: addresses of existing memory that takes a tensor's bytes; such tensors get no value.
        plain: tensors that become NumPy arrays whatever the builder makes.
        keepalive: what owns the memory of ``into``.
        read: how bytes come into memory; None for straight from the drive.

    Raises:
        CorruptCheckpointError: shards are missing or cut, or bytes changed.
    """
    raise_faults(shard_faults(directory, manifest), directory)
    into = into or {}
    tensors = manifest.tensors
    fresh = [i for i in wanted if i not in into]
    with collector_paused():
        buffers = _reader.allocate([nbytes_of(tensors[i]) for i in fresh])
        where = dict(zip(fresh, _reader.addresses(buffers).tolist(), strict=True))
        where.update(into)
    (read or _read_all)(directory, manifest, where, config, (buffers, keepalive))
    with collector_paused():
        return {
            i: value(tensors[i], data, None if i in plain else builder) for i, data in zip(fresh, buffers, strict=True)
        }
