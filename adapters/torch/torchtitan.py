"""torchtitan: its checkpoint manager with fp_multi's storage, and the fence before ``optimizers.step()``.

It is not imported by :mod:`fp_multi.adapters.torch`; it needs ``torchtitan`` 0.3.

Example:
    >>> checkpoint = FastPersistCheckpointManager.Config(  # doctest: +SKIP
    ...     interval=100, async_mode="async", overlap="hybrid"
    ... )
    >>> config = replace(model_registry_config, checkpoint=checkpoint)  # doctest: +SKIP
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
from torchtitan.tools.utils import GarbageCollection

from fp_multi.errors import ConfigError

from .dcp import AsyncStager, StorageReader, StorageWriter

__all__ = ["FastPersistCheckpointManager"]

_MANIFEST = "manifest.json"
"""Every fp_multi checkpoint has one, and it is written last (docs/format.md)."""


class FastPersistCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """torchtitan's ``CheckpointManager`` whose steps are fp_multi checkpoints.

    ``async_mode="disabled"`` returns when the checkpoint is on the drive. ``"async"`` returns at once: the drive reads
    parameters and optimizer states beside the next forward and backward pass, and torchtitan's
    ``maybe_wait_for_staging``, which it calls before ``optimizers.step()``, is the fence (FastPersist, arXiv
    2406.13768). All else is copied in the call of ``save``. ``"async_with_pinned_mem"`` is refused: its copy is what
    this does without.

    A save that failed in the background raises once: at the fence before the next ``optimizers.step()``, at the next
    ``save``, or at ``close``.

    A step that is incomplete is never loaded. Steps that torchtitan's own manager wrote are, and exports
    (``last_save_in_hf``) are written as ever. Remote folders are refused.

    Everything else is as in ``CheckpointManager``: arguments, retention, what is saved.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's settings and one more."""

        overlap: Literal["hybrid", "borrow", "snapshot"] = "hybrid"
        """With ``async_mode="async"``: how, see :class:`fp_multi.adapters.torch.AsyncStager`."""

    save_future: Any

    def __init__(self, config: Config, *, optimizers: Any, **options: Any) -> None:
        if config.async_mode == "async_with_pinned_mem":
            raise ConfigError(
                'async_mode="async_with_pinned_mem" copies the state to a process; use async_mode="async", which does '
                "not copy it"
            )
        self._fp_stager = AsyncStager(config.overlap)
        super().__init__(config, optimizers=optimizers, **options)
        if config.enable and "://" in self.folder:
            raise ConfigError(f"{self.folder}: checkpoints are written to local file systems only")
        if config.enable and config.async_mode == "async":
            self._fp_stager.attach(*optimizers.optimizers, hook=False)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save a step; torchtitan calls it."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        how: dict[str, Any] = {"checkpoint_id": checkpoint_id, "storage_writer": StorageWriter()}
        future: Any = None
        if async_mode == AsyncMode.ASYNC:
            future = async_save(state_dict, process_group=self.pg, async_stager=self._fp_stager, **how)
        else:
            save(state_dict, **how)
        if enable_garbage_collection:
            GarbageCollection.collect("after a checkpoint")
        return future

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load a step; torchtitan calls it."""
        if from_hf or not _is_ours(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        self._fp_stager.fence()
        load(state_dict, checkpoint_id=checkpoint_id, storage_reader=StorageReader(checkpoint_id))
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        folder = folder or self.folder
        newest: int = super()._find_load_step(folder)
        names = os.listdir(folder) if os.path.isdir(folder) else []
        for name in names:
            step = name.removeprefix("step-")
            if step != name and step.isdecimal() and _is_ours(os.path.join(folder, name)):
                newest = max(newest, int(step))
        return newest

    def _maybe_wait_for_staging(self) -> None:
        self._fp_stager.fence()
        super()._maybe_wait_for_staging()
        future: Any = self.save_future
        if future is not None and future.done():
            self._wait_for_saving()

    def _wait_for_saving(self) -> None:
        future: Any = self.save_future
        self.save_future = None  # an error is raised once
        future.result()

    def _close(self) -> None:
        try:
            self._fp_stager.close()
            self.maybe_wait_for_saving()
        finally:
            super()._close()


def _is_ours(path: str) -> bool:
    return os.path.isfile(os.path.join(path, _MANIFEST))
