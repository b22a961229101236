"""Atomic and durable appearance of a checkpoint directory or a single file.

The protocol is docs/commit.md; the numbers in the comments are its steps. A reader sees the old checkpoint or the new
one,
never a part, whatever moment the process, the machine or the drive stops at.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from types import TracebackType

from fp_multi import _engine, _writer
from fp_multi._types import ShardReceipt
from fp_multi.config import SaveConfig
from fp_multi.errors import CheckpointExistsError, NoSpaceError, StorageError

MANIFEST = "manifest.json"

_log = logging.getLogger("fp_multi")
_WORK_NAME = re.compile(r"^\.(?P<name>.+)\.fp_multi-(?P<what>tmp|old)-[0-9a-f]{16}$", re.DOTALL)
_NOREPLACE = 1
_EXCHANGE = 2
_NO_RENAMEAT2 = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_NAME_MAX = 255
_WORK_NAME_EXTRA = len("..fp_multi-tmp-") + 16


def _check(code: int, op: str, path: str) -> None:
    if code:
        raise StorageError(code, op, path)


def resolve(path: str | os.PathLike[str]) -> str:
    """The absolute path that a save or load means: links are followed, so that work happens beside the real thing."""
    return os.path.realpath(os.fspath(path))


def work_name(target: str, what: str) -> str:
    """A new hidden name beside ``target``."""
    parent, name = os.path.split(target)
    # A name near the length limit is cut: the name in the hidden name serves people and the search for leftovers only.
    while len(os.fsencode(name)) > _NAME_MAX - _WORK_NAME_EXTRA:
        name = name[:-1]
    return os.path.join(parent, f".{name}.fp_multi-{what}-{secrets.token_hex(8)}")


def is_checkpoint(path: str) -> bool:
    """Whether a directory holds a manifest."""
    return os.path.isfile(os.path.join(path, MANIFEST))


@contextlib.contextmanager
def _locked(path: str, *, block: bool) -> Iterator[int | None]:
    """Hold a lock on a directory; gives None if somebody else holds it, or the file system has no locks."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if block else fcntl.LOCK_NB))
        except OSError:
            yield None
        else:
            yield fd
    finally:
        os.close(fd)  # and with it the lock


