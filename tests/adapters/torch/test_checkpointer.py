"""The Checkpointer of training loops: what is read in place, what is copied, and when a step waits."""

from __future__ import annotations

import copy
import errno
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gates import Gate
from torch import Tensor, nn

import fp_multi as fp
from fp_multi import _eager, _engine
from fp_multi.adapters.torch import Checkpointer, capture
from fp_multi.errors import ConfigError, StorageError

Same = Callable[..., None]
MODES = ("hybrid", "borrow", "snapshot")
QUICK = fp.SaveConfig(durable=False, block_bytes=64 << 10, queue_depth=2)


class GatedCheckpointer(Checkpointer):
    """Leaves gates alone, which otherwise would be waited for in the call of save()."""

    def changing(self, sources: Sequence[fp.LeafSource]) -> list[int]:
        return [i for i in super().changing(sources) if not isinstance(sources[i].keepalive, Gate)]


class Net(nn.Module):
    """Batch norm changes its statistics in every forward; head and embedding are one tensor."""

    calls: Tensor

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.norm = nn.BatchNorm1d(width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(1000, dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return self.head(torch.relu(self.body(self.norm(self.embedding(tokens)))))  # type: ignore[no-any-return]


class Run:
    """A training loop."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def loss(self) -> Tensor:
        tokens = torch.randint(0, 100, (8,))
        return nn.functional.cross_entropy(self.net(tokens), tokens)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return capture(model=self.net, optimizer=self.optimizer)

    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.net.parameters()]


@pytest.fixture
def run() -> Run:
    run = Run()
    run.step()  # Adam's state exists from the first step on
    return run


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def without_gate(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "gate"}


def in_background(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


# Real training


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_every_step_comes_back_as_it_was_saved(
    tmp_path: Path, run: Run, same: Same, overlap: Any, in_flight: int
) -> None:
    expected = {}
    with Checkpointer(tmp_path, overlap=overlap, max_in_flight=in_flight, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        for step in range(10):
            run.step()
            state = run.state()
            expected[step] = copy.deepcopy(state)
            ckpt.save(step, state)
        ckpt.wait()
        assert ckpt.steps() == list(expected)
        for step, state in expected.items():
            fp.verify(tmp_path / f"step_{step:08d}")
            found, restored = ckpt.restore(step)
            assert found == step
            same(restored, state)
        assert ckpt.stats.saves == 10


@pytest.mark.parametrize("overlap", MODES)
def test_recycled_files_hold_the_newest_steps(tmp_path: Path, run: Run, same: Same, overlap: Any) -> None:
    expected: dict[int, Any] = {}
    with Checkpointer(tmp_path, overlap=overlap, keep=2, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        for step in range(10):
            run.step()
            expected[step] = copy.deepcopy(run.state())
            ckpt.save(step, run.state())
            newest = ckpt.latest_step()
            if newest is not None:
                same(ckpt.restore(newest)[1], expected[newest])
        ckpt.wait()
        assert ckpt.steps() == [8, 9]
        same(ckpt.restore()[1], expected[9])


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path, run: Run) -> None:
    with Checkpointer(tmp_path, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        report = ckpt.save(1, run.state())
        report.wait()
        model = ckpt.restore()[1]["model"]
    assert model["head.weight"] is model["embedding.weight"]


def test_lbfgs_waits_before_its_closure(tmp_path: Path, run: Run, gate: Gate, same: Same) -> None:
    run.optimizer = torch.optim.LBFGS(run.net.parameters(), lr=0.1, max_iter=3)  # type: ignore[assignment]
    seen = []

    def closure() -> Tensor:
        seen.append(gate.event.is_set())
        run.optimizer.zero_grad()
        loss = run.loss()
        loss.backward()
        return loss

    run.optimizer.step(closure)
    seen.clear()
    with GatedCheckpointer(tmp_path, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        state = {"gate": gate, **run.state()}
        expected = copy.deepcopy(without_gate(state))
        pending = ckpt.save(1, state)
        gate.open_soon()
        run.optimizer.step(closure)
        assert seen
        assert all(seen)
        pending.wait()
        same(without_gate(ckpt.restore()[1]), expected)


# What may change before the fence


@pytest.mark.parametrize("overlap", ["hybrid", "borrow"])
def test_only_what_the_optimizer_owns_is_read_later(
    tmp_path: Path, run: Run, gate: Gate, same: Same, overlap: Any
) -> None:
    with GatedCheckpointer(tmp_path, overlap=overlap, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        average = {name: value.clone() for name, value in run.net.state_dict().items()}
        array = np.arange(100_000)
        rate = torch.tensor(0.5)
        view = average["body.weight"].t()[1:]
        state = {"gate": gate, **run.state(), "average": average, "array": array, "rate": rate, "view": view}
        expected = copy.deepcopy(without_gate(state))
        pending = ckpt.save(1, state)

        run.backward()  # statistics, buffers, torch's random state
        for value in average.values():
            value.zero_()
        array[:] = 0
        rate.zero_()
        gate.open()
        pending.wait()
        same(without_gate(ckpt.restore()[1]), expected)

        report = pending.report
        owned = [*run.net.parameters()]
        # Adam's counters have no axes: such values are taken as they are now, whoever they belong to.
        owned += [value for values in run.optimizer.state.values() for value in values.values() if value.dim()]
        assert report.save is not None
        assert report.eager_nbytes == report.save.tensor_nbytes - 4096 - sum(tensor.nbytes for tensor in owned)
        assert report.borrowed_nbytes + report.copied_nbytes + report.eager_nbytes == report.save.tensor_nbytes


def test_two_optimizers_both_wait(tmp_path: Path, gate: Gate, same: Same) -> None:
    torch.manual_seed(1)
    nets = {"generator": nn.Linear(50, 50), "critic": nn.Linear(50, 50)}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for name, net in nets.items()}
    for net in nets.values():
        net(torch.randn(3, 50)).sum().backward()
    for name, optimizer in optimizers.items():
        optimizer.step()
        closed = Gate()
        with GatedCheckpointer(tmp_path / name, config=QUICK) as ckpt:
            ckpt.attach(*optimizers.values())
            state = {"gate": closed, **capture(model=nets, optimizer=optimizers)}
            expected = copy.deepcopy(without_gate(state))
            pending = ckpt.save(1, state)
            closed.open_soon()
            optimizer.step()
            assert closed.event.is_set()
            pending.wait()
            assert pending.report.stall_fence_s > 0.05
            same(without_gate(ckpt.restore()[1]), expected)


def test_parameters_of_other_optimizers_are_copied(tmp_path: Path, run: Run, gate: Gate, same: Same) -> None:
    other = nn.Linear(50, 50)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.randn(3, 50)).sum().backward()
    with GatedCheckpointer(tmp_path, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        state = {"gate": gate, **capture(model=[run.net, other], optimizer=[run.optimizer, others])}
        expected = copy.deepcopy(without_gate(state))
        pending = ckpt.save(1, state)
        others.step()
        gate.open()
        pending.wait()
        same(without_gate(ckpt.restore()[1]), expected)


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("attached", [True, False])
def test_much_that_may_change_is_copied_by_native_threads(
    tmp_path: Path, run: Run, same: Same, monkeypatch: pytest.MonkeyPatch, overlap: Any, attached: bool
) -> None:
    monkeypatch.setattr(_eager, "MOST_NBYTES", 1000)
    with Checkpointer(tmp_path, overlap=overlap, config=QUICK) as ckpt:
        if attached:
            ckpt.attach(run.optimizer)
        state = run.state()
        expected = copy.deepcopy(state)
        pending = ckpt.save(1, state)
        with torch.no_grad():
            for tensor in [*run.net.parameters(), *run.net.buffers()]:
                tensor.zero_()
        pending.wait()
        same(ckpt.restore()[1], expected)
        assert pending.report.eager_nbytes == 0


def test_a_small_state_without_an_optimizer_is_copied_in_the_call(
    tmp_path: Path, run: Run, gate: Gate, same: Same
) -> None:
    with GatedCheckpointer(tmp_path, config=QUICK) as ckpt:
        state = {"gate": gate, **run.state()}
        expected = copy.deepcopy(without_gate(state))
        pending = ckpt.save(1, state)
        run.step()
        gate.open()
        pending.wait()
        same(without_gate(ckpt.restore()[1]), expected)
        assert pending.report.stall_fence_s == 0


# The fence


@pytest.mark.parametrize("overlap", MODES)
def test_a_step_waits_and_parameters_are_unchanged_until_then(
    tmp_path: Path, run: Run, gate: Gate, same: Same, overlap: Any
) -> None:
    with GatedCheckpointer(tmp_path, overlap=overlap, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        state = {"gate": gate, **run.state()}
        expected = copy.deepcopy(without_gate(state))
        pending = ckpt.save(1, state)
        run.backward()
        before = run.parameters()
        stepping = in_background(run.optimizer.step)
        stepping.join(0.1)
        assert stepping.is_alive()
        same(run.parameters(), before)
        gate.open()
        stepping.join(30)
        assert not stepping.is_alive()
        assert any(not torch.equal(a, b) for a, b in zip(run.parameters(), before, strict=True))
        pending.wait()
        same(without_gate(ckpt.restore()[1]), expected)
        assert pending.report.stall_fence_s > 0.05
        assert (pending.report.copied_nbytes > 0) == (overlap != "borrow")


def test_without_a_hook_the_caller_is_the_fence(tmp_path: Path, run: Run, gate: Gate, same: Same) -> None:
    with GatedCheckpointer(tmp_path, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer, hook=False)
        state = {"gate": gate, **run.state()}
        expected = copy.deepcopy(without_gate(state))
        pending = ckpt.save(1, state)
        run.backward()
        gate.open_soon()
        ckpt.wait_for_staging()
        run.optimizer.step()
        pending.wait()
        same(without_gate(ckpt.restore()[1]), expected)
        assert pending.report.eager_nbytes < pending.report.borrowed_nbytes + pending.report.copied_nbytes


def test_a_step_that_a_scaler_skips_does_not_wait(tmp_path: Path, run: Run, gate: Gate) -> None:
    scaler = torch.amp.GradScaler("cpu")
    with GatedCheckpointer(tmp_path, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        pending = ckpt.save(1, {"gate": gate, **capture(model=run.net, optimizer=run.optimizer, scaler=scaler)})
        run.optimizer.zero_grad()
        scaler.scale(run.loss() * torch.inf).backward()
        before = run.parameters()
        scaler.step(run.optimizer)  # a wait would be for ever
        scaler.update()
        assert not pending.done
        assert all(torch.equal(a, b) for a, b in zip(run.parameters(), before, strict=True))
        run.optimizer.zero_grad()
        scaler.scale(run.loss()).backward()
        gate.open_soon()
        scaler.step(run.optimizer)
        scaler.update()
        assert gate.event.is_set()
        pending.wait()
        assert ckpt.restore()[1]["scaler"] == {**scaler.state_dict(), "scale": 65536.0, "_growth_tracker": 0}


def hooks(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks)


def test_hooks_go_with_the_checkpointer(tmp_path: Path, run: Run) -> None:
    with Checkpointer(tmp_path, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        ckpt.attach(run.optimizer)
        assert hooks(run.optimizer) == 1
    assert hooks(run.optimizer) == 0
    run.step()
    ckpt.close()
    with pytest.raises(ConfigError, match="closed"):
        ckpt.attach(run.optimizer)


def test_hooks_go_when_the_last_save_fails(tmp_path: Path, run: Run) -> None:
    ckpt = Checkpointer(tmp_path, config=QUICK)
    ckpt.attach(run.optimizer)
    _engine.inject_fault("write_completion", error=errno.EIO)
    ckpt.save(1, run.state())
    with pytest.raises(StorageError):
        ckpt.close()
    assert hooks(run.optimizer) == 0
    ckpt.close()


def test_only_optimizers_are_attached(tmp_path: Path, run: Run) -> None:
    with Checkpointer(tmp_path, config=QUICK) as ckpt:
        with pytest.raises(ConfigError, match="found Net; pass the optimizer that it wraps"):
            ckpt.attach(run.optimizer, run.net)  # type: ignore[arg-type]
        assert hooks(run.optimizer) == 0


# Failure


def test_a_failed_save_raises_at_the_step_which_can_be_repeated(tmp_path: Path, run: Run, same: Same) -> None:
    with Checkpointer(tmp_path, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        ckpt.save(1, run.state()).wait()
        _engine.inject_fault("write_completion", at=2, error=errno.ENOSPC)
        failed = ckpt.save(2, run.state())
        run.backward()
        failed.join()
        before, adam = run.parameters(), copy.deepcopy(run.optimizer.state_dict())
        with pytest.raises(StorageError) as caught:
            run.optimizer.step()
        assert caught.value.errno == errno.ENOSPC
        same(run.parameters(), before)
        same(run.optimizer.state_dict(), adam)
        assert ckpt.steps() == [1]

        run.optimizer.step()
        expected = copy.deepcopy(run.state())
        ckpt.save(2, run.state())
        run.step()
        ckpt.wait()
        same(ckpt.restore()[1], expected)


def test_training_goes_on_after_a_failed_save_if_so_wished(tmp_path: Path, run: Run, same: Same) -> None:
    with Checkpointer(tmp_path, on_error="warn", config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        _engine.inject_fault("write_completion", error=errno.EIO)
        failed = ckpt.save(1, run.state())
        run.backward()
        failed.join()
        before = run.parameters()
        with pytest.warns(RuntimeWarning, match="given up"):
            run.optimizer.step()
        assert any(not torch.equal(a, b) for a, b in zip(run.parameters(), before, strict=True))
        expected = copy.deepcopy(run.state())
        ckpt.save(2, run.state())
        run.step()
        ckpt.wait()
        assert ckpt.steps() == [2]
        same(ckpt.restore()[1], expected)


# Restoring, and seeing it


def test_restoring_into_tensors_waits_until_they_are_saved(tmp_path: Path, run: Run, gate: Gate, same: Same) -> None:
    with GatedCheckpointer(tmp_path, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        old = copy.deepcopy(run.net.state_dict())
        ckpt.save(1, {"model": run.net.state_dict()}).wait()
        run.step()
        new = copy.deepcopy(run.net.state_dict())
        pending = ckpt.save(2, {"gate": gate, "model": run.net.state_dict()})
        gate.open_soon()
        ckpt.restore(1, target={"model": run.net.state_dict()}, inplace=True)
        same(run.net.state_dict(), old)
        pending.wait()
        same(ckpt.restore(2)[1]["model"], new)


def test_tensors_come_back_where_they_are_wanted(tmp_path: Path, run: Run) -> None:
    with Checkpointer(tmp_path, config=QUICK) as ckpt:
        ckpt.save(3, run.state()).wait()
        step, state = ckpt.restore(map_location="cpu", only=["model"])
    assert step == 3
    assert {type(value) for value in state["model"].values()} == {Tensor}
    run.net.load_state_dict(state["model"])


def test_the_timeline_shows_steps(tmp_path: Path, run: Run) -> None:
    with Checkpointer(tmp_path / "run", config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        for step in range(3):
            run.step()
            ckpt.save(step, run.state())
        ckpt.wait()
        ckpt.export_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    steps = [event for event in events if event["ph"] == "X" and lanes[event["tid"]] == "steps"]
    assert [event["name"] for event in steps] == ["step 1", "step 2"]
    assert all(event["dur"] > 0 for event in steps)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("overlap", MODES)
def test_training_on_a_gpu(tmp_path: Path, run: Run, same: Same, overlap: Any) -> None:
    run.net.cuda()
    run.optimizer = torch.optim.AdamW(run.net.parameters(), lr=1e-2)
    expected = {}
    with Checkpointer(tmp_path, overlap=overlap, config=QUICK) as ckpt:
        ckpt.attach(run.optimizer)
        for step in range(6):
            run.optimizer.zero_grad()
            tokens = torch.randint(0, 100, (8,), device="cuda")
            nn.functional.cross_entropy(run.net(tokens), tokens).backward()
            run.optimizer.step()
            expected[step] = copy.deepcopy(run.state())
            ckpt.save(step, run.state())
        for step, state in expected.items():
            same(ckpt.restore(step)[1], state)
