"""Checkpointer: steps in a directory, saved beside the training that goes on, retired and reused."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

from fp_multi import _commit, _eager, _engines, _hidden
from fp_multi._advice import Advice
from fp_multi._arguments import require, whole_number
from fp_multi._comm import Comm
from fp_multi._format import check_metadata
from fp_multi._in_flight import InFlight, Progress
from fp_multi._pending import PendingSave
from fp_multi._stats import Stats
from fp_multi._step_reader import StepReader
from fp_multi._steps import Retention, complete_steps, step_path
from fp_multi._together import Together, begin, team_of
from fp_multi._trace import Trace
from fp_multi._tree import describe
from fp_multi._types import LeafSource, Selection
from fp_multi.config import LoadConfig, SaveConfig
from fp_multi.errors import ConfigError

Overlap = Literal["hybrid", "borrow", "snapshot"]

_UNBOUNDED = (1 << 63) - 1


class Checkpointer(StepReader):
    """Saves steps into a directory while training goes on (FastPersist, arXiv 2406.13768 section 4.3).

    ``save`` returns at once. The state must not change before ``wait_for_staging`` (the fence) has returned; adapters
    call it from a hook of the optimizer. Three modes:

    ``"borrow"``: the drive reads the state's own memory; the fence waits until the last byte has left it.
    ``"snapshot"``: everything is copied first, at memory speed; the fence waits for the copy.
    ``"hybrid"``: borrows, and when the fence comes copies only what has not left yet.

    A save that fails in the background raises once, at the first of ``save`` (without ``comm``), ``wait_for_staging``,
    ``wait``, ``close`` and :meth:`PendingSave.wait` that comes; the checkpoints that were complete stay as they are.

    Args:
        directory: where steps are kept; made if missing.
        overlap: the mode.
        keep: keep the newest so many steps; None keeps all.
        keep_every: keep steps that are a multiple of it for good. Needs ``keep``.
        recycle: overwrite the files of retired steps in place instead of removing them: faster, for one more
            checkpoint's room on the drive. Without ``keep`` nothing is retired.
        max_in_flight: saves that may be under way, 1 or 2; with more, ``save`` waits.
        staging_bytes: most memory for the copy of one save at a fence; past it the fence waits for the drive. None:
            no limit.
        on_error: ``"raise"``, or ``"warn"`` to go on after a failed background save.
        config: how to write.
        load_config: how to read.
        progress: called by a thread of its own about ten times a second while a step is saved, and once when that is
            over, with its :class:`PendingSave`: ``progress``, ``done``, ``error`` and ``report`` tell.
        comm: the processes that save together, as for :func:`fp_multi.save`. All of them make the Checkpointer, and
            call ``save`` and ``restore`` in the same order; they agree on each save in the background. Files are
            recycled with one save in flight only, and not on network file systems.

    Raises:
        ConfigError: a setting is out of range.
        StorageError: the directory cannot be made.

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
        progress: Progress | None = None,
        comm: Comm | None = None,
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
            if value is not None:
                whole_number(name, value, least)
        if keep_every is not None and keep is None:
            raise ConfigError("keep_every needs keep: without keep every step stays")
        if whole_number("max_in_flight", max_in_flight, 1) > 2:
            raise ConfigError(f"max_in_flight must be 1 or 2, found {max_in_flight}")
        require("config", config, SaveConfig)
        require("load_config", load_config, LoadConfig)
        if progress is not None and not callable(progress):
            raise ConfigError(f"progress must be a function, found {progress!r}")
        if comm is not None:
            require("comm", comm, Comm)
        comm = None if comm is None or comm.size == 1 else comm
        leads = comm is None or team_of(comm).leads
        path = _commit.resolve(directory)
        _commit.make_parents(path, durable=config.durable)
        complete_steps(path)  # says now if it is no directory, or not ours to read
        # Another host's lock on the step that it reads is not seen on a network file system, so nothing is overwritten.
        recycle = recycle and (comm is None or (max_in_flight == 1 and not _hidden.on_network(path)))
        retention = Retention(
            path,
            keep=keep if leads else None,
            keep_every=keep_every,
            spares=max_in_flight if recycle else 0,
            durable=config.durable,
        )
        super().__init__(path, load_config, retention, comm)
        self.overlap = overlap
        self.config = config
        self.stats = Stats()
        self._spill_nbytes = _UNBOUNDED if staging_bytes is None else staging_bytes
        self._trace = Trace()
        self._in_flight = InFlight(
            self.directory,
            config,
            self._retention,
            most=max_in_flight,
            warn=on_error == "warn",
            spill_nbytes=0 if overlap == "borrow" else self._spill_nbytes,
            progress=progress,
            stats=self.stats,
            trace=self._trace,
        )

    # Saving

    def save(
        self,
        step: int,
        state: Any,
        *,
        path: str | os.PathLike[str] | None = None,
        metadata: Mapping[str, str] | None = None,
        copy: Selection = (),
        overwrite: bool = False,
        allow_pickle: bool = False,
    ) -> PendingSave:
        """Start saving a step.

        Args:
            step: its number, at least 0.
            state: as for :func:`fp_multi.save`. Plain values, arrays without axes and byte arrays are taken as they
                are now; other arrays are read until the fence.
            path: a place of its own instead, of which ``steps``, ``restore`` and retention do not know.
            metadata: strings to keep with it.
            copy: subtrees whose arrays are copied before this returns, because they may change before the fence. If
                they are more than 64 MiB, the whole state is copied, as in snapshot mode, and this waits for it.
            overwrite: replace the step if it exists.
            allow_pickle: as for :func:`fp_multi.save`.

        Returns:
            A handle for waiting and for the report.

        Raises:
            UnsupportedLeafError: a leaf cannot be stored; nothing has been written.
            CheckpointExistsError: the step exists, or is being saved.
            ConfigError: the step or the metadata cannot be, or the Checkpointer is closed.
            EngineClosedError: this process was forked from the one that made the Checkpointer.
            FpMultiError: an earlier save failed in the background, and this one has not been started (with ``comm`` the
                fence, ``wait`` and ``close`` raise that instead).
        """
        self._require_open()
        number = whole_number("step", step, 0)
        begin_s = time.perf_counter()
        team = None if self.comm is None else begin(self.comm, f"step {number} in {self.directory!r}")
        try:
            if team is None:
                # With other ranks not: who has heard of an earlier error is another matter on each of them.
                self._in_flight.raise_errors()
            pending, queue_s, copies_all = self._begin_save(
                number, state, path, metadata, copy, overwrite, allow_pickle, team
            )
        except BaseException as error:
            if team is not None:
                team.give_up(error)
            raise
        if copies_all:
            pending.wait_staged()
        end_s = time.perf_counter()
        stalls = {"stall_save_s": end_s - begin_s - queue_s, "stall_queue_s": queue_s}
        pending.add(**stalls)
        pending.saved_s = end_s
        self.stats.asked(number, begin_s)
        self.stats.stalled(**stalls)
        self._trace.span("training", f"save {number}", begin_s, end_s, step=number, queue_s=queue_s)
        return pending

    def _begin_save(
        self,
        number: int,
        state: Any,
        path: str | os.PathLike[str] | None,
        metadata: Mapping[str, str] | None,
        copy: Selection,
        overwrite: bool,
        allow_pickle: bool,
        team: Together | None,
    ) -> tuple[PendingSave, float, bool]:
        """Describe and hand over; returns the save, seconds waited for its turn, and whether all of it is copied."""
        attached = check_metadata(metadata) or {}
        described = describe(state, allow_pickle=allow_pickle)
        changing = _eager.selected(described, copy).union(
            self.changing(described.sources), _eager.plain_values(described.sources)
        )
        eager_nbytes = _eager.nbytes_of(described, changing)
        copies_all = eager_nbytes > _eager.MOST_NBYTES
        if copies_all:
            eager_nbytes = 0
        elif eager_nbytes:
            described = _eager.copy_indices(described, changing)
        place = step_path(self.directory, number) if path is None else _commit.resolve(path)
        if team is not None:
            # Here, where all ranks come in the same order; in the background it is known then.
            team.prepare(described, self.config, os.path.dirname(place))
        pending, queue_s = self._in_flight.start(
            number,
            described,
            attached,
            path=place,
            overwrite=overwrite,
            eager_nbytes=eager_nbytes,
            spill_nbytes=self._spill_nbytes if copies_all or self.overlap == "snapshot" else None,
            team=team,
        )
        return pending, queue_s, copies_all

    def changing(self, sources: Sequence[LeafSource]) -> Iterable[int]:
        """Which tensors of a state may change before the fence, by index; adapters that know override it.

        :meth:`save` copies them, besides those that its caller names.
        """
        return ()

    def wait_for_staging(self) -> None:
        """The fence: returns when the states given to ``save`` may change.

        Raises:
            FpMultiError: a save failed in the background. The states may change all the same.
        """
        self._fence()
        self._in_flight.raise_errors()

    def _fence(self) -> None:
        begin_s = time.perf_counter()
        pending = self._in_flight.pending()
        for one in pending:
            saved_s, one.saved_s = one.saved_s, None
            if saved_s is not None:
                self.stats.window(begin_s - saved_s)
        pending = [one for one in pending if not one.staged]
        if self.overlap != "borrow":
            for one in pending:
                one.let_go(self._spill_nbytes)
        for one in pending:
            since_s = time.perf_counter()
            one.wait_staged()
            stall_s = time.perf_counter() - since_s
            one.add(stall_fence_s=stall_s)
            self.stats.stalled(stall_fence_s=stall_s)
        if pending:
            self._trace.span("training", "fence", begin_s, time.perf_counter())

    def wait(self) -> None:
        """Return when every save that was asked for is complete and on the drive.

        Raises:
            FpMultiError: a save failed in the background.
        """
        self._in_flight.join()
        self._in_flight.raise_errors()

    def _require_open(self) -> None:
        self._in_flight.require_open()

    def _before_restore(self, *, inplace: bool) -> None:
        self._in_flight.require_here()
        if inplace:
            self._fence()

    # Seeing it

    def export_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a timeline in Chrome's trace format: training, fences, staging, writes, flushes, commits.

        Raises:
            StorageError: the file cannot be written.
        """
        self._trace.export(path)

    def trace_span(self, lane: str, name: str, begin_s: float, end_s: float) -> None:
        """Add something of the caller's to the timeline; times are ``time.perf_counter()``.

        A span of the lane ``"steps"`` is a whole training step: :meth:`advise` takes its length from there.
        """
        if not self._in_flight.is_here:
            return  # in a forked child, whose parent's threads may have held the locks
        self._trace.span(lane, name, begin_s, end_s)
        if lane == "steps":
            self.stats.stepped(end_s - begin_s)

    def advise(
        self,
        *,
        mtbf_s: float,
        overhead: float = 0.05,
        step_s: float | None = None,
        forward_backward_s: float | None = None,
        nbytes: int | None = None,
        bytes_per_s: float | None = None,
        stall_s: float | None = None,
    ) -> Advice:
        """How often to save, from what was measured so far; what is given here is taken instead.

        Args:
            mtbf_s: mean time between failures of the whole job, in seconds.
            overhead: share of the training time that saving may cost.
            step_s: time of a training step without saving.
            forward_backward_s: the part of it in which the state does not change.
            nbytes: size of a checkpoint.
            bytes_per_s: rate of the drive beside training.
            stall_s: what training waits for each save.

        Returns:
            Numbers; ``str()`` of it says them in words.

        Raises:
            ConfigError: something is out of range, or neither given nor measured yet.
        """
        given = {
            "step_s": step_s,
            "forward_backward_s": forward_backward_s,
            "nbytes": nbytes,
            "bytes_per_s": bytes_per_s,
            "stall_s": stall_s,
        }
        return self.stats.advise(mtbf_s, overhead, given)

    # The end

    def close(self) -> None:
        """Finish every save, and let go of retired files. Idempotent.

        Raises:
            FpMultiError: a save failed in the background.
        """
        if not self._in_flight.is_here:
            return
        self._in_flight.close()
        try:
            self._in_flight.join()
        finally:
            self._in_flight.end()
            _engines.release_memory()
        self._in_flight.raise_errors()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except Exception:
            # The exception that ended the block matters more; the failed save is in the log.
            if kind is None:
                raise
