"""What ``make demo`` runs: kill a training run again and again, and see that nothing is lost; then time the saves.

Run: python examples/demo.py [--directory DIR]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import fp_multi as fp
from fp_multi.adapters.torch import load, save

HERE = Path(__file__).resolve().parent
STEPS = 14
KILLS = ("while it trains", "while it saves", "while it saves", "at any moment", "while it saves")
ROUNDS = 7
PATIENCE_S = 120.0


def start(path: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    path.mkdir(exist_ok=True)
    with open(path / "output.log", "ab") as output:
        command = [sys.executable, str(HERE / "torch_train.py"), str(path), *arguments]
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def fail(message: str) -> SystemExit:
    return SystemExit(f"FAILED: {message}")


def finish(process: subprocess.Popen[bytes], path: Path) -> None:
    if process.wait() != 0:
        raise fail(f"the training ended with {process.returncode}:\n{(path / 'output.log').read_text()[-2000:]}")


def lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def unfinished(path: Path) -> set[str]:
    """The hidden directories of saves that are running or were killed."""
    return {entry for entry in os.listdir(path) if entry.startswith(".step_") and ".fp_multi-tmp-" in entry}


def checkpoints(path: Path) -> list[Path]:
    """The complete checkpoints, oldest first: a directory without a manifest is none."""
    return sorted(step for step in path.glob("step_*") if (step / "manifest.json").exists())


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready() and process.poll() is None:
        if time.monotonic() > deadline:
            raise fail(f"no progress for {PATIENCE_S:.0f} s")
        time.sleep(0.0005)


def run_killed(path: Path, arguments: list[str], chance: random.Random) -> int:
    """Train to the end through all KILLS; returns how many of them hit a save."""
    hits = 0
    for number, moment in enumerate(KILLS, 1):
        left_before = unfinished(path) if path.exists() else set()
        done = len(lines(path / "saves.log"))
        process = start(path, arguments)
        try:
            # At least one new step, so that the run as a whole goes on.
            wait_until(lambda done=done: len(lines(path / "saves.log")) > done, process)
            saves = [float(elapsed_s) for _, _, elapsed_s, _ in lines(path / "saves.log")]
            if moment == "while it saves":
                wait_until(lambda old=left_before: bool(unfinished(path) - old), process)
                time.sleep(chance.uniform(0, 0.8) * min(saves))
            else:
                time.sleep(chance.uniform(0, 0.6))
        finally:
            process.kill()  # SIGKILL: no handler, no clean-up
            code = process.wait()
        if code == 0:
            print(f"  kill {number}: came too late, the training was done")
            break
        if code != -9:
            finish(process, path)
        cut = unfinished(path)
        hits += bool(cut)
        where = f"in the middle of the save of step {int(min(cut)[6:14])}" if cut else "between two saves"
        complete = checkpoints(path)
        for checkpoint in complete:
            fp.verify(checkpoint)
        kept = ", ".join(str(int(checkpoint.name[5:])) for checkpoint in complete)
        print(f"  kill {number}: {moment:<15} -> hit {where}; complete and verified: steps {kept}")
    finish(start(path, arguments), path)
    return hits


def compare(killed: Path, calm: Path, steps: int) -> None:
    expected = {step: loss for step, loss in lines(calm / "losses.log")}
    found: dict[str, set[str]] = {}
    count = 0
    for step, loss in lines(killed / "losses.log"):
        found.setdefault(step, set()).add(loss)
        count += 1
    if sorted(expected, key=int) != [str(i + 1) for i in range(steps)] or found.keys() != expected.keys():
        raise fail(f"steps are missing: {sorted(found, key=int)}")
    wrong = [step for step in expected if found[step] != {expected[step]}]
    if wrong:
        raise fail(f"the losses of steps {wrong} differ: {[(expected[s], found[s]) for s in wrong]}")
    print(f"  all {steps} losses agree bit for bit, {count - steps} of them computed again after a kill")
    print(f"  the last: {float.fromhex(expected[str(steps)]):.6f} = {expected[str(steps)]}")


def flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def time_saves(scratch: Path, source: Path) -> None:
    """The same state with fp_multi and with torch.save + fsync, in turn, each time to a new name."""
    state = load(source)
    nbytes = fp.read_manifest(source).totals.tensor_nbytes

    def save_ours(path: Path) -> None:
        save(state, path)

    def save_torch(path: Path) -> None:
        torch.save(state, path)
        flush(path)
        flush(path.parent)

    taken: dict[str, list[float]] = {"fp_multi": [], "torch.save + fsync": []}
    for number in range(ROUNDS + 1):
        for name, action in zip(taken, (save_ours, save_torch), strict=True):
            path = scratch / f"timed_{number}"
            begin = time.perf_counter()
            action(path)
            if number:  # the first round warms up
                taken[name].append(time.perf_counter() - begin)
            path.unlink() if path.is_file() else shutil.rmtree(path)
    print(f"\nThe same state, {nbytes / 1e6:.0f} MB, durable, median of {ROUNDS} alternating rounds:")
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        print(f"  {name:<20} {median * 1e3:7.1f} ms  {nbytes / 1e9 / median:6.2f} GB/s")
    ours, theirs = (statistics.median(seconds) for seconds in taken.values())
    print(f"  {theirs / ours:.1f} times as fast, and every byte is under a checksum")


def main(directory: str | os.PathLike[str], steps: int = STEPS, arguments: tuple[str, ...] = ()) -> None:
    """Run all of it in a scratch folder of ``directory``; raises SystemExit on the first mismatch."""
    scratch = Path(tempfile.mkdtemp(prefix="fp_multi-demo-", dir=directory))
    seed = random.randrange(1 << 32)
    command = ["--steps", str(steps), *arguments]
    can = fp.capabilities(scratch)
    print(
        f"Files: {scratch} (removed at the end). Here: {can['engine']}, direct I/O {'on' if can['direct'] else 'off'}."
    )
    try:
        print(f"\nA small GPT trains for {steps} steps and saves a checkpoint at each. It is killed {len(KILLS)} times")
        print(f"(SIGKILL, random seed {seed}) and goes on from the newest complete checkpoint:")
        hits = run_killed(scratch / "killed", command, random.Random(seed))
        if not hits:
            raise fail("no kill hit a save; run it again")
        print("\nThe same training, left alone:")
        finish(start(scratch / "calm", command), scratch / "calm")
        compare(scratch / "killed", scratch / "calm", steps)
        for run in ("killed", "calm"):
            for checkpoint in checkpoints(scratch / run):
                report = fp.verify(checkpoint)
                print(f"  {run}/{checkpoint.name}: {report.nbytes / 1e6:.0f} MB read, every checksum right")
        saves = lines(scratch / "calm" / "saves.log")
        stall_s = statistics.median(float(stall_s) for _, stall_s, _, _ in saves)
        elapsed_s = statistics.median(float(elapsed_s) for _, _, elapsed_s, _ in saves)
        nbytes = int(saves[-1][3])
        rate = nbytes / 1e9 / elapsed_s
        print(f"\nThe loop stood still for {stall_s * 1e3:.1f} ms at each step (median), to put {nbytes / 1e6:.0f} MB")
        print(f"  on the drive within {elapsed_s * 1e3:.0f} ms, beside the training: {rate:.2f} GB/s")
        time_saves(scratch, checkpoints(scratch / "calm")[-1])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print("\nAll as it should be. Scratch files removed.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a place on the drive that you want to try")
    main(parser.parse_args().directory)
