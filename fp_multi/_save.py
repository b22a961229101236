"""One save on its way: planned and started by the constructor, completed by finish()."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from fp_multi import _commit, _engine, _recycle, _writer
from fp_multi._collector import collector_paused
from fp_multi._dtypes import safetensors_code, stored_shape
from fp_multi._format import (
    FORMAT,
    MAX_AXES,
    SHARD_METADATA,
    VERSION,
    Manifest,
    Piece,
    Shard,
    Tensor,
    Totals,
    encode_header,
    encode_manifest,
)
from fp_multi._layout import DataLayout, chunk_count, lay_out
from fp_multi._types import Described, SaveReport
from fp_multi._version import WRITER
from fp_multi.config import SaveConfig

_MANIFEST_NBYTES_A_TENSOR = 256
"""For the question whether there is room: a guess, the real size is known after the write."""


def shard_name(index: int, count: int) -> str:
    """File name of a shard."""
    return f"shard-{index:05d}-of-{count:05d}.safetensors"


class Saving:
    """A checkpoint being written by the engine.

    Args:
        described: the state, taken apart. Its sources must not change before they are staged.
        path: the directory to make.
        config: how to write.
        overwrite: replace a checkpoint that is there.
        metadata: checked strings to keep with it.
        begin_s: when the save was asked for (``time.perf_counter()``).
        reuse: the path of a shard that may be overwritten in place; its file moves into the new checkpoint.
        slot: saves in different slots are written at the same time, each by an engine of its own.
        spill_nbytes: a fence may come and copy at most so much.

    Raises:
        CheckpointExistsError: the path exists.
        NoSpaceError: the file system has not the room; nothing has been written.
        StorageError: the operating system refused an operation; the path is untouched.
    """

    def __init__(
        self,
        described: Described,
        path: str | os.PathLike[str],
        config: SaveConfig,
        *,
        overwrite: bool,
        metadata: Mapping[str, str],
        begin_s: float,
        reuse: str | None = None,
        slot: int = 0,
        spill_nbytes: int = 0,
    ) -> None:
        self.config = config
        self._slot = slot
        self.metadata = dict(metadata)
        self._begin_s = begin_s
        self._described = described
        self._file = shard_name(0, 1)
        with collector_paused():
            self._layout = lay_out([source.nbytes for source in described.sources])
            header = encode_shard_header(described, self._layout)
        self._header_nbytes = len(header)
        needed = len(header) + self._layout.nbytes + _MANIFEST_NBYTES_A_TENSOR * len(described.sources)
        nbytes = needed - (_recycle.reusable_nbytes(reuse) if reuse else 0)
        self._commit = _commit.DirectoryCommit(path, config, overwrite=overwrite, nbytes=max(nbytes, 0))
        self._commit.__enter__()
        try:
            target = os.path.join(self._commit.path, self._file)
            recycled = reuse is not None and _recycle.adopt(reuse, target)
            if reuse is not None and not recycled:
                _commit.require_space(self._commit.parent, needed)
            with collector_paused():
                sources = [described.sources[i] for i in self._layout.order]
                self._pending = _writer.start_write(
                    target, header, sources, config, reuse=recycled, slot=slot, spill_nbytes=spill_nbytes
                )
        except BaseException:
            self._commit.__exit__()
            raise
        self._planned_s = time.perf_counter()

    @property
    def job(self) -> _engine.WriteJob:
        """The engine's part, for progress and fences."""
        return self._pending.job

    @property
    def nbytes(self) -> int:
        """Length of the shard."""
        return self._pending.nbytes

    def finish(self) -> SaveReport:
        """Wait for the shard, write the manifest, and make the checkpoint appear.

        Raises:
            StorageError: the operating system refused an operation; the path is untouched.
            CapabilityError: a capability that is switched on is not available.
            CheckpointExistsError: somebody else created the path meanwhile.
        """
        layout = self._layout
        try:
            with collector_paused():
                # Beside the write: the manifest without its checksums.
                tensors = _describe_tensors(self._described, layout, self._header_nbytes)
            receipt, crcs = self._pending.finish()
            written_s = time.perf_counter()
            with collector_paused():
                _fill_checksums(tensors, layout, crcs, self.config.chunk_bytes)
            manifest = Manifest(
                format=FORMAT,
                version=VERSION,
                writer=WRITER,
                chunk_nbytes=self.config.chunk_bytes,
                shards=[Shard(self._file, receipt.nbytes, self._header_nbytes, crcs[0])],
                tensors=tensors,
                tree=self._described.tree,
                metadata=self.metadata,
                totals=Totals(len(tensors), layout.nbytes, receipt.nbytes),
            )
            manifest_receipt = self._commit.publish(encode_manifest(manifest, _engine.crc32c), self._slot)
        except BaseException:
            self.abandon()
            raise
        self._commit.__exit__()
        end_s = time.perf_counter()
        return SaveReport(
            path=self._commit.target,
            tensors=len(tensors),
            tensor_nbytes=layout.nbytes,
            file_nbytes=receipt.nbytes + manifest_receipt.nbytes,
            engine=receipt.engine,
            direct=receipt.direct,
            reasons=receipt.reasons,
            plan_s=self._planned_s - self._begin_s,
            write_s=receipt.open_s + receipt.write_s,
            fsync_s=receipt.fsync_s,
            commit_s=end_s - written_s,
            elapsed_s=end_s - self._begin_s,
            begin_s=self._begin_s,
            shards=(receipt,),
        )

    def abandon(self) -> None:
        """Stop, and remove what was written."""
        self._pending.__exit__()
        self._commit.__exit__()


def encode_shard_header(described: Described, layout: DataLayout) -> bytes:
    """The safetensors header of a shard that holds whole tensors."""
    entries = []
    codes: dict[str, str] = {}
    corners = [(0,) * axes for axes in range(MAX_AXES + 2)]
    names, sources = described.names, described.sources
    for i, at in zip(layout.order, layout.begins, strict=True):
        source = sources[i]
        dtype = source.dtype
        code = codes.get(dtype)
        if code is None:
            code = codes[dtype] = safetensors_code(dtype)
        shape = stored_shape(dtype, source.shape)
        entries.append((names[i], code, shape, at, at + source.nbytes, corners[len(shape)]))
    return encode_header(entries, SHARD_METADATA)


def _describe_tensors(described: Described, layout: DataLayout, data_begin: int) -> list[Tensor]:
    begins = dict(zip(layout.order, layout.begins, strict=True))
    return [
        Tensor(
            name,
            source.dtype,
            list(source.shape),
            [Piece(data_begin + begins[i], source.nbytes, [])],
            source.kind,
            dict(source.attrs) if source.attrs else {},
        )
        for i, (name, source) in enumerate(zip(described.names, described.sources, strict=True))
    ]


def _fill_checksums(tensors: list[Tensor], layout: DataLayout, crcs: list[int], chunk_nbytes: int) -> None:
    at = 1  # the header's comes first
    for i in layout.order:
        piece = tensors[i].pieces[0]
        count = chunk_count(piece.nbytes, chunk_nbytes)
        piece.crc32c = crcs[at : at + count]
        at += count
