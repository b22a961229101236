"""Lightning's trainer with our CheckpointIO: what it saves, resumes, waits for, removes, and how it fails."""

from __future__ import annotations

import errno
import importlib.util
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gates import Gate
from torch import Tensor, nn
from trainers import QUICK, TRAINER_MARKS, names

import fp_multi as fp
from fp_multi import _engine
from fp_multi.errors import ConfigError, PickleRefusedError, StorageError, UnsupportedLeafError

pl: Any = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging  # noqa: E402

from fp_multi.adapters.torch import load  # noqa: E402
from fp_multi.adapters.torch.lightning import FastPersistCheckpointIO  # noqa: E402

pytestmark = TRAINER_MARKS

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "lightning_train.py"
MODES = ("hybrid", "borrow", "snapshot")
Same = Callable[..., None]


class Net(pl.LightningModule):  # type: ignore[misc]
    """Batch norm changes in forward; dropout draws; two parameter groups; a schedule."""

    def __init__(self, hook: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters({"sizes": (8, 16), "name": "net", "rate": 0.1, "hook": hook})
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1))
        self.head = nn.Linear(16, 4)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(torch.relu(self.body(batch[0]))), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.body.parameters(), "lr": 1e-2}, {"params": self.head.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def batches() -> Any:
    generator = torch.Generator().manual_seed(7)
    rows = torch.utils.data.TensorDataset(
        torch.randn(24, 8, generator=generator), torch.randint(0, 4, (24,), generator=generator)
    )
    return torch.utils.data.DataLoader(rows, batch_size=6)


def fit(
    directory: Path,
    io: FastPersistCheckpointIO | None,
    module: Any = None,
    *,
    epochs: int = 2,
    fence: bool = True,
    callbacks: Sequence[Any] = (),
    every: int = 1,
    top: int = 2,
    **how: Any,
) -> Any:
    """Train on the CPU and return the trainer."""
    pl.seed_everything(1)
    module = Net() if module is None else module
    keep = ModelCheckpoint(directory, monitor="loss", save_top_k=top, save_last=True, every_n_train_steps=every)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        plugins=[] if io is None else [io],
        callbacks=[*([io.callback] if io is not None and fence else []), *callbacks, keep],
    )
    trainer.fit(module, batches(), **how)
    return trainer


def state_of(trainer: Any) -> dict[str, Any]:
    return {
        "module": trainer.lightning_module.state_dict(),
        "optimizers": [one.state_dict() for one in trainer.optimizers],
        "global_step": trainer.global_step,
    }


