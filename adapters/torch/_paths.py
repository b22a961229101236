"""Saves to places that a trainer names, beside training: what the plug-ins for trainers share."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from fp_multi import LeafSource, PendingSave
from fp_multi.config import SaveConfig
from fp_multi.errors import ConfigError

from ._borrow import changing_sources
from .checkpointer import Checkpointer
from .state_dict import save

Overlap: TypeAlias = Literal["hybrid", "borrow", "snapshot"] | None

_log = logging.getLogger("fp_multi")


class PathSaver:
    """Saves states to paths, at once or in the background.

    Args:
        overlap: None saves in the call; else a mode of :class:`fp_multi.Checkpointer`.
        steady: gives where the storages begin that nothing changes before the next :meth:`wait_for_staging`; all other
            tensors are copied in the call of :meth:`save`.
        on_error: ``"raise"``, or ``"warn"`` to go on after a failed background save.
        allow_pickle: pickle values that the format has no form for, and unpickle them.
        config: how to write.
    """

    def __init__(
        self,
        overlap: Overlap,
        steady: Callable[[], set[int]],
        *,
        on_error: Literal["raise", "warn"] = "raise",
        allow_pickle: bool = False,
        config: SaveConfig = SaveConfig(),
    ) -> None:
        if overlap not in (None, "hybrid", "borrow", "snapshot"):
            raise ConfigError(f'overlap must be None, "hybrid", "borrow" or "snapshot", found {overlap!r}')
        self.overlap = overlap
        self.on_error = on_error
        self.allow_pickle = allow_pickle
        self.config = config
        self._steady = steady
        self._checkpointer: _PathCheckpointer | None = None
        self._saves: dict[str, PendingSave] = {}
        self._later: list[_Later] = []
        self._errors: list[Exception] = []
        self._lock = threading.Lock()  # guards the two lists
        self._acting = threading.RLock()  # held while something of _later is done

    def save(self, step: int, state: Any, path: str | os.PathLike[str]) -> None:
        """Save, replacing a checkpoint that is there.

        Args:
            step: a number for reports and messages.
            state: as for :func:`fp_multi.adapters.torch.save`.
            path: the checkpoint directory.

        Raises:
            UnsupportedLeafError: a value cannot be stored; nothing has been written.
            FpMultiError: the save failed, or an earlier one did in the background; this one has not been started then.
        """
        target = self._local(path)
        self._raise_errors()
        self._keep(target)
        if os.path.islink(target):
            os.unlink(target)  # replace the link, not what it points to
        if self.overlap is None:
            save(state, target, overwrite=True, config=self.config, allow_pickle=self.allow_pickle)
            return
        if self._checkpointer is None:
            self._checkpointer = _PathCheckpointer(
                os.path.dirname(target),
                steady=self._steady,
                overlap=self.overlap,
                max_in_flight=2,
                on_error=self.on_error,
                config=self.config,
                progress=lambda pending: self._settle() if pending.done else None,
            )
        pending = self._checkpointer.save(step, state, path=target, overwrite=True, allow_pickle=self.allow_pickle)
        self._saves = {place: one for place, one in self._saves.items() if not one.done}
        self._saves[target] = pending

    def wait_for(self, path: str | os.PathLike[str]) -> None:
        """Return when a save to that path is complete, and the states of others may change.

        Raises:
            FpMultiError: a save failed in the background.
        """
        pending = self._saves.get(self._local(path))
        if pending is not None:
            pending.wait()
        self.wait_for_staging()

    def wait_for_staging(self) -> None:
        """The fence: returns when the states given to :meth:`save` may change.

        Raises:
            FpMultiError: a save failed in the background.
        """
        if self._checkpointer is not None:
            self._checkpointer.wait_for_staging()
        self._raise_errors()

    def wait(self) -> None:
        """Return when every save is complete, and what was to come after it is done.

        Raises:
            FpMultiError: a save failed in the background.
        """
        if self._checkpointer is not None:
            self._checkpointer.wait()
        self._settle()
        self._raise_errors()

    def afterwards(self, action: Callable[[], object]) -> None:
        """Do something as soon as the newest saves are complete, in the background if need be; not if one fails."""
        self._add(action, "")

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, but not before the saves under way are complete: until then it may be the last one."""
        target = self._local(path)
        pending = self._saves.get(target)
        if pending is not None:
            pending.join()
        self._add(lambda: _remove(target), target)

    def close(self) -> None:
        """Finish every save. It can be used again.

        Raises:
            FpMultiError: a save failed in the background.
        """
        checkpointer, self._checkpointer = self._checkpointer, None
        try:
            if checkpointer is not None:
                checkpointer.close()
        finally:
            self._saves.clear()
            self._settle()
        self._raise_errors()

    def _local(self, path: str | os.PathLike[str]) -> str:
        text = os.fspath(path)
        if "://" in text:
            raise ConfigError(f"{text}: checkpoints are written to local file systems only")
        # The directory's links are followed, the last one is not: it would be replaced.
        parent, name = os.path.split(os.path.abspath(text))
        return os.path.join(os.path.realpath(parent), name)

    def _raise_errors(self) -> None:
        with self._lock:
            errors, self._errors = self._errors, []
        if errors:
            raise errors[0]

    # What comes after saves

    def _add(self, action: Callable[[], object], path: str) -> None:
        # Also those that are over: one that has failed already may not have been heard of.
        saves = list(self._saves.values())
        if not saves:
            action()
            return
        with self._lock:
            self._later.append(_Later(action, path, saves))
        self._settle()  # they may just have become complete

    def _keep(self, path: str) -> None:
        """Do not remove what is to be written again."""
        if any(one.path == path for one in list(self._later)):
            with self._acting, self._lock:
                self._later = [one for one in self._later if one.path != path]

    def _settle(self) -> None:
        with self._acting:
            with self._lock:
                ready = [one for one in self._later if all(save.done for save in one.saves)]
            for one in ready:
                failed = [save for save in one.saves if save.error is not None]
                try:
                    if failed:
                        _log.warning("a save failed, so what was to follow it is not done: %s", one.path or "publish")
                    else:
                        one.action()
                except Exception as error:
                    _log.error("after a save: %s", error)
                    with self._lock:
                        self._errors.append(error)
                with self._lock:
                    self._later.remove(one)


@dataclass(eq=False, slots=True)
class _Later:
    action: Callable[[], object]
    path: str
    saves: Sequence[PendingSave]


class _PathCheckpointer(Checkpointer):
    """A Checkpointer that is told which memory is steady."""

    def __init__(self, directory: str, *, steady: Callable[[], set[int]], **options: Any) -> None:
        super().__init__(directory, **options)
        self._steady = steady

    def changing(self, sources: Sequence[LeafSource]) -> Sequence[int]:
        return changing_sources(sources, self._steady())


def _remove(path: str) -> None:
    """Remove a checkpoint, link or file; no reader meets half of a directory."""
    if os.path.isdir(path) and not os.path.islink(path):
        parent, name = os.path.split(path)
        # A name of docs/commit.md section 4: what an interruption leaves of it is swept.
        hidden = os.path.join(parent, f".{name}.fp_multi-tmp-{os.urandom(8).hex()}")
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)
