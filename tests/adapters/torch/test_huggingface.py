"""The Hugging Face Trainer and Accelerate: what is written, when it appears, and what a resumed run computes."""

from __future__ import annotations

import errno
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gates import Gate
from trainers import QUICK, TRAINER_MARKS, names

import fp_multi as fp
from fp_multi import _engine
from fp_multi.errors import ConfigError, StorageError, UnsupportedLeafError

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
accelerate: Any = pytest.importorskip("accelerate", reason="accelerate is not installed")

from safetensors import safe_open  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

from fp_multi.adapters.torch import load  # noqa: E402
from fp_multi.adapters.torch.huggingface import FastPersistMixin, register_accelerate_hooks  # noqa: E402

pytestmark = TRAINER_MARKS

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "huggingface_train.py"


class MyTrainer(FastPersistMixin, transformers.Trainer):  # type: ignore[misc]
    pass


def tiny() -> Any:
    """Embedding and head are one tensor; dropout draws."""
    torch.manual_seed(3)
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, bos_token_id=0, eos_token_id=0, **sizes))


def rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 40, (32, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(directory: Path, kind: Any = MyTrainer, *, steps: int = 4, callbacks: Any = (), **options: Any) -> Any:
    own = {name: options.pop(name) for name in ("overlap", "allow_pickle") if name in options}
    if kind is not transformers.Trainer:
        own["save_config"] = QUICK
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"save_steps": 2, "save_strategy": "steps", **options},
    )
    data = rows()
    return kind(
        model=tiny(), args=arguments, train_dataset=data, eval_dataset=data[:4], callbacks=list(callbacks), **own
    )


def tensors_in(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in sorted(file.keys())}, file.metadata()


