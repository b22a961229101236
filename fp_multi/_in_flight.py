"""The saves under way: places for them, the threads that carry them out, and the errors they leave."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fp_multi import _hidden, _recycle
from fp_multi._crew import Crew
from fp_multi._pending import PendingSave, Work
from fp_multi._save import Saving
from fp_multi._stats import Stats
from fp_multi._steps import Retention, step_path
from fp_multi._together import Together
from fp_multi._trace import Trace
from fp_multi._types import Described
from fp_multi.config import SaveConfig
from fp_multi.errors import CheckpointExistsError, ConfigError, EngineClosedError, StorageError

Progress = Callable[[PendingSave], object]

_PROGRESS_S = 0.1
_LOOK_S = 0.02

_log = logging.getLogger("fp_multi")


class InFlight:
    """Everything of a Checkpointer that goes on in the background; thread-safe.

    Args:
        directory: where the steps are.
        config: how to write.
        retention: what happens to older steps after each save.
        most: saves that may be under way.
        warn: whether errors are warnings.
        spill_nbytes: most that the fence of one save copies; 0 if it copies nothing.
        progress: called while a step is saved, and when that is over.
        stats: where saves are counted.
        trace: where they are recorded.
    """

    def __init__(
        self,
        directory: str,
        config: SaveConfig,
        retention: Retention,
        *,
        most: int,
        warn: bool,
        spill_nbytes: int,
        progress: Progress | None,
        stats: Stats,
        trace: Trace,
    ) -> None:
        self._directory = directory
        self._config = config
        self._retention = retention
        self._most = most
        self._warn = warn
        self._spill_nbytes = spill_nbytes
        self._progress = progress
        self._stats = stats
        self._trace = trace
        self._pid = os.getpid()
        self._lock = threading.RLock()  # guards what is below
        self._pending: list[PendingSave] = []
        self._failed: deque[PendingSave] = deque()
        self._closed = False
        self._asked = 0
        self._others_spare = ""  # a retired checkpoint whose files the ranks take for the next save
        self._latest: PendingSave | None = None  # of the complete ones, the one that was asked for last
        # One thread more than saves: after its save a thread may still be removing what was retired.
        self._crew = Crew(most + 1, "fp_multi-save", retention.end)
        self._callers = Crew(most, "fp_multi-progress")

    # In the caller's thread

    @property
    def is_here(self) -> bool:
        """Whether this is the process that the saves belong to, not a forked child."""
        return os.getpid() == self._pid

    def require_here(self) -> None:
        """Raise in a forked child."""
        if not self.is_here:
            raise EngineClosedError(
                f"{self._directory}: the Checkpointer belongs to the process that this one was forked from; "
                "make another"
            )

    def require_open(self) -> None:
        """Raise in a forked child, and after the end."""
        self.require_here()
        if self._closed:
            raise ConfigError(f"{self._directory}: the Checkpointer is closed")

    def start(
        self,
        step: int,
        described: Described,
        metadata: Mapping[str, str],
        *,
        path: str,
        overwrite: bool,
        eager_nbytes: int,
        spill_nbytes: int | None,
        team: Together | None = None,
    ) -> tuple[PendingSave, float]:
        """Begin a save, waiting for a place if need be.

        Args:
            step: its number.
            described: the state.
            metadata: strings to keep with it.
            path: where it goes.
            overwrite: replace the step if it exists.
            eager_nbytes: how much of the state is a copy already.
            spill_nbytes: let the state go at once, by copying so much at most; None: at the fence.
            team: with whom it is saved.

        Returns:
            The save, and the seconds waited.

        Raises:
            CheckpointExistsError: the step exists, or is being saved.
            StorageError: no thread is to be had; the save is given up.
            FpMultiError: an earlier save failed.
        """
        waited_s = 0.0
        while True:
            with self._lock:
                self.require_open()
                if team is None:
                    self.raise_errors()
                same = [one for one in self._pending if one.path == path]
                if not overwrite and (same or _hidden.is_checkpoint(path)):
                    what = "is being saved" if same else "exists"
                    raise CheckpointExistsError(
                        errno.EEXIST, f"this step {what}; pass overwrite=True to replace it", path
                    )
                if not same and len(self._pending) < self._most:
                    work = Work(described, path, metadata, overwrite, time.perf_counter(), team)
                    return self._begin(step, work, eager_nbytes, spill_nbytes), waited_s
                first = (same or self._pending)[0]
            begin_s = time.perf_counter()
            first.wait_over(_LOOK_S)  # another one may be over before it
            waited_s += time.perf_counter() - begin_s

    def _begin(self, step: int, work: Work, eager_nbytes: int, spill_nbytes: int | None) -> PendingSave:
        """Under the lock."""
        slot = min(set(range(self._most)) - {one.slot for one in self._pending})
        self._asked += 1
        pending = PendingSave(step, self._asked, slot, work, self._seen)
        pending.add(eager_nbytes=eager_nbytes)
        if spill_nbytes is not None:
            pending.let_go(spill_nbytes)
        try:
            self._pending.append(pending)
            self._crew.run(partial(self._carry_out, pending))
        except BaseException as error:
            # Without a thread, or interrupted: nobody may wait for what nobody does.
            if pending.withdraw():
                self._pending.remove(pending)
            if isinstance(error, RuntimeError):
                raise StorageError(errno.EAGAIN, "start thread", work.path, hint=str(error)) from error
            raise
        return pending

    def pending(self) -> list[PendingSave]:
        """The saves under way, oldest first; none in a forked child."""
        if not self.is_here:
            return []
        with self._lock:
            return list(self._pending)

    def join(self) -> None:
        """Wait until the saves that are under way now are over."""
        for one in self.pending():
            one.join()

    def raise_errors(self) -> None:
        """Raise what went wrong since the last time, or warn of it.

        Raises:
            FpMultiError: a save failed.
        """
        if not self.is_here:
            return
        with self._lock:
            errors = [one.error for one in self._failed if one.error is not None]
            self._failed.clear()
        if self._warn:
            for error in errors:
                warnings.warn(f"a background save failed and was given up: {error}", RuntimeWarning, stacklevel=3)
        elif errors:
            for other in errors[1:]:
                errors[0].add_note(f"another save failed, too: {other}")
            raise errors[0]

    def _seen(self, pending: PendingSave) -> None:
        with self._lock:
            if pending in self._failed:
                self._failed.remove(pending)

    def close(self) -> None:
        """Take no more saves; those under way go on."""
        with self._lock:
            self._closed = True

    def end(self) -> None:
        """Wait for all threads, which remove what is retired."""
        for retired in self._retention.close():
            try:
                self._crew.run(retired.remove)
            except RuntimeError:
                retired.remove()  # no thread is to be had any more
        self._crew.end()
        self._callers.end()

    # In the background

    def _carry_out(self, pending: PendingSave) -> None:
        work = pending.take()
        if work is None:
            return
        error: BaseException | None = None
        doomed: list[_recycle.Retired] = []
        try:
            self._watch(pending)
            self._write(pending, work, doomed)
        except BaseException as caught:
            error = caught
            if work.team is not None:  # if it never came to writing; otherwise the round is over
                work.team.round.fail(error)
                work.team.round.close()
                work.team.team.forget()
            _forget_frames(error)
            _log.error("the save of step %d failed: %s", pending.step, error)
        alone = work.team is None
        # Whoever hears that the save is over finds nothing of the state held.
        del work
        self._settle(pending, error, doomed, retire=alone)
        for retired in doomed:
            retired.remove()

    def _write(self, pending: PendingSave, work: Work, doomed: list[_recycle.Retired]) -> None:
        def retire() -> str:
            doomed.extend(self._retention.apply(self._busy(pending)))
            return self._retention.spare_directory()

        spare = self._retention.take()
        if spare is not None:
            self._others_spare = spare.directory
        reuse = _recycle.reusable(self._others_spare, look=work.team is None)
        self._others_spare = ""
        try:
            saving = Saving(
                work.described,
                work.path,
                self._config,
                overwrite=work.overwrite,
                metadata=work.metadata,
                begin_s=work.begin_s,
                reuse=reuse,
                slot=pending.slot,
                spill_nbytes=self._spill_nbytes,
                team=work.team,
                word=retire,
            )
            try:
                pending.started(saving.jobs, saving.sizes)
                if work.team is None:
                    _remove(spare)
            except BaseException as error:
                # The engine reads the state until it is told to stop.
                saving.abandon(error)
                raise
            save = saving.finish()
        finally:
            # The other ranks take their files out of it, too: not before they are done.
            _remove(spare)
        self._others_spare = saving.word
        pending.complete(save, nbytes=saving.nbytes_here, copied_nbytes=saving.copied_nbytes, recycled=saving.recycled)

    def _settle(
        self, pending: PendingSave, error: BaseException | None, doomed: list[_recycle.Retired], *, retire: bool
    ) -> None:
        """Let everybody know that a save is over, and collect what is to be removed."""
        try:
            if error is None:
                self._stats.completed(pending)
                self._trace.save(pending)
                if retire:
                    doomed.extend(self._retention.apply(self._busy(pending)))
            else:
                self._stats.failed()
        except Exception as failure:
            # The checkpoint is complete all the same.
            _log.warning("after the save of step %d: %s", pending.step, failure)
        with self._lock:
            if error is not None:
                self._failed.append(pending)
            self._pending.remove(pending)
            pending.settle(error)

    def _busy(self, complete: PendingSave) -> list[int]:
        """Steps that retention leaves alone after a save."""
        with self._lock:
            in_place = complete.path == step_path(self._directory, complete.step)
            if in_place and (self._latest is None or self._latest.number < complete.number):
                # Also if its step is not the newest: somebody went back, and goes on from here.
                self._latest = complete
            latest = [] if self._latest is None else [self._latest.step]
            return latest + [one.step for one in self._pending if one.report.save is None]

    def _watch(self, pending: PendingSave) -> None:
        if self._progress is not None:
            try:
                self._callers.run(partial(_report, pending, self._progress))
            except RuntimeError as error:
                _log.warning("no thread for the progress of step %d: %s", pending.step, error)


def _report(pending: PendingSave, progress: Callable[[PendingSave], Any]) -> None:
    try:
        while not pending.wait_over(_PROGRESS_S):
            progress(pending)
        progress(pending)
    except Exception:
        _log.warning("the progress callback failed at step %d", pending.step, exc_info=True)


def _remove(retired: _recycle.Retired | None) -> None:
    if retired is not None:
        retired.remove()  # once is enough, more do no harm


def _forget_frames(error: BaseException) -> None:
    """Let an error that is kept not keep what its functions worked on."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__
