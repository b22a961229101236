"""Real training state: saved, loaded, and continued to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp_multi.adapters.torch import load, save

Same = Callable[..., None]


class Net(torch.nn.Module):
    """Convolution, batch norm, tied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.embedding = torch.nn.Embedding(7, 16)
        self.head = torch.nn.Linear(16, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, image: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(image)).flatten(1)
        return self.head(hidden + self.embedding(token))  # type: ignore[no-any-return]


def _adamw(net: Net) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, amsgrad=True)


def _sgd(net: Net) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": [net.conv.weight], "lr": 0.1}, {"params": [net.head.weight]}]
    return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)


def _adagrad(net: Net) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(net.parameters(), lr=torch.tensor(0.01))


def _lbfgs(net: Net) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=2)


def _cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def _sequential(optimizer: torch.optim.Optimizer) -> Any:
    schedulers = torch.optim.lr_scheduler
    parts = [schedulers.LinearLR(optimizer, total_iters=2), schedulers.MultiStepLR(optimizer, [3, 5])]
    return schedulers.SequentialLR(optimizer, parts, milestones=[2])


def _one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)


class Run:
    """A training loop that can be stopped and continued."""

    def __init__(self, make_optimizer: Any, make_scheduler: Any, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        self.net = Net()
        self.optimizer = make_optimizer(self.net)
        self.scheduler = make_scheduler(self.optimizer)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            image, token = torch.randn(5, 1, 4, 4), torch.randint(0, 7, (5,))

            def closure(image: torch.Tensor = image, token: torch.Tensor = token) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(self.net(image, token), token)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            losses.append(float(self.optimizer.step(closure)) + float(np.random.rand()))
            self.scheduler.step()
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict(),
            "torch_rng": torch.get_rng_state(),
            "generator": torch.Generator().manual_seed(5).get_state(),
            "numpy_rng": np.random.get_state(),
            "epoch": 3,
            "best": float("nan"),
            "argument shapes": [torch.Size([5, 1, 4, 4])],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["torch_rng"])
        np.random.set_state(state["numpy_rng"])


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own remarks about CPU scalers and step order
@pytest.mark.parametrize("make_scheduler", [_cosine, _sequential, _one_cycle])
@pytest.mark.parametrize("make_optimizer", [_adamw, _sgd, _adagrad, _lbfgs])
def test_training_continues_to_the_same_bits(
    make_optimizer: Any, make_scheduler: Any, tmp_path: Path, same: Same
) -> None:
    if make_optimizer is _adagrad and make_scheduler is _one_cycle:
        pytest.skip("OneCycleLR wants momentum or betas")
    if make_optimizer is _lbfgs and make_scheduler is _one_cycle:
        pytest.skip("OneCycleLR wants momentum or betas")
    run = Run(make_optimizer, make_scheduler, seed=1)
    run.train(3)
    before = run.state()
    save(before, tmp_path / "c")
    loaded = load(tmp_path / "c")
    same(loaded, before)
    assert loaded["net"]["head.weight"] is loaded["net"]["embedding.weight"]

    expected = run.train(3)
    other = Run(make_optimizer, make_scheduler, seed=2)
    other.restore(loaded)
    assert other.train(3) == expected
    same(other.net.state_dict(), run.net.state_dict())
    same(other.optimizer.state_dict(), run.optimizer.state_dict())


def test_a_scaler_in_use(round_trip: Callable[..., Any], same: Same) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    state = scaler.state_dict()
    same(round_trip(state), state)


def test_averaged_model(round_trip: Callable[..., Any], same: Same) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    averaged.update_parameters(torch.nn.Linear(2, 2))
    state = averaged.state_dict()
    same(round_trip(state), state)
