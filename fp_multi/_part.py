"""A rank's part of a checkpoint: its shards written, a receipt for them, and all receipts made into one manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from fp_multi import _engine, _writer
from fp_multi._collector import collector_paused
from fp_multi._contents import ShardLayout
from fp_multi._format import FORMAT, VERSION, Manifest, Piece, Shard, Tensor, Totals, manifest_fault
from fp_multi._types import Described, LeafSource, ShardReceipt
from fp_multi._version import WRITER
from fp_multi.config import SaveConfig
from fp_multi.errors import CommError


class Skeleton(msgspec.Struct, frozen=True):
    """What the manifest says beside the pieces; the first rank's counts."""

    tree: Any
    tensors: list[Tensor]


class Part(msgspec.Struct, frozen=True):
    """What one rank has written; small, and the same whichever way it travels to the rank that commits."""

    rank: int
    shards: list[Shard]
    tensors: list[int]
    """For each piece its tensor's index."""
    pieces: list[Piece]
    """``shard`` counts within this part."""
    receipts: list[ShardReceipt]
    chunk_nbytes: int
    plan_crc32c: int = 0
    """Of what the plan was made from: must be the same on every rank."""
    skeleton: Skeleton | None = None
    """Only where the part travels without the state."""
    tree: Any = None
    """This rank's tree, where the ranks' trees differ."""


def encode_part(part: Part) -> bytes:
    """A part as bytes, for a message or a file."""
    return msgspec.msgpack.encode(part)


def decode_part(data: bytes) -> Part:
    """Back.

    Raises:
        CommError: these are not the bytes of a part.
    """
    try:
        return msgspec.msgpack.decode(data, type=Part)
    except msgspec.MsgspecError as error:
        raise CommError(f"not the receipt of a part: {error}; do all ranks run one version?") from error


class PartWrite:
    """Shards being written by this process's engine; their sources must not change before they are staged.

    Args:
        directory: where the files go; it exists.
        shards: what they hold.
        config: how to write.
        chunk_nbytes: bytes that one checksum covers; the same on every rank.
        rank: of this process.
        reuse: by file name, a file in the directory that may be overwritten in place.
        slot: see :func:`fp_multi._writer.start_write`.
        spill_nbytes: a fence may come and copy at most so much.
        plan_crc32c: see :class:`Part`, like the next.
        skeleton: goes into the part, like the next.
        tree: this rank's.

    Raises:
        StorageError: the engine cannot take the work; what was started has been stopped.
    """

    def __init__(
        self,
        directory: str,
        shards: Sequence[ShardLayout],
        config: SaveConfig,
        *,
        chunk_nbytes: int,
        rank: int = 0,
        reuse: frozenset[str] = frozenset(),
        slot: int = 0,
        spill_nbytes: int = 0,
        plan_crc32c: int = 0,
        skeleton: Skeleton | None = None,
        tree: Any = None,
    ) -> None:
        self._tree = tree
        self._skeleton = skeleton
        self.directory = directory
        self.chunk_nbytes = chunk_nbytes
        self._rank = rank
        self._shards = shards
        self._plan_crc32c = plan_crc32c
        self._writes: list[_writer.PendingWrite] = []
        try:
            for shard in shards:
                with collector_paused():
                    self._writes.append(
                        _writer.start_write(
                            os.path.join(directory, shard.contents.file),
                            shard.header,
                            shard.parts(),
                            config,
                            sizes=shard.sizes(),
                            chunk_nbytes=chunk_nbytes,
                            reuse=shard.contents.file in reuse,
                            slot=slot,
                            spill_nbytes=spill_nbytes,
                        )
                    )
        except BaseException:
            self.abandon()
            raise

    @property
    def jobs(self) -> list[_engine.WriteJob]:
        """The engine's work, one job after the other, for progress and fences."""
        return [write.job for write in self._writes]

    @property
    def sizes(self) -> list[int]:
        """Length of each file, in the order of the jobs."""
        return [write.nbytes for write in self._writes]

    def staged(self, on_tick: Callable[[_engine.WriteJob], None] | None = None) -> Part:
        """Wait until the shards have been read and all checksums are known; the drive has a part of them to take.

        Args:
            on_tick: called about ten times a second; the write stops if it raises.

        Returns:
            The part, still without receipts.

        Raises:
            StorageError: a system call failed.
            CapabilityError: a capability that is switched on is not available.
        """
        try:
            with collector_paused():
                # Beside the write: everything but the checksums.
                pieces = [shard.pieces(number) for number, shard in enumerate(self._shards)]
            shards = []
            for shard, write, mine in zip(self._shards, self._writes, pieces, strict=True):
                crcs = write.checksums(on_tick)
                with collector_paused():
                    shard.fill_checksums(mine, crcs, self.chunk_nbytes)
                shards.append(Shard(shard.contents.file, write.nbytes, len(shard.header), crcs[0], self._rank))
        except BaseException:
            self.abandon()
            raise
        return Part(
            self._rank,
            shards,
            [tensor for shard in self._shards for tensor in shard.contents.tensors],
            [piece for mine in pieces for piece in mine],
            [],
            self.chunk_nbytes,
            self._plan_crc32c,
            self._skeleton,
            self._tree,
        )

    def finish(self, on_tick: Callable[[_engine.WriteJob], None] | None = None, *, part: Part | None = None) -> Part:
        """Wait until the shards are complete (and on the drive, if durable).

        Args:
            on_tick: called about ten times a second; the write stops if it raises.
            part: what :meth:`staged` has returned, if it was called.

        Raises:
            StorageError: a system call failed.
            CapabilityError: a capability that is switched on is not available.
        """
        part = part or self.staged(on_tick)
        try:
            part.receipts.extend([write.finish(on_tick) for write in self._writes])
        except BaseException:
            self.abandon()
            raise
        return part

    def abandon(self) -> None:
        """Stop; the files are the caller's to remove."""
        with ExitStack() as stack:
            for write in self._writes:
                stack.push(write.__exit__)


