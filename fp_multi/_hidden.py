"""Hidden names beside a target, where work in progress lies: made, locked, found, swept (docs/commit.md section 4)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import sys
from collections.abc import Iterator

from fp_multi import _engine
from fp_multi.errors import FpMultiError, StorageError

MANIFEST = "manifest.json"

_log = logging.getLogger("fp_multi")
_WORK_NAME = re.compile(r"\.(?P<name>.+)\.fp_multi-(?P<what>tmp|old|free)-[0-9a-f]{16}", re.DOTALL)
_CUT_NAME = re.compile(r".*~[0-9a-f]{16}", re.DOTALL)
_NAME_MAX = 255
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ESTALE)
_IS_THERE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
_WORK_NAME_EXTRA = len("..fp_multi-free-") + 16


@contextlib.contextmanager
def translated(op: str, path: str) -> Iterator[None]:
    """Raise what the operating system refuses as StorageError.

    Args:
        op: the operation, for the message.
        path: what it works on.
    """
    try:
        yield
    except FpMultiError:
        raise
    except OSError as error:
        raise StorageError(error.errno or errno.EIO, op, path) from error


def named(path: str | os.PathLike[str]) -> str:
    """A path as text, refused if nothing can have that name."""
    text = os.fsdecode(path)
    if not text:
        raise StorageError(errno.ENOENT, "resolve", text, hint="the path is empty")
    try:
        if b"\0" not in os.fsencode(text):
            return text
        why = "it has a zero byte"
    except UnicodeEncodeError as error:
        why = str(error)
    raise StorageError(errno.EINVAL, "resolve", text, hint=why)


def resolve(path: str | os.PathLike[str]) -> str:
    """The absolute path that a save or load means: links are followed, so that work happens beside the real thing."""
    text = named(path)
    with translated("resolve", text):
        return os.path.realpath(text)


def _hidden(name: str) -> str:
    """How a name stands in hidden names: as it is, or cut and with a digest where it is near the length limit."""
    if len(os.fsencode(name)) <= _NAME_MAX - _WORK_NAME_EXTRA:
        return name
    import hashlib  # rarely needed, and dear to import

    digest = "~" + hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()
    while len(os.fsencode(name)) > _NAME_MAX - _WORK_NAME_EXTRA - len(digest):
        name = name[:-1]
    return name + digest


def work_name(target: str, what: str, token: str | None = None) -> str:
    """A hidden name beside ``target``: a new one, or with 16 hexadecimal digits that several processes agree on."""
    parent, name = os.path.split(target)
    return os.path.join(parent, f".{_hidden(name)}.fp_multi-{what}-{token or os.urandom(8).hex()}")


def is_checkpoint(path: str) -> bool:
    """Whether a directory holds a manifest.

    Raises:
        StorageError: it cannot be known. A checkpoint that cannot be seen must not be taken for none.
    """
    manifest = os.path.join(path, MANIFEST)
    try:
        return stat.S_ISREG(os.stat(manifest).st_mode)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise StorageError(error.errno or errno.EIO, "look for", manifest) from error


def unlock(fd: int) -> None:
    """Give a lock back and close its descriptor."""
    # Closing is not enough: a child that was forked meanwhile shares the descriptor, and with it the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def lock(path: str, *, shared: bool = False) -> tuple[int, bool]:
    """Open a directory and lock it, without waiting.

    Args:
        path: the directory, no link to it.
        shared: others may hold the lock, too, if theirs is also shared.

    Returns:
        The descriptor, for :func:`unlock`, and whether it is locked: some file systems have no locks.

    Raises:
        BlockingIOError: somebody else holds the lock.
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    locked = False
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        locked = True
    except BaseException as error:
        if isinstance(error, BlockingIOError) or not isinstance(error, OSError):
            os.close(fd)
            raise
    return fd, locked


