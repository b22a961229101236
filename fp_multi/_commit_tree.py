"""Atomic and durable appearance of a directory that other software fills: docs/commit.md, without our manifest."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from fp_multi import _engine
from fp_multi._commit import _EXCHANGE, _NO_RENAMEAT2, _NOREPLACE, _check, _Work
from fp_multi._hidden import translated
from fp_multi.config import SaveConfig
from fp_multi.errors import CheckpointExistsError, StorageError


class TreeCommit(_Work):
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
        with translated("flush", self.path):
            for directory, _, files in os.walk(self.path, topdown=False):
                for name in files:
                    self._fsync(os.path.join(directory, name))
                self._fsync(directory)
        with translated("rename", self.target):
            swapped = self._swap()
        try:
            self._fsync(self.parent)
        except StorageError:
            _engine.rename(self.target, self.path, _EXCHANGE if swapped else 0)
            raise

    def _swap(self) -> bool:
        """Rename to the target; whether ``path`` has now what was there."""
        code = _engine.rename(self.path, self.target, _NOREPLACE)
        if code in _NO_RENAMEAT2 and not os.path.lexists(self.target):
            code = _engine.rename(self.path, self.target)
        if code == 0:
            return False
        if code not in _NO_RENAMEAT2 | {errno.EEXIST, errno.ENOTEMPTY}:
            _check(code, "rename", self.target)
        self._check_target()  # what is there now may be replaced, or this raises
        code = _engine.rename(self.path, self.target, _EXCHANGE)
        if code in _NO_RENAMEAT2:
            old = os.path.join(self.directory, "old")
            _check(_engine.rename(self.target, old), "rename", self.target)
            code = _engine.rename(self.path, self.target)
            if code:
                _engine.rename(old, self.target)
            _check(code, "rename", self.target)
            return False
        _check(code, "rename", self.target)
        return True