def state_of(trained: Any) -> dict[str, Any]:
    return {
        "model": dict(trained.model.state_dict()),
        "optimizer": trained.optimizer.state_dict(),
        "schedule": trained.lr_scheduler.state_dict(),
        "step": trained.state.global_step,
    }


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of the stock trainer, and the state at its end."""
    directory = tmp_path_factory.mktemp("stock")
    trained = trainer(directory, transformers.Trainer)
    trained.train()
    return directory, state_of(trained)


# What is written, and what a run goes on with


@pytest.mark.parametrize("overlap", [None, "hybrid", "borrow", "snapshot"])
def test_checkpoints_hold_what_the_stock_trainer_saves(
    tmp_path: Path, stock: tuple[Path, dict[str, Any]], same: Any, overlap: Any
) -> None:
    reference, end = stock
    trained = trainer(tmp_path, overlap=overlap)
    trained.train()
    same(state_of(trained), end)
    assert names(tmp_path) == names(reference) == ["checkpoint-2", "checkpoint-4"]
    for name in names(tmp_path):
        found, expected = tmp_path / name, reference / name
        fp.verify(found / "optimizer.fp")
        state = load(found / "optimizer.fp")
        same(state["optimizer"], torch.load(expected / "optimizer.pt", weights_only=True))
        same(state["lr_scheduler"], torch.load(expected / "scheduler.pt", weights_only=True))
        files = set(names(expected)) - {"optimizer.pt", "scheduler.pt"}
        assert set(names(found)) == files | {"optimizer.fp"}
        same(tensors_in(found / "model.safetensors"), tensors_in(expected / "model.safetensors"))
        for file in ("config.json", "generation_config.json"):
            assert json.loads((found / file).read_text()) == json.loads((expected / file).read_text())
        again = transformers.GPT2LMHeadModel.from_pretrained(found)
        assert again.lm_head.weight is again.transformer.wte.weight


@pytest.mark.parametrize("overlap", [None, "hybrid"])
def test_a_resumed_run_computes_the_same(
    tmp_path: Path, stock: tuple[Path, dict[str, Any]], same: Any, overlap: Any
) -> None:
    _, end = stock
    trainer(tmp_path, overlap=overlap).train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    resumed = trainer(tmp_path, overlap=overlap)
    resumed.train(resume_from_checkpoint=True)
    same(state_of(resumed), end)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_checkpoints_of_the_stock_trainer_are_resumed_from(
    tmp_path: Path, stock: tuple[Path, dict[str, Any]], same: Any
) -> None:
    reference, end = stock
    resumed = trainer(tmp_path, overlap="hybrid")
    resumed.train(resume_from_checkpoint=str(reference / "checkpoint-2"))
    same(state_of(resumed), end)


def test_an_existing_checkpoint_of_that_step_is_replaced(tmp_path: Path, same: Any) -> None:
    (tmp_path / "checkpoint-2").mkdir(parents=True)
    (tmp_path / "checkpoint-2" / "left").write_text("over")
    trainer(tmp_path, overlap="hybrid", steps=2).train()
    assert "left" not in names(tmp_path / "checkpoint-2")
    assert names(tmp_path) == ["checkpoint-2"]


def test_the_best_checkpoint_is_known_by_its_final_name(tmp_path: Path) -> None:
    trained = trainer(
        tmp_path,
        overlap="hybrid",
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        load_best_model_at_end=True,
        save_total_limit=1,
        learning_rate=1e-2,
    )
    trained.train()
    best = trained.state.best_model_checkpoint
    assert best == str(tmp_path / "checkpoint-4")
    assert names(tmp_path) == ["checkpoint-4"]
    assert json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["best_model_checkpoint"] == best


def test_a_plain_module_is_saved_too(tmp_path: Path, same: Any) -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(40, 4)

        def forward(self, input_ids: Any, labels: Any) -> Any:
            return {"loss": self.table(input_ids).square().mean()}

    made = trainer(tmp_path, steps=2)
    plain = MyTrainer(model=Plain(), args=made.args, train_dataset=rows(), save_config=QUICK)
    plain.train()
    found, metadata = tensors_in(tmp_path / "checkpoint-2" / "model.safetensors")
    same(found, {"table.weight": plain.model.table.weight.detach()})
    assert metadata == {"format": "pt"}


# When it appears


def in_state(lr_scheduler: Any, name: str, value: Any) -> None:
    """A schedule's state is its attributes."""
    setattr(getattr(lr_scheduler, "scheduler", lr_scheduler), name, value)


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """Holds the first save back until the step after it has been computed."""

    def __init__(self, directory: Path, gate: Gate) -> None:
        self.directory = directory
        self.gate = gate
        self.seen: list[list[str]] = []
        self.opened: list[bool] = []

    def on_train_begin(self, *args: Any, lr_scheduler: Any, **_: Any) -> None:
        in_state(lr_scheduler, "gate", self.gate)

    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.opened.append(self.gate.event.is_set())

    def on_substep_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 1:
            # Half of the next step has been computed beside the save.
            self.seen.append(names(self.directory))
            self.gate.open_soon()


@pytest.mark.parametrize("overlap", ["hybrid", "borrow", "snapshot"])
def test_the_optimizer_waits_and_the_checkpoint_appears_complete(tmp_path: Path, gate: Gate, overlap: Any) -> None:
    watch = Watch(tmp_path, gate)
    options = {"save_steps": 1, "gradient_accumulation_steps": 2}
    trainer(tmp_path, overlap=overlap, callbacks=[watch], steps=3, **options).train()
    assert watch.seen == [[".fp_multi-checkpoint"]]
    assert watch.opened == [False, True, True]
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    fp.verify(tmp_path / "checkpoint-1" / "optimizer.fp")


