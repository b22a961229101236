"""What the ranks of a Checkpointer have to say to each other, and how often."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from multiprocess import run_torch
from ranks import await_file, config, make_comm, said
from support import assert_same, hidden_names

import fp_multi as fp


def check_retention_comes_between(directory: str) -> tuple[int, list[int]]:
    """Rank 0's retention runs when the step is named, before anybody who has not locked it until then can."""
    from fp_multi._round import Round

    comm, root = make_comm(), Path(directory)
    named, retired = root / "named", root / "retired"
    states = [{"w": np.full(1 << 18, step)} for step in range(3)]
    with fp.Checkpointer(root / "steps", comm=comm, config=config(), keep=1) as ckpt:
        ckpt.save(0, states[0]).wait()
        retention, speak = ckpt._retention, Round._speak
        apply, reading = retention.apply, retention.reading

        def speak_and_tell(round_: Any, message: bytes) -> None:
            speak(round_, message)
            if "restore" in round_.tag:
                named.touch()

        def apply_when_named(busy: Any) -> Any:
            await_file(named)
            doomed = apply(busy)
            retired.touch()
            return doomed

        def read_when_retired(step: int | None) -> Any:
            if named.exists():
                await_file(retired)
            return reading(step)

        Round._speak = speak_and_tell  # type: ignore[method-assign]
        retention.apply = apply_when_named  # type: ignore[method-assign]
        retention.reading = read_when_retired  # type: ignore[method-assign]
        latest = ckpt.latest_step
        pending = ckpt.save(1, states[1])
        if comm.rank == 0:
            while latest() != 1:  # complete, and about to be followed by retention
                pending.wait_over(0.01)
        step, state = ckpt.restore(0)
        assert_same(state, states[0])
        Round._speak = speak  # type: ignore[method-assign]
        retention.apply, retention.reading = apply, reading  # type: ignore[method-assign]
        ckpt.wait()
        ckpt.save(2, states[2]).wait()  # nobody reads it any more: now it goes
        assert ckpt.restore()[0] == 2
        return step, ckpt.steps()


def test_retention_does_not_take_what_the_ranks_have_agreed_to_restore(tmp_path: Path) -> None:
    assert run_torch(check_retention_comes_between, 2, str(tmp_path)).results == [(0, [2])] * 2
    assert hidden_names(tmp_path / "steps") == []


def check_restores_that_fail(directory: str) -> dict[str, str]:
    comm, root, found = make_comm(), Path(directory), {}
    state = {"w": np.ones(100)}
    with fp.Checkpointer(root / "steps", comm=comm, config=config()) as ckpt:
        found["nothing there"] = said(ckpt.restore)
        ckpt.save(0, state).wait()
        found["no such step"] = said(lambda: ckpt.restore(7))
        found["other steps"] = said(lambda: ckpt.restore(comm.rank or None))
        found["other things"] = said(ckpt.restore if comm.rank else lambda: ckpt.save(1, state).wait())
        found["other things again"] = said(lambda: ckpt.save(2, state).wait() if comm.rank else ckpt.restore())
        found["new structure"] = said(ckpt.restore if comm.rank else lambda: ckpt.save(3, {"new": state}).wait())

        # A rank whose view of the directory is behind.
        reading = ckpt._retention.reading
        if comm.rank == 1:
            ckpt._retention.reading = lambda step: reading(9)  # type: ignore[method-assign]
        found["behind"] = said(lambda: ckpt.restore(0))
        ckpt._retention.reading = reading  # type: ignore[method-assign]
        ckpt.wait()
        assert_same(ckpt.restore(0), (0, state))
    return found


def test_restores_that_cannot_be(tmp_path: Path) -> None:
    first, second = run_torch(check_restores_that_fail, 2, str(tmp_path)).results
    for found in (first, second):
        # Everybody's own error: it is what tells a run that it begins.
        assert found["nothing there"].startswith("CheckpointNotFoundError: [Errno 2] no complete step here")
        assert "CheckpointNotFoundError: [Errno 2] step 7 is not here; there are 0" in found["no such step"]
        for what in ("other steps", "other things", "other things again", "new structure"):
            assert "must save and load the same things in the same order" in found[what], (what, found[what])
    assert first["behind"].startswith("RankFailedError: rank 1 failed")
    assert second["behind"].startswith("CheckpointNotFoundError: [Errno 2] step 9 is not here")


def counting(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    return counted


def check_fingerprints(directory: str) -> list[int]:
    from fp_multi import _plan, _team

    comm, calls, counts = make_comm(), [], []
    _plan.fingerprint = _team.fingerprint = counting(_plan.fingerprint, calls)  # type: ignore[assignment]
    same = {"w": np.ones(100), "b": [np.ones(3)] * 3}
    own = {"w": np.ones(100), f"of {comm.rank}": np.ones(4)}
    with fp.Checkpointer(directory, comm=comm, config=config()) as ckpt:
        for step, state in enumerate([same, same, own, own, same]):
            calls.clear()
            ckpt.save(step, state).wait()
            assert_same(ckpt.restore()[1]["w"], np.ones(100))
            counts.append(len(calls))
    return counts


def test_a_state_is_fingerprinted_once_a_save(tmp_path: Path) -> None:
    # The first time that the ranks have different things, what they have together is fingerprinted, too.
    assert run_torch(check_fingerprints, 2, str(tmp_path)).results == [[1, 1, 2, 1, 1]] * 2
