"""Retired checkpoints as the next save's files: no allocation, no unwritten extents to convert, nothing to unlink.

A checkpoint is retired only after its successor is durable. Its directory is renamed out of sight in one step, so
that it never
counts as a checkpoint again, and loses its manifest; its shard waits under the hidden name until a save moves it into
its
own directory and overwrites it. A process that stops at any point leaves a hidden name, which the next save sweeps.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os

from fp_multi import _commit, _engine

_log = logging.getLogger("fp_multi")


class Retired:
    """A retired checkpoint under its hidden name, locked so that no sweep takes it.

    Args:
        directory: the hidden directory.
        lock: an open descriptor of it.
    """

    def __init__(self, directory: str, lock: int) -> None:
        self.directory = directory
        self._lock = lock

    def shard(self) -> str | None:
        """The one file that a save may overwrite, None if there is no such file.

        A file with another name elsewhere (a hard link) is somebody's copy: its bytes are not ours to change.
        """
        names = os.listdir(self.directory)
        if len(names) != 1:
            return None
        path = os.path.join(self.directory, names[0])
        stat = os.lstat(path)
        return path if stat.st_nlink == 1 and os.path.isfile(path) and not os.path.islink(path) else None

    def remove(self) -> None:
        """Remove it, or what a save has left of it."""
        _commit.remove_tree(self.directory)
        os.close(self._lock)


def retire(path: str) -> Retired | None:
    """Take a checkpoint out of sight; None if it is gone already or cannot be moved."""
    hidden = _commit.work_name(path, "free")
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    # Before the rename: under the hidden name an unlocked directory is anybody's to sweep.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    code = _engine.rename(path, hidden)
    if code:
        _log.warning("cannot retire %s: %s", path, os.strerror(code))
        os.close(lock)
        return None
    # The old name must be gone for good before its shard is overwritten: after a power cut it would be back.
    failed = _engine.fsync_path(os.path.dirname(path))
    _engine.unlink(os.path.join(hidden, _commit.MANIFEST))
    if failed:
        _log.warning("cannot flush %s: %s; the retired checkpoint is removed", path, os.strerror(failed))
        Retired(hidden, lock).remove()
        return None
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
    if code:
        _log.info("cannot reuse %s: %s; writing a new file", path, os.strerror(code))
    return code == 0
