"""The examples run, and a training run that is killed and resumed is the run that was left alone."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

import fp_multi as fp

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TINY = ("--layers", "2", "--width", "64", "--heads", "2", "--context", "32", "--batch", "2")
STEPS = 12


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_numpy_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("numpy_quickstart").main(tmp_path)
    assert "one bit flipped, and load says: " in capsys.readouterr().out


def test_flax_training_is_killed_resumed_and_moved_to_other_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("flax", "optax", "orbax"):
        pytest.importorskip(package)
    example("flax_train").main(tmp_path)
    said = capsys.readouterr().out
    assert "losses are the same" in said
    assert "on 2 devices" in said


def train(path: Path, steps: int = STEPS) -> subprocess.Popen[str]:
    path.mkdir(exist_ok=True)
    command = [sys.executable, str(EXAMPLES / "torch_train.py"), str(path), "--steps", str(steps), *TINY]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output


def kill_after(process: subprocess.Popen[str], log: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not log.exists() or len(log.read_text().splitlines()) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def losses(path: Path) -> dict[int, set[str]]:
    """Of every step all values that were logged: one, if a step that was computed again came out the same."""
    found: dict[int, set[str]] = {}
    for line in (path / "losses.log").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


def test_a_killed_training_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    killed, calm = tmp_path / "killed", tmp_path / "calm"

    # The loss of step 4 is logged before its save begins, so this one is killed in or near a save.
    kill_after(train(killed), killed / "losses.log", 4)
    kill_after(train(killed), killed / "saves.log", 7)
    output = finish(train(killed))
    assert output.startswith("resumed from step ")
    finish(train(calm))
    finish(train(calm))  # done already: adds nothing

    assert losses(killed) == losses(calm)
    assert sorted(losses(calm)) == list(range(1, STEPS + 1))
    assert all(len(values) == 1 for values in losses(calm).values())
    assert len((calm / "losses.log").read_text().splitlines()) == STEPS
    assert len(set.union(*losses(calm).values())) == STEPS  # it does move
    for run in (killed, calm):
        left = sorted(entry.name for entry in run.iterdir() if entry.is_dir())
        assert left == [f"step_{STEPS - 1:08d}", f"step_{STEPS:08d}"]
        for name in left:
            fp.verify(run / name)