def is_at(fd: int, path: str) -> bool:
    """Whether a path still leads to an open directory; it may be renamed between its opening and its lock."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def held(path: str) -> Iterator[bool]:
    """Hold a lock on a directory; gives False if somebody else holds it, or there are no locks here."""
    try:
        fd, locked = lock(path)
    except OSError:
        yield False
        return
    try:
        yield locked
    finally:
        unlock(fd)


def claim(path: str, *, shared: bool = False) -> int | None:
    """Lock a directory just made; None if a sweep took it for abandoned before it was locked.

    Args:
        path: the directory.
        shared: several processes work in it, and each holds the lock.
    """
    try:
        fd, _ = lock(path, shared=shared)  # without locks sweeps leave the directory alone, too
    except (FileNotFoundError, BlockingIOError):
        return None
    mine = False
    try:
        mine = is_at(fd, path)
    finally:
        if not mine:
            unlock(fd)
    return fd if mine else None


def _remove_flat(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        for name in os.listdir(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
        os.rmdir(path)


def remove_tree(path: str) -> None:
    """Remove a directory that no longer matters; what cannot be removed is logged and left."""
    # Ours are flat and often empty. That goes without the descriptors and imports that a walk needs: what is not to be
    # had may be why the save failed.
    try:
        return _remove_flat(path)
    except FileNotFoundError:
        return None
    except OSError:
        import shutil  # rarely needed, and dear to import

    def failed(_: object, where: str, error: BaseException) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            _log.warning("cannot remove %s: %s", where, error)

    if sys.version_info >= (3, 12):
        shutil.rmtree(path, onexc=failed)
    else:
        shutil.rmtree(path, onerror=lambda call, where, info: failed(call, where, info[1]))
    return None


def sweep(target: str, keep: str | None = None) -> list[str]:
    """Remove what interrupted saves left beside ``target`` (step 2). Running saves hold a lock and are left alone.

    Other hosts' locks on directories are not seen on network file systems; so only leftovers of the target itself are
    looked at there, which nobody else saves.

    Args:
        target: the path that is saved to.
        keep: a hidden directory of this save, in which other processes may be at work already.

    Returns:
        The paths removed or put back.
    """
    done: list[str] = []
    parent, name = os.path.split(target)
    with contextlib.suppress(OSError):
        only_own = on_network(parent)
        for entry in os.listdir(parent):
            match = _WORK_NAME.fullmatch(entry)
            path = os.path.join(parent, entry)
            if match is None or path == keep:
                continue
            owner = os.path.join(parent, match["name"])
            if match["name"] == _hidden(name):
                owner = target
            elif only_own:
                continue
            elif match["what"] == "old" and _CUT_NAME.fullmatch(match["name"]):
                continue  # whose it is only a save to that name can tell
            with contextlib.suppress(OSError), held(path) as locked:
                if locked:
                    _dispose(path, owner, match["what"])
                    done.append(path)
    return done


def _dispose(path: str, owner: str, what: str) -> None:
    if what == "old":
        try:
            os.rename(path, owner)  # step 8b was interrupted between its two renames
            return
        except OSError as error:
            if error.errno not in _IS_THERE:
                raise
        # Half removed it must not be taken for the owner's old checkpoint.
        doomed = work_name(owner, "tmp")
        os.rename(path, doomed)
        path = doomed
    remove_tree(path)


def _is_empty(path: str) -> bool:
    """Whether it is a directory in which nothing is: a rename to it succeeds, as if it was not there."""
    try:
        return not os.listdir(path)
    except OSError:
        return False


def on_network(path: str) -> bool:
    """Whether other hosts may use the file system on which a path is, or will be."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return _engine.on_network(path)


def _find_old(target: str) -> str | None:
    """A complete checkpoint that step 8b had moved aside when it was interrupted."""
    parent, name = os.path.split(target)
    with contextlib.suppress(OSError):
        for entry in os.listdir(parent):
            match = _WORK_NAME.fullmatch(entry)
            if match and match["what"] == "old" and match["name"] == _hidden(name):
                path = os.path.join(parent, entry)
                if is_checkpoint(path):
                    return path
    return None


def find(path: str | os.PathLike[str]) -> str | None:
    """The directory to read a checkpoint from, or None."""
    target = resolve(path)
    if is_checkpoint(target):
        return target
    if os.path.lexists(target) and not _is_empty(target):
        return None
    old = _find_old(target)
    # Without an old one step 8b may have ended between the two looks.
    return target if old is None and is_checkpoint(target) else old


def identity(path: str | os.PathLike[str]) -> tuple[int, int, int] | None:
    """Differs when another checkpoint is at the path; None without one."""
    directory = find(path)
    try:
        found = os.stat(os.path.join(directory or "", MANIFEST))
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
