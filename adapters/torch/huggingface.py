"""Hugging Face: a ``Trainer`` whose checkpoints are durable, complete or not there, and half written in the background.

It is not imported by :mod:`fp_multi.adapters.torch`; it needs ``transformers`` 5 and ``accelerate``.

Example:
    >>> class MyTrainer(FastPersistMixin, Trainer): ...  # doctest: +SKIP
    >>> trainer = MyTrainer(model=model, args=args, train_dataset=rows, overlap="hybrid")  # doctest: +SKIP
    >>> trainer.train(resume_from_checkpoint=True)  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from functools import partial
from typing import Any

import safetensors.torch
from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback, modeling_utils
from transformers.trainer_utils import rotate_checkpoints
from transformers.utils import is_sagemaker_mp_enabled

from fp_multi.config import LoadConfig, SaveConfig
from fp_multi.errors import CapabilityError, ConfigError
from fp_multi.storage import replace_tree

from ._borrow import steady_storages
from ._paths import Overlap, PathSaver
from ._safetensors import save_file
from .state_dict import load, save

__all__ = ["FastPersistMixin", "FastPersistTrainer", "register_accelerate_hooks"]

OPTIMIZER = "optimizer.fp"
"""In a checkpoint of the trainer: an fp_multi checkpoint of optimizer and schedule."""
MODEL = "model.fp"
"""In a directory of ``Accelerator.save_state``: an fp_multi checkpoint of the models' weights."""
_WORK = ".fp_multi-checkpoint"

_log = logging.getLogger("fp_multi")


class FastPersistMixin:
    """Put before ``Trainer``: ``class MyTrainer(FastPersistMixin, Trainer)``.

    A checkpoint is written beside ``output_dir``'s others under a hidden name, flushed, and renamed to
    ``checkpoint-N`` when it is complete; only then do older ones go. In it

    - ``model.safetensors`` (or its shards) has what ``save_pretrained`` decides, written by
      :func:`fp_multi.adapters.torch.save_file`,
    - ``optimizer.fp`` is an fp_multi checkpoint of optimizer and schedule, in the place of ``optimizer.pt`` and
      ``scheduler.pt``,
    - the rest is as ``Trainer`` writes it, random states included.

    With ``overlap`` the optimizer's state, two thirds of the bytes with Adam, is written while training goes on; before
    the optimizer changes it, the trainer waits for what has not been read. ``checkpoint-N`` appears later then, at the
    latest before the next save and at the end of ``train``; ``on_save`` callbacks come before it. A save that failed in
    the background raises at the next save, before the next optimizer step, or at the end.

    Checkpoints of a stock ``Trainer`` are resumed from, too. With DeepSpeed, FSDP, XLA and SageMaker the optimizer is
    saved as ``Trainer`` does it.

    Args:
        *args: for ``Trainer``.
        overlap: None to return when the checkpoint is complete; else a mode of :class:`fp_multi.Checkpointer`.
        allow_pickle: pickle what the format has no form for (in a custom optimizer or schedule), and unpickle it.
        save_config: how to write.
        load_config: how to read.
        **options: for ``Trainer``.

    Raises:
        ConfigError: a setting has none of its values.
    """

    # What a Trainer has.
    args: Any
    state: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        overlap: Overlap = None,
        allow_pickle: bool = False,
        save_config: SaveConfig = SaveConfig(),
        load_config: LoadConfig = LoadConfig(),
        **options: Any,
    ) -> None:
        self._fp_work: str | None = None
        self._fp_config = save_config
        self._fp_load_config = load_config
        self._fp_saver = PathSaver(
            overlap,
            lambda: steady_storages([self.optimizer]),
            allow_pickle=allow_pickle,
            config=save_config,
        )
        # First: callbacks after it may change parameters.
        options["callbacks"] = [_Fence(self._fp_saver), *(options.get("callbacks") or ())]
        super().__init__(*args, **options)

    def train(self, *args: Any, **options: Any) -> Any:
        """Train, then finish every save; as ``Trainer.train``.

        Raises:
            ConfigError: ``push_to_hub``, which uploads a checkpoint while it is moved.
            FpMultiError: a save failed.
        """
        if self.args.push_to_hub:
            raise ConfigError("push_to_hub=True uploads checkpoints before they have their name; push after train()")
        try:
            result = super().train(*args, **options)  # type: ignore[misc]
        except BaseException:
            try:
                self._fp_saver.close()
            except Exception as error:
                _log.error("after training failed: %s", error)
            raise
        self._fp_saver.close()
        return result

    # Saving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._fp_saver.wait()
        run = self._get_output_dir(trial=trial)
        work = os.path.join(run, _WORK)
        if self.args.should_save:
            shutil.rmtree(work, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._fp_work = work
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._fp_work = None
        self.accelerator.wait_for_everyone()  # other processes' random states are in it now
        name = f"checkpoint-{self.state.global_step}"
        best = self.state.best_model_checkpoint
        if best is not None and os.path.dirname(best) == work:
            best = self.state.best_model_checkpoint = os.path.join(run, os.path.basename(best))
            if self.args.should_save:
                self.state.save_to_json(os.path.join(work, name, "trainer_state.json"))
        if self.args.should_save:
            publish = partial(replace_tree, os.path.join(work, name), os.path.join(run, name), self._fp_config)
            tidy = partial(shutil.rmtree, work, ignore_errors=True)
            rotate = partial(rotate_checkpoints, run, self.args.save_total_limit, best, use_mtime=True)
            self._fp_saver.afterwards(lambda: (publish(), tidy(), rotate()))

    def _get_output_dir(self, trial: Any) -> str:
        if self._fp_work is not None:
            return self._fp_work
        found: str = super()._get_output_dir(trial=trial)  # type: ignore[misc]
        return found

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with _writing_with_fp_multi(self._fp_config):
            super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._fp_is_plain():
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        elif self.args.should_save:
            state = {"optimizer": self.optimizer.state_dict(), "lr_scheduler": self.lr_scheduler.state_dict()}
            self._fp_saver.save(self.state.global_step, state, os.path.join(output_dir, OPTIMIZER))

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self._fp_saver.wait()
        self.accelerator.wait_for_everyone()  # each process may load the best checkpoint
        return super()._finalize_training(*args, **options)  # type: ignore[misc]

    # Resuming

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        path = os.path.join(checkpoint or "", OPTIMIZER)
        if checkpoint is None or not os.path.isdir(path):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        # Several processes would fill the host's memory with a copy each.
        device = self.args.device if self.args.world_size > 1 else "cpu"
        allow_pickle = self._fp_saver.allow_pickle
        state = load(path, device, config=self._fp_load_config, allow_pickle=allow_pickle)
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])

    def _fp_is_plain(self) -> bool:
        others = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.XLA, DistributedType.MEGATRON_LM)
        return self.accelerator.distributed_type not in others and not is_sagemaker_mp_enabled()


