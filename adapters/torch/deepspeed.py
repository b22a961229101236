"""DeepSpeed: a checkpoint engine that writes fp_multi checkpoints beside training.

It is not imported by :mod:`fp_multi.adapters.torch`; it needs ``deepspeed``.

Example:
    >>> engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)  # doctest: +SKIP
    >>> FastPersistCheckpointEngine.install(engine)  # doctest: +SKIP
    >>> engine.save_checkpoint("run")  # the next engine.step() commits it  # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Self

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from fp_multi.config import LoadConfig, SaveConfig
from fp_multi.errors import PickleRefusedError

from ._borrow import steady_storages
from ._paths import PathSaver
from .state_dict import load

__all__ = ["FastPersistCheckpointEngine"]


class FastPersistCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Each file of a DeepSpeed checkpoint becomes an fp_multi checkpoint directory of the same name.

    With ``decoupled``, ``save_checkpoint`` returns when the state has been taken apart. The drive reads it beside the
    next forward and backward pass; the next ``engine.step`` that updates the model first commits: it waits until
    everything is on the drive, and DeepSpeed then writes ``latest``. That is FastPersist's overlap (arXiv 2406.13768).
    Only what ``install`` knows that no forward pass changes is read that late; the rest is copied in the call.

    DeepSpeed never commits a decoupled checkpoint that no step follows. :meth:`cleanup`, which ``engine.destroy``
    calls, does, and :meth:`finish` does and lets DeepSpeed write ``latest``: call it after the last save.

    Files of DeepSpeed's own engine are read, too, with ``allow_pickle``. Its ``zero_to_fp32.py`` and its inference
    engine read only those.

    Args:
        config_params: as DeepSpeed passes it; not used.
        decoupled: whether saves go on beside training; otherwise ``save_checkpoint`` returns when everything is on the
            drive.
        allow_pickle: pickle what the format has no form for, and unpickle it. ZeRO keeps its loss scaler as an object,
            so its checkpoints need it.
        config: how to write.
        load_config: how to read.
    """

    def __init__(
        self,
        config_params: Any = None,
        *,
        decoupled: bool = True,
        allow_pickle: bool = False,
        config: SaveConfig = SaveConfig(),
        load_config: LoadConfig = LoadConfig(),
    ) -> None:
        super().__init__(config_params)
        self.name = type(self).__name__
        self._decoupled = decoupled
        self._load_config = load_config
        self._info: CheckpointCommitInfo | None = None
        self._saves = 0
        self._engine: Any = None
        # A commit waits for the drive, so there is nothing to win by copying at it.
        self._saver = PathSaver("borrow" if decoupled else None, self._steady, allow_pickle=allow_pickle, config=config)

    @classmethod
    def install(cls, engine: Any, **options: Any) -> Self:
        """Let a DeepSpeed engine save and load with it.

        Args:
            engine: what ``deepspeed.initialize`` gave.
            **options: as for the class.

        Returns:
            The checkpoint engine.
        """
        made = cls(None, **options)
        made._engine = engine
        replaced, engine.checkpoint_engine = engine.checkpoint_engine, made
        replaced.cleanup()
        return made

    # What DeepSpeed calls

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint; one that has not been committed is finished first."""
        self._saver.wait()
        self._info = info

    def save(self, state_dict: Any, path: str) -> None:
        """Save one file of it.

        Raises:
            UnsupportedLeafError: a value cannot be stored; the message names its place.
            FpMultiError: the save failed.
        """
        self._saves += 1
        self._saver.save(self._saves, state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Load one file of a checkpoint.

        Raises:
            PickleRefusedError: it is a file of ``torch.save``, or has pickled values, and ``allow_pickle`` is not set.
            FpMultiError: the checkpoint cannot be read.
        """
        self._saver.wait()
        allow_pickle = self._saver.allow_pickle
        if os.path.isfile(path):
            if not allow_pickle:
                raise PickleRefusedError(
                    f"{path}: a file of torch.save, which can run any code; pass allow_pickle=True if you trust it"
                )
            return torch.load(path, map_location=map_location, weights_only=False)
        return load(path, map_location, config=self._load_config, allow_pickle=allow_pickle)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return when everything saved is on the drive.

        Raises:
            FpMultiError: a save failed. The checkpoint is given up; DeepSpeed does not name it in ``latest``.
        """
        self._info = None
        self._saver.wait()
        return True

    def is_decoupled(self) -> bool:
        """Whether DeepSpeed commits at the next step instead of in ``save_checkpoint``."""
        return self._decoupled

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """The checkpoint that has not been committed."""
        return self._info

    def cleanup(self) -> None:
        """Finish every save.

        Raises:
            FpMultiError: a save failed.
        """
        self._info = None
        self._saver.close()

    def preserves_storage_sharing(self) -> bool:
        """No: of a view only the view is stored, so DeepSpeed need not copy tensors before."""
        return False

    # For its users

    def finish(self) -> None:
        """Commit the last checkpoint, and let DeepSpeed write ``latest``; every process must call it.

        Raises:
            FpMultiError: a save failed.
        """
        if self._decoupled and self._engine is not None:
            self._engine._commit_decoupled_checkpoint()

    def _steady(self) -> set[int]:
        if self._engine is None or getattr(self._engine, "zenflow", False):
            return set()  # ZenFlow updates parameters beside forward and backward pass
        return steady_storages(_optimizers(self._engine)) | {
            parameter.untyped_storage().data_ptr() for parameter in self._engine.module.parameters()
        } - {0}


def _optimizers(engine: Any) -> Iterable[torch.optim.Optimizer]:
    """The torch optimizer inside DeepSpeed's wrappers."""
    at = engine.optimizer
    while at is not None:
        if isinstance(at, torch.optim.Optimizer):
            yield at
        at = getattr(at, "optimizer", None)
