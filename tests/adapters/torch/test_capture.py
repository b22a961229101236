"""capture() and resume(): a resumed run goes on with the same bits as one that was never stopped."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp_multi as fp
from fp_multi.adapters.torch import Checkpointer, capture, load, resume, save
from fp_multi.errors import ConfigError, KeyNotFoundError

Same = Callable[..., None]
QUICK = fp.SaveConfig(durable=False)


@pytest.fixture(autouse=True)
def random_states_kept() -> Iterator[None]:
    before = capture()
    yield
    resume(before)


class Loader:
    """A data loader that can be resumed, as torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> Tensor:
        self.position += 1
        generator = torch.Generator().manual_seed(self.position)
        return torch.randn(6, 8, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Run:
    """A loop whose losses depend on everything that there is."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=50)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.loader = Loader()
        self.epoch = 0

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.net,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "dataloader": self.loader,
        }

    def step(self) -> list[Any]:
        self.epoch += 1
        noise = torch.from_numpy(np.random.standard_normal((6, 1))).float() * random.random()
        loss = (self.net(self.loader.next()) - noise).square().mean()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return [loss.item(), self.scheduler.get_last_lr(), self.scaler.get_scale(), self.epoch]


def test_a_resumed_run_goes_on_with_the_same_bits(tmp_path: Path, same: Same) -> None:
    run = Run(seed=1)
    with Checkpointer(tmp_path, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        for step in range(4):
            run.step()
            ckpt.save(step, capture(**run.parts(), epoch=run.epoch, history=[0.5, None]))
        expected = [run.step() for _ in range(4)]
        final = run.net.state_dict()
        ckpt.wait()

        other = Run(seed=2)
        step, state = ckpt.restore(map_location="cpu")
        rest = resume(state, **other.parts())
    assert step == 3
    assert rest == {"epoch": 4, "history": [0.5, None]}
    other.epoch = rest["epoch"]
    assert [other.step() for _ in range(4)] == expected
    same(other.net.state_dict(), final)


def test_what_the_core_loads_is_resumed_too(tmp_path: Path) -> None:
    save({"rng": capture()["rng"]}, tmp_path / "saved", config=QUICK)
    expected = [random.random(), np.random.random(), torch.rand(1).item()]
    resume(fp.load(tmp_path / "saved"))
    assert [random.random(), np.random.random(), torch.rand(1).item()] == expected


def test_random_states_are_left_alone_if_so_wished() -> None:
    assert "rng" not in capture(rng=False)
    state = capture()
    drawn = torch.rand(1)
    resume(state, rng=False)
    assert torch.rand(1) != drawn
    resume(state)
    assert torch.rand(1) == drawn


def test_several_models_and_optimizers(tmp_path: Path, same: Same) -> None:
    def parts() -> dict[str, Any]:
        nets = {"generator": nn.Linear(3, 3), "critic": nn.Linear(3, 1)}
        return {"model": nets, "optimizer": [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets.values()]}

    old, new = parts(), parts()
    average = torch.optim.swa_utils.AveragedModel(old["model"]["critic"])
    other_average = torch.optim.swa_utils.AveragedModel(new["model"]["critic"])
    old["optimizer"][1].param_groups[0]["lr"] = 0.3
    save(capture(**old, average=average), tmp_path / "saved", config=QUICK)
    assert resume(load(tmp_path / "saved"), **new, average=other_average) == {}
    for name in old["model"]:
        same(new["model"][name].state_dict(), old["model"][name].state_dict())
    same(other_average.state_dict(), average.state_dict())
    assert new["optimizer"][1].param_groups[0]["lr"] == 0.3


def test_only_a_part_is_wanted() -> None:
    old, new = nn.Linear(3, 3), nn.Linear(3, 3)
    state = capture(model=old, optimizer=torch.optim.SGD(old.parameters(), lr=0.1), epoch=3, rng=False)
    rest = resume(state, model=new)
    assert torch.equal(old.weight, new.weight)
    assert set(rest) == {"optimizer", "epoch"}


def test_what_cannot_be_resumed_is_refused() -> None:
    net = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=r"dataloader: a DataLoader has no state_dict\(\); leave it out"):
        capture(dataloader=torch.utils.data.DataLoader([1, 2, 3]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"model\['a'\]: a int has no state_dict"):
        capture(model={"a": 3})
    state = capture(model=[net], epoch=3)
    with pytest.raises(KeyNotFoundError, match="the state has no optimizer, scaler; it has: model, epoch, rng"):
        resume(state, model=[net], optimizer=net, scaler=net)
    with pytest.raises(ConfigError, match="model: the state does not have the same objects"):
        resume(state, model=[net, net])
    with pytest.raises(ConfigError, match="model: the state does not have the same objects"):
        resume(state, model={"a": net})
    with pytest.raises(ConfigError, match=r"epoch: a int has no load_state_dict\(\)"):
        resume(state, epoch=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_random_states_of_gpus_that_are_not_here(caplog: pytest.LogCaptureFixture) -> None:
    state = capture()
    drawn = torch.rand(1)
    state["rng"]["cuda"] = [torch.zeros(16, dtype=torch.uint8)]
    resume(state)
    assert torch.rand(1) == drawn
    assert "of 1 CUDA devices, found 0 devices" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_random_states_of_gpus(tmp_path: Path) -> None:
    torch.cuda.manual_seed_all(3)
    torch.rand(1, device="cuda")
    save(capture(), tmp_path / "saved", config=QUICK)
    drawn = torch.rand(5, device="cuda")
    resume(load(tmp_path / "saved", map_location="cuda"))
    assert torch.equal(torch.rand(5, device="cuda"), drawn)
