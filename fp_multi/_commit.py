"""Atomic and durable appearance of a checkpoint directory or a single file.

The protocol is docs/commit.md; the numbers in the comments are its steps. A reader sees the old checkpoint or the new
one, never a part, whatever moment the process, the machine or the drive stops at.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from typing import Self

from fp_multi import _engine, _writer
from fp_multi._hidden import MANIFEST as MANIFEST
from fp_multi._hidden import claim, held, is_at, is_checkpoint, sweep, translated, unlock
from fp_multi._hidden import find as find
from fp_multi._hidden import identity as identity
from fp_multi._hidden import remove_tree as remove_tree
from fp_multi._hidden import resolve as resolve
from fp_multi._hidden import work_name as work_name
from fp_multi.config import SaveConfig
from fp_multi.errors import CheckpointExistsError, NoSpaceError, StorageError

_NOREPLACE = 1
_EXCHANGE = 2
_NO_RENAMEAT2 = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_CLAIM_TRIES = 100
_CLAIM_PAUSE_S = 0.02


def _check(code: int, op: str, path: str) -> None:
    if code:
        raise StorageError(code, op, path)


def make_parents(parent: str, *, durable: bool) -> None:
    """Make the directories above a checkpoint."""
    missing = []
    at = parent
    while not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    for path in reversed(missing):
        code = _engine.mkdir(path)
        if code != errno.EEXIST:
            _check(code, "mkdir", path)
        elif not os.path.isdir(path):
            raise StorageError(errno.ENOTDIR, "mkdir", path)
        if durable:
            _check(_engine.fsync_path(os.path.dirname(path)), "fsync", os.path.dirname(path))


def require_space(directory: str, nbytes: int) -> None:
    """Raise before anything is written if the file system has not the room.

    Raises:
        NoSpaceError: with the bytes needed and free.
    """
    with translated("statvfs", directory):
        stat = os.statvfs(directory)
    free = (stat.f_bavail if os.geteuid() else stat.f_bfree) * stat.f_frsize
    if nbytes > free:
        raise NoSpaceError(directory, nbytes, free)


def allocated_nbytes(directory: str) -> int:
    """Bytes on the drive that the files of a directory have; 0 if there is none."""
    total = 0
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            total += entry.stat().st_blocks * 512
    return total


class _Work:
    """What directory and file commits share: a hidden directory beside the target, locked while the save runs."""

    def __init__(
        self, path: str | os.PathLike[str], config: SaveConfig, *, nbytes: int, token: str | None = None
    ) -> None:
        self.target = resolve(path)
        self.parent = os.path.dirname(self.target)
        self.config = config
        self.nbytes = nbytes
        self.directory = work_name(self.target, "tmp", token)
        self._shared = token is not None
        self.published = False
        self._lock: int | None = None

    def _check_target(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        with translated("prepare", self.target):
            self._prepare()
            require_space(self.parent, self.nbytes)
            try:
                self._make_directory()
            except BaseException:
                self._leave()
                raise
        return self

    def _prepare(self) -> None:
        """What comes before the question whether there is room."""
        self._check_target()
        make_parents(self.parent, durable=self.config.durable)
        with suppress(FileNotFoundError):
            os.lstat(self.target)  # a name that cannot be is refused now, not after everything is written
        sweep(self.target, keep=self.directory if self._shared else None)
        self._check_target()  # an old checkpoint may have been put back

    def _make_directory(self) -> None:
        for _ in range(_CLAIM_TRIES):
            code = _engine.mkdir(self.directory)
            if not (self._shared and code == errno.EEXIST):
                _check(code, "mkdir", self.directory)  # step 3
            self._lock = claim(self.directory, shared=self._shared)
            if self._lock is not None:
                return
            if self._shared:
                time.sleep(_CLAIM_PAUSE_S)  # a sweep looks at it: over in a moment
            else:
                self.directory = work_name(self.target, "tmp")
        raise StorageError(errno.EBUSY, "lock", self.directory)

    def _leave(self) -> None:
        if not self.published:
            remove_tree(self.directory)
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def __exit__(self, *exception: object) -> None:
        self._leave()

    def _fsync(self, path: str) -> None:
        if self.config.durable:
            _check(_engine.fsync_path(path), "fsync", path)


class _Replacing(_Work):
    """What the two have in common that make a directory, which may have to take another one's place."""

    @property
    def path(self) -> str:
        """The directory that becomes the target."""
        return self.directory

    def _put_in_place(self) -> str | None:
        """Give ``path`` the target's name, for good; returns where what was replaced is now.

        Raises:
            StorageError: a step failed; the target is untouched.
            CheckpointExistsError: somebody else created the target meanwhile.
        """
        # What is replaced stays locked, and so out of every sweep, until its successor is durable.
        with held(self.target):
            with translated("rename", self.target):
                old = self._swap()
            self.published = True
            try:
                self._fsync(self.parent)
            except StorageError:
                self.published = not self._undo(old)
                raise
        return old

    def _swap(self) -> str | None:
        code = _engine.rename(self.path, self.target, _NOREPLACE)
        if code in _NO_RENAMEAT2 and not os.path.lexists(self.target):
            code = _engine.rename(self.path, self.target)
        if code == 0:
            return None
        if code not in _NO_RENAMEAT2 | {errno.EEXIST, errno.ENOTEMPTY}:
            _check(code, "rename", self.target)
        self._check_target()  # what is there now may be replaced, or this raises
        if not os.path.isdir(self.target) or not os.listdir(self.target):
            _check(_engine.rename(self.path, self.target), "rename", self.target)
            return None
        code = _engine.rename(self.path, self.target, _EXCHANGE)
        if code in _NO_RENAMEAT2:
            self._swap_in_two_steps()
        else:
            _check(code, "rename", self.target)
        return self.path  # where the new one was

    def _swap_in_two_steps(self) -> None:
        # 8b: for a moment there is no checkpoint under the name; find() and sweep() know where the old one is then.
        old = work_name(self.target, "old")
        with held(self.target):  # a sweep must not put it back meanwhile
            _check(_engine.rename(self.target, old), "rename", self.target)
            try:
                _check(_engine.rename(self.path, self.target), "rename", self.target)
            except BaseException:
                _engine.rename(old, self.target)
                raise
            # Under this name a half removed one is not taken for a checkpoint.
            _check(_engine.rename(old, self.path), "rename", self.path)

    def _undo(self, old: str | None) -> bool:
        """Give the name back to what was there; False where that fails: both are left as they are."""
        if old is None:
            code = _engine.rename(self.target, self.path, _NOREPLACE)
            return (_engine.rename(self.target, self.path) if code in _NO_RENAMEAT2 else code) == 0
        code = _engine.rename(self.target, old, _EXCHANGE)
        if code not in _NO_RENAMEAT2:
            return code == 0
        aside = work_name(self.target, "tmp")
        if _engine.rename(self.target, aside):
            return False
        if _engine.rename(old, self.target):
            _engine.rename(aside, self.target)
            return False
        return _engine.rename(aside, self.path) == 0


