"""Training runs that save every step, killed at random moments: what can be restored is always one whole step."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import hidden_names, running

import fp_multi as fp

MODES = ("hybrid", "borrow", "snapshot")
MOST_DELAY_S = 0.6
PATIENCE_S = 60.0

# The state of a step follows from its number, so that everybody knows what it must be.
STATES = """
    def expected_arrays(step):
        base = np.arange(1 << 20, dtype=np.uint64)
        return {
            "weights": base * np.uint64(2 * step + 1),
            "moments": [base[:300_007] + np.uint64(step), (base[:250_000] ^ np.uint64(step)).reshape(500, 500).T],
            "growing": np.full(1000 * (step % 7), step, np.int32),
            "scalar": np.float64(step),
        }
"""

NUMPY_RUN = (
    STATES
    + """
    directory, overlap, in_flight = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with fp.Checkpointer(directory, overlap=overlap, keep=2, max_in_flight=in_flight) as ckpt:
        step = ckpt.latest_step()
        if step is None:
            step, state = 0, {"step": 0, **expected_arrays(0)}
        else:
            step, state = ckpt.restore()
        print("ready", flush=True)
        while True:
            step += 1
            new = expected_arrays(step)  # forward and backward
            ckpt.wait_for_staging()
            state["step"] = step
            state["weights"][:] = new["weights"]
            for old, moment in zip(state["moments"], new["moments"]):
                old[:] = moment
            state["growing"], state["scalar"] = new["growing"], new["scalar"]
            ckpt.save(step, state)
            if step % 3 == 0:
                ckpt.wait()
                print("waited", step, flush=True)
"""
)

TORCH_RUN = """
    import torch
    from fp_multi.adapters.torch import Checkpointer, capture, resume
    directory, overlap, in_flight = sys.argv[1], sys.argv[2], int(sys.argv[3])

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.zeros(n) for n in (1 << 20, 300_007, 7))
            self.register_buffer("forwards", torch.zeros(10_000, dtype=torch.int64))

        def forward(self):
            self.forwards += 1
            return sum(weights.sum() for weights in self.weights)

    net = Net()
    # Every gradient is 1: a step adds 1 to the momentum, and takes the momentum from the weights.
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=1.0)
    with Checkpointer(directory, overlap=overlap, keep=2, max_in_flight=in_flight) as ckpt:
        ckpt.attach(optimizer)
        step = 0
        if ckpt.latest_step() is not None:
            step, state = ckpt.restore()
            resume(state, model=net, optimizer=optimizer)
        print("ready", flush=True)
        while True:
            step += 1
            optimizer.zero_grad()
            net().backward()
            optimizer.step()
            ckpt.save(step, capture(model=net, optimizer=optimizer, step=step))
            if step % 3 == 0:
                ckpt.wait()
                print("waited", step, flush=True)
"""

names: dict[str, Any] = {"np": np}
exec(STATES.replace("\n    ", "\n"), names)


def check_numpy(step: int, state: Any) -> None:
    expected = names["expected_arrays"](step)
    assert state.pop("step") == step
    assert list(state) == list(expected)
    moments, expected_moments = state.pop("moments"), expected.pop("moments")
    for found, wanted in [*zip(moments, expected_moments, strict=True), *((state[k], expected[k]) for k in state)]:
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted), f"the state of step {step} is not its own"


def check_torch(step: int, state: Any) -> None:
    assert state["step"] == step
    assert (state["model"]["forwards"] == step).all()
    for i in range(3):
        assert (state["model"][f"weights.{i}"] == -step * (step + 1) / 2).all()
        assert (state["optimizer"]["state"][i]["momentum_buffer"] == step).all()


RUNS = {"numpy": (NUMPY_RUN, check_numpy), "torch": (TORCH_RUN, check_torch)}


def killed_run(code: str, directory: Path, overlap: str, in_flight: int, delay_s: float) -> int:
    """Start a run, kill it; returns the last step that it knew to be on the drive, 0 if there was none."""
    with running(code, directory, overlap, in_flight) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        rest, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -signal.SIGKILL, f"the run ended by itself\n{errors}"
    assert first == "ready\n"
    # What the last line lacks was not said.
    lines = [line.split() for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    return max((int(line[1]) for line in lines if line[0] == "waited"), default=0)


def torture(kind: str, directory: Path, count: int) -> None:
    code, check = RUNS[kind]
    chance = random.Random(count)
    known = 0
    seen = set()
    for number in range(count):
        overlap, in_flight = MODES[number % 3], 1 + number // 3 % 2
        waited = killed_run(code, directory, overlap, in_flight, chance.uniform(0, MOST_DELAY_S))
        known = max(known, waited)
        with fp.Checkpointer(directory) as ckpt:
            steps = ckpt.steps()
            for step in steps:
                fp.verify(directory / f"step_{step:08d}")
            newest = ckpt.latest_step() or 0
            assert newest >= known, f"step {known} was complete, the newest now is {newest} (run {number}, {overlap})"
            if steps:
                step, state = ckpt.restore()
                assert step == newest
                check(step, state)
                seen.add(step)
        # Two that are kept, and for each save under way one more that retention had not come to.
        assert len(steps) <= 2 + in_flight
        assert len(hidden_names(directory)) <= 2 * in_flight + 1
    assert len(seen) > count / 2, "the runs have not come far enough to be a test"


def test_killed_runs(tmp_path: Path) -> None:
    torture("numpy", tmp_path, 27)


def test_killed_training_with_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    torture("torch", tmp_path, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("numpy", 250), ("torch", 50)])
def test_very_many_killed_runs(tmp_path: Path, kind: str, count: int) -> None:
    pytest.importorskip(kind)
    torture(kind, tmp_path, count)