def remove_tree(path: str) -> None:
    """Remove a directory that no longer matters; what cannot be removed is logged and left."""

    def failed(_: object, where: str, info: tuple[type, BaseException, TracebackType]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            _log.warning("cannot remove %s: %s", where, info[1])

    shutil.rmtree(path, onerror=failed)


def sweep(parent: str) -> list[str]:
    """Remove what interrupted saves left in a directory (step 2). Running saves hold a lock and are left alone.

    Returns:
        The paths removed or put back.
    """
    done = []
    # Between mkdir and its lock a new temp directory looks abandoned: creation and sweep exclude each other.
    with _locked(parent, block=False) as lock:
        if lock is None:
            return []
        for entry in os.listdir(parent):
            match = _WORK_NAME.match(entry)
            path = os.path.join(parent, entry)
            if not match or os.path.islink(path):
                continue
            if os.path.isfile(path):
                with contextlib.suppress(OSError), _locked_file(path) as held:
                    if held:
                        os.unlink(path)
                        done.append(path)
                continue
            with contextlib.suppress(OSError), _locked(path, block=False) as held_dir:
                if held_dir is None:
                    continue
                target = os.path.join(parent, match["name"])
                if match["what"] == "old" and not os.path.lexists(target):
                    os.rename(path, target)  # step 8b was interrupted between its two renames
                else:
                    remove_tree(path)
                done.append(path)
    return done


@contextlib.contextmanager
def _locked_file(path: str) -> Iterator[bool]:
    fd = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except OSError:
            yield False
    finally:
        os.close(fd)


def _make_parents(parent: str, *, durable: bool) -> None:
    missing = []
    at = parent
    while not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    for path in reversed(missing):
        code = _engine.mkdir(path)
        if code != errno.EEXIST:
            _check(code, "mkdir", path)
        if durable:
            _check(_engine.fsync_path(os.path.dirname(path)), "fsync", os.path.dirname(path))


def require_space(directory: str, nbytes: int) -> None:
    """Raise before anything is written if the file system has not the room.

    Raises:
        NoSpaceError: with the bytes needed and free.
    """
    stat = os.statvfs(directory)
    free = (stat.f_bavail if os.geteuid() else stat.f_bfree) * stat.f_frsize
    if nbytes > free:
        raise NoSpaceError(directory, nbytes, free)


def _find_old(target: str) -> str | None:
    """A complete checkpoint that step 8b had moved aside when it was interrupted."""
    parent, name = os.path.split(target)
    with contextlib.suppress(OSError):
        for entry in os.listdir(parent):
            match = _WORK_NAME.match(entry)
            if match and match["what"] == "old" and match["name"] == name:
                path = os.path.join(parent, entry)
                if is_checkpoint(path):
                    return path
    return None


def find(path: str | os.PathLike[str]) -> str | None:
    """The directory to read a checkpoint from, or None."""
    target = resolve(path)
    if is_checkpoint(target):
        return target
    return None if os.path.lexists(target) else _find_old(target)


class _Work:
    """What directory and file commits share: a hidden name beside the target, locked while the save runs."""

    def __init__(self, path: str | os.PathLike[str], config: SaveConfig) -> None:
        self.target = resolve(path)
        self.parent = os.path.dirname(self.target)
        self.config = config
        self.path = work_name(self.target, "tmp")
        self.published = False

    def _prepare(self, nbytes: int) -> None:
        _make_parents(self.parent, durable=self.config.durable)
        sweep(self.parent)
        require_space(self.parent, nbytes)

    def _fsync(self, path: str) -> None:
        if self.config.durable:
            _check(_engine.fsync_path(path), "fsync", path)

    def _rename(self, source: str, target: str, mode: int = 0) -> int:
        return _engine.rename(source, target, mode)


class DirectoryCommit(_Work):
    """One checkpoint on its way: write shards into ``path``, then :meth:`publish`.

    Leaving the ``with`` block without publishing removes everything that was written.
    """

    def __init__(self, path: str | os.PathLike[str], config: SaveConfig, *, overwrite: bool, nbytes: int) -> None:
        super().__init__(path, config)
        self.overwrite = overwrite
        self.nbytes = nbytes
        self._lock: int | None = None

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

    def __enter__(self) -> DirectoryCommit:
        self._check_target()
        self._prepare(self.nbytes)
        with _locked(self.parent, block=True):
            _check(_engine.mkdir(self.path), "mkdir", self.path)  # step 3
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # no locks on this file system: sweep() leaves it alone then
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self

    def publish(self, manifest: bytes) -> ShardReceipt:
        """Make the directory complete and visible (steps 5 to 9).

        Raises:
            StorageError: a step failed; the target is untouched.
            CheckpointExistsError: somebody else created the target meanwhile.
        """
        receipt = _writer.write_bytes(os.path.join(self.path, MANIFEST), manifest, self.config)
        self._fsync(self.path)  # the names of the files; their bytes are flushed already
        old = self._swap()
        self.published = True
        self._fsync(self.parent)
        if old is not None:
            remove_tree(old)  # step 9: only after the new one is durable
        return receipt

    def _swap(self) -> str | None:
        """Rename to the target; returns where the replaced checkpoint is now."""
        code = self._rename(self.path, self.target, _NOREPLACE)
        if code in _NO_RENAMEAT2 and not os.path.lexists(self.target):
            code = self._rename(self.path, self.target)
        if code == 0:
            return None
        if code not in _NO_RENAMEAT2 | {errno.EEXIST, errno.ENOTEMPTY}:
            _check(code, "rename", self.target)
        self._check_target()  # what is there now may be replaced, or this raises
        if not is_checkpoint(self.target):
            _check(self._rename(self.path, self.target), "rename", self.target)
            return None
        code = self._rename(self.path, self.target, _EXCHANGE)
        if code == 0:
            return self.path  # the names were swapped: the hidden one has the old checkpoint now
        if code not in _NO_RENAMEAT2:
            _check(code, "rename", self.target)
        return self._swap_in_two_steps()

    def _swap_in_two_steps(self) -> str:
        # 8b: for a moment there is no checkpoint under the name; find() and sweep() know where the old one is then.
        old = work_name(self.target, "old")
        _check(self._rename(self.target, old), "rename", self.target)
        code = self._rename(self.path, self.target)
        if code:
            self._rename(old, self.target)
            _check(code, "rename", self.target)
        return old

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.published:
            remove_tree(self.path)
        if self._lock is not None:
            os.close(self._lock)


class FileCommit(_Work):
    """One file on its way: write to ``path``, then :meth:`publish`. An existing target is replaced atomically."""

    def __init__(self, path: str | os.PathLike[str], config: SaveConfig, *, nbytes: int) -> None:
        super().__init__(path, config)
        self.nbytes = nbytes

    def __enter__(self) -> FileCommit:
        if os.path.isdir(self.target):
            raise CheckpointExistsError(errno.EEXIST, "is a directory, a file is wanted", self.target)
        self._prepare(self.nbytes)
        return self

    def publish(self) -> None:
        """Put the finished, flushed file under its name.

        Raises:
            StorageError: a step failed; the target is untouched.
        """
        _check(self._rename(self.path, self.target), "rename", self.target)
        self.published = True
        self._fsync(self.parent)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.published:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
