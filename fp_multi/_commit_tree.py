"""Atomic and durable appearance of a directory that other software fills: docs/commit.md, without our manifest."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from fp_multi._commit import _Replacing, remove_tree
from fp_multi._hidden import sweep, translated
from fp_multi.config import SaveConfig
from fp_multi.errors import CheckpointExistsError


class _Tree(_Replacing):
    def _flush(self) -> None:
        """Flush everything below ``path``."""
        with translated("flush", self.path):
            for directory, _, files in os.walk(self.path, topdown=False):
                for name in files:
                    self._fsync(os.path.join(directory, name))
                self._fsync(directory)


class TreeCommit(_Tree):
    """One directory on its way: let it be made at ``path``, then :meth:`publish`.

    Leaving the ``with`` block without publishing removes everything that was written.

    Args:
        path: the directory to make.
        config: whether to flush.
        replaceable: whether a directory that is there may be replaced; None if nothing may. An empty one always may.
        nbytes: what it will take.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: SaveConfig,
        *,
        replaceable: Callable[[str], bool] | None,
        nbytes: int,
    ) -> None:
        super().__init__(path, config, nbytes=nbytes)
        self._replaceable = replaceable

    @property
    def path(self) -> str:
        """The directory that becomes the target; it does not exist yet."""
        # A name of no special characters: some software takes the paths it is given for patterns.
        return os.path.join(self.directory, "tree")

    def _check_target(self) -> None:
        if not os.path.lexists(self.target):
            return
        if os.path.isdir(self.target):
            if not os.listdir(self.target):
                return
            if self._replaceable is not None and self._replaceable(self.target):
                return
        raise CheckpointExistsError(
            errno.EEXIST, "exists and is no checkpoint of this format: nothing is replaced", self.target
        )

    def publish(self) -> None:
        """Flush everything below ``path``, and give it the target's name.

        Raises:
            StorageError: a step failed; the target is untouched.
            CheckpointExistsError: somebody else created the target meanwhile.
        """
        self._flush()
        self._put_in_place()
        remove_tree(self.directory)  # with what was replaced, if it was


class _Moved(_Tree):
    """A directory that is complete, under a name that nobody looks for."""

    def __init__(self, source: str, target: str, config: SaveConfig) -> None:
        super().__init__(target, config, nbytes=0)
        self.directory = source

    def _check_target(self) -> None:
        if os.path.lexists(self.target) and not os.path.isdir(self.target):
            raise CheckpointExistsError(errno.EEXIST, "exists and is no directory: nothing is replaced", self.target)

    def publish(self) -> None:
        sweep(self.target)
        self._flush()
        old = self._put_in_place()
        if old is not None:
            remove_tree(old)


def replace_tree(source: str, target: str, config: SaveConfig) -> None:
    """Flush everything below a directory, and give it another name; a directory that has that name is replaced.

    Args:
        source: the complete directory.
        target: its name from now on, in the same file system.
        config: whether to flush.

    Raises:
        StorageError: a step failed; the target is untouched.
        CheckpointExistsError: the target is a file.
    """
    _Moved(source, target, config).publish()
