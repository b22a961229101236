"""Retired checkpoints as the next save's files: no allocation, no unwritten extents to convert, nothing to unlink.

A checkpoint is retired only after its successor is durable. Its directory is renamed out of sight in one step, so
that it never counts as a checkpoint again, and loses its manifest; its shard waits under the hidden name until a save
moves it into its own directory and overwrites it. A process that stops at any point leaves a hidden name, which the
next save sweeps.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import signal
import stat

from fp_multi import _engine, _hidden

_log = logging.getLogger("fp_multi")
_SHARD_NAME = re.compile(r"shard-\d{5,}-of-\d{5,}(\.\d+)?\.safetensors")


class Retired:
    """A retired checkpoint under its hidden name, locked so that no sweep takes it.

    Args:
        directory: the hidden directory.
        lock: an open descriptor of it.
    """

    def __init__(self, directory: str, lock: int) -> None:
        self.directory = directory
        self._lock: int | None = lock

    def shards(self) -> dict[str, str]:
        """The files that a save may overwrite: paths by name."""
        return reusable(self.directory)

    def remove(self) -> None:
        """Remove it, or what a save has left of it; what cannot be removed is logged and left."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        try:
            _hidden.remove_tree(self.directory)
        finally:
            _hidden.unlock(lock)


def reusable(directory: str, *, look: bool = True) -> dict[str, str]:
    """The files of a retired checkpoint that a save may overwrite: paths by name.

    None of them if it is gone, or if somebody has put other things into it.

    Args:
        directory: the retired checkpoint.
        look: whether to look at each file, too. Several ranks would be in each other's way: a file that one looks at
            is open. :func:`adopt` looks at the one that it takes.
    """
    try:
        names = os.listdir(directory) if directory else []
    except OSError:
        return {}
    if not all([_SHARD_NAME.fullmatch(name) for name in names]):
        return {}
    paths = {name: os.path.join(directory, name) for name in sorted(names)}
    return {name: path for name, path in paths.items() if not look or _is_ours_alone(path)}


def _is_ours_alone(path: str) -> bool:
    """Whether nobody can notice that a file's bytes change.

    A file with another name elsewhere (a hard link) is somebody's copy, and one that is open or mapped somewhere
    is being read: an unlink would leave both as they are, overwriting would not.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or not os.access(path, os.W_OK):
            return False
        try:
            # Who opens the file while there is a lease has a signal sent to us: one that does nothing.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            # Granted only while no other descriptor or mapping of the file exists.
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            # Where leases do not work nobody can tell; then hard links are all that is looked at.
            return error.errno not in (errno.EAGAIN, errno.EBUSY)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True
    finally:
        os.close(fd)


def retire(path: str, *, durable: bool) -> Retired | None:
    """Take a checkpoint out of sight.

    Args:
        path: the checkpoint.
        durable: make sure that its name is gone for good.

    Returns:
        The retired checkpoint; None if it is gone already, somebody reads it, or it cannot be moved.
    """
    hidden = _hidden.work_name(path, "free")
    try:
        # Before the rename: under the hidden name an unlocked directory is anybody's to sweep.
        lock, _ = _hidden.lock(path)
    except OSError:
        return None
    code = _engine.rename(path, hidden)
    if code:
        if code != errno.ENOENT:
            _log.warning("cannot retire %s: %s", path, os.strerror(code))
        _hidden.unlock(lock)
        return None
    # The old name must be gone for good before its shard is overwritten: after a power cut it would be back.
    failed = _engine.fsync_path(os.path.dirname(path)) if durable else 0
    if failed:
        _log.warning("cannot flush %s: %s; %s is swept, not reused", os.path.dirname(path), os.strerror(failed), hidden)
        _hidden.unlock(lock)
        return None
    _engine.unlink(os.path.join(hidden, _hidden.MANIFEST))
    return Retired(hidden, lock)


def reusable_nbytes(path: str) -> int:
    """Bytes on the drive that a save need not allocate."""
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0


def adopt(path: str, target: str) -> bool:
    """Move a retired shard into a save's directory; False if it cannot be, and a new file is to be made."""
    code = _engine.rename(path, target)
    if code == 0 and not _is_ours_alone(target):
        # Somebody linked or opened it after it was chosen. From here on its name says that it is unfinished.
        code = _engine.rename(target, path) or errno.EBUSY
        if code != errno.EBUSY:
            _engine.unlink(target)  # it could not be moved back
    if code:
        _log.info("cannot reuse %s: %s; writing a new file", path, os.strerror(code))
    return code == 0
