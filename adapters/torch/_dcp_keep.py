"""What else lies in a directory that a save replaces: it stays there.

A checkpoint appears by a rename of its whole directory (docs/commit.md). DCP's users keep other files in the directory
that they save to. Those are linked into the new directory before the rename, so that they are at the path at every
moment. The first time that is before anything is written, so that a file that cannot be linked fails the save early;
what has changed since then is done again before the rename, and after it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from contextlib import suppress

from fp_multi.errors import CheckpointExistsError, StorageError
from fp_multi.storage import is_checkpoint

_OWN = re.compile(r"manifest\.json|shard-\d{5,}-of-\d{5,}(\.\d+)?\.safetensors")
_OF_DCP = re.compile(r"(__\d+)?\.metadata|__\d+_\d+\.distcp")
_REMOVED_IN_NFS = re.compile(r"\.nfs[0-9a-f]{8,}")
"""A file that somebody has open and that has been removed."""

_Identity = tuple[int, int]
"""Device and inode."""


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
            if _REMOVED_IN_NFS.fullmatch(entry.name) or (owns is not None and owns.fullmatch(entry.name)):
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


class Keeper:
    """Links what else is in a directory into the one that takes its place; again and again, as both may change.

    Args:
        spare: a directory that is removed if its process is killed: names in it harm nobody.
    """

    def __init__(self, spare: str) -> None:
        self._spare = spare
        self._linked: dict[str, _Identity] = {}
        """What this one has linked, by name. Whatever else has such a name is somebody's, and newer."""

    def keep(self, directory: str, new: str, *, is_early: bool = False) -> bool:
        """Make the others in ``new`` those of ``directory``, except for what somebody has changed in ``new``.

        Args:
            directory: what is replaced; has nothing if it is not there.
            new: its successor.
            is_early: the checkpoint is still to be written, and may need some of the names.

        Returns:
            Whether there is anything, or was.

        Raises:
            CheckpointExistsError: something in it cannot stay.
            StorageError: something in it cannot be linked.
            OSError: the operating system refused an operation.
        """
        names = others_in(directory) if os.path.lexists(directory) else []
        for name in names:
            # Through a link of such a name the checkpoint would be written into somebody's file.
            if is_early and _OWN.fullmatch(name):
                continue
            path = os.path.join(directory, name)
            try:
                self._keep(name, path, os.path.join(new, name))
            except CheckpointExistsError:
                raise
            except OSError as error:
                raise StorageError(
                    error.errno or errno.EIO,
                    "link",
                    path,
                    hint="it could not stay beside the new checkpoint; move it, or choose another path",
                ) from error
        gone = self._linked.keys() - set(names)
        for name in gone:
            link = os.path.join(new, name)
            if _identity_of(link) == self._linked.pop(name):
                with suppress(FileNotFoundError):
                    os.unlink(link)  # removed where it came from
        return bool(names or gone)

    def _keep(self, name: str, path: str, link: str) -> None:
        before, there = self._linked.get(name), _identity_of(path)
        if there is None or there == before:
            return  # removed meanwhile, or linked already, and what became of that is somebody's affair
        if before is not None and _identity_of(link) != before:
            return
        if before is None and _OWN.fullmatch(name) and os.path.lexists(link):
            raise CheckpointExistsError(errno.EEXIST, "is in the way: the checkpoint has a file of that name", path)
        with suppress(FileNotFoundError):
            if before is None:
                with suppress(FileExistsError):  # somebody's, who has seen that the new one is there
                    os.link(path, link, follow_symlinks=False)
                    self._linked[name] = _identity_of(link) or there  # another one may have come meanwhile
            else:
                self._linked[name] = self._replace(path, link) or before

    def _replace(self, path: str, link: str) -> _Identity | None:
        """Put a link in the place of one that is there, which is at no moment without one."""
        aside = os.path.join(self._spare, f".link-{secrets.token_hex(8)}")
        os.link(path, aside, follow_symlinks=False)
        try:
            linked = _identity_of(aside)
            os.replace(aside, link)
            return linked
        finally:
            with suppress(FileNotFoundError):
                os.unlink(aside)  # still there if both were one file


def _identity_of(path: str) -> _Identity | None:
    """Which file has a name; None if there is none."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def take_on(directory: str, new: str) -> None:
    """Permissions and owner, as far as this process may give them: the directory is somebody's."""
    with suppress(FileNotFoundError):
        there, here = os.stat(directory), os.stat(new)
        with suppress(OSError):  # before the owner, who alone may do it
            os.chmod(new, stat.S_IMODE(there.st_mode))
        if (there.st_uid, there.st_gid) != (here.st_uid, here.st_gid):
            with suppress(OSError):
                os.chown(new, there.st_uid, there.st_gid)
