"""A save that is killed: at every system call and completion, and at moments nobody chose. Old or new, never half."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support import assert_same, check_child, config, hidden_names, running, small_state

import fp_multi as fp

# Forks a child for each moment; the child dies there. What it leaves is judged by its parent, by the same means as
# anybody's: load, verify, and the next save.
SWEEP = """
directory, mode = sys.argv[1], eval(sys.argv[2])
path = directory + "/ckpt"
settings = config(durable=True, **mode)
OLD, NEW = small_state(1), small_state(2)

def save(state):
    fp.save(state, path, overwrite=True, config=settings)

def in_child(act):
    pid = os.fork()
    if not pid:
        try:
            act()
        except BaseException as error:
            print("child:", repr(error), flush=True)
            os._exit(3)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def count():
    _engine.count_faults()
    save(OLD)
    with open(directory + "/counts", "w") as file:
        file.write(repr(_engine.fault_counts()))

save(OLD)
assert in_child(count) == 0
seen = {"old": 0, "new": 0}
for point, calls in eval(open(directory + "/counts").read()):
    for at in range(1, calls + 1):
        save(OLD)

        def die():
            _engine.inject_fault(point, at=at, kill=True)
            save(NEW)

        status = in_child(die)
        # Fewer calls than last time: timing decides how often the ring is looked at.
        assert os.WIFSIGNALED(status) or point in ("uring_enter", "mmap"), (point, at, status)
        found = fp.load(path)
        seen["old" if found["seed"] == 1 else "new"] += 1
        assert_same(found, small_state(found["seed"]))
        fp.verify(path)
        save(NEW)
        assert_same(fp.load(path), NEW)
        left = hidden_names(directory)
        assert left == [], (point, at, left)
print(seen)
"""

MODES = ["{}", "{'io_uring': 'off'}", "{'direct': 'off'}"]


@pytest.mark.parametrize("mode", MODES)
def test_killed_at_every_call(tmp_path, mode):
    seen = eval(check_child(SWEEP, tmp_path, mode, timeout_s=300).strip().splitlines()[-1])
    assert seen["old"] > 30
    assert seen["new"] >= 1, "the flush of the parent directory comes behind the rename"


SAVE_FOR_EVER = """
print("ready", flush=True)
seed = int(sys.argv[2])
while True:
    fp.save(small_state(seed), sys.argv[1], overwrite=True, config=config(durable=True))
    seed += 1
    print(seed, flush=True)
"""


def kill_at_random(directory: Path, rounds: int) -> None:
    import random

    random.seed(7)
    path = directory / "ckpt"
    fp.save(small_state(0), path, config=config())
    complete = 0
    for number in range(rounds):
        first = 1000 * (number + 1)
        with running(SAVE_FOR_EVER, path, first) as saver:
            assert saver.stdout.readline() == "ready\n"
            for _ in range(random.randrange(3)):
                saver.stdout.readline()
            # Not a clock that decides anything: some moment, whichever.
            for _ in range(random.randrange(200_000)):
                pass
            saver.send_signal(signal.SIGKILL)
            saver.wait()
        found = fp.load(path)
        assert_same(found, small_state(found["seed"]))
        fp.verify(path)
        assert found["seed"] >= complete
        complete = found["seed"]
        assert len(hidden_names(directory)) <= 1
    fp.save(small_state(0), directory / "other", config=config())
    assert hidden_names(directory) == []


def test_killed_at_random(tmp_path):
    kill_at_random(tmp_path, 8)


@pytest.mark.slow
def test_killed_at_random_many_times(tmp_path):
    kill_at_random(tmp_path, 200)


TWO_STEPS = """
path, kill_at = sys.argv[1], int(sys.argv[2])
real, calls = _engine.rename, [0]

def rename(source, target, mode=0):
    if mode:
        return errno.EINVAL  # as a file system without the flags
    calls[0] += 1
    if calls[0] == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(source, target)

_engine.rename = rename
fp.save(small_state(2), path, overwrite=True, config=config())
"""


@pytest.mark.parametrize(
    ("kill_at", "seed", "at_the_name"), [(1, 1, True), (2, 1, False), (3, 2, True)], ids=["before", "between", "after"]
)
def test_killed_between_the_two_renames(tmp_path, kill_at, seed, at_the_name):
    path = tmp_path / "ckpt"
    fp.save(small_state(1), path, config=config())
    with running(TWO_STEPS, path, kill_at) as saver:
        assert saver.wait(60) == -signal.SIGKILL
    assert os.path.lexists(path) == at_the_name
    assert hidden_names(tmp_path)
    assert_same(fp.load(path), small_state(seed))
    fp.verify(path)
    assert fp.read_manifest(path).tensors
    fp.save(small_state(3), tmp_path / "other", config=config())
    assert hidden_names(tmp_path) == []
    assert path.is_dir()
    assert_same(fp.load(path), small_state(seed))
    with pytest.raises(fp.errors.CheckpointExistsError):
        fp.save(small_state(3), path, config=config())


FILES = """
directory = sys.argv[1]
path = directory + "/model.safetensors"

def save(value):
    fp.save_safetensors({"x": np.full(40_000, value)}, path, config=config(durable=True))

for point in ("open", "fallocate", "write_completion", "fdatasync", "close", "mkdir", "rename", "fsync"):
    for at in (1, 2):
        save(1)
        pid = os.fork()
        if not pid:
            _engine.inject_fault(point, at=at, kill=True)
            save(2)
            os._exit(0)
        os.waitpid(pid, 0)
        x = fp.load_safetensors(path)["x"]
        assert (x == x[0]).all() and x[0] in (1, 2) and len(x) == 40_000, (point, at)
        save(3)
        assert hidden_names(directory) == []
"""


def test_a_file_killed_on_its_way(tmp_path):
    check_child(FILES, tmp_path)
