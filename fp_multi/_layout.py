"""Where bytes go in a file and which requests fetch them back: pure, and the only Python module that aligns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

PAGE = 4096
"""Direct I/O works on whole pages: offsets, lengths and addresses."""
DIRECT_MIN_NBYTES = 256 << 10
"""Smaller parts are not worth a request of their own: they travel with their neighbours through a staging block."""
BRIDGE_NBYTES = 128 << 10
"""A gap up to this size is read along: cheaper than another request."""

_CHUNKS = 256 << 10
_MIN_CHUNK_NBYTES = 32 << 10
_MAX_CHUNK_NBYTES = 4 << 20


def align_down(value: int, unit: int = PAGE) -> int:
    """Largest multiple of ``unit`` (a power of two) that is at most ``value``."""
    return value & ~(unit - 1)


def align_up(value: int, unit: int = PAGE) -> int:
    """Smallest multiple of ``unit`` (a power of two) that is at least ``value``."""
    return (value + unit - 1) & ~(unit - 1)


@dataclass(frozen=True, slots=True)
class DataLayout:
    """The data part of a shard: which tensor lies where, counted from the start of the data."""

    order: list[int]
    """Tensor indices in file order."""
    begins: list[int]
    """Begin of each tensor of ``order``; the tensors are back to back."""
    nbytes: int


def lay_out(sizes: Sequence[int]) -> DataLayout:
    """Order tensors so that those of whole pages stay aligned (docs/format.md rule 2.7).

    Args:
        sizes: bytes of each tensor, in tree order.
    """
    paged = [i for i, n in enumerate(sizes) if n and n % PAGE == 0]
    rest = [i for i, n in enumerate(sizes) if not n or n % PAGE]
    order = paged + rest
    begins = []
    at = 0
    for i in order:
        begins.append(at)
        at += sizes[i]
    return DataLayout(order, begins, at)


def chunk_nbytes_for(nbytes: int, chunk_bytes: int) -> int:
    """How many bytes one checksum covers in a checkpoint.

    Whoever reads a part of a tensor reads the chunks that it touches, so small ones save reading; each costs about ten
    bytes in the manifest.

    Args:
        nbytes: of all tensors.
        chunk_bytes: the setting; 0 leaves the choice to the size of the checkpoint.
    """
    if chunk_bytes:
        return chunk_bytes
    wanted = -(-nbytes // _CHUNKS)
    return min(max(1 << (wanted - 1).bit_length() if wanted else 1, _MIN_CHUNK_NBYTES), _MAX_CHUNK_NBYTES)


def chunk_sizes(nbytes: int, chunk_nbytes: int) -> Iterator[int]:
    """Lengths of the checksum chunks of a piece."""
    full, rest = divmod(nbytes, chunk_nbytes)
    for _ in range(full):
        yield chunk_nbytes
    if rest:
        yield rest


def chunk_table(sizes: Sequence[int], chunk_nbytes: int) -> npt.NDArray[np.uint64]:
    """:func:`chunk_sizes` of many pieces, one after the other: a big state has more chunks than Python counts fast."""
    nbytes = np.array(sizes, np.int64)
    nbytes = nbytes[nbytes > 0]
    counts = -(-nbytes // chunk_nbytes)
    ends = np.cumsum(counts)
    chunks = np.full(ends[-1] if len(ends) else 0, chunk_nbytes, np.uint64)
    chunks[ends - 1] = nbytes - (counts - 1) * chunk_nbytes
    return chunks


def chunk_count(nbytes: int, chunk_nbytes: int) -> int:
    """Number of checksum chunks of a piece."""
    return -(-nbytes // chunk_nbytes)


def _split(begin: int, end: int, block_bytes: int) -> I64:
    starts = np.arange(begin, end, block_bytes, dtype=np.int64)
    return np.stack([starts, np.minimum(starts + block_bytes, end) - starts], axis=1)


def _direct(segments: I64, chunks: I64) -> npt.NDArray[np.bool_]:
    """Which segments can be read by the drive straight into their final memory."""
    offset, nbytes, address = segments.T
    able: npt.NDArray[np.bool_] = (offset % PAGE == 0) & (nbytes % PAGE == 0) & (address % PAGE == 0)
    able &= nbytes >= DIRECT_MIN_NBYTES
    if len(chunks) and able.any():
        # A chunk that reaches over the edge of the segment needs its neighbours' bytes in the same pass.
        starts, ends = chunks[:, 0], chunks[:, 0] + chunks[:, 1]
        for edge in (offset, offset + nbytes):
            i = np.searchsorted(starts, edge, side="left") - 1
            able &= (i < 0) | (ends[np.maximum(i, 0)] <= edge)
    return able


def plan_reads(segments: I64, chunks: I64, block_bytes: int, file_nbytes: int) -> I64:
    """Turn wanted ranges into requests: large aligned ones straight to memory, the rest merged into blocks.

    Args:
        segments: shape (n, 3): file offset, nbytes, memory address; sorted by offset, disjoint.
        chunks: shape (m, 2): offset and nbytes of the checksum chunks that must be covered; sorted, disjoint.
        block_bytes: the longest request.
        file_nbytes: the length of the file.

    Returns:
        Shape (k, 3): file offset, nbytes, and the memory address or 0 for "through a staging block"; sorted, disjoint.
    """
    direct = _direct(segments, chunks)
    parts = []
    for offset, nbytes, address in segments[direct].tolist():
        ops = _split(offset, offset + nbytes, block_bytes)
        parts.append(np.column_stack([ops, ops[:, 0] - offset + address]))

    staged = segments[~direct, :2]
    if direct.any() and len(chunks):
        covered = segments[direct]
        i = np.searchsorted(covered[:, 0], chunks[:, 0], side="right") - 1
        inside = (i >= 0) & (chunks[:, 0] < covered[i, 0] + covered[i, 1])
        chunks = chunks[~inside]
    ranges = np.concatenate([staged, chunks])
    if len(ranges):
        ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
        ends = np.maximum.accumulate(ranges[:, 0] + ranges[:, 1])
        cut = np.flatnonzero(ranges[1:, 0] > ends[:-1] + BRIDGE_NBYTES)
        begins = ranges[np.concatenate([[0], cut + 1]), 0]
        finishes = ends[np.concatenate([cut, [len(ends) - 1]])]
        for begin, end in zip(begins.tolist(), finishes.tolist(), strict=True):
            ops = _split(align_down(begin), min(align_up(end), file_nbytes), block_bytes)
            parts.append(np.column_stack([ops, np.zeros(len(ops), np.int64)]))
    if not parts:
        return np.empty((0, 3), np.int64)
    ops = np.concatenate(parts)
    return ops[np.argsort(ops[:, 0], kind="stable")]


def shared_runs(
    length: Sequence[int], frames: Sequence[tuple[Sequence[int], Sequence[int]]], itemsize: int
) -> tuple[list[I64], int]:
    """Where a box's bytes lie in several tensors or boxes around it, in runs that are contiguous in each.

    Args:
        length: of the box, on each axis.
        frames: for each its shape, and where the box starts in it.
        itemsize: bytes of an element.

    Returns:
        For each frame the byte offsets of the runs in its C-order bytes, in the box's C order; and the length of a run.
    """
    run = itemsize
    axis = len(length)
    while axis > 0:
        axis -= 1
        run *= length[axis]
        if any([shape[axis] != length[axis] for shape, _ in frames]):
            break
    return [_run_offsets(length, axis, shape, start, itemsize) for shape, start in frames], run


def _run_offsets(length: Sequence[int], axis: int, shape: Sequence[int], start: Sequence[int], itemsize: int) -> I64:
    # Axes before `axis` are walked one index at a time; the run starts at the box's corner on `axis` and behind.
    at, step = 0, itemsize
    offsets = np.array([0], np.int64)
    for i in range(len(length) - 1, -1, -1):
        at += start[i] * step
        if i < axis:
            offsets = (np.arange(length[i], dtype=np.int64)[:, None] * step + offsets[None, :]).ravel()
        step *= shape[i]
    return offsets + at


def touched_chunks(offsets: I64, run: int, chunk_nbytes: int, nbytes: int) -> I64:
    """Which checksum chunks of a piece runs of bytes touch, in order.

    Args:
        offsets: where the runs begin in the piece.
        run: bytes of each.
        chunk_nbytes: bytes of a chunk.
        nbytes: of the piece.
    """
    edges = np.zeros(chunk_count(nbytes, chunk_nbytes) + 1, np.int64)
    np.add.at(edges, offsets // chunk_nbytes, 1)
    np.add.at(edges, (offsets + run - 1) // chunk_nbytes + 1, -1)
    return np.flatnonzero(np.cumsum(edges[:-1])).astype(np.int64)
