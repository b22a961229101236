"""How the ranks of a DCP save work in one hidden directory, and how the coordinator makes it the checkpoint.

The protocol is docs/commit.md. Every rank knows the directory's name from its orders, and holds it locked while it
writes, the coordinator until the checkpoint is there. No rank hears whether another one failed (DCP tells its caller,
not the storage), so whoever fails removes the directory, and what the coordinator still holds then is dropped by its
writer's next save, or when the writer is.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import Any, Self

from fp_multi.config import SaveConfig
from fp_multi.errors import CheckpointExistsError, StorageError
from fp_multi.storage import (
    DirectoryCommit,
    MemberCommit,
    claim,
    is_checkpoint,
    make_parents,
    mkdir,
    remove_tree,
    translated,
    unlock,
)

from ._dcp_keep import Keeper, others_in, take_on

_busy: dict[str, CoordinatorCommit | RankCommit] = {}
"""By directory: who works in it in this process. One that its thread has left may be replaced."""
_seen: dict[str, None] = {}
"""Tokens with which this process has taken part in saves."""
_busy_lock = threading.Lock()  # guards both

_MOST_SEEN = 256


class _Owned:
    """A working directory of one save that this process knows again, whatever happens to its name."""

    directory: str
    target: str
    published: bool
    _lock: int | None

    def _take(self) -> None:
        self._pid = os.getpid()
        self._thread = threading.current_thread()
        with _busy_lock:
            other = _busy.get(self.directory)
            if other is not None:
                if other._thread is not self._thread and other._thread.is_alive():
                    raise StorageError(
                        errno.EBUSY, "save", self.target, hint="another save to this path is under way in this process"
                    )
                other._drop()
            _busy[self.directory] = self  # type: ignore[assignment]

    def _drop(self) -> None:
        """Remove the directory unless it is the checkpoint by now, or somebody else's; give the lock back."""
        if self._lock is None or self._pid != os.getpid():
            return
        if not self.published and self.is_ours():
            remove_tree(self.directory)
        unlock(self._lock)
        self._lock = None

    def _leave(self) -> None:
        self._drop()
        with _busy_lock:
            if _busy.get(self.directory) is self:
                del _busy[self.directory]

    def is_ours(self) -> bool:
        """Whether the name still stands for the directory that is locked here."""
        try:
            return self._lock is not None and os.path.samestat(os.fstat(self._lock), os.stat(self.directory))
        except OSError:
            return False


class CoordinatorCommit(_Owned, DirectoryCommit):
    """The coordinator's side: entered before any rank writes, and published by ``finish``."""

    def __enter__(self) -> Self:
        self._take()
        self._keeper = Keeper(self.directory)
        early = None
        try:
            with translated("prepare", self.target):
                self._check_target()
                make_parents(self.parent, durable=self.config.durable)
                # Locked before the sweep: where a planner has a plan cache of its own, a rank may have written already.
                mkdir(self.directory)
                early = claim(self.directory, shared=True)
            super().__enter__()
            with translated("prepare", self.target):
                self._keeper.keep(self.target, self.directory, is_early=True)
            return self
        except BaseException:
            if early is not None and self._lock is None:
                remove_tree(self.directory)
            self._leave()
            raise
        finally:
            if early is not None:
                unlock(early)

    def _check_target(self) -> None:
        check_target(self.target, overwrite=self.overwrite)

    def _swap(self) -> str | None:
        if self._keeper.keep(self.target, self.directory):
            take_on(self.target, self.directory)
            self._fsync(self.directory)
        old: str | None = super()._swap()
        if old is not None:
            try:
                if self._keeper.keep(old, self.target):  # what came meanwhile
                    self._fsync(self.target)
            except BaseException:
                self._undo(old)
                raise
        return old

    def write_manifest(self, manifest: bytes) -> None:
        """See :meth:`DirectoryCommit.write_manifest`."""
        if not self.is_ours():
            raise StorageError(
                errno.ENOENT, "publish", self.directory, hint="a rank that failed, or another save, has removed it"
            )
        super().write_manifest(manifest)


class RankCommit(_Owned, MemberCommit):
    """Another rank's side, while it writes. It leaves what it wrote if ``published`` is set, and nothing otherwise."""

    is_new = True
    """Whether the coordinator must have made the directory: a rank that comes late must not make it again after another
    one has failed and removed it."""

    def _make_directory(self) -> None:
        if not self.is_new:
            return super()._make_directory()
        self._lock = claim(self.directory, shared=True)
        if self._lock is None:
            raise StorageError(
                errno.ENOENT,
                "open",
                self.directory,
                hint="the coordinator has made it, but it is not here: another rank failed meanwhile, or the ranks do "
                "not see one file system",
            )
        return None

    def __enter__(self) -> Self:
        self._take()
        try:
            return super().__enter__()
        except BaseException:
            self._leave()
            raise


def coordinate(path: str | os.PathLike[str], config: SaveConfig, *, overwrite: bool, nbytes: int, token: str) -> Any:
    """Make the directory of a save.

    Raises:
        CheckpointExistsError: the path exists.
        NoSpaceError: the file system has not the room.
        StorageError: the operating system refused an operation.
    """
    return CoordinatorCommit(path, config, overwrite=overwrite, nbytes=nbytes, token=token).__enter__()


def take_part(path: str | os.PathLike[str], config: SaveConfig, *, token: str) -> RankCommit:
    """Go to the directory that the coordinator has made; or makes, if the token comes from a cached plan.

    Raises:
        StorageError: it is not there, or the operating system refused an operation.
    """
    commit = RankCommit(path, config, nbytes=0, token=token)
    with _busy_lock:
        commit.is_new = token not in _seen
        _seen[token] = None
        while len(_seen) > _MOST_SEEN:
            del _seen[next(iter(_seen))]
    return commit.__enter__()


def check_target(target: str, *, overwrite: bool) -> None:
    """Refuse a place where nothing may be put, before any plan is made.

    Raises:
        CheckpointExistsError: something is there that may not be replaced, or could not stay.
        StorageError: it cannot be read.
    """
    if not os.path.lexists(target):
        return
    if is_checkpoint(target) and not overwrite:
        raise CheckpointExistsError(
            errno.EEXIST, "Checkpoint already exists and overwrite=False; choose another path", target
        )
    with translated("prepare", target):
        others_in(target)
