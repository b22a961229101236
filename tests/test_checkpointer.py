"""The Checkpointer as its user meets it: steps, errors, ends of all kinds, and what it shows."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import Gate
from support import (
    assert_same,
    check_child,
    child,
    config,
    descriptor_count,
    hidden_names,
    injected,
    load_config,
    random_bytes,
    running,
    small_state,
)

import fp_multi as fp
from fp_multi.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    StorageError,
    UnsupportedLeafError,
)

QUICK = config()
Calls = dict[str, Callable[[fp.Checkpointer, fp.PendingSave], object]]


def step_dir(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


# Steps


@pytest.mark.parametrize("durable", [True, False])
def test_steps_come_back(tmp_path: Path, durable: bool) -> None:
    with fp.Checkpointer(tmp_path / "new" / "run", config=config(durable=durable)) as ckpt:
        assert ckpt.steps() == []
        assert ckpt.latest_step() is None
        for step in (5, 2, np.int64(7)):
            ckpt.save(step, small_state(int(step)), metadata={"step": str(step)})  # type: ignore[arg-type]
        ckpt.wait()
        assert ckpt.steps() == [2, 5, 7]
        assert ckpt.latest_step() == 7
        for step in ckpt.steps():
            found, state = ckpt.restore(step)
            assert found == step
            assert_same(state, small_state(step))
            assert fp.read_manifest(step_dir(tmp_path / "new" / "run", step)).metadata == {"step": str(step)}
        assert ckpt.restore()[0] == 7
        assert hidden_names(tmp_path / "new" / "run") == []


def test_what_is_given_is_taken_at_once(tmp_path: Path) -> None:
    gate = Gate()
    with fp.Checkpointer(tmp_path, config=QUICK) as ckpt:
        metadata = {"a": "b"}
        state = {"gate": gate, "values": [1, 2], "loss": 0.5}
        ckpt.save(1, state, metadata=metadata)
        metadata["a"] = "c"
        state["values"].append(3)  # type: ignore[attr-defined]
        state["loss"] = 1.5
        gate.open()
        ckpt.wait()
        found = ckpt.restore()[1]
        assert (found["values"], found["loss"]) == ([1, 2], 0.5)
        assert fp.read_manifest(step_dir(tmp_path, 1)).metadata == {"a": "b"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlap": "none"}, "overlap"),
        ({"on_error": "ignore"}, "on_error"),
        ({"keep": 0}, "keep must be at least 1, found 0"),
        ({"keep": 2, "keep_every": 0}, "keep_every must be at least 1"),
        ({"keep_every": 2}, "keep_every needs keep"),
        ({"staging_bytes": -1}, "staging_bytes must be at least 0"),
        ({"max_in_flight": 3}, "max_in_flight must be 1 or 2"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fp.Checkpointer(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [-1, 1.0, "1", None])
def test_steps_that_cannot_be(tmp_path: Path, step: Any) -> None:
    with fp.Checkpointer(tmp_path) as ckpt, pytest.raises(ConfigError, match="step must be"):
        ckpt.save(step, {})


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        fp.Checkpointer(tmp_path / "file")


def test_a_state_that_cannot_be_stored_leaves_nothing(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, config=QUICK) as ckpt:
        with pytest.raises(UnsupportedLeafError):
            ckpt.save(1, {"x": object()})
        assert os.listdir(tmp_path) == []
        ckpt.save(1, {"x": 1})


def test_an_existing_step_is_replaced_only_if_asked(tmp_path: Path) -> None:
    gate = Gate()
    with fp.Checkpointer(tmp_path, keep=2, max_in_flight=2, config=QUICK) as ckpt:
        ckpt.save(1, {"x": 1}).wait()
        with pytest.raises(CheckpointExistsError, match="this step exists") as caught:
            ckpt.save(1, {"x": 2})
        assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(step_dir(tmp_path, 1)))
        first = ckpt.save(2, {"x": gate})
        with pytest.raises(CheckpointExistsError, match="is being saved"):
            ckpt.save(2, {"x": 3})
        threading.Timer(0.1, gate.open).start()
        ckpt.save(2, {"x": 4}, overwrite=True)
        assert first.done  # the same step is never written twice at once
        ckpt.save(1, {"x": 5}, overwrite=True)
        ckpt.wait()
        assert [ckpt.restore(step)[1] for step in ckpt.steps()] == [{"x": 5}, {"x": 4}]


def test_going_back_to_an_earlier_step(tmp_path: Path) -> None:
    # What was saved last stays even if retention has newer steps to keep.
    with fp.Checkpointer(tmp_path, keep=1, config=QUICK) as ckpt:
        for step in (10, 11, 5):
            ckpt.save(step, {"x": step}).wait()
        assert ckpt.steps() == [5, 11]
        ckpt.save(6, {"x": 6}).wait()
        assert ckpt.steps() == [6, 11]


def test_restoring_in_every_way(tmp_path: Path) -> None:
    state = small_state(3)
    with fp.Checkpointer(tmp_path, config=QUICK, load_config=load_config()) as ckpt:
        with pytest.raises(CheckpointNotFoundError, match="no complete step"):
            ckpt.restore()
        ckpt.save(3, state).wait()
        ckpt.save(4, small_state(4)).wait()
        with pytest.raises(CheckpointNotFoundError, match="step 5 is not here; there are 3, 4"):
            ckpt.restore(5)
        assert_same(ckpt.restore(3, only=["odd"])[1], {"odd": state["odd"]})
        target = small_state(9)
        found = ckpt.restore(3, target=target, inplace=True)[1]
        assert found["odd"] is target["odd"]
        assert_same(found, state)
        ckpt.save(6, {"x": [1, object]}, allow_pickle=True).wait()
        assert ckpt.restore(allow_pickle=True) == (6, {"x": [1, object]})


def test_restoring_into_arrays_waits_until_they_are_saved(tmp_path: Path) -> None:
    gate = Gate()
    with fp.Checkpointer(tmp_path, config=QUICK) as ckpt:
        state = {"x": random_bytes(10_000, 1)}
        ckpt.save(1, state).wait()
        state["x"][:] = random_bytes(10_000, 2)
        ckpt.save(2, {"gate": gate, **state})
        threading.Timer(0.1, gate.open).start()
        ckpt.restore(1, target=state, inplace=True)
        assert_same(state["x"], random_bytes(10_000, 1))
        ckpt.wait()
        assert_same(ckpt.restore(2)[1]["x"], random_bytes(10_000, 2))


# Errors

CALLS: Calls = {
    "save": lambda ckpt, pending: ckpt.save(9, {"x": 9}),
    "fence": lambda ckpt, pending: ckpt.wait_for_staging(),
    "wait": lambda ckpt, pending: ckpt.wait(),
    "close": lambda ckpt, pending: ckpt.close(),
    "handle": lambda ckpt, pending: pending.wait(),
}


def fail(ckpt: fp.Checkpointer, step: int, code: int = errno.EIO) -> fp.PendingSave:
    with injected("write_completion", times=100, error=code):
        pending = ckpt.save(step, small_state(step))
        pending.join()
    assert pending.done
    return pending


@pytest.mark.parametrize("call", CALLS)
def test_an_error_is_raised_once_by_whoever_comes_first(
    tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    with fp.Checkpointer(tmp_path, keep=2, config=QUICK) as ckpt:
        ckpt.save(1, small_state(1)).wait()
        pending = fail(ckpt, 2)
        # It is in the log before anybody asks.
        (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert "the save of step 2 failed: " in record.getMessage()
        with pytest.raises(StorageError) as caught:
            CALLS[call](ckpt, pending)
        assert caught.value is pending.error
        assert caught.value.errno == errno.EIO
        assert caught.value.op == "write"
        assert caught.value.filename.startswith(str(tmp_path / ".step_00000002.fp_multi-tmp-"))
        assert pending.report.save is None
        assert ckpt.steps() == [1]
        assert hidden_names(tmp_path) == []
        for name, again in CALLS.items():
            if name == "handle":
                with pytest.raises(StorageError):
                    again(ckpt, pending)  # a handle tells whenever it is asked
            elif not (name == "save" and call == "close"):
                again(ckpt, pending)
        assert (ckpt.stats.failures, ckpt.stats.saves) == (1, 1 if call == "close" else 2)
    assert_same(fp.load(step_dir(tmp_path, 1)), small_state(1))


def test_a_save_that_follows_a_failed_one_succeeds(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, keep=2, config=QUICK) as ckpt:
        for step in range(4):
            ckpt.save(step, small_state(step)).wait()
        with pytest.raises(StorageError):
            fail(ckpt, 4, errno.ENOSPC).wait()
        assert ckpt.steps() == [2, 3]
        for step in range(4, 8):
            ckpt.save(step, small_state(step)).wait()
        assert ckpt.steps() == [6, 7]
        assert_same(ckpt.restore()[1], small_state(7))


def test_several_errors_are_raised_together(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, max_in_flight=2, config=QUICK) as ckpt:
        gates = [Gate(), Gate()]
        pending = [ckpt.save(step, {"x": gate}) for step, gate in enumerate(gates)]
        with injected("write_completion", times=100, error=errno.EIO):
            for gate in gates:
                gate.open()
            for one in pending:
                one.join()
        with pytest.raises(StorageError) as caught:
            ckpt.wait()
        assert len(caught.value.__notes__) == 1
        assert "another save failed, too" in caught.value.__notes__[0]
        ckpt.wait()


@pytest.mark.parametrize("call", ["save", "fence", "wait", "close"])
def test_training_goes_on_if_errors_are_warnings(tmp_path: Path, call: str) -> None:
    with fp.Checkpointer(tmp_path, on_error="warn", config=QUICK) as ckpt:
        pending = fail(ckpt, 1)
        with pytest.warns(RuntimeWarning, match="given up: .*Input/output error") as caught:
            CALLS[call](ckpt, pending)
        assert [warning.filename for warning in caught] == [__file__]
        ckpt.wait()
        with pytest.raises(StorageError):
            pending.wait()  # somebody asks for this one


def test_the_exception_that_ends_the_block_is_the_one_that_is_seen(tmp_path: Path) -> None:
    def train() -> None:
        with ckpt:
            saved.append(fail(ckpt, 1))
            raise KeyError

    saved: list[fp.PendingSave] = []
    ckpt = fp.Checkpointer(tmp_path, config=QUICK)
    with pytest.raises(KeyError):
        train()
    (pending,) = saved
    assert isinstance(pending.error, StorageError)
    ckpt.close()
    with pytest.raises(ConfigError, match="is closed"):
        ckpt.save(2, {})
    assert ckpt.steps() == []


def test_no_thread_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fp.Checkpointer(tmp_path, config=QUICK) as ckpt:
        array = np.zeros(10)
        gone = weakref.ref(array)

        def start(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(StorageError, match="can't start new thread") as caught:
                ckpt.save(1, {"x": array})
        assert caught.value.errno == errno.EAGAIN
        del array, caught
        gc.collect()
        assert gone() is None
        ckpt.wait()
        ckpt.wait_for_staging()
        # What was given up stays so.
        ckpt.save(2, {"x": 2}).wait()
        assert ckpt.steps() == [2]


def test_a_failure_behind_the_commit_does_not_undo_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def apply(busy: object) -> list[object]:
        raise OSError("no retention today")

    with fp.Checkpointer(tmp_path, keep=1, config=QUICK) as ckpt:
        monkeypatch.setattr(ckpt._retention, "apply", apply)
        for step in (1, 2):
            ckpt.save(step, {"x": step}).wait()
        assert ckpt.steps() == [1, 2]
    assert "no retention today" in caplog.text


# Memory


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_state_is_held_when_the_save_is_over(tmp_path: Path, fails: bool) -> None:
    with fp.Checkpointer(tmp_path, config=QUICK) as ckpt:
        for step in range(2):
            array = random_bytes(100_000)
            gone = weakref.ref(array)
            if fails:
                with injected("write_completion", error=errno.EIO):
                    pending = ckpt.save(step, {"x": array, "y": array[5:]})
                    pending.join()
            else:
                pending = ckpt.save(step, {"x": array, "y": array[5:]})
                pending.wait()
            del array
            # Without the collector's help: there are no cycles.
            assert gone() is None
            assert pending.progress[1] > 200_000
            if fails:
                with pytest.raises(StorageError):
                    pending.wait()


def test_many_saves_leak_nothing(tmp_path: Path) -> None:
    code = """
    def resident_nbytes():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    state = {"a": random_bytes(3 << 20), "b": [np.arange(i) for i in range(40)]}
    with fp.Checkpointer(sys.argv[1], keep=2, keep_every=80, config=config()) as ckpt:
        def save(first, last):
            for step in range(first, last):
                state["a"][:8] = step % 256
                ckpt.save(step, state, metadata={"step": str(step)})
                ckpt.wait_for_staging()
            ckpt.wait()
            return resident_nbytes()

        before = save(0, 40)
        counts = descriptor_count(), thread_count()
        after = save(40, 240)
        assert (descriptor_count(), thread_count()) == counts, (counts, descriptor_count(), thread_count())
        assert after < before + (3 << 20), (before, after)
        assert ckpt.steps() == [0, 80, 160, 238, 239], ckpt.steps()
    names = {thread.name for thread in threading.enumerate()}
    assert names == {"MainThread"}, names
    assert hidden_names(sys.argv[1]) == []
    fp.verify(sys.argv[1] + "/step_00000239")
    """
    check_child(code, tmp_path, timeout_s=120)


def test_a_checkpointer_leaves_no_descriptor(tmp_path: Path) -> None:
    def once(name: str) -> int:
        with fp.Checkpointer(tmp_path / name, keep=1, config=QUICK) as ckpt:
            for step in range(4):
                ckpt.save(step, small_state(step))
        return descriptor_count()

    assert once("a") == once("b")


# Ends


def test_who_forgets_to_close_leaves_nothing(tmp_path: Path) -> None:
    threads, descriptors = threading.active_count(), descriptor_count()
    ckpt = fp.Checkpointer(tmp_path, keep=1, config=QUICK, progress=lambda pending: None)
    for step in range(3):
        pending = ckpt.save(step, small_state(step))
    del ckpt  # with a save under way
    pending.wait()
    del pending
    end_s = time.monotonic() + 30
    while threading.active_count() > threads or hidden_names(tmp_path):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert descriptor_count() <= descriptors + 1  # the engine's ring may have been made just now
    with fp.Checkpointer(tmp_path) as other:
        assert_same(other.restore()[1], small_state(2))


SAVE_AND = """
path = sys.argv[1]
ckpt = fp.Checkpointer(path, keep=2, config=config(durable=True))
for step in range(3):
    ckpt.save(step, {"step": step, "x": random_bytes(20_000_000, step)})
    ckpt.wait_for_staging()