class FastPersistTrainer(FastPersistMixin, Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` with :class:`FastPersistMixin`."""


class _Fence(TrainerCallback):  # type: ignore[misc]
    def __init__(self, saver: PathSaver) -> None:
        self._saver = saver

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        self._saver.wait_for_staging()


def register_accelerate_hooks(accelerator: Any, *, config: SaveConfig = SaveConfig()) -> None:
    """Let ``Accelerator.save_state`` and ``load_state`` keep the models' weights in an fp_multi checkpoint.

    It is ``model.fp`` in the directory, durable when ``save_state`` returns. Accelerate has no hook for the rest:
    optimizers, schedules, samplers and random states stay its own files, and its directory is not made in one step.
    Does nothing for FSDP, DeepSpeed and Megatron-LM, which save the weights themselves.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        config: how to write.

    Example:
        >>> accelerator = Accelerator()  # doctest: +SKIP
        >>> register_accelerate_hooks(accelerator)  # doctest: +SKIP
        >>> accelerator.save_state("run/state")  # doctest: +SKIP
    """

    def on_save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        each_node = accelerator.project_configuration.save_on_each_node
        if weights and (accelerator.is_local_main_process if each_node else accelerator.is_main_process):
            save(list(weights), os.path.join(output_dir, MODEL), overwrite=True, config=config)
        weights.clear()  # what is left in it Accelerate would write

    def on_load(models: list[Any], input_dir: str) -> None:
        path = os.path.join(input_dir, MODEL)
        if models and os.path.isdir(path):
            for model, weights in zip(models, load(path, "cpu"), strict=True):
                model.load_state_dict(weights)
            models.clear()

    accelerator.register_save_state_pre_hook(on_save)
    accelerator.register_load_state_pre_hook(on_load)


@contextlib.contextmanager
def _writing_with_fp_multi(config: SaveConfig) -> Iterator[None]:
    """Let ``save_pretrained`` decide what is in the files, and write them with our :func:`save_file`.

    Which tensors are tied, ignored, renamed or in which shard is its business, and it has no argument for a writer.
    """
    places = [(modeling_utils, "safe_save_file"), (safetensors.torch, "save_file")]
    found = []
    for module, name in places:
        if not hasattr(module, name):
            raise CapabilityError(f"this version of transformers has no {module.__name__}.{name}; use version 5")
        found.append((module, name, getattr(module, name)))
    try:
        for module, name, _ in found:
            setattr(module, name, partial(save_file, config=config))
        yield
    finally:
        for module, name, original in found:
            setattr(module, name, original)