class DirectoryCommit(_Replacing):
    """One checkpoint on its way: write shards into ``path``, then :meth:`publish`.

    Leaving the ``with`` block without publishing removes everything that was written.

    Args:
        path: the checkpoint.
        config: whether to flush.
        overwrite: replace a checkpoint that is there.
        nbytes: what it will take.
        token: where several processes write: what they agree on for the name of the directory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: SaveConfig,
        *,
        overwrite: bool,
        nbytes: int,
        token: str | None = None,
    ) -> None:
        super().__init__(path, config, nbytes=nbytes, token=token)
        self.overwrite = overwrite

    def _check_target(self) -> None:
        if not os.path.lexists(self.target):
            return
        if os.path.isdir(self.target):
            if is_checkpoint(self.target):
                if self.overwrite:
                    return
                raise CheckpointExistsError(
                    errno.EEXIST,
                    "a checkpoint exists; pass overwrite=True to replace it",
                    self.target,
                )
            if not os.listdir(self.target):
                return  # rename replaces an empty directory
        raise CheckpointExistsError(errno.EEXIST, "exists and is not a checkpoint: nothing is replaced", self.target)

    def write_manifest(self, manifest: bytes) -> None:
        """Write and flush ``manifest.json`` (step 5), perhaps while the drive still takes the end of the shards.

        Raises:
            StorageError: it failed.
        """
        _writer.write_bytes(os.path.join(self.path, MANIFEST), manifest, self.config)

    def publish(self) -> None:
        """Make the directory, which is complete, visible (steps 6 to 9).

        Raises:
            StorageError: a step failed; the target is untouched.
            CheckpointExistsError: somebody else created the target meanwhile.
        """
        self._fsync(self.path)  # the names of the files; their bytes are flushed already
        old = self._put_in_place()
        if old is not None:
            remove_tree(old)  # step 9: only after the new one is durable


class MemberCommit(_Work):
    """The same for a process that writes shards into a checkpoint that another one publishes.

    Leaving the ``with`` block removes what this process wrote, unless ``published`` is set: the publishing process has
    the files then, and only it can give them back.
    """

    files: tuple[str, ...] = ()
    """Names of the files that this process writes."""

    def _prepare(self) -> None:
        # The rest is the publisher's: its sweep knows what is in use, and what may be replaced is its affair.
        make_parents(self.parent, durable=self.config.durable)

    @property
    def path(self) -> str:
        """The directory that becomes the checkpoint."""
        return self.directory

    def _leave(self) -> None:
        # The directory is that of all. The publisher removes it if the save fails; a process that comes late makes it
        # again, and is the one that has to remove it then.
        if not self.published and self._lock is not None:
            with suppress(OSError):
                # After an exchange another directory has the hidden name: the checkpoint that was replaced.
                if is_at(self._lock, self.directory):
                    for name in self.files:
                        _engine.unlink(os.path.join(self.directory, name))
                    os.rmdir(self.directory)
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None


class FileCommit(_Work):
    """One file on its way: write to ``path``, then :meth:`publish`. An existing file is replaced atomically."""

    @property
    def path(self) -> str:
        """The file that becomes the target."""
        return os.path.join(self.directory, os.path.basename(self.target))

    def _check_target(self) -> None:
        if os.path.lexists(self.target) and not os.path.isfile(self.target):
            raise CheckpointExistsError(errno.EEXIST, "exists and is no file: nothing is replaced", self.target)

    def publish(self) -> None:
        """Put the finished, flushed file under its name.

        Raises:
            StorageError: a step failed. Before the rename the target is untouched; if the last flush failed it has the
            new file, complete.
        """
        self._check_target()
        _check(_engine.rename(self.path, self.target), "rename", self.target)
        self._fsync(self.parent)