"""


def check_steps(directory: Path, *expected: int) -> None:
    with fp.Checkpointer(directory) as ckpt:
        assert tuple(ckpt.steps()) == expected
        for step in expected:
            assert_same(ckpt.restore(step)[1], {"step": step, "x": random_bytes(20_000_000, step)})


def test_the_end_of_the_interpreter_completes_the_save(tmp_path: Path) -> None:
    check_child(SAVE_AND, tmp_path)
    check_steps(tmp_path, 1, 2)
    assert hidden_names(tmp_path) == []


def test_an_exception_in_the_loop_completes_the_save(tmp_path: Path) -> None:
    done = child(SAVE_AND + "\nraise KeyError('training failed')", tmp_path)
    assert done.returncode == 1
    assert "training failed" in done.stderr
    check_steps(tmp_path, 1, 2)


def test_a_save_that_fails_at_the_end_is_in_the_log(tmp_path: Path) -> None:
    code = SAVE_AND + "\nckpt.wait()\n_engine.inject_fault('fdatasync', error=5)\nckpt.save(3, {'x': 1})"
    done = child(code, tmp_path)
    assert done.returncode == 0
    assert "the save of step 3 failed: [Errno 5] fdatasync: Input/output error" in done.stderr
    check_steps(tmp_path, 1, 2)


def test_saving_while_the_interpreter_ends_is_refused(tmp_path: Path) -> None:
    code = """
    import atexit
    def late():
        try:
            ckpt.save(9, {"x": 9})
        except fp.FpMultiError as error:
            print(error, flush=True)
        ckpt.close()
    atexit.register(late)
    """
    assert "shutdown" in check_child(code + SAVE_AND.replace("\n", "\n    "), tmp_path)
    check_steps(tmp_path, 1, 2)


TRAIN = """
path = sys.argv[1]
if sys.argv[2] == "handler":
    def leave(*_):
        sys.exit(3)
    signal.signal(signal.SIGTERM, leave)
