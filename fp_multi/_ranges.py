"""From wanted boxes to ranges of the shards' bytes, and the checksum chunks that they touch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp_multi._boxes import intersect
from fp_multi._dtypes import itemsize
from fp_multi._format import Manifest, Piece, Tensor
from fp_multi._layout import I64, chunk_count, shared_runs, touched_chunks
from fp_multi._types import Box


class ShardChunks(NamedTuple):
    """Chunks of one shard, as arrays."""

    places: I64
    """Shape (n, 2): offset and nbytes."""
    expected: npt.NDArray[np.uint32]
    tensors: I64
    """Index of the tensor of each."""
    numbers: I64
    """Which chunk of its piece each is."""


class ShardRanges:
    """What to read from one shard."""

    def __init__(self, granule: int) -> None:
        self.segments: list[I64] = []
        self._granule = granule
        self._single: list[tuple[int, int, int, int]] = []
        self._several: list[tuple[Piece, int, I64]] = []

    def add_chunk(self, tensor: int, piece: Piece) -> None:
        """A piece that is one chunk."""
        self._single.append((piece.offset, piece.nbytes, piece.crc32c[0], tensor))

    def add_chunks(self, tensor: int, piece: Piece, numbers: I64) -> None:
        """Chunks of a piece, in order; some of them may have been added before."""
        self._several.append((piece, tensor, numbers))

    def chunks(self) -> ShardChunks:
        """All that was added, each once."""
        single = np.array(self._single, np.int64).reshape(-1, 4)
        parts = [np.column_stack([single, np.zeros(len(single), np.int64)])]
        for piece, tensor, numbers in self._several:
            begins = numbers * self._granule
            crcs = np.array(piece.crc32c, np.int64)[numbers]
            rest = np.minimum(piece.nbytes - begins, self._granule)
            parts.append(np.column_stack([begins + piece.offset, rest, crcs, np.full(len(numbers), tensor), numbers]))
        table = np.concatenate(parts)
        if self._several:
            table = table[np.unique(table[:, 0], return_index=True)[1]]
        return ShardChunks(table[:, :2].copy(), table[:, 2].astype(np.uint32), table[:, 3], table[:, 4])


class Request(NamedTuple):
    """A wanted part of a tensor."""

    tensor: int
    """Its index."""
    address: int
    """Memory that takes the part's bytes, in C order."""
    box: Box | None = None
    """Which part; None for all of it."""


def plan_ranges(manifest: Manifest, requests: Sequence[Request], *, verify: bool) -> dict[int, ShardRanges]:
    """Which bytes of which shards are wanted, and which chunks they touch.

    Args:
        manifest: a checked manifest.
        requests: what is wanted; no byte of the checkpoint twice.
        verify: whether the checksums of the chunks are wanted.

    Returns:
        By number of the shard.
    """
    plans: dict[int, ShardRanges] = {}
    whole: dict[int, list[tuple[int, int, int]]] = {}
    granule = manifest.chunk_nbytes
    for index, address, wanted in requests:
        tensor = manifest.tensors[index]
        for piece in tensor.pieces:
            if not piece.nbytes:
                continue
            runs = touched = None
            if piece.box is None and wanted is None:
                pass
            else:
                overlap = _overlap(tensor, piece, wanted)
                if overlap is None:
                    continue
                (in_piece, in_memory), run = overlap
                runs = np.column_stack([in_piece + piece.offset, np.full(len(in_piece), run), in_memory + address])
                if verify:
                    touched = touched_chunks(in_piece, run, granule, piece.nbytes)
            plan = plans.get(piece.shard)
            if plan is None:
                plan = plans[piece.shard] = ShardRanges(granule)
                whole[piece.shard] = []
            if runs is None:
                whole[piece.shard].append((piece.offset, piece.nbytes, address))
            else:
                plan.segments.append(runs)
            if not verify:
                continue
            if piece.nbytes <= granule and runs is None:
                plan.add_chunk(index, piece)
            else:
                numbers = np.arange(chunk_count(piece.nbytes, granule)) if touched is None else touched
                plan.add_chunks(index, piece, numbers)
    for shard, rows in whole.items():
        if rows:
            plans[shard].segments.append(np.array(rows, np.int64))
    return plans


def _overlap(tensor: Tensor, piece: Piece, wanted: Box | None) -> tuple[list[I64], int] | None:
    """The bytes of a piece that are wanted: where in the piece and in the memory, and the length of a run."""
    shape = tensor.shape
    corner = [0] * len(shape)
    stored = Box(tuple(corner), tuple(shape)) if piece.box is None else Box(tuple(piece.box[0]), tuple(piece.box[1]))
    frame: tuple[Sequence[int], Sequence[int]]
    if wanted is None:
        both, frame = stored, (shape, stored.start)
    else:
        found = intersect(stored, wanted)
        if found is None:
            return None
        both, frame = found, (wanted.length, _less(found.start, wanted.start))
    return shared_runs(both.length, [(stored.length, _less(both.start, stored.start)), frame], itemsize(tensor.dtype))


def _less(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x - y for x, y in zip(a, b, strict=True)]
