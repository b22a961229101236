"""Checkpointer: steps in a directory, saved beside the training that goes on, retired and reused."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Self

from fp_multi import _commit, _eager, _recycle
from fp_multi._format import check_metadata
from fp_multi._pending import OverlapReport, PendingSave
from fp_multi._save import Saving
from fp_multi._stats import Stats
from fp_multi._steps import complete_steps, retired_steps, step_path
from fp_multi._trace import Trace
from fp_multi._tree import describe
from fp_multi._types import Described, Selection
from fp_multi.checkpoint import load
from fp_multi.config import LoadConfig, SaveConfig
from fp_multi.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigError

Overlap = Literal["hybrid", "borrow", "snapshot"]
_UNBOUNDED = (1 << 63) - 1


class Checkpointer:
    """Saves steps into a directory while training goes on (FastPersist, arXiv 2406.13768 section 4.3).

    ``save`` returns at once. The state must not change before ``wait_for_staging`` (the fence) has returned; adapters
    call it from a hook of the optimizer. Three modes:

    ``"borrow"``: the drive reads the state's own memory; the fence waits until the last byte has left it.
    ``"snapshot"``: everything is copied first, at memory speed; the fence waits for the copy.
    ``"hybrid"``: borrows, and when the fence comes copies only what has not left yet.

    A save that fails in the background raises at the next call of ``save``, ``wait_for_staging``, ``wait`` or
    ``close``, once; the checkpoints that were complete stay as they are.

    Args:
        directory: where steps are kept; made if missing.
        overlap: the mode.
        keep: keep the newest so many steps; None keeps all.
        keep_every: keep steps that are a multiple of it for good.
        recycle: overwrite the files of retired steps in place instead of removing them: faster, and for one more
            checkpoint's room on the drive. Needs ``keep``.
        max_in_flight: saves that may be under way, 1 or 2; with more, ``save`` waits.
        staging_bytes: most memory for copies at a fence; past it the fence waits for the drive. None: no limit.
        on_error: ``"raise"``, or ``"warn"`` to go on after a failed background save.
        config: how to write.
        load_config: how to read.
        progress: called by a background thread after each completed step, with its :class:`OverlapReport`.

    Raises:
        ConfigError: a setting is out of range.

    Example:
        >>> import numpy as np, fp_multi as fp
        >>> with fp.Checkpointer("run", keep=2) as ckpt:
        ...     for step in range(3):
        ...         pending = ckpt.save(step, {"w": np.full(4, step)})
        ...         ckpt.wait_for_staging()  # the state may change now
        >>> with fp.Checkpointer("run") as ckpt:
        ...     ckpt.steps(), ckpt.restore()[1]["w"]
        ([1, 2], array([2, 2, 2, 2]))
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        overlap: Overlap = "hybrid",
        keep: int | None = None,
        keep_every: int | None = None,
        recycle: bool = True,
        max_in_flight: int = 1,
        staging_bytes: int | None = None,
        on_error: Literal["raise", "warn"] = "raise",
        config: SaveConfig = SaveConfig(),
        load_config: LoadConfig = LoadConfig(),
        progress: Callable[[OverlapReport], None] | None = None,
    ) -> None:
        if overlap not in ("hybrid", "borrow", "snapshot"):
            raise ConfigError(f'overlap must be "hybrid", "borrow" or "snapshot", found {overlap!r}')
        if on_error not in ("raise", "warn"):
            raise ConfigError(f'on_error must be "raise" or "warn", found {on_error!r}')
        for name, value, least in (
            ("keep", keep, 1),
            ("keep_every", keep_every, 1),
            ("staging_bytes", staging_bytes, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, found {value}")
        if max_in_flight not in (1, 2):
            raise ConfigError(f"max_in_flight must be 1 or 2, found {max_in_flight}")
        self.directory = _commit.resolve(directory)
        self.overlap = overlap
        self.config = config
        self.load_config = load_config
        self.stats = Stats()
        self._keep = keep
        self._keep_every = keep_every
        self._recycle = recycle and keep is not None
        self._max_in_flight = max_in_flight
        self._spill_nbytes = _UNBOUNDED if staging_bytes is None else staging_bytes
        self._on_error = on_error
        self._progress = progress
        self._trace = Trace()
        self._lock = threading.RLock()
        self._pending: deque[PendingSave] = deque()
        self._errors: deque[BaseException] = deque()
        self._retired: deque[_recycle.Retired] = deque()
        self._reading: list[int] = []
        self._closed = False
        _commit.make_parents(self.directory, durable=config.durable)

    # Saving

    def save(
        self,
        step: int,
        state: Any,
        *,
        metadata: Mapping[str, str] | None = None,
        copy: Selection = (),
        overwrite: bool = False,
        allow_pickle: bool = False,
    ) -> PendingSave:
        """Start saving a step.

        Args:
            step: its number, at least 0.
            state: as for :func:`fp_multi.save`. Plain values are taken as they are now; arrays are read until the
            fence.
            metadata: strings to keep with it.
            copy: subtrees whose arrays are copied before this returns, because they may change before the fence.
            overwrite: replace the step if it exists.
            allow_pickle: as for :func:`fp_multi.save`.

        Returns:
            A handle for waiting and for the report.

        Raises:
            UnsupportedLeafError: a leaf cannot be stored; nothing has been written.
            CheckpointExistsError: the step exists.
            FpMultiError: an earlier save failed in the background.
        """
        self._require_open()
        if step < 0:
            raise ConfigError(f"step must be at least 0, found {step}")
        begin_s = time.perf_counter()
        self._raise_errors()
        attached = check_metadata(metadata) or {}
        described = describe(state, allow_pickle=allow_pickle)
        described, eager_nbytes = _eager.copy_selected(described, copy)
        return self.start(step, described, attached, overwrite, eager_nbytes, begin_s)

    def start(
        self,
        step: int,
        described: Described,
        metadata: Mapping[str, str],
        overwrite: bool,
        eager_nbytes: int,
        begin_s: float,
    ) -> PendingSave:
        """The second half of :meth:`save`, for adapters that describe states themselves."""
        queued_s = time.perf_counter()
        self._make_room()
        started_s = time.perf_counter()
        path = step_path(self.directory, step)
        if not overwrite and step in complete_steps(self.directory):
            raise CheckpointExistsError(17, "this step exists; pass overwrite=True to replace it", path)
        with self._lock:
            retired = self._retired.popleft() if self._retired else None
            slot = len(self._pending)
        try:
            saving = Saving(
                described,
                path,
                self.config,
                overwrite=overwrite,
                metadata=metadata,
                begin_s=begin_s,
                reuse=retired.shard() if retired is not None else None,
                slot=slot,
            )
        finally:
            if retired is not None:
                retired.remove()
        if self.overlap == "snapshot":
            saving.job.fence(self._spill_nbytes)
        end_s = time.perf_counter()
        stall_s = end_s - begin_s - (started_s - queued_s)
        report = OverlapReport(step, None, stall_s, started_s - queued_s, 0.0, 0, 0, eager_nbytes)
        self._trace.span("training", f"save {step}", begin_s, end_s, step=step)
        with self._lock:
            pending = PendingSave(step, saving, report, self._finished)
            self._pending.append(pending)
        return pending

    def wait_for_staging(self) -> None:
        """The fence: returns when the states given to ``save`` may change.

        Raises:
            FpMultiError: a save failed in the background.
        """
        begin_s = time.perf_counter()
        with self._lock:
            pending = list(self._pending)
        for one in pending:
            one.fence(0 if self.overlap == "borrow" else self._spill_nbytes)
        if pending:
            self._trace.span("training", "fence", begin_s, time.perf_counter())
        self._raise_errors()

    def wait(self) -> None:
        """Return when every save is complete and on the drive.

        Raises:
            FpMultiError: a save failed in the background.
        """
        while True:
            with self._lock:
                pending = self._pending[0] if self._pending else None
            if pending is None:
                break
            pending.join()
        self._raise_errors()

    def _make_room(self) -> None:
        while True:
            with self._lock:
                if len(self._pending) < self._max_in_flight:
                    return
                oldest = self._pending[0]
            oldest.join()

    def _finished(self, pending: PendingSave) -> None:
        """Runs in the save's thread, when it is complete or has failed."""
        report = pending.report
        if pending.error is not None:
            with self._lock:
                self._errors.append(pending.error)
        else:
            self.stats.add(report)
            self._trace_save(report)
            self._retire()
        with self._lock:
            self._pending.remove(pending)
        if pending.error is None and self._progress is not None:
            self._progress(report)

    def _trace_save(self, report: OverlapReport) -> None:
        save = report.save
        if save is None:
            return
        end_s = save.begin_s + save.elapsed_s
        commit_s = end_s - save.commit_s
        flush_s = commit_s - save.fsync_s
        facts = {"step": report.step, "GB/s": round(save.gbytes_per_s, 3)}
        self._trace.span("drive", f"write {report.step}", flush_s - save.write_s, flush_s, **facts)
        self._trace.span("drive", f"fsync {report.step}", flush_s, commit_s)
        self._trace.span("commit", f"commit {report.step}", commit_s, end_s)

    def _retire(self) -> None:
        with self._lock:
            in_use = tuple(self._reading)
        steps = complete_steps(self.directory)
        for step in retired_steps(steps, keep=self._keep, keep_every=self._keep_every, in_use=in_use):
            retired = _recycle.retire(steps[step])
            if retired is None:
                continue
            with self._lock:
                spare = self._recycle and not self._closed and len(self._retired) < self._max_in_flight
                if spare and retired.shard() is not None:
                    self._retired.append(retired)
                    continue
            retired.remove()

    # Errors

    def _raise_errors(self) -> None:
        with self._lock:
            error = self._errors.popleft() if self._errors else None
        if error is None:
            return
        if self._on_error == "raise":
            raise error
        warnings.warn(f"a background save failed and was given up: {error}", RuntimeWarning, stacklevel=3)

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError(f"{self.directory}: the Checkpointer is closed")

    # Restoring

    def steps(self) -> list[int]:
        """The complete steps, in order."""
        return list(complete_steps(self.directory))

    def latest_step(self) -> int | None:
        """The newest complete step, None if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def restore(self, step: int | None = None, **options: Any) -> tuple[int, Any]:
        """Load a step.

        Args:
            step: which; None for the newest complete one.
            **options: ``target``, ``only``, ``inplace``, ``allow_pickle``, ``tensor_builder`` of :func:`fp_multi.load`.

        Returns:
            The step and the state.

        Raises:
            CheckpointNotFoundError: there is no such step.
            FpMultiError: whatever :func:`fp_multi.load` raises.
        """
        with self._reserved(step) as (chosen, path):
            return chosen, load(path, config=self.load_config, **options)

    @contextmanager
    def _reserved(self, step: int | None) -> Iterator[tuple[int, str]]:
        # Chosen and reserved in one: retention must not take the step in between.
        with self._lock:
            chosen = self.latest_step() if step is None else step
            if chosen is None:
                raise CheckpointNotFoundError(2, "no complete step here", self.directory)
            self._reading.append(chosen)
        try:
            yield chosen, step_path(self.directory, chosen)
        finally:
            with self._lock:
                self._reading.remove(chosen)

    # Seeing it

    def export_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a timeline in Chrome's trace format: training, fences, writes, flushes, commits."""
        self._trace.export(path)

    def trace_span(self, lane: str, name: str, begin_s: float, end_s: float) -> None:
        """Add something of the caller's to the timeline; times are ``time.perf_counter()``."""
        self._trace.span(lane, name, begin_s, end_s)

    # The end

    def close(self) -> None:
        """Finish every save, and let go of retired files. Idempotent.

        Raises:
            FpMultiError: a save failed in the background.
        """
        with self._lock:
            self._closed = True
        try:
            self.wait()
        finally:
            with self._lock:
                retired, self._retired = list(self._retired), deque()
            for one in retired:
                one.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except Exception:
            # The exception that ended the block matters more; the failed save is in the log.
            if kind is None:
                raise
