"""Lightning: a ``CheckpointIO`` that writes fp_multi checkpoints, at once or beside training.

It is not imported by :mod:`fp_multi.adapters.torch`; it needs ``lightning`` (or ``pytorch_lightning``).

Example:
    >>> io = FastPersistCheckpointIO(overlap="hybrid")  # doctest: +SKIP
    >>> trainer = Trainer(plugins=[io], callbacks=[io.callback, ModelCheckpoint(save_top_k=2)])  # doctest: +SKIP
    >>> trainer.fit(module, ckpt_path="last")  # doctest: +SKIP
"""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from fp_multi.config import LoadConfig, SaveConfig
from fp_multi.errors import ConfigError

from ._borrow import steady_storages
from ._paths import Overlap, PathSaver
from .state_dict import load

try:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch import Callback, callbacks
except ImportError:
    from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
    from pytorch_lightning import Callback, callbacks

__all__ = ["FastPersistCheckpointIO", "FenceCallback"]

# They put other weights into the module between steps, where no fence is.
_SWAPPING = tuple(
    getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name)
)


class FastPersistCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Lightning's checkpoints as fp_multi directories: durable, checked, and written while training goes on.

    With ``overlap`` and :attr:`callback` among the trainer's callbacks, a save returns at once; the drive reads weights
    and optimizer state during the next forward and backward pass, and the callback waits, right before the optimizer
    changes them, for what has not been read (FastPersist, arXiv 2406.13768). Everything else is copied in the call.
    Without the callback, and beside Lightning's callbacks that average weights, everything is copied in the call.

    What changes parameters elsewhere (``.data`` in a hook, a swap of weights) must call :meth:`wait_for_staging` first.

    A save that failed in the background raises at the next save, before the next optimizer step, or at the end of
    ``fit``. A checkpoint that Lightning removes stays until those that are being written are complete.

    Files of ``TorchCheckpointIO`` are read, too. Strategies that write shards themselves (FSDP, DeepSpeed) do not
    come here; ``LightningModule.load_from_checkpoint`` reads files only.

    Args:
        overlap: None to return when the checkpoint is on the drive; else a mode of :class:`fp_multi.Checkpointer`.
        allow_pickle: pickle what the format has no form for (objects in hyperparameters or in a callback's state)
            instead of refusing it by its path, and unpickle it. Only for checkpoints you trust.
        on_error: ``"raise"``, or ``"warn"`` to train on after a failed background save.
        config: how to write.
        load_config: how to read.

    Raises:
        ConfigError: a setting has none of its values.
    """

    def __init__(
        self,
        overlap: Overlap = None,
        *,
        allow_pickle: bool = False,
        on_error: Literal["raise", "warn"] = "raise",
        config: SaveConfig = SaveConfig(),
        load_config: LoadConfig = LoadConfig(),
    ) -> None:
        self._optimizers: list[torch.optim.Optimizer] = []
        self._load_config = load_config
        self._saver = PathSaver(
            overlap,
            lambda: steady_storages(self._optimizers),
            on_error=on_error,
            allow_pickle=allow_pickle,
            config=config,
        )
        self.callback = FenceCallback(self)
        """To be put among the trainer's callbacks."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save, replacing a checkpoint that is there.

        Args:
            checkpoint: what the trainer gives.
            path: the checkpoint directory.
            storage_options: none are known.

        Raises:
            ConfigError: ``storage_options``, or a path that is not local.
            UnsupportedLeafError: a value cannot be stored; the message names its place.
            FpMultiError: this save failed, or an earlier one in the background.
        """
        if storage_options is not None:
            raise ConfigError(f"storage_options: none are known here, found {storage_options!r}")
        self._saver.save(int(checkpoint.get("global_step", 0)), checkpoint, path)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Load, after a save to that path is complete.

        Args:
            path: a checkpoint directory, or a file of ``TorchCheckpointIO``.
            map_location: where tensors go, see :func:`fp_multi.adapters.torch.load`.
            weights_only: True refuses pickled values even with ``allow_pickle``.
            **options: for files, what ``TorchCheckpointIO`` takes.

        Returns:
            What was saved.

        Raises:
            FpMultiError: the save to that path failed, or the checkpoint cannot be read.
        """
        self._saver.wait_for(path)
        if os.path.isfile(path):
            loaded = TorchCheckpointIO().load_checkpoint(
                path, map_location=map_location, weights_only=weights_only, **options
            )
        else:
            loaded = load(
                path,
                map_location,
                config=self._load_config,
                allow_pickle=self._saver.allow_pickle and weights_only is not True,
            )
        found: dict[str, Any] = loaded
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint when the saves under way are complete: until then it may be the last one."""
        self._saver.remove(path)

    def wait_for_staging(self) -> None:
        """The fence: returns when parameters may change. :attr:`callback` calls it before each optimizer step.

        Raises:
            FpMultiError: a save failed in the background.
        """
        self._saver.wait_for_staging()

    def teardown(self) -> None:
        """Finish every save.

        Raises:
            FpMultiError: a save failed in the background.
        """
        self._optimizers = []
        self._saver.close()


class FenceCallback(Callback):  # type: ignore[misc]
    """Waits before an optimizer changes what is being saved; made by :class:`FastPersistCheckpointIO`."""

    def __init__(self, io: FastPersistCheckpointIO) -> None:
        self._io = io

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """From here on only optimizers change their parameters."""
        if not any(isinstance(one, _SWAPPING) for one in trainer.callbacks):
            self._io._optimizers = [one for one in trainer.optimizers if isinstance(one, torch.optim.Optimizer)]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """After the closure's backward pass, before the parameters change."""
        self._io.wait_for_staging()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """What follows may change anything."""
        self._io._optimizers = []
        self._io.wait_for_staging()
