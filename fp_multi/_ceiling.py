"""The drive's own speed: the same engine with nothing to copy and nothing to check."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fp_multi import _commit, _engine, _engines
from fp_multi._layout import align_up, plan_reads
from fp_multi.config import MIB, IOConfig, LoadConfig, SaveConfig

_NO_CHUNKS = np.empty((0, 2), np.uint64)


class CeilingResult(NamedTuple):
    """One raw measurement."""

    gbytes_per_s: float
    block_bytes: int
    queue_depth: int
    engine: str
    direct: bool
    reasons: tuple[str, ...]


def measure_ceiling(
    directory: str | os.PathLike[str],
    nbytes: int = 1 << 30,
    *,
    read: bool = False,
    reuse: bool = False,
    block_bytes: Sequence[int] = (MIB // 2, MIB, 2 * MIB, 4 * MIB),
    queue_depth: Sequence[int] = (8, 16, 32),
    config: IOConfig | None = None,
) -> list[CeilingResult]:
    """Measure raw rates of a directory's drive: huge-page buffers, preallocated file, until durable.

    Args:
        directory: where a temporary file is made and removed.
        nbytes: its size.
        read: measure reads (of a file just written directly, so not cached) into fresh memory instead of writes.
        reuse: for writes, overwrite the file in place each time instead of making it anew.
        block_bytes: request sizes to try.
        queue_depth: requests in flight to try.
        config: capabilities; sizes and depths in it are not used.

    Returns:
        One result for each combination, in the order tried.

    Raises:
        NoSpaceError: the file system has not the room.
        StorageError: the operating system refused an operation.

    Example:
        >>> import fp_multi as fp
        >>> max(r.gbytes_per_s for r in fp.measure_ceiling(".", 64 << 20)) > 0
        True
    """
    directory = _commit.resolve(directory)
    nbytes = align_up(nbytes)
    base = _engines.options(config or (LoadConfig() if read else SaveConfig()))
    results = []
    # Never published: a hidden directory that no save sweeps meanwhile, and any save if this process dies.
    with _commit.FileCommit(os.path.join(directory, ".fp_multi-ceiling"), SaveConfig(), nbytes=nbytes) as scratch:
        path = scratch.path
        if read or reuse:
            # With the usual settings, whatever is measured then: a file to be read must not be in the page cache.
            _write(path, nbytes, _engines.options(SaveConfig()), reuse=False)
        for block in block_bytes:
            for depth in queue_depth:
                chosen: _engines.Options = {**base, "block_bytes": block, "queue_depth": depth}
                if not (read or reuse):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                begin = time.perf_counter()
                stats = _read(path, nbytes, chosen) if read else _write(path, nbytes, chosen, reuse=reuse)
                elapsed_s = time.perf_counter() - begin
                results.append(
                    CeilingResult(
                        nbytes / 1e9 / elapsed_s,
                        block,
                        depth,
                        stats["engine"],
                        stats["direct"],
                        tuple(stats["reasons"]),
                    )
                )
    return results


def _write(path: str, nbytes: int, options: _engines.Options, *, reuse: bool) -> _engine.Stats:
    # Address 0 tells the engine to send its staging blocks as they are.
    extents = np.array([[0, nbytes, 0]], np.uint64)
    job = _engines.engine("write").submit_write(
        path, extents, np.array([nbytes], np.uint64), [], reuse=reuse, **options
    )
    return _engines.wait(job).stats


def _read(path: str, nbytes: int, options: _engines.Options) -> _engine.Stats:
    memory = _engine.allocate(nbytes)
    address = _engine.address_of(memory)
    segments = np.array([[0, nbytes, address]], np.int64)
    ops = plan_reads(segments, _NO_CHUNKS.astype(np.int64), options["block_bytes"], nbytes)
    job = _engines.engine("read").submit_read(
        path, ops.astype(np.uint64), segments.astype(np.uint64), _NO_CHUNKS, **options
    )
    return _engines.wait(job).stats


def capabilities(directory: str | os.PathLike[str], config: IOConfig | None = None) -> dict[str, object]:
    """What I/O works in a directory, found out by doing it: a small file is written and removed.

    Args:
        directory: the directory.
        config: the capabilities to try; default those of a save.

    Returns:
        ``engine``, ``direct``, ``reasons`` (why something is not used), ``crc32c`` (implementation), ``alignment``
        (of direct I/O, bytes: memory and offset, 0 if the file system does not say).

    Raises:
        StorageError: the operating system refused an operation.

    Example:
        >>> import fp_multi as fp
        >>> fp.capabilities(".")["engine"] in ("io_uring", "threads")
        True
    """
    probe = os.path.join(_commit.resolve(directory), ".fp_multi-probe")
    with _commit.FileCommit(probe, SaveConfig(), nbytes=0) as scratch:
        stats = _write(scratch.path, 2 * 4096, _engines.options(config or SaveConfig()), reuse=False)
        _, memory, offset = _engine.dio_alignment(scratch.path)
    return {
        "engine": stats["engine"],
        "direct": stats["direct"],
        "reasons": tuple(stats["reasons"]),
        "crc32c": _engine.crc32c_implementation(),
        "alignment": (memory, offset),
    }
