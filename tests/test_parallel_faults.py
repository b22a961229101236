"""Several ranks that save together while something goes wrong, or changes, on one of them."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from multiprocess import run_torch
from ranks import config, make_comm, said
from support import assert_same, hidden_names

import fp_multi as fp
from fp_multi import errors


def check_what_differs(directory: str) -> dict[str, str]:
    comm, root, found = make_comm(), Path(directory), {}
    rank = comm.rank

    # Plain values are those of this save, also where the ranks have different keys.
    for step in (1, 2):
        state = {
            "step": step,
            "own": {f"rank{rank}": {"lr": step + rank / 10, "m": np.full(3, step)}},
            "flat": fp.ShardOf(np.full(5, step + 10 * rank), shape=(10,), start=(5 * rank,)),
        }
        fp.save(state, root / f"union_{step}", comm=comm, config=config())
        got = fp.load(root / f"union_{step}")
        assert got["step"] == step
        assert [got["own"][f"rank{i}"]["lr"] for i in range(2)] == [step, step + 0.1]
        assert got["flat"].tolist() == [step] * 5 + [step + 10] * 5

    # Keys with nothing but plain values below count, too.
    fp.save({"w": np.ones(4), "own": {f"rank{rank}": {"lr": 0.5}}}, root / "plain", comm=comm, config=config())
    assert sorted(fp.load(root / "plain")["own"]) == ["rank0", "rank1"]

    # No tensor at all; a part that is the whole, on both; nothing of a tensor on one.
    fp.save({"step": 1}, root / "empty", comm=comm, config=config())
    assert fp.load(root / "empty") == {"step": 1}
    fp.save({"x": fp.ShardOf(np.ones(4), (4,), (0,))}, root / "replicas", comm=comm, config=config())
    assert_same(fp.load(root / "replicas"), {"x": np.ones(4)})

    # What cannot be one checkpoint.
    a, b = np.full(300_000, 1.0), np.full(300_000, 2.0)
    tied = {"a": a, "b": b} if rank == 0 else {"a": a, "b": a}
    found["tied"] = said(lambda: fp.save(tied, root / "no", comm=comm, config=config()))
    chunk = (1 << 20) if rank == 0 else (1 << 20) + 65536
    found["chunks"] = said(
        lambda: fp.save({"w": np.ones(400_000)}, root / "no", comm=comm, config=config(chunk_bytes=chunk))
    )
    for size in (3, 4 + rank):
        state = {"w": np.ones(4), "own": {f"rank{rank}": {"b": b"x" * (size if rank else 3)}}}
        found[f"structure {size > 3}"] = said(
            lambda state=state: fp.save(state, root / "no", comm=comm, config=config(), overwrite=True)
        )
    fp.save(state, root / "again", comm=comm, config=config())  # all have asked each other anew

    # Both load "ckpt", which is another one for each of them.
    os.makedirs(root / f"cwd{rank}")
    os.chdir(root / f"cwd{rank}")
    fp.save({"x": np.full(1 << 20, float(rank))}, "ckpt")
    found["identity"] = said(lambda: fp.load("ckpt", comm=comm, broadcast=True))
    return found


def test_what_differs_between_ranks(tmp_path: Path) -> None:
    job = run_torch(check_what_differs, 2, str(tmp_path))
    for found in job.results:
        assert "tie it on" in found["tied"]
        assert "chunk_bytes must be the same" in found["chunks"]
        assert found["structure False"] == "fine"
        assert "has changed on rank 1, but not on rank 0" in found["structure True"]
        assert "must load the same parts of one checkpoint" in found["identity"] or "path" in found["identity"]
    assert hidden_names(tmp_path) == []


def check_torn(directory: str, overwrite: bool) -> tuple[str, str]:
    """Rank 0 is slow, and slower to publish than rank 1 will wait."""
    from fp_multi import _commit, _save

    comm, path = make_comm(3.0), Path(directory) / "ckpt"
    before = path if overwrite else Path(directory) / "other"
    fp.save({"w": np.zeros(1 << 18)}, before, comm=comm, config=config())
    if comm.rank == 0:
        finish, write_bytes = _save.PartWrite.finish, _commit._writer.write_bytes

        def late(self: Any, on_tick: Any = None) -> Any:
            part = finish(self, on_tick)
            time.sleep(2.5)
            return part

        def slow(*arguments: Any) -> Any:
            time.sleep(1.5)
            return write_bytes(*arguments)

        _save.PartWrite.finish = late  # type: ignore[method-assign]
        _commit._writer.write_bytes = slow  # type: ignore[assignment]
    state = {"w": np.ones(1 << 18)}
    outcome = said(lambda: fp.save(state, path, comm=comm, config=config(), overwrite=True))
    time.sleep(2.5)
    return outcome, said(lambda: assert_same(fp.load(path), state))


def test_a_rank_that_gives_up_waiting_takes_nothing_away(tmp_path: Path) -> None:
    for overwrite in (False, True):
        directory = tmp_path / str(overwrite)
        directory.mkdir()
        (first, loads), (second, loads_too) = run_torch(check_torn, 2, str(directory), overwrite).results
        assert first == loads == loads_too == "fine"
        assert second.startswith("CommTimeoutError")
        fp.verify(directory / "ckpt")


def check_checkpointer(directory: str) -> dict[str, Any]:
    from fp_multi import _commit, _engine, _steps

    comm, found = make_comm(), {}
    rank, root = comm.rank, Path(directory)
    state = {"w": np.ones(1 << 19)}

    # Only one rank looks at the error of a save: the next saves work all the same.
    with fp.Checkpointer(root / "errors", comm=comm, config=config()) as ckpt:
        if rank == 1:
            _engine.inject_fault("fdatasync", error=errno.EIO)
        pending = ckpt.save(0, state)
        pending.join()
        _engine.clear_faults()
        found["error"] = said(pending.wait) if rank == 0 else ""
        for step in (1, 2, 3):
            ckpt.save(step, state).wait()
        found["after"] = said(ckpt.wait)
        assert ckpt.steps() == [1, 2, 3]

    # An interrupt in save(), when the background has the work already.
    with fp.Checkpointer(root / "interrupt", comm=comm, config=config()) as ckpt:
        ckpt.save(0, state).wait()
        if rank == 0:
            write_bytes, asked = _commit._writer.write_bytes, ckpt.stats.asked

            def slow(*arguments: Any) -> Any:
                time.sleep(1.0)
                return write_bytes(*arguments)

            def interrupted(*arguments: Any) -> None:
                time.sleep(0.5)
                raise KeyboardInterrupt

            _commit._writer.write_bytes = slow  # type: ignore[assignment]
            ckpt.stats.asked = interrupted  # type: ignore[method-assign]
        found["interrupt"] = said(lambda: ckpt.save(1, state))
        ckpt.wait()
        if rank == 0:
            _commit._writer.write_bytes = write_bytes  # type: ignore[assignment]
            ckpt.stats.asked = asked  # type: ignore[method-assign]
        assert_same(ckpt.restore(1)[1], state)

    # Retention that fails is no reason to call the save failed.
    with fp.Checkpointer(root / "retention", comm=comm, config=config(), keep=2) as ckpt:
        ckpt.save(0, state).wait()
        original = _steps.complete_steps
        if rank == 0:

            def broken(*arguments: Any) -> Any:
                raise errors.StorageError(errno.ESTALE, "list", directory)

            _steps.complete_steps = broken
        found["retention"] = said(ckpt.save(1, state).wait)
        _steps.complete_steps = original
        assert ckpt.steps() == [0, 1]
        report = ckpt.save(2, state).report
        ckpt.wait()

        # A restore that fails on one rank before it has said anything, and the next one.
        latest = ckpt.latest_step
        if rank == 1:
            ckpt.latest_step = lambda: 1 // 0  # type: ignore[method-assign]
        found["restore"] = said(ckpt.restore)
        ckpt.latest_step = latest  # type: ignore[method-assign]
        assert ckpt.restore()[0] == 2
        pending = ckpt.save(3, state)
        pending.wait()
        report = pending.report
        assert report.save is not None
        own = report.borrowed_nbytes + report.copied_nbytes + report.eager_nbytes
        assert 0 < own < report.save.written_nbytes < state["w"].nbytes
    return found


def test_a_checkpointer_whose_ranks_are_not_of_one_mind(tmp_path: Path) -> None:
    first, second = run_torch(check_checkpointer, 2, str(tmp_path)).results
    assert first["error"].startswith("RankFailedError")
    assert first["after"] == "fine"
    assert "Input/output error" in second["after"]
    assert first["interrupt"].startswith("KeyboardInterrupt")
    assert second["interrupt"] == "fine"
    assert first["retention"] == second["retention"] == "fine"
    assert first["restore"] == second["restore"] == "fine"


def check_no_fence(directory: str) -> list[Any]:
    """Two saves at once, no fence between them, one rank late: the ranks ask each other in the order of the saves."""
    comm = make_comm()
    states = [{"a": np.full(1 << 17, 1.0)}, {"b": np.full((2, 1 << 16), 2.0), "c": np.full(99, 3.0)}]
    with fp.Checkpointer(directory, comm=comm, config=config(), max_in_flight=2) as ckpt:
        for step in range(6):
            if comm.rank == 1:
                time.sleep(0.1)
            ckpt.save(step, states[step % 2])
        ckpt.wait()
        for step in range(6):
            assert_same(ckpt.restore(step)[1], states[step % 2])
        return ckpt.steps()


def test_two_saves_at_once_of_different_structure(tmp_path: Path) -> None:
    assert run_torch(check_no_fence, 2, str(tmp_path)).results == [[0, 1, 2, 3, 4, 5]] * 2
