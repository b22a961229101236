"""One save on its way: planned and started by the constructor, completed by finish()."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from fp_multi import _commit, _eager, _engine, _recycle
from fp_multi._collector import collector_paused
from fp_multi._contents import lay_out_shard
from fp_multi._format import Manifest, encode_manifest
from fp_multi._hidden import resolve
from fp_multi._layout import chunk_nbytes_for
from fp_multi._part import Part, PartWrite, assemble, combine, decode_part, encode_part, tensor_heads
from fp_multi._plan import TeamPlan, plan_part
from fp_multi._together import Together, Watch
from fp_multi._types import Described, SaveReport
from fp_multi.config import SaveConfig
from fp_multi.errors import CommError, EngineClosedError, StorageError

if TYPE_CHECKING:
    from fp_multi._round import Round

_log = logging.getLogger("fp_multi")
_MANIFEST_NBYTES_A_TENSOR = 256
"""For the question whether there is room: a guess, the real size is known after the write."""


class Saving:
    """A checkpoint being written by the engine.

    Args:
        described: the state, taken apart. Its sources must not change before they are staged.
        path: the directory to make.
        config: how to write.
        overwrite: replace a checkpoint that is there.
        metadata: checked strings to keep with it.
        begin_s: when the save was asked for (``time.perf_counter()``).
        reuse: by name, the paths of files that may be overwritten in place; one that has the name of a shard moves
            into the new checkpoint.
        slot: saves in different slots are written at the same time, each by an engine of its own.
        spill_nbytes: a fence may come and copy at most so much.
        team: the ranks that save this together, and the round in which they agree on it; whatever goes wrong here, the
            round hears of it.
        word: called when a checkpoint of a team is durable, by the rank that commits; all ranks find what it returns in
            ``word`` when the save is finished.

    Raises:
        CheckpointExistsError: the path exists.
        NoSpaceError: the file system has not the room; nothing has been written.
        StorageError: the operating system refused an operation; the path is untouched.
        CommError: another rank failed, or is gone.
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
        reuse: Mapping[str, str] | None = None,
        slot: int = 0,
        spill_nbytes: int = 0,
        team: Together | None = None,
        word: Callable[[], str] = str,
    ) -> None:
        self.config = config
        self.word = ""
        self._last_word = word
        self.metadata = dict(metadata)
        self._begin_s = begin_s
        self._team = None if team is None else team.team
        self._round = None if team is None else team.round
        self.recycled = False
        """Whether a file was overwritten in place."""
        self._commit: _commit.DirectoryCommit | _commit.MemberCommit | None = None
        self._write: PartWrite | None = None
        try:
            self._start(described, path, overwrite, reuse or {}, slot, spill_nbytes, team)
        except BaseException as error:
            self._give_up(error)
            raise
        self._planned_s = time.perf_counter()

    def _start(
        self,
        described: Described,
        path: str | os.PathLike[str],
        overwrite: bool,
        reuse: Mapping[str, str],
        slot: int,
        spill_nbytes: int,
        team: Together | None,
    ) -> None:
        if team is None:
            self._plan = TeamPlan(described, plan_part(described), (0,), "")
        else:
            prepared = team.prepare(described, self.config, os.path.dirname(resolve(path)))
            self._plan = team.team.plan(described, self.config, prepared)
        part = self._plan.part
        self._layouts = [lay_out_shard(contents) for contents in part.contents]
        needed = sum([layout.nbytes for layout in self._layouts])
        found = {name: old for name, old in reuse.items() if name in self._names}
        allocated = sum([_recycle.reusable_nbytes(old) for old in found.values()])
        self._commit = self._begin_commit(path, overwrite, needed, allocated, reuse)
        directory = self._commit.path
        adopted = [name for name, old in found.items() if _recycle.adopt(old, os.path.join(directory, name))]
        if len(adopted) < len(found):
            _commit.require_space(self._commit.parent, needed)
        self.recycled = bool(adopted)
        self._write = PartWrite(
            directory,
            self._layouts,
            self.config,
            chunk_nbytes=chunk_nbytes_for(part.nbytes, self.config.chunk_bytes),
            rank=0 if self._team is None else self._team.comm.rank,
            reuse=frozenset(adopted),
            slot=slot,
            spill_nbytes=spill_nbytes,
            plan_crc32c=part.crc32c,
            tree=self._plan.tree,
        )

    def _begin_commit(
        self,
        path: str | os.PathLike[str],
        overwrite: bool,
        needed: int,
        allocated: int,
        reuse: Mapping[str, str],
    ) -> _commit.DirectoryCommit | _commit.MemberCommit:
        manifest_nbytes = _MANIFEST_NBYTES_A_TENSOR * len(self._plan.described.sources)
        if self._team is None or self._round is None:
            nbytes = max(needed + manifest_nbytes - allocated, 0)
            return _commit.DirectoryCommit(path, self.config, overwrite=overwrite, nbytes=nbytes).__enter__()
        token = self._team.token(self._round)
        if not self._team.leads:
            member = _commit.MemberCommit(path, self.config, nbytes=max(needed - allocated, 0), token=token)
            member.files = tuple(self._names)
            return member.__enter__()
        commit = _commit.DirectoryCommit(path, self.config, overwrite=overwrite, nbytes=0, token=token)
        # For all ranks; some may have their space already, in the retired step or in the new directory.
        there = sum([_recycle.reusable_nbytes(old) for old in reuse.values()]) + _commit.allocated_nbytes(commit.path)
        commit.nbytes = max(max(needed, self._plan.part.nbytes) + manifest_nbytes - there, 0)
        return commit.__enter__()

    @property
    def _names(self) -> list[str]:
        return [layout.contents.file for layout in self._layouts]

    @property
    def jobs(self) -> list[_engine.WriteJob]:
        """The engine's part, one job for each shard, for progress and fences."""
        return [] if self._write is None else self._write.jobs

    @property
    def sizes(self) -> list[int]:
        """Length of each shard, in the order of the jobs."""
        return [layout.nbytes for layout in self._layouts]

    @property
    def nbytes_here(self) -> int:
        """Bytes of tensors that this process writes."""
        return sum([layout.data.nbytes for layout in self._layouts])

    @property
    def copied_nbytes(self) -> int:
        """Bytes of tensors that fences have copied and that were not copies before; known when it is finished."""
        return sum(
            [
                _eager.copied_at_fence(layout, job.stats["copied_nbytes"])
                for layout, job in zip(self._layouts, self.jobs, strict=True)
            ]
        )

    def finish(self) -> SaveReport:
        """Wait for the shards, write the manifest, and make the checkpoint appear.

        Raises:
            StorageError: the operating system refused an operation; the path is untouched.
            CapabilityError: a capability that is switched on is not available.
            CheckpointExistsError: somebody else created the path meanwhile.
            CommError: another rank failed, or is gone.
        """
        if self._write is None or self._commit is None:
            raise EngineClosedError("the save was given up")
        try:
            if isinstance(self._commit, _commit.DirectoryCommit):
                with collector_paused():
                    self._tensors = tensor_heads(self._plan.described)  # beside the write
            if self._round is not None:
                part = self._write.finish(Watch(self._round))
                written_s = time.perf_counter()
                file_nbytes = self._agree(self._round, part)
            elif isinstance(self._commit, _commit.DirectoryCommit):
                part = self._write.staged()
                manifest = self._manifest_of([part])
                encoded = encode_manifest(manifest, _engine.crc32c)
                self._commit.write_manifest(encoded)  # beside the end of the shards
                self._write.finish(part=part)
                written_s = time.perf_counter()
                self._commit.publish()
                file_nbytes = manifest.totals.shard_nbytes + len(encoded)
            else:
                raise EngineClosedError("only the first rank publishes")
        except BaseException as error:
            self._give_up(error)
            raise
        self._end()
        end_s = time.perf_counter()
        receipts = part.receipts
        first = receipts[0] if receipts else None
        return SaveReport(
            path=self._commit.target,
            tensors=len(self._plan.described.sources),
            tensor_nbytes=self._plan.part.nbytes,
            file_nbytes=file_nbytes,
            engine=first.engine if first else "",
            direct=first.direct if first else False,
            reasons=first.reasons if first else (),
            plan_s=self._planned_s - self._begin_s,
            write_s=sum([receipt.open_s + receipt.write_s for receipt in receipts]),
            fsync_s=sum([receipt.fsync_s for receipt in receipts]),
            commit_s=end_s - written_s,
            elapsed_s=end_s - self._begin_s,
            begin_s=self._begin_s,
            shards=tuple(receipts),
            writers=self._plan.writers,
            writers_reason=self._plan.reason,
        )

    def _agree(self, round_: Round, part: Part) -> int:
        """Hand in this rank's part and wait for what becomes of it; returns the bytes of all files."""
        commit = self._commit
        if isinstance(commit, _commit.MemberCommit):
            # From here on the files may be part of a checkpoint at any moment: only the first rank's no gives them
            # back.
            commit.published = True
        round_.post(encode_part(part))
        if not isinstance(commit, _commit.MemberCommit):
            file_nbytes = self._publish([decode_part(receipt) for receipt in round_.collect()])
            self._tell(round_, file_nbytes)
            return file_nbytes
        try:
            file_nbytes, self.word = msgspec.msgpack.decode(round_.outcome(), type=tuple[int, str])
        finally:
            commit.published = not round_.rejected
        return file_nbytes

    def _tell(self, round_: Round, file_nbytes: int) -> None:
        """The checkpoint is there and durable, whatever happens now: what fails here is logged."""
        try:
            self.word = self._last_word()
        except Exception as error:
            _log.warning("%s is complete; but after it: %s", self._commit and self._commit.target, error)
        try:
            round_.decide(msgspec.msgpack.encode((file_nbytes, self.word)))
        except CommError as error:
            _log.warning("%s is complete; but the others do not know: %s", self._commit and self._commit.target, error)

    def _publish(self, parts: Sequence[Part]) -> int:
        """Write the manifest and make the checkpoint appear; returns the bytes of all files."""
        if not isinstance(self._commit, _commit.DirectoryCommit):
            raise EngineClosedError("only the first rank publishes")
        manifest = self._manifest_of(parts)
        encoded = encode_manifest(manifest, _engine.crc32c)
        self._commit.write_manifest(encoded)
        self._commit.publish()
        return manifest.totals.shard_nbytes + len(encoded)

    def _manifest_of(self, parts: Sequence[Part]) -> Manifest:
        tree = self._plan.described.tree
        if self._team is None or self._commit is None:
            return assemble(tree, self._tensors, parts, self.metadata)
        if self._plan.union is not None:
            tree = self._team.tree_of_all([part.tree for part in parts], self._plan)
        return combine(self._commit.path, tree, self._tensors, parts, self.metadata)

    def _give_up(self, error: BaseException) -> None:
        """Stop; raise what another rank met first, if this error is but a consequence of it: the directory is gone."""
        first = None
        if self._round is not None and isinstance(error, StorageError):
            with suppress(CommError):
                first = self._round.failed()
        self.abandon(error)
        if self._team is not None:
            self._team.forget()
        if first is not None:
            raise first from error

    def abandon(self, error: BaseException | None = None) -> None:
        """Stop, and remove what was written.

        Args:
            error: why, for the other ranks.
        """
        if self._write is not None:
            self._write.abandon()
        if self._round is not None:
            self._round.fail(error or EngineClosedError("the save was given up"))
        self._end()

    def _end(self) -> None:
        if self._commit is not None:
            self._commit.__exit__()
        if self._round is not None:
            self._round.close()
