"""What else lies in a directory that a save replaces: it stays there.

A checkpoint appears by a rename of its whole directory (docs/commit.md). DCP's users keep other files in the directory
that they save to. Those are linked into the new directory before the rename, so that they are at the path at every
moment, and what came between the links and the rename is linked after it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress

from fp_multi.errors import CheckpointExistsError, StorageError
from fp_multi.storage import is_checkpoint

_OWN = re.compile(r"manifest\.json|shard-\d{5,}-of-\d{5,}(\.\d+)?\.safetensors")
_OF_DCP = re.compile(r"(__\d+)?\.metadata|__\d+_\d+\.distcp")


def others_in(directory: str) -> list[str]:
    """Names of what is in a directory besides the checkpoint that it is, if it is one.

    Raises:
        CheckpointExistsError: it is no directory, or something in it cannot stay when it is replaced.
        OSError: it cannot be read.
    """
    if not os.path.isdir(directory):
        raise CheckpointExistsError(errno.EEXIST, "exists and is no directory: nothing is replaced", directory)
    owns = _OWN if is_checkpoint(directory) else None
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if owns is not None and owns.fullmatch(entry.name):
                continue
            if _OF_DCP.fullmatch(entry.name):
                why = "holds a checkpoint of DCP's own storage, and nothing of that is replaced"
            elif entry.is_dir(follow_symlinks=False):
                why = f"holds other directories ({entry.name}), which cannot stay when a checkpoint takes its place"
            else:
                found.append(entry.name)
                continue
            raise CheckpointExistsError(errno.EEXIST, f"{why}; remove them first, or choose another path", directory)
    return found


def keep_others(directory: str, new: str) -> bool:
    """Link what else is in a directory into the one that takes its place.

    Args:
        directory: what is replaced.
        new: its successor.

    Returns:
        Whether there was anything.

    Raises:
        CheckpointExistsError: something in it cannot stay.
        StorageError: the file system has no links.
        OSError: the operating system refused an operation.
    """
    names = others_in(directory)
    for name in names:
        path = os.path.join(directory, name)
        try:
            with suppress(FileNotFoundError):  # removed meanwhile
                _link(path, os.path.join(new, name))
        except OSError as error:
            if isinstance(error, CheckpointExistsError):
                raise
            raise StorageError(
                error.errno or errno.EIO, "link", path, hint="it could not stay; move it, or choose another path"
            ) from error
    if names:
        _take_on(directory, new)
    return bool(names)


def _link(path: str, link: str) -> None:
    try:
        os.link(path, link, follow_symlinks=False)
    except FileExistsError:
        if os.path.samestat(os.lstat(path), os.lstat(link)):
            return
        if _OWN.fullmatch(os.path.basename(path)):
            raise CheckpointExistsError(
                errno.EEXIST, "is in the way: the checkpoint has a file of that name", path
            ) from None
        # Linked before, and since then somebody has put another one in its place.
        os.unlink(link)
        os.link(path, link, follow_symlinks=False)


def _take_on(directory: str, new: str) -> None:
    """Permissions and owner: the directory is somebody's."""
    there = os.stat(directory)
    with suppress(PermissionError):
        os.chown(new, there.st_uid, there.st_gid)
    os.chmod(new, stat.S_IMODE(there.st_mode))