with fp.Checkpointer(path, keep=2, config=config(durable=True)) as ckpt:
    step = 0
    while True:
        pending = ckpt.save(step, {"step": step, "x": random_bytes(20_000_000, step)})
        if step == 2:
            print("go", flush=True)
        ckpt.wait_for_staging()
        step += 1
"""


@pytest.mark.parametrize("how", ["default", "handler"])
def test_sigterm_leaves_old_or_new(tmp_path: Path, how: str) -> None:
    with running(TRAIN, tmp_path, how) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == "go\n"
        training.send_signal(signal.SIGTERM)
        status = training.wait(60)
    assert status == (3 if how == "handler" else -signal.SIGTERM)
    with fp.Checkpointer(tmp_path, keep=2, config=QUICK) as ckpt:
        assert len(ckpt.steps()) in (2, 3)
        for step in ckpt.steps():
            assert_same(ckpt.restore(step)[1], {"step": step, "x": random_bytes(20_000_000, step)})
        if how == "handler":
            assert hidden_names(tmp_path) == []
        ckpt.save(1000, {"x": 1}).wait()
        assert hidden_names(tmp_path) != [] or len(ckpt.steps()) == 2
    assert hidden_names(tmp_path) == []


INTERRUPTED = """
import random

armed = False

def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