# What is saved


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Two runs of Lightning alone, the second resumed; their checkpoints are at "1" and "2"."""
    base = tmp_path_factory.mktemp("lightning")
    states = [state_of(fit(base / "run", None, epochs=1))]
    shutil.copytree(base / "run", base / "1")
    states.append(state_of(fit(base / "run", None, epochs=2, ckpt_path=str(base / "run" / "last.ckpt"))))
    (base / "run").rename(base / "2")
    return base, states


@pytest.mark.parametrize("overlap", [None, *MODES])
def test_a_run_and_its_resumption_are_those_of_lightning_alone(
    stock: tuple[Path, list[dict[str, Any]]], same: Same, overlap: Any
) -> None:
    base, states = stock
    run = base / "run"  # checkpoints tell where they are: all runs are in the same place
    try:
        for number, ckpt_path in ((1, None), (2, "last")):
            trainer = fit(run, FastPersistCheckpointIO(overlap, config=QUICK), epochs=number, ckpt_path=ckpt_path)
            same(state_of(trainer), states[number - 1])
            assert names(run) == names(base / str(number))
            assert len(names(run)) == 3
            for name in names(run):
                fp.verify(run / name)
                same(load(run / name), torch.load(base / str(number) / name, weights_only=False))
    finally:
        shutil.rmtree(run)


def test_one_plugin_serves_several_fits(tmp_path: Path) -> None:
    io = FastPersistCheckpointIO("hybrid", config=QUICK)
    fit(tmp_path / "a", io, epochs=1)
    fit(tmp_path / "b", io, epochs=1)
    assert load(tmp_path / "b" / "last.ckpt")["global_step"] == 4
    assert len(names(tmp_path / "a")) == len(names(tmp_path / "b")) == 3


def test_files_of_torch_are_read(tmp_path: Path, same: Same) -> None:
    reference = state_of(fit(tmp_path / "stock", None, epochs=1))
    trainer = fit(
        tmp_path / "run",
        FastPersistCheckpointIO("hybrid", config=QUICK),
        epochs=1,
        ckpt_path=str(tmp_path / "stock" / "last.ckpt"),
    )
    same(trainer.lightning_module.state_dict(), reference["module"])


def test_a_linked_last_checkpoint_is_replaced_and_not_what_it_points_to(tmp_path: Path) -> None:
    io = FastPersistCheckpointIO(config=QUICK)
    io.save_checkpoint({"global_step": 1}, tmp_path / "best.ckpt")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    io.save_checkpoint({"global_step": 2}, tmp_path / "last.ckpt")
    assert load(tmp_path / "best.ckpt") == {"global_step": 1}
    assert load(tmp_path / "last.ckpt") == {"global_step": 2}
    (tmp_path / "link.ckpt").symlink_to("best.ckpt")
    io.remove_checkpoint(tmp_path / "link.ckpt")
    assert names(tmp_path) == ["best.ckpt", "last.ckpt"]


# What cannot be saved


def hook(values: Tensor) -> Tensor:
    return values


@pytest.mark.parametrize("overlap", [None, "hybrid"])
def test_unknown_objects_are_refused_by_their_place_or_pickled(tmp_path: Path, overlap: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"hyper_parameters\.hook"):
        fit(tmp_path / "run", FastPersistCheckpointIO(overlap, config=QUICK), Net(hook))
    assert not (tmp_path / "run").exists() or names(tmp_path / "run") == []
    io = FastPersistCheckpointIO(overlap, allow_pickle=True, config=QUICK)
    fit(tmp_path / "run", io, Net(hook), epochs=1)
    last = tmp_path / "run" / "last.ckpt"
    assert io.load_checkpoint(last)["hyper_parameters"]["hook"] is hook
    with pytest.raises(PickleRefusedError):
        io.load_checkpoint(last, weights_only=True)
    with pytest.raises(PickleRefusedError):
        FastPersistCheckpointIO().load_checkpoint(last)


def test_settings_and_paths_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="overlap must be None"):
        FastPersistCheckpointIO("later")  # type: ignore[arg-type]
    io = FastPersistCheckpointIO()
    with pytest.raises(ConfigError, match="storage_options"):
        io.save_checkpoint({}, tmp_path / "a", storage_options={"copies": 2})
    with pytest.raises(ConfigError, match=r"s3://bucket/a: .* local file systems only"):
        io.save_checkpoint({}, "s3://bucket/a")
    assert names(tmp_path) == []


# The fence


class Gated(Net):
    """Its second step is computed while the save of the first is held back."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        self.expected: dict[str, Tensor] = {}
        self.opened_before_update: list[bool] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not self.expected:
            self.expected = {name: value.clone() for name, value in self.state_dict().items()}
            checkpoint["gate"] = self.gate

    def on_after_backward(self) -> None:
        if self.expected:
            self.gate.open_soon()  # a fence that came before this would wait for ever

    def configure_optimizers(self) -> Any:
        opened = self.opened_before_update
        gate = self.gate

        class Watched(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = closure()
                opened.append(gate.event.is_set())
                return super().step(lambda: loss)

        return Watched(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("overlap", MODES)
def test_the_optimizer_waits_after_the_backward_pass(tmp_path: Path, gate: Gate, same: Same, overlap: Any) -> None:
    module = Gated(gate)
    fit(tmp_path, FastPersistCheckpointIO(overlap, config=QUICK), module, epochs=1, top=-1)
    assert module.opened_before_update == [False, True, True, True]
    first = load(tmp_path / "epoch=0-step=1.ckpt")
    same(dict(first["state_dict"]), module.expected)


class Zeroing(Net):
    """Changes its weights where no fence is."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: dict[str, Tensor] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved = {name: value.clone() for name, value in self.state_dict().items()}

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def on_train_epoch_end(self) -> None:
        self.on_train_batch_start(None, 0)


@pytest.mark.parametrize("overlap", MODES)
def test_without_the_callback_everything_is_copied_in_the_call(tmp_path: Path, same: Same, overlap: Any) -> None:
    module = Zeroing()
    fit(tmp_path, FastPersistCheckpointIO(overlap, config=QUICK), module, epochs=1, fence=False, every=4)
    same(dict(load(tmp_path / "last.ckpt")["state_dict"]), module.saved)


class Look(pl.Callback):  # type: ignore[misc]
    """Notes how many optimizers' memory is read late."""

    def __init__(self, io: FastPersistCheckpointIO) -> None:
        self.io = io
        self.seen: set[int] = set()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.add(len(self.io._optimizers))


@pytest.mark.parametrize(("averaging", "late"), [(False, 1), (True, 0)])
def test_weights_are_not_read_late_beside_averaging(tmp_path: Path, averaging: bool, late: int) -> None:
    io = FastPersistCheckpointIO("hybrid", config=QUICK)
    look = Look(io)
    callbacks = [StochasticWeightAveraging(1e-3), look] if averaging else [look]
    fit(tmp_path, io, callbacks=callbacks)
    assert look.seen == {late}
    assert io._optimizers == []


# Failure


class Failing(Gated):
    """Knows that a save has failed before its next update."""

    saver: Any

    def on_after_backward(self) -> None:
        for pending in self.saver._saves.values():
            pending.join()


def test_a_failed_save_raises_before_the_next_update(tmp_path: Path, gate: Gate, same: Same) -> None:
    module, io = Failing(gate), FastPersistCheckpointIO("hybrid", config=QUICK)
    module.saver = io._saver
    gate.open()
    _engine.inject_fault("write_completion", error=errno.ENOSPC)
    with pytest.raises(StorageError) as caught:
        fit(tmp_path, io, module, top=0)
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == []
    # Batch norm's statistics are those of the forward pass since.
    weights = {name: value.detach() for name, value in module.named_parameters()}
    same(weights, {name: module.expected[name] for name in weights})


def test_a_failed_save_raises_at_the_next_save(tmp_path: Path) -> None:
    io = FastPersistCheckpointIO("hybrid", config=QUICK)
    _engine.inject_fault("write_completion", error=errno.EIO)
    io.save_checkpoint({"w": torch.ones(9)}, tmp_path / "a")
    io._saver._saves[str(tmp_path.resolve() / "a")].join()
    with pytest.raises(StorageError):
        io.save_checkpoint({"w": torch.ones(9)}, tmp_path / "b")
    io.save_checkpoint({"w": torch.ones(9)}, tmp_path / "b")
    io.teardown()
    assert names(tmp_path) == ["b"]


def test_a_failed_save_raises_at_the_end(tmp_path: Path) -> None:
    _engine.inject_fault("write_completion", error=errno.EIO)
    with pytest.raises(StorageError):
        fit(tmp_path, FastPersistCheckpointIO("snapshot", config=QUICK), epochs=1, every=4)


def test_training_goes_on_after_a_failed_save_if_so_wished(tmp_path: Path) -> None:
    _engine.inject_fault("write_completion", error=errno.EIO)
    with pytest.warns(RuntimeWarning, match="given up"):
        fit(tmp_path, FastPersistCheckpointIO("hybrid", on_error="warn", config=QUICK), epochs=1)
    assert load(tmp_path / "last.ckpt")["global_step"] == 4


# Removing and loading while a save is under way


def test_loading_waits_for_the_save(tmp_path: Path, gate: Gate) -> None:
    io = FastPersistCheckpointIO("hybrid", config=QUICK)
    io.save_checkpoint({"gate": gate, "global_step": 3}, tmp_path / "a")
    assert names(tmp_path) == [] or names(tmp_path)[0].startswith(".a.")
    gate.open_soon()
    assert io.load_checkpoint(tmp_path / "a")["global_step"] == 3
    io.teardown()


def test_an_old_checkpoint_stays_until_the_new_one_is_complete(tmp_path: Path, gate: Gate) -> None:
    io = FastPersistCheckpointIO("hybrid", config=QUICK)
    io.save_checkpoint({"global_step": 1}, tmp_path / "old")
    io._saver.wait()
    io.save_checkpoint({"gate": gate, "global_step": 2}, tmp_path / "new")
    io.remove_checkpoint(tmp_path / "old")
    assert (tmp_path / "old").exists()
    gate.open()
    io.teardown()
    assert names(tmp_path) == ["new"]


@pytest.mark.parametrize("known", [False, True])
def test_an_old_checkpoint_stays_if_the_new_one_fails(tmp_path: Path, gate: Gate, known: bool) -> None:
    io = FastPersistCheckpointIO("hybrid", config=QUICK)
    io.save_checkpoint({"global_step": 1}, tmp_path / "old")
    io._saver.wait()
    _engine.inject_fault("write_completion", error=errno.EIO)
    io.save_checkpoint({"gate": gate, "global_step": 2}, tmp_path / "new")
    if known:
        gate.open()
        io._saver._saves[str(tmp_path.resolve() / "new")].join()
    io.remove_checkpoint(tmp_path / "old")
    gate.open()
    with pytest.raises(StorageError):
        io.teardown()
    assert names(tmp_path) == ["old"]


def test_what_is_written_again_is_not_removed(tmp_path: Path, gate: Gate) -> None:
    io = FastPersistCheckpointIO("hybrid", config=QUICK)
    io.save_checkpoint({"global_step": 1}, tmp_path / "a")
    io._saver.wait()
    io.save_checkpoint({"gate": gate}, tmp_path / "b")
    io.remove_checkpoint(tmp_path / "a")
    io.save_checkpoint({"global_step": 3}, tmp_path / "a")
    gate.open()
    io.teardown()
    assert load(tmp_path / "a") == {"global_step": 3}


def test_removing_waits_for_the_save_of_that_path(tmp_path: Path, gate: Gate) -> None:
    io = FastPersistCheckpointIO("hybrid", config=QUICK)
    io.save_checkpoint({"gate": gate}, tmp_path / "a")
    removing = threading.Thread(target=io.remove_checkpoint, args=(tmp_path / "a",))
    removing.start()
    removing.join(0.1)
    assert removing.is_alive()
    gate.open()
    removing.join(30)
    io.teardown()
    assert names(tmp_path) == []


# The example


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("lightning_train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(tmp_path, steps=2, enable_progress_bar=False)
    example.main(tmp_path, steps=4, enable_progress_bar=False)
    assert "resumed from step 2" in capsys.readouterr().out
    assert load(tmp_path / "last.ckpt")["global_step"] == 4
