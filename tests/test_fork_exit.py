"""A process that forks, ends or is interrupted in the middle of things, and one that saves for a long time."""

from __future__ import annotations

import os
import signal

import pytest
from support import assert_same, check_child, hidden_names, running, small_state

import fp_multi as fp

FORK_WHILE_SAVING = """
path = sys.argv[1]
settings = config(durable=True)
if sys.argv[2] == "warm":
    fp.save(small_state(), path + "/parent", config=settings)
    fp.load(path + "/parent")
stop = threading.Event()
saved = [0]
failures = []

def saver():
    try:
        while not stop.is_set():
            fp.save(small_state(saved[0]), path + "/parent", overwrite=True, config=settings)
            saved[0] += 1
    except BaseException as error:
        failures.append(error)

thread = threading.Thread(target=saver)
thread.start()
children = 0
while children < 12 and not failures:
    seen = saved[0]
    pid = os.fork()
    if pid == 0:
        # The engine's threads, its ring and its memory stayed with the parent.
        mine = f"{path}/child-{children}"
        fp.save(small_state(children), mine, config=settings)
        assert_same(fp.load(mine), small_state(children))
        sys.exit(0)  # the whole way out, with every atexit handler
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
    children += 1
    while saved[0] == seen and not failures:
        time.sleep(0.001)
stop.set()
thread.join()
assert not failures, failures
assert_same(fp.load(path + "/parent"), small_state(saved[0] - 1))
fp.verify(path + "/parent")
assert hidden_names(path) == []
"""


@pytest.mark.parametrize("first", ["warm", "cold"])
def test_fork_in_the_middle_of_a_save(tmp_path, first):
    # Cold: the fork may fall into the first import of what a save needs, in another thread.
    check_child(FORK_WHILE_SAVING, tmp_path, first, timeout_s=30)
    for i in range(12):
        assert_same(fp.load(tmp_path / f"child-{i}"), small_state(i))


FORK_AND_LIVE_ON = """
from fp_multi import _commit
path = sys.argv[1]
with _commit.DirectoryCommit(path + "/a", config(), overwrite=False, nbytes=0) as commit:
    pid = os.fork()  # a worker that lives longer than the save, with all its descriptors
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    left = commit.path
    commit.published = True  # as if it were done: only the lock is given back
assert hidden_names(path)
fp.save(small_state(), path + "/b", config=config())
assert hidden_names(path) == [], "the lock went with the save, not with the child"
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
"""


def test_a_forked_worker_does_not_keep_locks(tmp_path):
    check_child(FORK_AND_LIVE_ON, tmp_path, timeout_s=30)


POOL = """
import multiprocessing
path = sys.argv[1]
fp.save(small_state(3), path, config=config())
fp.load(path)  # this process has engines; its children must not use them

def work(number):
    assert_same(fp.load(path, config=load_config(direct="auto" if number % 2 else "off")), small_state(3))
    fp.save(small_state(number), f"{path}-{number}", config=config())
    return fp.load(f"{path}-{number}")["seed"]

with multiprocessing.get_context("fork").Pool(3) as pool:
    assert pool.map(work, range(9), chunksize=1) == list(range(9))
    pool.close()
    pool.join()
"""


def test_a_pool_of_forked_workers(tmp_path):
    check_child(POOL, tmp_path / "ckpt", timeout_s=60)


def test_exit_right_after_a_save(tmp_path):
    check_child("fp.save(small_state(5), sys.argv[1])", tmp_path / "ckpt", timeout_s=30)
    assert_same(fp.load(tmp_path / "ckpt"), small_state(5))


@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)", "raise SystemExit", "pass"])
def test_ways_to_exit_after_save_and_load(tmp_path, how):
    code = f"fp.save(small_state(5), sys.argv[1]); state = fp.load(sys.argv[1]); {how}"
    check_child(code, tmp_path / "ckpt", timeout_s=30)


EXIT_WHILE_A_DAEMON_SAVES = """
path = sys.argv[1]
saves = int(sys.argv[2])
done = threading.Semaphore(0)

def saver():
    seed = 0
    while True:
        fp.save(small_state(seed), path + "/ckpt", overwrite=True, config=config())
        fp.load(path + "/ckpt")
        seed += 1
        done.release()

for _ in range(2):
    threading.Thread(target=saver, daemon=True).start()
for _ in range(saves):
    done.acquire()
"""


