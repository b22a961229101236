"""One rank's part of a state, for hosts with a directory and a commit of their own (Orbax, for instance)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fp_multi import _commit, _engine, _writer
from fp_multi._contents import lay_out_shard
from fp_multi._format import encode_manifest
from fp_multi._hidden import MANIFEST
from fp_multi._layout import chunk_nbytes_for
from fp_multi._part import PartWrite, Skeleton, combine, decode_part, encode_part, tensor_heads
from fp_multi._plan import plan_part
from fp_multi._tree import describe
from fp_multi.config import SaveConfig
from fp_multi.errors import CommError, StorageError


class StatePart:
    """What one rank writes of a state. Making it is the short part: it describes the state, and keeps its memory.

    Args:
        state: as for :func:`fp_multi.save`, the same on every rank but for what tensors hold where.
        rank: of this process.
        size: number of ranks.
        writers: the ranks that write what several have; None for all.
        allow_pickle: as for :func:`fp_multi.save`.

    Raises:
        UnsupportedLeafError: a leaf cannot be stored.
    """

    def __init__(
        self,
        state: Any,
        *,
        rank: int = 0,
        size: int = 1,
        writers: Sequence[int] | None = None,
        allow_pickle: bool = False,
    ) -> None:
        self._described = describe(state, allow_pickle=allow_pickle)
        self._plan = plan_part(self._described, rank=rank, size=size, writers=writers)
        self._rank = rank

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all ranks."""
        return self._plan.nbytes

    @property
    def written_nbytes(self) -> int:
        """Bytes that this rank writes."""
        return sum([contents.nbytes for contents in self._plan.contents])

    def write(self, directory: str | os.PathLike[str], config: SaveConfig = SaveConfig(), *, slot: int = 0) -> bytes:
        """Write this rank's shards; they are on the drive on return.

        Args:
            directory: where the checkpoint is put together; it exists, and is the same for all ranks.
            config: how to write.
            slot: parts in different slots are written at the same time.

        Returns:
            The receipt, for :func:`combine_parts`.

        Raises:
            NoSpaceError: the file system has not the room; nothing has been written.
            StorageError: the operating system refused an operation.
        """
        path = os.fspath(directory)
        layouts = [lay_out_shard(contents) for contents in self._plan.contents]
        _commit.require_space(path, sum([layout.nbytes for layout in layouts]))
        part = PartWrite(
            path,
            layouts,
            config,
            chunk_nbytes=chunk_nbytes_for(self._plan.nbytes, config.chunk_bytes),
            rank=self._rank,
            slot=slot,
            plan_crc32c=self._plan.crc32c,
            skeleton=None if self._rank else Skeleton(self._described.tree, tensor_heads(self._described)),
        ).finish()
        return encode_part(part)


def combine_parts(
    directory: str | os.PathLike[str],
    parts: Sequence[bytes],
    *,
    metadata: Mapping[str, str] | None = None,
    config: SaveConfig = SaveConfig(),
) -> None:
    """Make a directory of shards a checkpoint: write its manifest and flush the directory.

    Args:
        directory: where the parts were written.
        parts: the receipts of all ranks.
        metadata: strings to keep with it.
        config: how to write.

    Raises:
        CommError: the parts do not belong together, or a shard is not here.
        StorageError: the operating system refused an operation.

    Example:
        >>> import os, numpy as np, fp_multi as fp
        >>> os.makedirs("mine", exist_ok=True)
        >>> receipt = fp.StatePart({"w": np.ones(3)}).write("mine")
        >>> fp.combine_parts("mine", [receipt])
        >>> fp.load("mine")["w"]
        array([1., 1., 1.])
    """
    path = os.fspath(directory)
    known = sorted([decode_part(data) for data in parts], key=lambda part: part.rank)
    if not known or known[0].skeleton is None or len({part.rank for part in known}) != len(known):
        raise CommError(f"{path}: expected one part of each rank from 0, found ranks {[part.rank for part in known]}")
    skeleton = known[0].skeleton
    manifest = combine(path, skeleton.tree, skeleton.tensors, known, metadata or {})
    _writer.write_bytes(os.path.join(path, MANIFEST), encode_manifest(manifest, _engine.crc32c), config)
    if config.durable:
        code = _engine.fsync_path(path)
        if code:
            raise StorageError(code, "fsync", path)