def tensor_heads(described: Described) -> list[Tensor]:
    """The manifest's tensors, still without pieces."""
    return [head(name, source) for name, source in zip(described.names, described.sources, strict=True)]


def head(name: str, source: LeafSource) -> Tensor:
    """The manifest's entry of a tensor, still without pieces."""
    attrs = dict(source.attrs) if source.attrs else {}
    return Tensor(name, source.dtype, list(source.shape), [], source.kind, attrs)


def assemble(tree: Any, tensors: list[Tensor], parts: Sequence[Part], metadata: Mapping[str, str]) -> Manifest:
    """Make the manifest of a checkpoint.

    Args:
        tree: the structure.
        tensors: from :func:`tensor_heads`; they get their pieces.
        parts: what all ranks wrote, by rank.
        metadata: what the user attached.
    """
    shards: list[Shard] = []
    nbytes = 0
    with collector_paused():
        for part in parts:
            for index, piece in zip(part.tensors, part.pieces, strict=True):
                piece.shard += len(shards)
                tensors[index].pieces.append(piece)
                nbytes += piece.nbytes
            shards.extend(part.shards)
        for tensor in tensors:
            if len(tensor.pieces) > 1:
                tensor.pieces.sort(key=_corner)
    return Manifest(
        format=FORMAT,
        version=VERSION,
        writer=WRITER,
        chunk_nbytes=parts[0].chunk_nbytes,
        shards=shards,
        tensors=tensors,
        tree=tree,
        metadata=dict(metadata),
        totals=Totals(len(tensors), nbytes, sum([shard.nbytes for shard in shards])),
    )


def combine(
    directory: str, tree: Any, tensors: list[Tensor], parts: Sequence[Part], metadata: Mapping[str, str]
) -> Manifest:
    """:func:`assemble`, with proof that the parts of several ranks make one checkpoint.

    Args:
        directory: where the shards are.
        tree: the structure.
        tensors: from :func:`tensor_heads`; they get their pieces.
        parts: by rank.
        metadata: what the user attached.

    Raises:
        CommError: the parts do not belong together, or a shard is not to be seen from here.
    """
    for part in parts:
        if part.plan_crc32c != parts[0].plan_crc32c:
            raise CommError(
                f"{directory}: rank {part.rank} has another state than rank {parts[0].rank}: paths, shapes, dtypes and "
                "shardings must be the same on all ranks, and change on all at once"
            )
        if part.chunk_nbytes != parts[0].chunk_nbytes:
            raise CommError(
                f"{directory}: rank {part.rank} has one checksum for {part.chunk_nbytes} bytes, rank {parts[0].rank} "
                f"for {parts[0].chunk_nbytes}; SaveConfig.chunk_bytes must be the same on all ranks"
            )
    manifest = assemble(tree, tensors, parts, metadata)
    fault = manifest_fault(manifest)
    if fault is not None:
        raise CommError(f"{directory}: what the ranks have written does not make a checkpoint: {fault}")
    for shard in manifest.shards:
        path = os.path.join(directory, shard.file)
        try:
            found = os.stat(path).st_size
        except OSError as error:
            raise CommError(
                f"{path}: rank {shard.rank} has written it, but here it is not ({error.strerror}); all ranks must save "
                "to one file system"
            ) from error
        if found != shard.nbytes:
            raise CommError(f"{path}: rank {shard.rank} has written {shard.nbytes} bytes, here it has {found}")
    return manifest


def _corner(piece: Piece) -> list[int]:
    return piece.box[0] if piece.box is not None else []