def test_older_checkpoints_go_only_when_the_new_one_is_there(tmp_path: Path, gate: Gate) -> None:
    trainer(tmp_path, steps=2).train()
    (tmp_path / "checkpoint-2").rename(tmp_path / "checkpoint-0")
    watch = Watch(tmp_path, gate)
    options = {"save_steps": 1, "gradient_accumulation_steps": 2, "save_total_limit": 1}
    trainer(tmp_path, overlap="hybrid", callbacks=[watch], steps=2, **options).train()
    assert watch.seen == [[".fp_multi-checkpoint", "checkpoint-0"]]
    assert names(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize("overlap", [None, "hybrid"])
def test_a_failed_save_leaves_no_checkpoint(tmp_path: Path, overlap: Any) -> None:
    trained = trainer(tmp_path, overlap=overlap)
    original = trained._save_optimizer_and_scheduler

    def fail_second(output_dir: str) -> None:
        if trained.state.global_step == 4:
            _engine.inject_fault("write_completion", error=errno.ENOSPC)
        original(output_dir)

    trained._save_optimizer_and_scheduler = fail_second
    with pytest.raises(StorageError) as caught:
        trained.train()
    assert caught.value.errno == errno.ENOSPC
    assert [name for name in names(tmp_path) if name.startswith("checkpoint")] == ["checkpoint-2"]
    _engine.clear_faults()
    trainer(tmp_path, overlap=overlap).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize("fails", ["a file", "the directory"])
def test_a_checkpoint_that_cannot_be_published_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    (tmp_path / "checkpoint-2").mkdir(parents=True)
    (tmp_path / "checkpoint-2" / "left").write_text("as it was")
    fsync_path = _engine.fsync_path

    def refuse(path: str) -> int:
        is_it = path == str(tmp_path) if fails == "the directory" else path.endswith("trainer_state.json")
        return errno.EIO if is_it else fsync_path(path)

    monkeypatch.setattr(_engine, "fsync_path", refuse)
    trained = trainer(tmp_path, overlap="hybrid", steps=2)
    trained._fp_config = fp.SaveConfig()
    with pytest.raises(StorageError, match="fsync: Input/output error"):
        trained.train()
    assert names(tmp_path) == [".fp_multi-checkpoint", "checkpoint-2"]
    assert (tmp_path / "checkpoint-2" / "left").read_text() == "as it was"


def test_what_cannot_be_stored_is_refused_or_pickled(tmp_path: Path) -> None:
    class Odd(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, lr_scheduler: Any, **_: Any) -> None:
            in_state(lr_scheduler, "odd", set)

    with pytest.raises(UnsupportedLeafError, match=r"lr_scheduler\.odd"):
        trainer(tmp_path, callbacks=[Odd()]).train()
    trainer(tmp_path, callbacks=[Odd()], allow_pickle=True).train()
    assert load(tmp_path / "checkpoint-4" / "optimizer.fp", allow_pickle=True)["lr_scheduler"]["odd"] is set


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="overlap must be None"):
        trainer(tmp_path, overlap="later")
    made = trainer(tmp_path)
    made.args.push_to_hub = True
    with pytest.raises(ConfigError, match="push_to_hub"):
        made.train()


# Accelerate


def test_accelerate_keeps_weights_in_a_checkpoint(tmp_path: Path, same: Any) -> None:
    def prepared(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        accelerator = accelerate.Accelerator(cpu=True)
        register_accelerate_hooks(accelerator, config=QUICK)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
        return accelerator, net, optimizer

    accelerator, net, optimizer = prepared(1)
    accelerator.backward(net(torch.randn(8, 4)).square().sum())
    optimizer.step()
    accelerator.save_state(str(tmp_path))
    assert "model.fp" in names(tmp_path)
    assert "model.safetensors" not in names(tmp_path)
    fp.verify(tmp_path / "model.fp")
    again, other, other_optimizer = prepared(2)
    again.load_state(str(tmp_path))
    same(other.state_dict(), net.state_dict())
    same(other_optimizer.state_dict(), optimizer.state_dict())
    accelerator.save_state(str(tmp_path))  # a second one replaces it

    stock = accelerate.Accelerator(cpu=True)
    plain = stock.prepare(torch.nn.Linear(4, 4))
    stock.save_state(str(tmp_path / "stock"))
    with_hooks = accelerate.Accelerator(cpu=True)
    register_accelerate_hooks(with_hooks)
    loaded = with_hooks.prepare(torch.nn.Linear(4, 4))
    with_hooks.load_state(str(tmp_path / "stock"))
    same(loaded.state_dict(), plain.state_dict())


# The example


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("huggingface_train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(tmp_path, steps=2, disable_tqdm=True)
    example.main(tmp_path, steps=4, disable_tqdm=True)
    assert "resuming from checkpoint-2" in capsys.readouterr().out
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
