"""Steps in a directory: their names, which are complete, which are being read, which may go."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from fp_multi import _hidden, _recycle
from fp_multi.errors import CheckpointNotFoundError, StorageError

_STEP_NAME = re.compile(r"step_([0-9]{8,})")
_SHOWN = 20
_LOCK_TRIES = 1000
_LOCK_PAUSE_S = 0.01

_log = logging.getLogger("fp_multi")


def step_path(directory: str, step: int) -> str:
    """Where the checkpoint of a step is."""
    return os.path.join(directory, f"step_{step:08d}")


def complete_steps(directory: str) -> dict[int, str]:
    """The committed steps of a directory and their paths, in order.

    Raises:
        StorageError: the directory cannot be read, or the newest step: who goes on from the newest must not go on from
            an older one only because it could not be seen. Older ones are left out, with a warning.
    """
    found, unseen = _look(directory)
    newest = max(found, default=-1)
    for step, error in sorted(unseen.items(), reverse=True):
        if step > newest:
            raise error
        _log.warning("step %d is left out: %s", step, error)
    return found


def _look(directory: str) -> tuple[dict[int, str], dict[int, StorageError]]:
    """The committed steps and their paths, in order, and why others cannot be read."""
    found: dict[int, str] = {}
    unseen: dict[int, StorageError] = {}
    with _hidden.translated("list", directory):
        try:
            names = os.listdir(directory)
        except FileNotFoundError:
            return {}, {}
    for name in names:
        match = _STEP_NAME.fullmatch(name)
        if match:
            step, path = int(match[1]), os.path.join(directory, name)
            # Only the one spelling that a step is saved under.
            if path != step_path(directory, step):
                continue
            try:
                if _hidden.is_checkpoint(path):
                    found[step] = path
            except StorageError as error:
                unseen[step] = error
    return dict(sorted(found.items())), unseen


def retired_steps(
    steps: Iterable[int], *, keep: int | None, keep_every: int | None, in_use: Collection[int] = ()
) -> list[int]:
    """Which steps retention lets go.

    Args:
        steps: the complete steps.
        keep: the newest so many stay; None keeps all.
        keep_every: steps that are a multiple of it stay, too.
        in_use: steps that stay whatever the policy says.

    Returns:
        The steps to retire, oldest first; never the newest.
    """
    ordered = sorted(steps)
    if keep is None:
        return []
    return [
        step
        for step in ordered[: -max(keep, 1)]
        if step not in in_use and not (keep_every is not None and step % keep_every == 0)
    ]


class Retention:
    """Retires steps, and keeps the files of some for the next saves; thread-safe.

    Args:
        directory: where the steps are.
        keep: the newest so many stay; None keeps all.
        keep_every: steps that are a multiple of it stay, too.
        spares: retired checkpoints to keep for :meth:`take` at most.
        durable: whether names are to be gone for good before files are overwritten.
    """

    def __init__(self, directory: str, *, keep: int | None, keep_every: int | None, spares: int, durable: bool) -> None:
        self._directory = directory
        self._keep = keep
        self._keep_every = keep_every
        self._most_spares = spares
        self._durable = durable
        self._lock = threading.Lock()
        self._reading: list[int] = []
        self._spares: deque[_recycle.Retired] = deque()

    def apply(self, busy: Collection[int]) -> list[_recycle.Retired]:
        """Retire what the policy lets go.

        Args:
            busy: steps that stay.

        Returns:
            What the caller has to remove.
        """
        if self._keep is None:
            return []
        doomed = []
        with self._lock:
            steps, _ = _look(self._directory)  # what cannot be read stays
            in_use = {*busy, *self._reading}
            for step in retired_steps(steps, keep=self._keep, keep_every=self._keep_every, in_use=in_use):
                retired = _recycle.retire(steps[step], durable=self._durable)
                if retired is None:
                    continue
                if len(self._spares) < self._most_spares and retired.shards():
                    self._spares.append(retired)
                else:
                    doomed.append(retired)
        return doomed

    def take(self) -> _recycle.Retired | None:
        """A retired checkpoint whose file may be overwritten; the caller removes what is left."""
        with contextlib.suppress(IndexError):
            return self._spares.popleft()
        return None

    def spare_directory(self) -> str:
        """Where the retired checkpoint lies that :meth:`take` gives next; empty if there is none."""
        with contextlib.suppress(IndexError):
            return self._spares[0].directory
        return ""

    def close(self) -> list[_recycle.Retired]:
        """Keep no more spares; returns those that there are, for the caller to remove."""
        with self._lock:
            self._most_spares = 0
            # Not forgotten: whoever was interrupted before they were removed closes again.
            return list(self._spares)

    def end(self) -> None:
        """Remove all spares."""
        for retired in self.close():
            retired.remove()

    @contextmanager
    def reading(self, step: int | None) -> Iterator[tuple[int, str]]:
        """Choose a step (None: the newest) and keep it from being retired, by other processes, too.

        Raises:
            CheckpointNotFoundError: there is no such step.
        """
        with self._lock:
            chosen, path, lock = self._choose(step)
            self._reading.append(chosen)
        try:
            yield chosen, path
        finally:
            with self._lock:
                self._reading.remove(chosen)
            if lock is not None:
                _hidden.unlock(lock)

    def _steps_with(self, step: int) -> dict[int, str]:
        """All steps that can be read; an error if it is this one that cannot."""
        steps, unseen = _look(self._directory)
        if step in unseen:
            raise unseen[step]
        return steps

    def _choose(self, step: int | None) -> tuple[int, str, int | None]:
        while True:
            steps = complete_steps(self._directory) if step is None else self._steps_with(step)
            if not steps:
                raise CheckpointNotFoundError(errno.ENOENT, "no complete step here", self._directory)
            chosen = max(steps) if step is None else step
            if chosen not in steps:
                known = list(steps)
                shown = ", ".join(map(str, known[-_SHOWN:]))
                shown = f"the newest of {len(known)} are {shown}" if len(known) > _SHOWN else f"there are {shown}"
                raise CheckpointNotFoundError(
                    errno.ENOENT, f"step {chosen} is not here; {shown}", step_path(self._directory, chosen)
                )
            found, lock = _share(steps[chosen])
            if found:
                return chosen, steps[chosen], lock


def _share(path: str) -> tuple[bool, int | None]:
    """Lock a checkpoint against retention; whether it is (still) there, and the lock's descriptor if there is one."""
    for _ in range(_LOCK_TRIES):
        try:
            fd, locked = _hidden.lock(path, shared=True)
        except FileNotFoundError:
            return False, None
        except BlockingIOError:
            # Just being published, or just being retired: both take a moment only.
            time.sleep(_LOCK_PAUSE_S)
            continue
        except OSError:
            return True, None  # a link, which retention leaves alone; or not ours to open, which reading it will say
        with contextlib.suppress(OSError):
            if locked and _hidden.is_at(fd, path):
                return True, fd
        _hidden.unlock(fd)
        if not locked:
            return True, None  # no locks on this file system
    return os.path.isdir(path), None