def guarded(action, after_s):
    global armed
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, after_s)
        action()
        armed = False
    except KeyboardInterrupt:
        return 1
    return 0

def state_of(step):
    return {"step": step, "x": random_bytes(200_000, step)}

def train(step):
    ckpt.save(step, state_of(step))
    ckpt.wait_for_staging()
    if step % 5 == 0:
        ckpt.wait()

signal.signal(signal.SIGALRM, interrupt)
rng = random.Random(1)
interrupted = 0
for run in range(8):
    path = f"{sys.argv[1]}/{run}"
    ckpt = fp.Checkpointer(path, keep=3, max_in_flight=1 + run % 2, config=config())
    for step in range(30):
        interrupted += guarded(lambda: train(step), rng.uniform(0.00005, 0.004))
    interrupted += guarded(ckpt.close, 0.0005)
    ckpt.close()
    with fp.Checkpointer(path) as other:
        for step in other.steps():
            assert_same(other.restore(step)[1], state_of(step))
    assert hidden_names(path) == []
print(interrupted)
"""


def test_interrupts_at_any_moment_leave_it_usable(tmp_path: Path) -> None:
    assert int(check_child(INTERRUPTED, tmp_path)) > 20


def test_a_forked_child_has_nothing_to_do_with_the_saves(tmp_path: Path) -> None:
    code = (
        SAVE_AND
        + """
