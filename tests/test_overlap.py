"""The fence: what it waits for in each mode, what may change behind it, and how its bytes are counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import Gate
from support import SMALL_BLOCK, FakeDevice, assert_same, config, random_bytes

import fp_multi as fp
from fp_multi import _eager, _engine, _engines, _in_flight

MODES = ("hybrid", "borrow", "snapshot")
QUICK = config()


@contextmanager
def busy_engine(directory: Path, slot: int = 0) -> Iterator[Callable[[], None]]:
    """An engine that takes jobs but does none until it is told to."""
    data = np.ones(1, np.uint8)
    job = _engines.engine("write", slot).submit_write(
        str(directory / f"busy-{slot}-{time.monotonic_ns()}"),
        np.array([[data.ctypes.data, 1, 0]], np.uint64),
        np.ones(1, np.uint64),
        [],
        durable=False,
        ready_nbytes=0,
        keepalive=data,
        **_engines.options(QUICK),
    )
    try:
        yield lambda: job.set_ready_nbytes(1 << 60)
    finally:
        job.set_ready_nbytes(1 << 60)
        job.wait()


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def beside(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def state_of(step: int, nbytes: int = 40 * SMALL_BLOCK) -> dict[str, Any]:
    return {
        "paged": random_bytes(nbytes, step),
        "odd": random_bytes(nbytes // 3 + 1, step + 1000),
        "strided": np.arange(step, step + 60_000).reshape(200, 300).T,
        "step": step,
        "counter": np.array(step),
    }


def spoil(state: dict[str, Any]) -> None:
    """What an optimizer's step does, made as visible as can be."""
    for value in state.values():
        if isinstance(value, np.ndarray):
            value[...] = ~value


