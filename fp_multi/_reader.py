"""Wanted ranges of a file -> bytes in memory, each chunk's CRC computed on the way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fp_multi import _engine, _engines
from fp_multi._layout import I64, plan_reads
from fp_multi.config import LoadConfig

_MAPPED_NBYTES = 1 << 20
"""Larger tensors get memory of their own from the kernel: page-aligned, so that the drive can write straight into
it."""


def allocate(sizes: list[int]) -> list[npt.NDArray[np.uint8]]:
    """Memory for loaded tensors; each owns its own, so that none keeps another's alive.

    Args:
        sizes: bytes of each.
    """
    empty = np.empty
    return [
        _engine.allocate(n) if n >= _MAPPED_NBYTES else empty(n, np.uint8)  # small ones: malloc
        for n in sizes
    ]


def addresses(buffers: list[npt.NDArray[np.uint8]]) -> I64:
    """The memory address of each buffer."""
    return np.frombuffer(_engine.addresses(buffers), np.int64)


class RangesRead:
    """Parts of one file on their way into memory. Several may be begun: they are carried out in order.

    Whoever begins one ends it, with :meth:`finish` or :meth:`abandon`: until then the drive writes into its memory.

    Args:
        path: the file.
        file_nbytes: its length.
        segments: (n, 3): file offset, nbytes and memory address of each wanted range; disjoint.
        chunks: (m, 2): file offset and nbytes of each range whose CRC is wanted; disjoint.
        config: how to read.
        keepalive: what owns the memory. If the ring breaks while the drive writes into it, it is never freed.
    """

    def __init__(
        self, path: str, file_nbytes: int, segments: I64, chunks: I64, config: LoadConfig, keepalive: object = None
    ) -> None:
        segments = segments[np.argsort(segments[:, 0], kind="stable")]
        self._order = np.argsort(chunks[:, 0], kind="stable")
        chunks = chunks[self._order]
        ops = plan_reads(segments, chunks, config.block_bytes, file_nbytes)
        self._nbytes = int(ops[:, 1].sum())
        self._job = _engines.engine("read").submit_read(
            path,
            ops.astype(np.uint64),
            segments.astype(np.uint64),
            chunks.astype(np.uint64),
            keepalive=keepalive,
            **_engines.options(config),
        )

    def finish(self, progress: Callable[[int], None] | None = None) -> tuple[npt.NDArray[np.uint32], int]:
        """Wait for it.

        Args:
            progress: called now and then with the number of bytes read.

        Returns:
            The CRC-32C of each chunk, in the order given; and how many bytes the drive gave for all of it.

        Raises:
            StorageError: a system call failed, or the file ended early.
            CapabilityError: a capability that is switched on is not available.
        """
        _engines.wait(self._job, None if progress is None else lambda running: progress(running.moved_nbytes))
        crcs = np.empty(len(self._order), np.uint32)
        crcs[self._order] = np.frombuffer(self._job.crcs(), np.uint32)
        return crcs, self._nbytes

    def cancel(self) -> None:
        """Let it stop soon, or not begin."""
        self._job.cancel()

    def abandon(self) -> None:
        """Stop it, whatever it has read; its memory is left alone from here on."""
        self.cancel()
        self._job.wait()


def read_ranges(
    path: str,
    file_nbytes: int,
    segments: I64,
    chunks: I64,
    config: LoadConfig,
    progress: Callable[[int], None] | None = None,
    keepalive: object = None,
) -> tuple[npt.NDArray[np.uint32], int]:
    """Read parts of one file into memory: :class:`RangesRead`, begun and finished."""
    return RangesRead(path, file_nbytes, segments, chunks, config, keepalive).finish(progress)
