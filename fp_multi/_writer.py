"""Layout + tensors -> one file on the drive, and a receipt for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fp_multi import _engine, _engines, _staging
from fp_multi._layout import chunk_nbytes_for, chunk_table
from fp_multi._types import LeafSource, ShardReceipt
from fp_multi.config import SaveConfig
from fp_multi.errors import StorageError


@dataclass(slots=True)
class PendingWrite:
    """A file being written by the engine; the sources must not change before :meth:`finish` returns.

    Leaving it as a context stops the engine if it is not done, and undoes page locks.
    """

    path: str
    nbytes: int
    parts: _staging.Extents
    job: _engine.WriteJob
    _crcs: list[int] | None = None

    def __enter__(self) -> PendingWrite:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.job.done:
            self.job.cancel()
            self.job.wait()
        _staging.release(self.parts)

    def checksums(self, on_tick: Callable[[_engine.WriteJob], None] | None = None) -> list[int]:
        """Wait until all of it has been staged; the drive may still have a part of it to take.

        Args:
            on_tick: called about ten times a second; the write stops if it raises.

        Returns:
            The CRC of each chunk: the header's first, then each tensor's in file order.

        Raises:
            StorageError: a system call failed.
            CapabilityError: a capability that is switched on is not available.
        """
        if self._crcs is None:
            try:
                _staging.feed(self.job, self.parts)
                _engines.wait_staged(self.job, self.nbytes, on_tick)
            except BaseException:
                self.__exit__()
                raise
            crcs: list[int] = np.frombuffer(self.job.crcs(), np.uint32).tolist()
            self._crcs = crcs
        return self._crcs

    def finish(self, on_tick: Callable[[_engine.WriteJob], None] | None = None) -> ShardReceipt:
        """Wait until the file is complete (and on the drive, if durable).

        Args:
            on_tick: called about ten times a second; the write stops if it raises.

        Raises:
            StorageError: a system call failed.
            CapabilityError: a capability that is switched on is not available.
        """
        self.checksums(on_tick)
        with self:
            _engines.wait(self.job, on_tick)
        stats = self.job.stats
        return ShardReceipt(
            file=os.path.basename(self.path),
            nbytes=self.nbytes,
            engine=stats["engine"],
            direct=stats["direct"],
            reasons=tuple(stats["reasons"]),
            open_s=stats["open_s"],
            write_s=stats["transfer_s"],
            fsync_s=stats["sync_s"],
        )


def start_write(
    path: str,
    header: bytes,
    sources: Sequence[LeafSource],
    config: SaveConfig,
    *,
    sizes: Sequence[int] | None = None,
    chunk_nbytes: int | None = None,
    reuse: bool = False,
    slot: int = 0,
    spill_nbytes: int = 0,
) -> PendingWrite:
    """Start writing a file made of a header and tensors.

    Args:
        path: the file; it must not exist, unless ``reuse``.
        header: the first bytes.
        sources: the tensors behind it, in file order.
        config: how to write.
        sizes: bytes of each piece that has checksums of its own; None if each source is one.
        chunk_nbytes: bytes that one checksum covers; None for what the configuration says.
        reuse: overwrite an existing file in place and cut it to length: its blocks are allocated already, which is the
            fastest way to write there is. The old content is lost from the first moment.
        slot: files in different slots are written at the same time, each by an engine of its own.
        spill_nbytes: a fence may come and copy at most so much; its memory is touched while the write runs.
    """
    parts = _staging.extents(header, sources, config.block_bytes)
    if sizes is None:
        sizes = [source.nbytes for source in sources]
    if chunk_nbytes is None:
        chunk_nbytes = chunk_nbytes_for(sum(sizes), config.chunk_bytes)
    chunks = np.concatenate([chunk_table([len(header)], max(len(header), 1)), chunk_table(sizes, chunk_nbytes)])
    try:
        job = _engines.engine("write", slot).submit_write(
            path,
            parts.table,
            chunks,
            parts.layouts,
            reuse=reuse,
            durable=config.durable,
            ready_nbytes=parts.ready_nbytes,
            spill_nbytes=spill_nbytes,
            keepalive=parts.keepalive,
            **_engines.options(config),
        )
    except BaseException:
        _staging.release(parts)
        raise
    return PendingWrite(path, len(header) + sum(sizes), parts, job)


def write_bytes(path: str, data: bytes, config: SaveConfig) -> None:
    """Make a small file, on the drive on return if the configuration is durable.

    Not by an engine, which has no thread to spare: the shards are under way, perhaps.

    Raises:
        StorageError: a system call failed; what is there of the file is the caller's to remove.
    """
    code, op = _engine.write_file(path, data, config.durable)
    if code:
        raise StorageError(code, op, path, 0, len(data))
