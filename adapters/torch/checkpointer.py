"""Checkpointer for training loops: the optimizer's step waits for the copy, nobody else does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

import fp_multi
from fp_multi import LeafSource, PendingSave
from fp_multi.errors import ConfigError

from ._borrow import changing_sources, steady_storages
from ._builder import builder_for
from ._location import MapLocation
from ._together import saving_together


class Checkpointer(fp_multi.Checkpointer):
    """:class:`fp_multi.Checkpointer` that knows when a training loop changes what.

    :meth:`attach` an optimizer, and its step waits until the state that was saved may change. Until then only the
    optimizer's parameters and the tensors of its state are read from where they are. Everything else (BatchNorm's
    statistics and other buffers, averaged weights, random states, parameters of other optimizers) may change in a
    forward pass and is copied in the call of ``save``; if that is more than 64 MiB, or no optimizer is attached and
    that is therefore everything, the whole state is copied by native threads and ``save`` returns when they are done.

    What else changes parameters between ``save`` and the next step (weight clipping, swapping in averaged weights,
    ``load_state_dict``) must call ``wait_for_staging`` first.

    A save that failed in the background raises at the next ``save``, ``wait_for_staging``, ``wait`` or ``close``, and
    at the next step of an attached optimizer, before that optimizer has changed a parameter: its step can be
    repeated. With
    ``on_error="warn"`` it is a warning there, and the step is made.

    It is made like :class:`fp_multi.Checkpointer`. With ``comm=`` every rank of the job makes one and attaches its own
    optimizer; a fence waits for this rank's own bytes only, never for another rank. DTensors are saved by their
    placements, each rank its parts.

    Example:
        >>> with Checkpointer("run", keep=2) as ckpt:  # doctest: +SKIP
        ...     ckpt.attach(optimizer)
        ...     for step, batch in enumerate(batches):
        ...         loss(model(batch)).backward()
        ...         optimizer.step()  # waits for what is left of the save before, if anything
        ...         ckpt.save(step, capture(model=model, optimizer=optimizer))
    """

    _attached: tuple[_Attached, ...] = ()

    def attach(self, *optimizers: torch.optim.Optimizer, hook: bool = True) -> None:
        """Let the next step of each optimizer wait for the saves that read its parameters.

        The wait is in a hook that runs at the begin of ``step``. With ``step(closure)``, which calls forward and
        backward itself, it therefore comes before them and leaves less time to overlap. A step that a ``GradScaler``
        skips changes nothing and does not wait. Attaching an optimizer again does nothing.

        Attach every optimizer that changes a parameter: a parameter is read from where it is as soon as one optimizer
        that has it is attached.

        Args:
            *optimizers: those whose parameters and states are saved.
            hook: pass False to call :meth:`wait_for_staging` before every step yourself, for example at the end of the
                closure.

        Raises:
            ConfigError: not an optimizer, or the Checkpointer is closed.
        """
        self._require_open()
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise ConfigError(
                    f"attach() takes torch.optim.Optimizer, found {type(optimizer).__qualname__}; pass the optimizer "
                    "that it wraps, or use fp_multi.Checkpointer and call wait_for_staging() before each step"
                )
        for optimizer in optimizers:
            if all(one.optimizer is not optimizer for one in self._attached):
                one = _Attached(self, optimizer, len(self._attached))
                if hook:
                    one.install()
                self._attached = (*self._attached, one)

    def save(self, step: int, state: Any, **options: Any) -> PendingSave:
        """Start saving a step.

        Args:
            step: its number.
            state: as for :func:`fp_multi.adapters.torch.save`.
            **options: see :meth:`fp_multi.Checkpointer.save`.

        Returns:
            A handle for waiting and for the report.

        Raises:
            FpMultiError: whatever :meth:`fp_multi.Checkpointer.save` raises.
        """
        with saving_together(self.comm):
            return super().save(step, state, **options)

    def changing(self, sources: Sequence[LeafSource]) -> Sequence[int]:
        """The tensors that do not belong to an attached optimizer, by index."""
        return changing_sources(sources, steady_storages(one.optimizer for one in self._attached))

    def restore(self, step: int | None = None, *, map_location: MapLocation = None, **options: Any) -> tuple[int, Any]:
        """Load a step.

        Args:
            step: which; None for the newest complete one.
            map_location: where tensors go, see :func:`fp_multi.adapters.torch.load`.
            **options: ``target``, ``only``, ``inplace``, ``allow_pickle``, see :func:`fp_multi.adapters.torch.load`.

        Returns:
            The step and the state, with torch tensors; :func:`fp_multi.adapters.torch.resume` puts it into a model and
            its optimizer.

        Raises:
            CheckpointNotFoundError: there is no such step.
            FpMultiError: whatever :func:`fp_multi.adapters.torch.load` raises.
        """
        options.setdefault("tensor_builder", builder_for(map_location, inplace=options.get("inplace", False)))
        return super().restore(step, **options)

    def close(self) -> None:
        """Remove the hooks, and finish every save. Idempotent.

        Raises:
            FpMultiError: a save failed in the background.
        """
        attached, self._attached = self._attached, ()
        for one in attached:
            one.remove()
        super().close()


class _Attached:
    """An optimizer whose steps wait."""

    def __init__(self, checkpointer: Checkpointer, optimizer: torch.optim.Optimizer, number: int) -> None:
        self.optimizer = optimizer
        self._checkpointer = checkpointer
        self._lane = f"steps of optimizer {number}" if number else "steps"
        self._handle: RemovableHandle | None = None
        self._steps = 0
        self._last_s = 0.0

    def install(self) -> None:
        self._handle = self.optimizer.register_step_pre_hook(self._before_step)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _before_step(self, *_: Any) -> None:
        now_s = time.perf_counter()
        if self._steps:
            self._checkpointer.trace_span(self._lane, f"step {self._steps}", self._last_s, now_s)
        self._steps += 1
        self._last_s = now_s
        self._checkpointer.wait_for_staging()