def test_exit_while_daemon_threads_save(tmp_path):
    for saves in range(8):
        check_child(EXIT_WHILE_A_DAEMON_SAVES, tmp_path, saves, timeout_s=30)
        if saves:
            found = fp.load(tmp_path / "ckpt")
            assert_same(found, small_state(found["seed"]))
            fp.verify(tmp_path / "ckpt")
    fp.save(small_state(), tmp_path / "ckpt", overwrite=True)
    assert hidden_names(tmp_path) == []


EXIT_WHILE_A_THREAD_SAVES = """
def saver():
    for seed in range(5):
        fp.save(small_state(seed), sys.argv[1], overwrite=True, config=config())

threading.Thread(target=saver).start()
"""


def test_exit_waits_for_ordinary_threads(tmp_path):
    check_child(EXIT_WHILE_A_THREAD_SAVES, tmp_path / "ckpt", timeout_s=30)
    assert fp.load(tmp_path / "ckpt")["seed"] == 4


NO_SAVE_IN_ATEXIT = """
import atexit
fp.save(small_state(), sys.argv[1] + "/a")

def late():
    try:
        fp.save(small_state(), sys.argv[1] + "/b")
    except fp.errors.EngineClosedError as error:
        print(error)

import fp_multi._engines
atexit._run_exitfuncs()
late()
os._exit(0)
"""


def test_saving_after_the_engines_were_closed_is_refused(tmp_path):
    # os._exit prints nothing that is buffered.
    check_child(NO_SAVE_IN_ATEXIT.replace("print(error)", "print(error, flush=True)"), tmp_path)
    assert os.listdir(tmp_path) == ["a"]


INTERRUPTED = """
path = sys.argv[1]
fp.save(small_state(0), path + "/ckpt", config=config())
rounds = int(sys.argv[2])
main = threading.get_ident()
saved = [0]
go = threading.Event()

def interrupter():
    import random
    rng = random.Random(rounds)
    for _ in range(rounds):
        go.wait()
        go.clear()
        for _ in range(rng.randrange(30_000)):
            pass
        signal.pthread_kill(main, signal.SIGINT)

threading.Thread(target=interrupter, daemon=True).start()
interrupted = 0
for number in range(1, rounds + 1):
    try:
        go.set()
        state = small_state(number)
        while True:
            fp.save(state, path + "/ckpt", overwrite=True, config=config())
            saved[0] = number
    except KeyboardInterrupt:
        interrupted += 1
    found = fp.load(path + "/ckpt")
    assert_same(found, small_state(found["seed"]))
    left = hidden_names(path)
    assert left == [], left
assert interrupted == rounds
import gc
gc.collect()
print(threading.active_count(), descriptor_count())
"""


def test_interrupts_during_saves_leave_nothing(tmp_path):
    check_child(INTERRUPTED, tmp_path, 25, timeout_s=60)


def test_control_c_ends_a_saving_process(tmp_path):
    # Who runs the tests in the background of a shell has the signal ignored.
    code = """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        fp.save(small_state(1), sys.argv[1], overwrite=True, config=config())
        print("saved", flush=True)
    """
    with running(code, tmp_path / "ckpt") as saver:
        assert saver.stdout.readline() == "saved\n"
        saver.send_signal(signal.SIGINT)
        saver.stdout.read()
        assert "KeyboardInterrupt" in saver.stderr.read()
        assert saver.wait(30) == -signal.SIGINT
    assert_same(fp.load(tmp_path / "ckpt"), small_state(1))
    assert hidden_names(tmp_path) == []


MANY = """
path = sys.argv[1]

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def once(i):
    mode = {"io_uring": "off"} if i % 5 == 0 else {}
    fp.save(small_state(1), path, overwrite=True, config=config(**mode))
    fp.load(path)
    if i % 10 == 0:
        try:
            with injected("write_completion", at=2, error=errno.EIO):
                fp.save(small_state(1), path, overwrite=True, config=config())
        except fp.errors.StorageError:
            pass

for i in range(20):
    once(i)
before = descriptor_count(), thread_count()
memory = resident()
for i in range(200):
    once(i)
assert (descriptor_count(), thread_count()) == before
grown = resident() - memory
assert grown < 16 << 20, grown
"""


def test_many_saves_leak_nothing(tmp_path):
    check_child(MANY, tmp_path / "ckpt", timeout_s=120)