def sums(report: fp.OverlapReport) -> int:
    return report.borrowed_nbytes + report.copied_nbytes + report.eager_nbytes


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("staging_bytes", [None, 0, 5 * SMALL_BLOCK])
def test_changes_behind_the_fence_are_not_seen(
    tmp_path: Path, overlap: Any, max_in_flight: int, staging_bytes: int | None
) -> None:
    state = state_of(0)
    expected = {}
    with fp.Checkpointer(
        tmp_path,
        overlap=overlap,
        keep=3,
        max_in_flight=max_in_flight,
        staging_bytes=staging_bytes,
        config=QUICK,
    ) as ckpt:
        for step in range(12):
            expected[step] = {name: np.copy(v) if isinstance(v, np.ndarray) else v for name, v in state.items()}
            pending = ckpt.save(step, state)
            ckpt.wait_for_staging()
            spoil(state)
        ckpt.wait()
        report = pending.report
        assert ckpt.steps() == [9, 10, 11]
        for step in ckpt.steps():
            fp.verify(tmp_path / f"step_{step:08d}")
            assert_same(ckpt.restore(step)[1], expected[step])
    assert report.save is not None
    assert sums(report) == report.save.tensor_nbytes == sum(v.nbytes for v in state.values() if hasattr(v, "nbytes"))
    assert report.eager_nbytes == 8
    if max_in_flight == 1:  # with two, a save may begin before the one that retires its file is over
        assert report.recycled
    if overlap == "borrow" or staging_bytes == 0:
        assert report.copied_nbytes == 0


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("overlap", ["hybrid", "snapshot"])
def test_everything_is_copied_if_nothing_has_left(
    tmp_path: Path, overlap: Any, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(1)
    reached, go_on = threading.Event(), threading.Event()
    saving = _in_flight.Saving

    def slow_saving(*args: Any, **kwargs: Any) -> Any:
        reached.set()
        assert go_on.wait(30)
        return saving(*args, **kwargs)

    monkeypatch.setattr(_in_flight, "Saving", slow_saving)
    with fp.Checkpointer(tmp_path / "run", overlap=overlap, config=QUICK) as ckpt, busy_engine(tmp_path) as free:
        pending = ckpt.save(1, state)
        assert reached.wait(30)
        if not early:
            go_on.set()
            until(lambda: pending._begun.is_set())
        # The fence may come before the engine has the job, or behind that.
        fence = beside(ckpt.wait_for_staging)
        until(lambda: pending._spill_nbytes is not None)
        assert not pending.staged
        go_on.set()
        until(lambda: pending._begun.is_set())
        free()
        fence.join()
        assert pending.staged
        spoil(state)
        pending.wait()
        assert_same(ckpt.restore()[1], state_of(1))
        report = pending.report
        assert report.save is not None
        assert report.borrowed_nbytes == 0
        assert report.copied_nbytes == report.save.tensor_nbytes - report.eager_nbytes
        assert report.stall_fence_s > 0
        assert ckpt.stats.scalars()["checkpoint/stall_fence_s_total"] == pytest.approx(report.stall_fence_s)


@pytest.mark.parametrize("blocks", [0, 1, 7])
def test_a_fence_copies_no_more_than_it_may(tmp_path: Path, blocks: int) -> None:
    limit = blocks * SMALL_BLOCK
    with (
        fp.Checkpointer(tmp_path / "run", staging_bytes=limit, config=QUICK) as ckpt,
        busy_engine(tmp_path) as free,
    ):
        state = state_of(1)
        pending = ckpt.save(1, state)
        fence = beside(ckpt.wait_for_staging)
        until(lambda: pending._begun.is_set() and pending._spill_nbytes is not None)
        free()
        fence.join()
        spoil(state)
        pending.wait()
        assert_same(ckpt.restore()[1], state_of(1))
        # What remains is looked at between two blocks; the eager copy is not counted as copied again.
        assert max(limit - SMALL_BLOCK, 0) <= pending.report.copied_nbytes + pending.report.eager_nbytes
        assert pending.report.copied_nbytes <= limit


def test_eager_copies_that_a_fence_copies_again_count_once(tmp_path: Path) -> None:
    state = {"a": random_bytes(10 * SMALL_BLOCK), "b": random_bytes(3 * SMALL_BLOCK + 5), "c": np.array(1)}
    with fp.Checkpointer(tmp_path / "run", config=QUICK) as ckpt, busy_engine(tmp_path) as free:
        pending = ckpt.save(1, state, copy=["b"])
        state["b"][:] = 0  # before any fence
        fence = beside(ckpt.wait_for_staging)
        until(lambda: pending._begun.is_set() and pending._spill_nbytes is not None)
        free()
        fence.join()
        pending.wait()
        report = pending.report
        assert (report.borrowed_nbytes, report.copied_nbytes) == (0, 10 * SMALL_BLOCK)
        assert report.eager_nbytes == 3 * SMALL_BLOCK + 5 + 8
        assert_same(ckpt.restore()[1]["b"], random_bytes(3 * SMALL_BLOCK + 5))


def test_much_that_changes_is_copied_before_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_eager, "MOST_NBYTES", 1000)
    for overlap in MODES:
        with fp.Checkpointer(tmp_path / overlap, overlap=overlap, config=QUICK) as ckpt:  # type: ignore[arg-type]
            state = state_of(1)
            pending = ckpt.save(1, state, copy=["odd"])
            assert pending.staged
            spoil(state)
            pending.wait()
            assert_same(ckpt.restore()[1], state_of(1))
            assert pending.report.eager_nbytes == 0
            assert pending.report.stall_fence_s == 0


@pytest.mark.parametrize("overlap", MODES)
def test_a_fence_waits_for_what_a_device_has_not_sent(tmp_path: Path, overlap: Any) -> None:
    gate, device = Gate(), FakeDevice()
    with fp.Checkpointer(tmp_path, overlap=overlap, config=QUICK) as ckpt:
        state = state_of(1)
        tensor = random_bytes(5 * SMALL_BLOCK, 9)
        pending = ckpt.save(1, {"gate": gate, "device": device.tensor(tensor), **state})
        fence = beside(ckpt.wait_for_staging)
        until(lambda: overlap == "borrow" or pending._spill_nbytes is not None)
        assert fence.is_alive()
        gate.open()
        fence.join()
        spoil(state)
        pending.wait()
        found = ckpt.restore()[1]
        assert found["gate"].tobytes() == b"\x01" * 4096
        assert_same(found["device"], tensor)
        assert_same({name: found[name] for name in state}, state_of(1))


def test_a_fence_costs_nothing_when_all_has_been_read(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path, config=QUICK) as ckpt:
        ckpt.wait_for_staging()
        pending = ckpt.save(1, state_of(1))
        until(lambda: pending.staged)
        ckpt.wait_for_staging()
        assert pending.report.stall_fence_s == 0
        pending.wait()
        ckpt.wait_for_staging()


