"""verify(): read every byte of a checkpoint and say what is wrong with it, all of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from fp_multi import _assemble, _reader
from fp_multi._arguments import require
from fp_multi._dtypes import safetensors_code, stored_shape
from fp_multi._format import HeaderEntry, Manifest, decode_header
from fp_multi._hidden import translated
from fp_multi._layout import chunk_sizes
from fp_multi._types import VerifyReport
from fp_multi.checkpoint import on_one_checkpoint
from fp_multi.config import LoadConfig
from fp_multi.errors import CorruptCheckpointError, StorageError

_Chunk = tuple[int, int, int, "int | None", int]  # offset, nbytes, expected CRC, tensor index, number


def verify(
    path: str | os.PathLike[str],
    *,
    config: LoadConfig = LoadConfig(),
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check a checkpoint completely: manifest, files, headers, and the checksum of every byte.

    Args:
        path: the checkpoint directory.
        config: how to read.
        progress: called now and then with the bytes checked so far and in all.

    Returns:
        What was read, if there is no fault.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        ManifestError: the manifest is damaged, impossible, or of a newer version (FormatVersionError).
        CorruptCheckpointError: a single fault is raised as itself (MissingShardError, TruncatedShardError,
            ChecksumError); several as one error whose ``faults`` has them all. Each names tensor, shard and chunk.

    Example:
        >>> import fp_multi as fp
        >>> fp.verify("ckpt/step_7").tensors
        1
    """
    require("config", config, LoadConfig)
    return on_one_checkpoint(path, lambda directory, manifest: _verify(directory, manifest, config, progress))


def _verify(
    directory: str,
    manifest: Manifest,
    config: LoadConfig,
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    begin = time.perf_counter()
    faults = _assemble.shard_faults(directory, manifest)
    # A cut shard is still read as far as it goes: which tensors survive is what its owner wants to know.
    lost = {fault.shard for fault in faults if isinstance(fault, FileNotFoundError)}
    total = sum(shard.nbytes for shard in manifest.shards if shard.file not in lost)
    done = 0
    for number, shard in enumerate(manifest.shards):
        if shard.file in lost:
            continue
        faults.extend(
            _check_shard(
                directory,
                manifest,
                number,
                config,
                None if progress is None else _offset(progress, done, total),
            )
        )
        done += shard.nbytes
        if progress is not None:
            progress(done, total)
    _assemble.raise_faults(faults, directory)
    return VerifyReport(
        path=directory,
        tensors=len(manifest.tensors),
        shards=len(manifest.shards),
        nbytes=total,
        elapsed_s=time.perf_counter() - begin,
    )


def _offset(progress: Callable[[int, int], None], done: int, total: int) -> Callable[[int], None]:
    return lambda moved: progress(done + moved, total)


def _chunks(manifest: Manifest, number: int) -> list[_Chunk]:
    shard = manifest.shards[number]
    chunks: list[_Chunk] = [(0, shard.header_nbytes, shard.header_crc32c, None, 0)]
    for index, tensor in enumerate(manifest.tensors):
        for piece in tensor.pieces:
            if piece.shard != number:
                continue
            at = piece.offset
            sizes = chunk_sizes(piece.nbytes, manifest.chunk_nbytes)
            for k, (nbytes, crc) in enumerate(zip(sizes, piece.crc32c, strict=True)):
                chunks.append((at, nbytes, crc, index, k))
                at += nbytes
    return chunks


def _check_shard(
    directory: str,
    manifest: Manifest,
    number: int,
    config: LoadConfig,
    progress: Callable[[int], None] | None,
) -> list[CorruptCheckpointError]:
    shard = manifest.shards[number]
    path = os.path.join(directory, shard.file)
    chunks = _chunks(manifest, number)
    with translated("stat", path):
        present = os.stat(path).st_size
    lost = [chunk for chunk in chunks if chunk[0] + chunk[1] > present]
    chunks = [chunk for chunk in chunks if chunk[0] + chunk[1] <= present]
    faults: list[CorruptCheckpointError] = [
        CorruptCheckpointError(
            f"{path}: tensor {_name(manifest, index)!r}, chunk {k} (offset {offset}, {nbytes} bytes): "
            f"behind the end of the file, which has {present} bytes",
            tensor=_name(manifest, index),
            shard=shard.file,
            chunk=k,
        )
        for offset, nbytes, _, index, k in lost
    ]
    table = np.array([chunk[:3] for chunk in chunks], np.int64).reshape(-1, 3)
    try:
        crcs, _ = _reader.read_ranges(path, present, np.empty((0, 3), np.int64), table[:, :2], config, progress)
    except StorageError as error:
        raise CorruptCheckpointError(f"{path}: cannot be read: {error}", shard=shard.file) from error
    for i in np.flatnonzero(crcs != table[:, 2]).tolist():
        offset, nbytes, expected, index, k = chunks[i]
        name = _name(manifest, index)
        faults.append(_assemble.chunk_fault(directory, shard.file, name, k, offset, nbytes, expected, int(crcs[i])))
    if not faults:
        faults.extend(_check_header(path, manifest, number))
    return faults


def _name(manifest: Manifest, index: int | None) -> str | None:
    return None if index is None else manifest.tensors[index].name


def _check_header(path: str, manifest: Manifest, number: int) -> list[CorruptCheckpointError]:
    """The shard as other software sees it: its header must say the same as the manifest."""
    shard = manifest.shards[number]
    with translated("read", path), open(path, "rb") as file:
        head = file.read(shard.header_nbytes)
    try:
        found = decode_header(head, shard.nbytes, path)
    except CorruptCheckpointError as error:
        return [error]
    expected = {
        tensor.name: HeaderEntry(
            safetensors_code(tensor.dtype),
            stored_shape(tensor.dtype, tuple(piece.box[1] if piece.box else tensor.shape)),
            piece.offset - shard.header_nbytes,
            piece.offset - shard.header_nbytes + piece.nbytes,
        )
        for tensor in manifest.tensors
        for piece in tensor.pieces
        if piece.shard == number
    }
    return [
        CorruptCheckpointError(
            f"{path}: header of tensor {name!r}: expected {expected.get(name)}, found {found.get(name)}",
            tensor=name,
            shard=shard.file,
        )
        for name in expected.keys() | found.keys()
        if expected.get(name) != found.get(name)
    ]
