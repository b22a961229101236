"""The agreement of ranks, over a store in memory with a thread for each rank."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from multiprocess import die, run_plain
from support import random_bytes

from fp_multi import _round
from fp_multi._agree import SWEEP_ROUNDS, Round, Session
from fp_multi._comm import VALUE_NBYTES, Comm, SingleProcess
from fp_multi._messages import delete_value, get_value, put_value
from fp_multi.errors import (
    CommError,
    CommTimeoutError,
    FpMultiError,
    NoSpaceError,
    RankFailedError,
)

HANG_LIMIT_S = 60.0


class ThreadComm:
    """One rank of a job whose ranks are threads; they share one table."""

    def __init__(self, shared: SingleProcess, rank: int, size: int, timeout_s: float) -> None:
        self.shared = shared
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.calls: Counter[str] = Counter()
        self.gone = False

    def _count(self, call: str) -> None:
        if self.gone:
            raise CommError("the store is gone")
        self.calls[call] += 1

    def put(self, key: str, value: bytes) -> None:
        self._count("put")
        assert len(value) <= VALUE_NBYTES
        assert key.isascii()
        assert len(key) <= 512
        self.shared.put(key, value)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        self._count("get")
        return self.shared.get(key, timeout_s)

    def delete(self, key: str) -> None:
        self._count("delete")
        self.shared.delete(key)

    def all_gather(self, part: Any, whole: Any) -> None:
        raise NotImplementedError


class Job:
    """Ranks that are threads."""

    def __init__(self, size: int, timeout_s: float = HANG_LIMIT_S) -> None:
        self.shared = SingleProcess()
        self.comms = [ThreadComm(self.shared, rank, size, HANG_LIMIT_S) for rank in range(size)]
        self.sessions = self.run(lambda rank: Session(self.comms[rank]))
        for comm in self.comms:
            comm.timeout_s = timeout_s

    def stored(self) -> list[str]:
        """The keys in the store."""
        return sorted(self.shared._values)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """What the function returns or raises on each rank."""

        def on(rank: int) -> Any:
            try:
                return function(rank)
            except BaseException as error:
                return error

        with ThreadPoolExecutor(len(self.comms)) as pool:
            return [f.result(HANG_LIMIT_S) for f in [pool.submit(on, rank) for rank in range(len(self.comms))]]

    def save(self, write: Callable[[Round, int], bytes], tag: str = "save") -> list[Any]:
        """One agreement, as a save has it."""

        def on(rank: int) -> list[bytes]:
            with self.sessions[rank].round(tag) as round_:
                round_.post(write(round_, rank))
                if rank == 0:
                    round_.decide(pickle.dumps(round_.collect()))
                return pickle.loads(round_.outcome())

        return self.run(on)


def receipt(round_: Round, rank: int) -> bytes:
    return b"receipt %d" % rank


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_receipts_reach_the_leader_and_its_word_reaches_all(size: int) -> None:
    job = Job(size)
    expected = [b"receipt %d" % rank for rank in range(size)]
    assert job.save(receipt) == [expected] * size
    assert job.save(receipt) == [expected] * size


def test_empty_and_long_values() -> None:
    job = Job(3)
    values = [b"", random_bytes(3 * VALUE_NBYTES + 17).tobytes(), random_bytes(VALUE_NBYTES).tobytes()]
    assert job.save(lambda round_, rank: values[rank]) == [values] * 3


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_the_error_of_a_rank_reaches_every_rank(failing: int) -> None:
    job = Job(4)
    mine = NoSpaceError("/checkpoints", 100, 7)

    def write(round_: Round, rank: int) -> bytes:
        if rank == failing:
            raise mine
        return b""

    for rank, error in enumerate(job.save(write)):
        if rank == failing:
            assert error is mine
        else:
            assert isinstance(error, RankFailedError)
            assert (error.rank, error.kind, error.text) == (failing, "NoSpaceError", str(mine))
            assert "NoSpaceError" in str(error)
    # The session goes on.
    assert job.save(receipt) == [[b"receipt %d" % rank for rank in range(4)]] * 4


def test_a_failure_is_noticed_while_others_are_still_writing() -> None:
    job = Job(4)
    told = threading.Event()

    def write(round_: Round, rank: int) -> bytes:
        if rank == 3:
            raise ValueError("no")
        if rank == 2:
            # The slow rank: rank 0 and 1 must have their answer before this ends.
            assert told.wait(HANG_LIMIT_S)
            error = round_.failed()
            assert isinstance(error, RankFailedError)
            raise error
        return b""

    def on(rank: int) -> Any:
        with job.sessions[rank].round("save") as round_:
            try:
                round_.post(write(round_, rank))
                if rank == 0:
                    round_.collect()
                round_.outcome()
            finally:
                if rank == 1:
                    told.set()

    results = job.run(on)
    assert isinstance(results[3], ValueError)
    for error in results[:3]:
        assert isinstance(error, RankFailedError)
        assert (error.rank, error.kind, error.text) == (3, "ValueError", "no")


def test_the_first_failure_is_the_one_that_counts() -> None:
    job = Job(3)
    first = threading.Event()

    def write(round_: Round, rank: int) -> bytes:
        if rank == 2:
            error = OSError("first")
            round_.fail(error)
            first.set()
            raise error
        assert first.wait(HANG_LIMIT_S)
        if rank == 1:
            raise OSError("a consequence")
        return b""

    leader, other, _ = job.save(write)
    assert (leader.rank, leader.text) == (2, "first")
    assert str(other) == "a consequence"


def test_a_rank_may_fail_after_it_has_posted() -> None:
    job = Job(2)
    failed = threading.Event()

    def on(rank: int) -> None:
        with job.sessions[rank].round("save") as round_:
            round_.post(b"")
            if rank == 1:
                round_.fail(RuntimeError("late"))
                failed.set()
                round_.outcome()
            else:
                assert failed.wait(HANG_LIMIT_S)
                round_.collect()

    leader, other = job.run(on)
    assert (leader.rank, leader.text) == (1, "late")
    assert type(other) is RuntimeError


def test_missing_ranks_are_named_on_every_rank() -> None:
    job = Job(5)
    posted = threading.Barrier(3, timeout=HANG_LIMIT_S)

    def on(rank: int) -> Any:
        round_ = job.sessions[rank].round("save step 7")
        if rank in (2, 4):
            return None  # dies: says nothing
        round_.post(b"")
        posted.wait()
        if rank == 0:
            round_.collect(timeout_s=0.3)
        return round_.outcome()

    results = job.run(on)
    for rank in (0, 1, 3):
        error = results[rank]
        assert isinstance(error, CommTimeoutError)
        assert isinstance(error, TimeoutError)
        assert error.ranks == (2, 4)
        assert "2 of 5 ranks (2, 4)" in str(error)
        assert "save step 7" in str(error)


def test_a_dead_leader_ends_the_wait_and_nothing_is_committed() -> None:
    job = Job(3, timeout_s=1.0)

    def on(rank: int) -> Any:
        with job.sessions[rank].round("save") as round_:
            round_.post(b"")
            return "dead" if rank == 0 else round_.outcome()

    _, *others = job.run(on)
    for error in others:
        assert isinstance(error, CommTimeoutError)
        assert error.ranks == (0,)


def test_a_leader_hears_of_a_rank_that_gave_up() -> None:
    job = Job(2)
    job.comms[1].timeout_s = 0.1
    gave_up = threading.Event()

    def on(rank: int) -> Any:
        with job.sessions[rank].round("save") as round_:
            round_.post(b"")
            if rank == 0:
                assert gave_up.wait(HANG_LIMIT_S)
                round_.collect()
            else:
                try:
                    round_.outcome()
                except CommTimeoutError as error:
                    round_.fail(error)
                    gave_up.set()
                    raise

    leader, other = job.run(on)
    assert isinstance(leader, RankFailedError)
    assert (leader.rank, leader.kind) == (1, "CommTimeoutError")
    assert isinstance(other, CommTimeoutError)


def test_closing_takes_a_receipt_back() -> None:
    job = Job(2)
    leader, other = (session.round("save") for session in job.sessions)
    other.post(random_bytes(2 * VALUE_NBYTES).tobytes())
    other.close()
    leader.post(b"")
    with pytest.raises(CommTimeoutError) as caught:
        leader.collect(timeout_s=0)
    assert caught.value.ranks == (1,)
    assert not [key for key in job.stored() if "/r1" in key]


def test_ranks_that_do_different_things_are_told() -> None:
    job = Job(3)

    def on(rank: int) -> Any:
        with job.sessions[rank].round("restore" if rank == 2 else "save") as round_:
            round_.post(b"")
            if rank == 0:
                round_.collect()
            round_.outcome()

    leader, *others = job.run(on)
    assert isinstance(leader, CommError)
    assert "rank 2 takes part in 'restore' while rank 0 does in 'save'" in str(leader)
    for error in others:
        assert isinstance(error, RankFailedError)
        assert (error.rank, error.kind) == (0, "CommError")
        assert "'restore'" in error.text


def test_only_the_leader_decides_and_only_once() -> None:
    job = Job(2)
    leader, other = (session.round("save") for session in job.sessions)
    for wrong in (lambda: other.decide(b""), leader.collect, leader.outcome):
        with pytest.raises(CommError):
            wrong()
    other.post(b"")
    with pytest.raises(CommError):
        other.collect()
    leader.post(b"")
    leader.collect()
    leader.decide(b"yes")
    with pytest.raises(CommError):
        leader.decide(b"no")
    leader.reject(OSError("too late"))
    other.fail(OSError("not too late to fail, but to stop the leader"))
    with pytest.raises(OSError, match="not too late to fail"):
        other.outcome()
    assert leader.outcome() == b"yes"


def test_an_exception_of_the_leader_after_its_word_changes_nothing() -> None:
    job = Job(2)

    def on(rank: int) -> Any:
        with job.sessions[rank].round("save") as round_:
            round_.post(b"")
            if rank == 0:
                round_.collect()
                round_.decide(b"yes")
                raise OSError("retention failed")
            return round_.outcome()

    leader, other = job.run(on)
    assert type(leader) is OSError
    assert other == b"yes"


def test_exchange() -> None:
    job = Job(4)
    values = [b"", b"x" * 3 * VALUE_NBYTES, b"host a", b"host b"]
    assert job.run(lambda rank: job.sessions[rank].exchange("topology", values[rank])) == [values] * 4


def test_exchange_passes_errors_on() -> None:
    job = Job(2, timeout_s=1.0)
    leader, _ = job.run(lambda rank: job.sessions[rank].exchange("topology", b"") if rank == 0 else None)
    assert isinstance(leader, CommTimeoutError)
    assert leader.ranks == (1,)


def test_exchange_inside_a_round() -> None:
    job = Job(3)

    def on(rank: int) -> list[bytes]:
        with job.sessions[rank].round("save") as round_:
            first = round_.exchange("topology", b"host %d" % rank)
            second = round_.exchange("paths", b"")
            round_.post(b"")
            if rank == 0:
                round_.collect()
                round_.decide(b"done")
            return [*first, *second, round_.outcome()]

    assert job.run(on) == [[b"host 0", b"host 1", b"host 2", b"", b"", b"", b"done"]] * 3


@pytest.mark.parametrize("exchanges", [0, 1])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_who_fails_before_an_exchange_inside_a_round_keeps_nobody_waiting(failing: int, exchanges: int) -> None:
    job = Job(3)

    def on(rank: int) -> None:
        with job.sessions[rank].round("save") as round_:
            for _ in range(exchanges):
                round_.exchange("topology", b"")
            if rank == failing:
                raise OSError("no")
            round_.exchange("structure", b"")

    for rank, error in enumerate(job.run(on)):
        assert isinstance(error, OSError if rank == failing else RankFailedError)
    for _ in range(3 * SWEEP_ROUNDS):
        job.save(receipt)
    assert len(job.stored()) <= 3 + 2 * SWEEP_ROUNDS, job.stored()


def test_the_store_does_not_grow_with_the_rounds() -> None:
    job = Job(3)

    def on(rank: int) -> None:
        for number in range(1000):
            with job.sessions[rank].round(f"save {number}") as round_:
                round_.post(b"receipt")
                if rank == 0:
                    round_.collect()
                    round_.decide(b"done")
                round_.outcome()

    assert job.run(on) == [None] * 3
    # Two ranks' progress, the session's nonce, and the words that are not swept up yet.
    assert len(job.stored()) <= 3 + 2 * SWEEP_ROUNDS, job.stored()


def test_the_store_does_not_grow_with_failing_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_round, "POLL_S", 0.001)
    job = Job(3)

    def on(rank: int) -> int:
        failures = 0
        for number in range(200):
            try:
                with job.sessions[rank].round("save") as round_:
                    if rank == number % 3:
                        raise OSError("drive full")
                    round_.post(b"x")
                    if rank == 0:
                        round_.collect()
                    round_.outcome()
            except (OSError, RankFailedError):
                failures += 1
        return failures

    assert job.run(on) == [200] * 3
    assert len(job.stored()) <= 3 + 4 * SWEEP_ROUNDS, job.stored()


def test_a_rank_that_lags_still_finds_the_leaders_word() -> None:
    job = Job(2)
    slow = job.sessions[1].round("slow")
    leading = job.sessions[0].round("slow")
    slow.post(b"")
    leading.post(b"")
    leading.collect()
    leading.decide(b"found")
    leading.close()
    for _ in range(3 * SWEEP_ROUNDS):
        job.save(receipt)
    assert slow.outcome() == b"found"
    slow.close()
    for _ in range(2 * SWEEP_ROUNDS):
        job.save(receipt)
    assert len(job.stored()) <= 2 + 2 * SWEEP_ROUNDS


def test_what_a_waiting_rank_does_is_independent_of_the_number_of_ranks() -> None:
    def calls(size: int) -> tuple[Counter[str], Counter[str]]:
        job = Job(size)
        for comm in job.comms:
            comm.calls.clear()
        job.save(receipt)
        return job.comms[0].calls, job.comms[-1].calls

    leader, waiting = calls(24)
    assert waiting == calls(2)[1]
    assert sum(waiting.values()) <= 5
    assert leader["put"] + leader["delete"] <= 2


def test_rounds_at_once_do_not_mix() -> None:
    job = Job(3)

    def on(rank: int) -> list[bytes]:
        rounds = [job.sessions[rank].round("save") for _ in range(8)]

        def agree(number: int) -> bytes:
            with rounds[number] as round_:
                round_.post(b"%d" % number)
                if rank == 0:
                    round_.decide(b" ".join(round_.collect()))
                return round_.outcome()

        order = [*range(8)] if rank == 1 else [*reversed(range(8))]
        with ThreadPoolExecutor(8) as pool:
            futures = {number: pool.submit(agree, number) for number in order}
            return [futures[number].result(HANG_LIMIT_S) for number in range(8)]

    assert job.run(on) == [[b" ".join([b"%d" % number] * 3) for number in range(8)]] * 3


def test_sessions_of_one_comm_do_not_mix() -> None:
    job = Job(2)
    again = job.run(lambda rank: Session(job.comms[rank]))
    nonces = {session.nonce for session in [*job.sessions, *again]}
    assert len(nonces) == 2
    assert job.sessions[0].nonce == job.sessions[1].nonce
    job.sessions[1].round("save").post(b"of the first session")
    leader = again[0].round("save")
    leader.post(b"")
    with pytest.raises(CommTimeoutError):
        leader.collect(timeout_s=0)


def test_a_session_needs_its_leader() -> None:
    comm = ThreadComm(SingleProcess(), 1, 2, timeout_s=0.1)
    with pytest.raises(CommTimeoutError) as caught:
        Session(comm)
    assert caught.value.ranks == (0,)


def test_a_store_that_is_gone() -> None:
    job = Job(2)
    leader, other = (session.round("save") for session in job.sessions)
    other.post(b"")
    leader.post(b"")
    for comm in job.comms:
        comm.gone = True
    for call in (leader.collect, other.outcome, other.failed):
        with pytest.raises(CommError, match="gone"):
            call()
    mine = OSError("mine")
    other.fail(mine)  # what happened first is what the caller gets
    with pytest.raises(OSError, match="mine") as caught:
        other.outcome()
    assert caught.value is mine
    assert "could not be told" in mine.__notes__[0]
    other.close()
    leader.close()


def test_long_and_odd_error_texts_arrive() -> None:
    job = Job(2)

    def write(round_: Round, rank: int) -> bytes:
        if rank == 1:
            raise OSError("\udcff ä \n" + "x" * 10 * VALUE_NBYTES)
        return b""

    leader, _ = job.save(write)
    assert leader.text.startswith("\udcff ä \nxxx")
    assert len(leader.text) <= 1 << 14


@pytest.mark.parametrize("error", [RankFailedError(3, "OSError", "no"), CommTimeoutError("late", [4, 5])])
def test_errors_keep_what_they_say_when_pickled(error: Any) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert isinstance(again, (FpMultiError, RuntimeError))


LENGTHS = (0, 1, VALUE_NBYTES - 1, VALUE_NBYTES, VALUE_NBYTES + 1, 2 * VALUE_NBYTES, 20 * VALUE_NBYTES + 5)


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_values_of_any_length(nbytes: int) -> None:
    comm = ThreadComm(SingleProcess(), 0, 1, timeout_s=1.0)
    value = random_bytes(nbytes).tobytes()
    parts = put_value(comm, "key", value)
    assert get_value(comm, "key", 0) == value
    delete_value(comm, "key", parts)
    assert not comm.shared._values
    assert get_value(comm, "key", 0) is None


def test_a_lost_part_is_an_error() -> None:
    comm = ThreadComm(SingleProcess(), 0, 1, timeout_s=0.1)
    put_value(comm, "key", bytes(3 * VALUE_NBYTES))
    comm.delete("key/1")
    with pytest.raises(CommError, match="part 1 of 3"):
        get_value(comm, "key", 0)


def ends(how: str) -> int:
    rank = int(os.environ["RANK"])
    if rank == 1 and how == "fails":
        raise ValueError("this must be seen")
    if rank == 1 and how == "hangs":
        threading.Event().wait()
    if rank == 1 and how == "dies":
        die()
    return rank


def test_the_launcher_tells_how_its_processes_ended() -> None:
    assert run_plain(ends, 3, "well").results == [0, 1, 2]
    job = run_plain(ends, 2, "dies", dies=[1])
    assert (job.results, job.codes) == ([0, None], [0, -signal.SIGKILL])
    with pytest.raises(AssertionError, match="this must be seen"):
        run_plain(ends, 1 + 1, "fails", grace_s=0)
    with pytest.raises(AssertionError, match="hung for 2 s"):
        run_plain(ends, 2, "hangs", timeout_s=2)


@pytest.fixture
def waiting() -> Iterator[Callable[..., Any]]:
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *args: pool.submit(function, *args)


def test_single_process(waiting: Callable[..., Any]) -> None:
    comm = SingleProcess()
    assert isinstance(comm, Comm)
    assert comm.get("a", 0) is None
    began_s = time.monotonic()
    assert comm.get("a", 0.05) is None
    assert time.monotonic() - began_s >= 0.05
    future = waiting(comm.get, "a", HANG_LIMIT_S)
    comm.put("a", b"1")
    assert future.result(HANG_LIMIT_S) == b"1"
    comm.put("a", b"2")
    assert comm.get("a", 0) == b"2"
    comm.delete("a")
    comm.delete("a")
    assert comm.get("a", 0) is None


def test_single_process_gathers_from_itself() -> None:
    comm = SingleProcess()
    part, whole = random_bytes(1000), np.zeros(1000, np.uint8)
    comm.all_gather(part, whole)
    assert np.array_equal(part, whole)
    comm.all_gather(whole, whole)
    assert np.array_equal(part, whole)
    with pytest.raises(CommError, match="1000"):
        comm.all_gather(part, whole[:999])