pending = ckpt.save(3, {"step": 3, "x": random_bytes(20_000_000, 3)})
children = []
for i in range(6):
    pid = os.fork()
    if pid == 0:
        ckpt.wait_for_staging()
        ckpt.wait()
        for refused in (lambda: ckpt.save(9, {}), pending.wait, ckpt.restore):
            try:
                refused()
            except fp.errors.EngineClosedError as error:
                assert "forked" in str(error), error
            else:
                sys.exit("not refused")
        ckpt.close()
        with fp.Checkpointer(f"{path}/child-{i}", keep=1, config=config()) as mine:
            for step in range(3):
                mine.save(step, {"step": step})
        assert mine.restore() == (2, {"step": 2})
        sys.exit()  # with every exit handler
    children.append(pid)
for pid in children:
    assert os.waitpid(pid, 0)[1] == 0
ckpt.close()
"""
    )
    check_child(code, tmp_path)
    check_steps(tmp_path, 2, 3)


# Seeing it


def test_progress_is_told_during_the_write_and_after(tmp_path: Path) -> None:
    gate, seen = Gate(), []
    called = threading.Event()

    def progress(pending: fp.PendingSave) -> None:
        seen.append((pending.step, *pending.progress, pending.done, pending.report.save is not None))
        called.set()

    with fp.Checkpointer(tmp_path, config=QUICK, progress=progress) as ckpt:
        ckpt.save(1, {"gate": gate, "x": random_bytes(1 << 20)})
        assert called.wait(30)
        gate.open()
        ckpt.wait()
    assert all(step == 1 for step, *_ in seen)
    _, moved, total, done, complete = seen[0]
    assert moved < total
    assert not done
    assert not complete
    _, moved, total, done, complete = seen[-1]
    assert moved == total > 1 << 20
    assert done
    assert complete
    assert [done for *_, done, _ in seen].count(True) == 1


def test_a_callback_that_fails_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def progress(pending: fp.PendingSave) -> None:
        raise ValueError("what is this")

    with fp.Checkpointer(tmp_path, config=QUICK, progress=progress) as ckpt:
        for step in range(3):
            ckpt.save(step, small_state(step)).wait()
    assert caplog.text.count("the progress callback failed") == 3
    assert ckpt.steps() == [0, 1, 2]


def test_waiting_with_a_limit(tmp_path: Path) -> None:
    gate = Gate()
    with fp.Checkpointer(tmp_path, config=QUICK) as ckpt:
        pending = ckpt.save(1, {"gate": gate})
        assert not pending.wait(0.01)
        assert not pending.done
        gate.open()
        assert pending.wait(30)
        assert pending.done


def test_reports_and_scalars_agree(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, keep=1, config=QUICK) as ckpt:
        assert ckpt.stats.last is None
        assert ckpt.stats.scalars()["checkpoint/saves"] == 0
        reports = []
        for step in range(5):
            pending = ckpt.save(step, small_state(step))
            ckpt.wait_for_staging()
            pending.wait()
            reports.append(pending.report)
        scalars = ckpt.stats.scalars("c/")
    assert all(isinstance(value, float) for value in scalars.values())
    for name in ("stall_save_s", "stall_queue_s", "stall_fence_s", "borrowed_nbytes", "copied_nbytes", "eager_nbytes"):
        assert scalars[f"c/{name}_total"] == pytest.approx(sum(getattr(report, name) for report in reports))
        assert scalars[f"c/{name}"] == getattr(reports[-1], name)
    assert scalars["c/saves"] == 5
    assert scalars["c/failures"] == 0
    assert scalars["c/recycled"] == sum(report.recycled for report in reports) == 3
    assert scalars["c/step"] == 4
    last = ckpt.stats.last
    assert last == reports[-1]
    assert last is not None
    assert last.save is not None
    assert scalars["c/stall_s"] == last.stall_s == last.stall_save_s + last.stall_queue_s + last.stall_fence_s
    assert scalars["c/gbytes_per_s"] == last.save.gbytes_per_s > 0


def test_a_report_counts_from_when_the_save_got_its_turn(tmp_path: Path) -> None:
    gate = Gate()
    with fp.Checkpointer(tmp_path, config=QUICK) as ckpt:
        ckpt.save(1, {"gate": gate})
        threading.Timer(0.3, gate.open).start()
        report = None
        second = ckpt.save(2, small_state(2))
        second.wait()
        report = second.report
    assert report.save is not None
    assert report.stall_queue_s > 0.1
    assert report.stall_save_s < report.stall_s
    save = report.save
    assert save.plan_s + save.write_s + save.fsync_s <= save.elapsed_s + 1e-3
    assert 0 < save.commit_s < save.elapsed_s


def test_the_timeline(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path / "run", max_in_flight=2, config=QUICK) as ckpt:
        for step in range(4):
            ckpt.save(step, small_state(step))
            ckpt.wait_for_staging()
            ckpt.trace_span("steps", f"step {step}", float(step), step + 0.5)
        ckpt.wait()
        ckpt.export_trace(tmp_path / "trace.json")
        with pytest.raises(StorageError, match="No such file"):
            ckpt.export_trace(tmp_path / "none" / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        assert event["ph"] in ("M", "X")
        assert event["pid"] == os.getpid()
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0
            # Numbered lanes hold what runs at the same time as another.
            spans.setdefault(lanes[event["tid"]].rstrip(" 2"), []).append(event)
    assert set(spans) == {"training", "steps", "staging", "writing", "fsync", "commit"}
    assert {event["name"] for event in spans["training"]} >= {f"save {step}" for step in range(4)}
    for lane, verb in (("staging", "stage"), ("writing", "write"), ("fsync", "fsync"), ("commit", "commit")):
        assert sorted(event["name"] for event in spans[lane]) == [f"{verb} {step}" for step in range(4)]
    for step in range(4):
        write, flush, commit = (
            next(event for event in spans[lane] if event["name"].endswith(f" {step}"))
            for lane in ("writing", "fsync", "commit")
        )
        assert write["ts"] + write["dur"] == pytest.approx(flush["ts"], abs=1)
        assert flush["ts"] + flush["dur"] == pytest.approx(commit["ts"], abs=1)
        assert write["args"]["nbytes"] > 0


def test_advice_from_what_was_measured(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, keep=1, config=QUICK) as ckpt:
        with pytest.raises(ConfigError, match="not measured yet: step_s, forward_backward_s, nbytes, bytes_per_s, st"):
            ckpt.advise(mtbf_s=3600)
        given = ckpt.advise(mtbf_s=3600, step_s=1, forward_backward_s=0.9, nbytes=10**9, bytes_per_s=2e9, stall_s=0.01)
        assert given.write_s == 0.5
        for step in range(6):
            ckpt.save(step, small_state(step))
            ckpt.wait_for_staging()
            ckpt.wait()
        measured = ckpt.advise(mtbf_s=3600, overhead=0.1)
        last = ckpt.stats.last
        assert last is not None
        assert last.save is not None
        assert measured.nbytes == last.save.tensor_nbytes
        assert measured.stall_s > 0
        assert measured.step_s > 0
        assert (measured.mtbf_s, measured.overhead) == (3600, 0.1)
        # An optimizer's hook knows better than the time from save to save.
        for _ in range(3):
            ckpt.trace_span("steps", "step", 0.0, 1000.0)
        assert ckpt.advise(mtbf_s=3600).step_s == 1000.0
        assert ckpt.advise(mtbf_s=3600, step_s=7.0).step_s == 7.0
