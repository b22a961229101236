"""From a checked manifest to values: memory, read plan, checksums, NumPy arrays or framework tensors."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fp_multi import _reader
from fp_multi._collector import collector_paused
from fp_multi._dtypes import itemsize, numpy_dtype
from fp_multi._format import Manifest, Tensor
from fp_multi._hidden import translated
from fp_multi._layout import I64, box_runs, chunk_count
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


class _ShardPlan:
    """What to read from one shard."""

    def __init__(self) -> None:
        self.segments: list[I64] = []
        self.chunks: list[tuple[int, int]] = []
        self.expected: list[int] = []
        self.owners: list[tuple[int, int]] = []  # tensor index, chunk number in its piece


def _plan(
    manifest: Manifest, wanted: Sequence[int], where: Mapping[int, int], *, verify: bool
) -> dict[int, _ShardPlan]:
    plans: dict[int, _ShardPlan] = {}
    whole: dict[int, list[tuple[int, int, int]]] = {}
    granule = manifest.chunk_nbytes
    for index in wanted:
        tensor = manifest.tensors[index]
        for piece in tensor.pieces:
            if not piece.nbytes:
                continue
            plan = plans.get(piece.shard)
            if plan is None:
                plan = plans[piece.shard] = _ShardPlan()
                whole[piece.shard] = []
            if piece.box is None:
                whole[piece.shard].append((piece.offset, piece.nbytes, where[index]))
            else:
                runs, run = box_runs(tensor.shape, *piece.box, itemsize(tensor.dtype))
                at = piece.offset + np.arange(len(runs), dtype=np.int64) * run
                plan.segments.append(np.column_stack([at, np.full(len(runs), run, np.int64), runs + where[index]]))
            if not verify:
                continue
            plan.expected.extend(piece.crc32c)
            if piece.nbytes <= granule:
                plan.chunks.append((piece.offset, piece.nbytes))
                plan.owners.append((index, 0))
            else:
                for k in range(chunk_count(piece.nbytes, granule)):
                    begin = k * granule
                    plan.chunks.append((piece.offset + begin, min(granule, piece.nbytes - begin)))
                    plan.owners.append((index, k))
    for shard, rows in whole.items():
        if rows:
            plans[shard].segments.append(np.array(rows, np.int64))
    return plans


def fetch(
    directory: str,
    manifest: Manifest,
    where: Mapping[int, int],
    config: LoadConfig,
    keepalive: object,
) -> list[CorruptCheckpointError]:
    """Read tensors into memory and compare every chunk's checksum.

    Args:
        directory: the checkpoint.
        manifest: its checked manifest.
        where: for each wanted tensor index, the address of its memory (C order).
        config: how to read.
        keepalive: what owns the memory.

    Returns:
        The chunks whose bytes are not what was written; empty if all is well.
    """
    faults: list[CorruptCheckpointError] = []
    with collector_paused():
        plans = _plan(manifest, list(where), where, verify=config.verify)
    for number, plan in sorted(plans.items()):
        shard = manifest.shards[number]
        crcs = _reader.read_ranges(
            os.path.join(directory, shard.file),
            shard.nbytes,
            np.concatenate(plan.segments),
            np.array(plan.chunks, np.int64).reshape(-1, 2),
            config,
            keepalive=keepalive,
        )
        expected = np.array(plan.expected, np.uint32)
        for i in np.flatnonzero(crcs != expected).tolist():
            index, chunk = plan.owners[i]
            faults.append(
                chunk_fault(
                    directory,
                    shard.file,
                    manifest.tensors[index].name,
                    chunk,
                    *plan.chunks[i],
                    int(expected[i]),
                    int(crcs[i]),
                )
            )
    return faults


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


def load_values(
    directory: str,
    manifest: Manifest,
    wanted: Sequence[int],
    config: LoadConfig,
    builder: TensorBuilder | None,
    into: Mapping[int, int] | None = None,
    plain: Collection[int] = (),
    keepalive: object = None,
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
    raise_faults(fetch(directory, manifest, where, config, (buffers, keepalive)), directory)
    with collector_paused():
        return {
            i: value(tensors[i], data, None if i in plain else builder) for i, data in zip(fresh, buffers, strict=True)
        }