def test_two_saves_at_once_have_places_of_their_own(tmp_path: Path) -> None:
    gates = [Gate(), Gate(), Gate()]
    with fp.Checkpointer(tmp_path, max_in_flight=2, config=QUICK) as ckpt:
        first = ckpt.save(1, {"gate": gates[0], **state_of(1)})
        second = ckpt.save(2, {"gate": gates[1], **state_of(2)})
        third: list[fp.PendingSave] = []
        asked = beside(lambda: third.append(ckpt.save(3, {"gate": gates[2], **state_of(3)})))
        assert {first.slot, second.slot} == {0, 1}
        gates[0].open()
        first.wait()
        asked.join()
        assert not second.done
        assert third[0].slot == first.slot
        assert third[0].report.stall_queue_s > 0
        assert ckpt.stats.scalars()["checkpoint/stall_queue_s_total"] == third[0].report.stall_queue_s
        gates[2].open()
        third[0].wait()
        gates[1].open()
        ckpt.wait()
        assert ckpt.steps() == [1, 2, 3]
        for step in ckpt.steps():
            found = ckpt.restore(step)[1]
            assert_same({name: found[name] for name in state_of(step)}, state_of(step))


def test_a_fence_lets_both_saves_go(tmp_path: Path) -> None:
    with (
        fp.Checkpointer(tmp_path / "run", max_in_flight=2, config=QUICK) as ckpt,
        busy_engine(tmp_path, 0) as free,
        busy_engine(tmp_path, 1) as free_second,
    ):
        states = [state_of(1), state_of(2)]
        pending = [ckpt.save(step, state) for step, state in enumerate(states, 1)]
        fence = beside(ckpt.wait_for_staging)
        until(lambda: all(one._begun.is_set() and one._spill_nbytes is not None for one in pending))
        free_second()
        free()
        fence.join()
        for state in states:
            spoil(state)
        ckpt.wait()
        for step in (1, 2):
            assert_same(ckpt.restore(step)[1], state_of(step))
        assert [one.report.borrowed_nbytes for one in pending] == [0, 0]


@pytest.mark.parametrize("overlap", MODES)
def test_many_threads_at_once(tmp_path: Path, overlap: Any) -> None:
    nbytes = 3 * SMALL_BLOCK
    failures: list[BaseException] = []
    with fp.Checkpointer(tmp_path, overlap=overlap, keep=3, keep_every=10, max_in_flight=2, config=QUICK) as ckpt:
        ckpt.save(0, state_of(0, nbytes)).wait()
        stop = threading.Event()

        def saver(first: int) -> None:
            for step in range(first, 40, 2):
                ckpt.save(step, state_of(step, nbytes))

        def fencer() -> None:
            while not stop.is_set():
                ckpt.wait_for_staging()

        def reader() -> None:
            while not stop.is_set():
                step, state = ckpt.restore()
                assert_same(state, state_of(step, nbytes))
                assert_same(ckpt.restore(0)[1], state_of(0, nbytes))

        def waiter() -> None:
            while not stop.is_set():
                ckpt.wait()
                ckpt.stats.scalars()

        def guarded(action: Callable[..., None], *args: int) -> threading.Thread:
            def run() -> None:
                try:
                    action(*args)
                except BaseException as error:
                    failures.append(error)

            return beside(run)

        others = [guarded(action) for action in (fencer, reader, waiter)]
        savers = [guarded(saver, first) for first in (1, 2)]
        for thread in savers:
            thread.join()
        stop.set()
        for thread in others:
            thread.join()
        ckpt.wait()
        assert failures == []
        steps = ckpt.steps()
        assert {0, 10, 20, 30, 37, 38, 39} <= set(steps)
        for step in steps:
            assert_same(ckpt.restore(step)[1], state_of(step, nbytes))
        assert ckpt.stats.saves == 40


def test_no_memory_for_the_copy_makes_the_fence_wait(tmp_path: Path) -> None:
    # A configuration of its own, so that no test before has left memory that is large enough.
    with fp.Checkpointer(tmp_path / "run", config=QUICK) as ckpt, busy_engine(tmp_path) as free:
        state = state_of(1, 200 * SMALL_BLOCK)
        pending = ckpt.save(1, state)
        fence = beside(ckpt.wait_for_staging)
        until(lambda: pending._begun.is_set() and pending._spill_nbytes is not None)
        _engine.inject_fault("mmap", times=1000, error=12)
        free()
        fence.join()
        _engine.clear_faults()
        spoil(state)
        pending.wait()
        assert_same(ckpt.restore()[1], state_of(1, 200 * SMALL_BLOCK))
