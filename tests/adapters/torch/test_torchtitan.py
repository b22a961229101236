"""torchtitan's checkpoint manager with our storage: its own containers, in the order in which its trainer calls it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support import check_child

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")

# The manager makes a process group of its own: a process of its own, too.
CODE = """
import shutil, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from fp_multi.adapters.torch import _dcp_stager
from fp_multi.adapters.torch.torchtitan import FastPersistCheckpointManager
from fp_multi.errors import ConfigError

torch.set_num_threads(1)
home = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{home}/store", rank=0, world_size=1)


class Progress:
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


class Run:
    def __init__(self, kind, folder, seed, **settings):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
        groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})]
        self.optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(
            model_parts=[self.model])
        self.schedules = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=20)
        self.progress = Progress()
        config = kind.Config(enable=True, folder=folder, interval=1, last_save_model_only=False, **settings)
        self.checkpointer = config.build(
            dataloader=None, model_parts=[self.model], optimizers=self.optimizers, lr_schedulers=self.schedules,
            states={"train_state": self.progress}, sd_adapter=None, base_folder=home)

    def train(self, until):
        while self.progress.step < until:
            rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(self.progress.step))
            self.optimizers.zero_grad()
            self.model(rows).square().mean().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedules.step()
            self.progress.step += 1
            self.checkpointer.save(self.progress.step, last_step=self.progress.step == 6)

    def weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def equal(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


stock = Run(CheckpointManager, "stock", 1, keep_latest_k=0)
stock.train(3)
middle = stock.weights()
stock.train(6)
reference = stock.weights()
stock.checkpointer.close()

for mode, overlap in (("disabled", "hybrid"), ("async", "hybrid"), ("async", "borrow"), ("async", "snapshot")):
    folder = f"{mode}-{overlap}"
    run = Run(FastPersistCheckpointManager, folder, 1, keep_latest_k=0, async_mode=mode, overlap=overlap)
    fences = []
    plain = run.checkpointer._fp_stager.fence
    run.checkpointer._fp_stager.fence = lambda: (fences.append(run.progress.step), plain())
    run.train(6)
    run.checkpointer.close()
    assert equal(run.weights(), reference)
    assert fences[:6] == [0, 1, 2, 3, 4, 5], fences
    for step in range(1, 7):
        assert fp.verify(f"{home}/{folder}/step-{step}")

    # Resumed from the middle; a step that has no manifest does not count.
    for step in (4, 5, 6):
        shutil.rmtree(f"{home}/{folder}/step-{step}")
    os.mkdir(f"{home}/{folder}/step-9")
    again = Run(FastPersistCheckpointManager, folder, 2, keep_latest_k=0, async_mode=mode, overlap=overlap)
    assert again.checkpointer.load()
    assert again.progress.step == 3
    assert equal(again.weights(), middle)
    again.train(6)
    assert equal(again.weights(), reference)
    again.checkpointer.close()

# torchtitan's own checkpoints are resumed from.
shutil.copytree(f"{home}/stock/step-3", f"{home}/moved/step-3")
again = Run(FastPersistCheckpointManager, "moved", 2, keep_latest_k=0, async_mode="async")
assert again.checkpointer.load()
assert equal(again.weights(), middle)
again.train(6)
assert equal(again.weights(), reference)
again.checkpointer.close()

# Retention.
kept = Run(FastPersistCheckpointManager, "kept", 1, keep_latest_k=2, async_mode="async")
kept.train(6)
kept.checkpointer.close()
assert {"step-5", "step-6"} <= set(os.listdir(f"{home}/kept"))

# A failure in the background is raised once: at the fence, by the next save, or at the end.
def fence(failing):
    while not failing.checkpointer.save_future.done():
        time.sleep(0.01)
    before = failing.weights()
    try:
        failing.checkpointer.maybe_wait_for_staging()
    finally:
        assert equal(failing.weights(), before)

for raises in (fence, lambda one: one.checkpointer.save(2), lambda one: one.checkpointer.close()):
    failing = Run(FastPersistCheckpointManager, "failing", 1, keep_latest_k=0, async_mode="async")
    _engine.inject_fault("write_completion", error=errno.ENOSPC)
    failing.train(1)
    try:
        raises(failing)
    except BaseException as error:
        assert "No space left" in str(error), error
    else:
        raise AssertionError("no error")
    failing.checkpointer.close()
    assert not os.path.exists(f"{home}/failing/step-1")

for refused in ({"async_mode": "async_with_pinned_mem"}, {"overlap": "later"}):
    try:
        Run(FastPersistCheckpointManager, "refused", 1, **refused)
    except ConfigError as error:
        assert "async_with_pinned_mem" in str(error) or "overlap" in str(error)
    else:
        raise AssertionError("no error")
print("all is well", flush=True)
os._exit(0)  # whatever gloo does at the end of a process is not the matter here
"""


def test_training_saving_and_resuming(tmp_path: Path) -> None:
    assert "all is well" in check_child(CODE, tmp_path, timeout_s=180)
