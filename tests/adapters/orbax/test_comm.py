"""JaxComm over real processes of jax.distributed on the CPU."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from multiprocess import die, run_jax
from support import random_bytes

jax = pytest.importorskip("jax")

from jax._src import distributed  # noqa: E402

from fp_multi._agree import SWEEP_ROUNDS, Session  # noqa: E402
from fp_multi._comm import VALUE_NBYTES, Comm  # noqa: E402
from fp_multi.adapters.orbax.comm import JaxComm  # noqa: E402
from fp_multi.errors import CommError, CommTimeoutError, ConfigError, RankFailedError  # noqa: E402

HANG_LIMIT_S = 60.0


def agree(session: Session, value: bytes, fail: int | None = None) -> list[bytes]:
    rank = session.comm.rank
    with session.round("save") as round_:
        if rank == fail:
            raise OSError(f"drive of rank {rank} is full")
        round_.post(value)
        if rank == 0:
            round_.decide(b"|".join(round_.collect()))
        return round_.outcome().split(b"|")


def check_store(comm: JaxComm) -> None:
    key = f"of {comm.rank}"
    assert comm.get(key, 0) is None
    assert comm.get(key, 0.01) is None
    assert comm.get(key, 1.1) is None  # the call that blocks
    comm.put(key, b"")
    assert comm.get(key, 0) == b""
    comm.put(key, b"\0binary\xff")
    assert comm.get(key, 2.0) == b"\0binary\xff"
    comm.put(key, bytes(VALUE_NBYTES))
    assert comm.get(key, 0) == bytes(VALUE_NBYTES)
    comm.put("a/1", b"")
    comm.put("a/10", b"")
    comm.delete("a/1")
    assert comm.get("a/10", 0) == b""
    comm.delete(key)
    comm.delete(key)
    assert comm.get(key, 0) is None


def check_session(session: Session) -> None:
    size, rank = session.comm.size, session.comm.rank
    expected = [b"of %d" % r for r in range(size)]
    assert agree(session, b"of %d" % rank) == expected
    for failing in range(size):
        if rank == failing:
            with pytest.raises(OSError, match="is full"):
                agree(session, b"", failing)
        else:
            with pytest.raises(RankFailedError) as caught:
                agree(session, b"", failing)
            assert (caught.value.rank, caught.value.kind) == (failing, "OSError")
    assert session.exchange("topology", b"of %d" % rank) == expected
    values = [random_bytes(20 * VALUE_NBYTES + r, seed=r).tobytes() for r in range(size)]
    with session.round("long") as round_:
        round_.post(values[rank])
        if rank == 0:
            assert round_.collect() == values
            round_.decide(values[-1])
        assert round_.outcome() == values[-1]


def check_rounds_leave_no_keys(session: Session) -> None:
    for _ in range(300):
        agree(session, b"x")
    session.exchange("all are done", b"")
    keys = distributed.global_state.client.key_value_dir_get_bytes("fp_multi/")
    assert 0 < len(keys) <= 10 + 3 * SWEEP_ROUNDS, [key for key, _ in keys]


def check_threads(comm: JaxComm) -> None:
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(comm.get, f"thread {i}", HANG_LIMIT_S) for i in range(2)]
        if comm.rank == 0:
            comm.put("thread 1", b"1")
            assert waits[1].result(HANG_LIMIT_S) == b"1"
            comm.put("thread 0", b"0")
        assert [wait.result(HANG_LIMIT_S) for wait in waits] == [b"0", b"1"]


def check_gather(comm: JaxComm) -> None:
    for sizes in ([1000] * comm.size, [rank * 70_001 for rank in range(comm.size)], [0] * comm.size, [9 << 20, 5]):
        parts = [random_bytes(size, seed=rank) for rank, size in enumerate(sizes)][: comm.size]
        expected = np.concatenate(parts)
        whole = np.zeros(expected.size, np.uint8)
        comm.all_gather(parts[comm.rank], whole)
        assert np.array_equal(whole, expected)
    with pytest.raises(CommError, match="bytes together"):
        comm.all_gather(np.zeros(3, np.uint8), np.zeros(3 * comm.size + (comm.rank == 0), np.uint8))


def check_subset(world: JaxComm) -> None:
    with pytest.raises(CommError, match="cannot be in"):
        JaxComm(processes=[1 - world.rank])
    alone = JaxComm(processes=[world.rank])
    assert (alone.rank, alone.size) == (0, 1)
    assert agree(Session(alone), b"me") == [b"me"]
    check_gather(alone)
    both = JaxComm(processes=[1, 0])
    assert (both.rank, both.size) == (world.rank, 2)
    both.put("key", b"")
    assert world.get("key", 0) is None
    assert Session(both).exchange("topology", b"%d" % both.rank) == [b"0", b"1"]


def two_processes() -> tuple[int, ...]:
    comm = JaxComm(timeout_s=HANG_LIMIT_S)
    assert isinstance(comm, Comm)
    session = Session(comm)
    check_store(comm)
    check_session(session)
    check_threads(comm)
    assert jax.process_count() == comm.size == 2
    assert jax.process_index() == comm.rank
    assert jax.device_count() == 4
    check_gather(comm)
    check_subset(comm)
    check_rounds_leave_no_keys(session)
    comm.timeout_s = 2.0
    round_ = session.round("save")
    if comm.rank == 1:
        die()
    round_.post(b"")
    with pytest.raises(CommTimeoutError) as caught, round_:
        round_.collect()
    return caught.value.ranks


def test_two_processes() -> None:
    job = run_jax(two_processes, 2, devices=2, dies=[1])
    assert job.results == [(1,), None]
    assert job.codes[1] == -signal.SIGKILL


def leader_dies() -> str:
    comm = JaxComm(timeout_s=HANG_LIMIT_S)
    session = Session(comm)
    agree(session, b"")
    round_ = session.round("save")
    round_.post(b"")
    if comm.rank == 0:
        round_.collect()
        die()
    with pytest.raises(CommError) as caught, round_:
        round_.outcome()
    return type(caught.value).__name__


def test_a_killed_leader_is_noticed() -> None:
    # JAX itself ends a process whose coordinator is gone; whichever is first, nobody takes the save for complete.
    job = run_jax(leader_dies, 2, dies=[0, 1])
    assert job.codes[0] == -signal.SIGKILL
    assert job.results[1] == "CommError" or job.codes[1] != 0


def test_without_jax_distributed_it_is_one_process() -> None:
    comm = JaxComm()
    assert isinstance(comm, Comm)
    assert (comm.rank, comm.size) == (0, 1)
    check_store_alone(comm)
    whole = np.zeros(5, np.uint8)
    comm.all_gather(np.arange(5, dtype=np.uint8), whole)
    assert whole.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CommError, match="job has 1"):
        JaxComm(processes=[0, 1])
    with pytest.raises(ConfigError, match="twice"):
        JaxComm(processes=[0, 0])
    with pytest.raises(ConfigError, match="timeout_s"):
        JaxComm(timeout_s=-1)


def check_store_alone(comm: JaxComm) -> None:
    comm.put("key", b"value")
    assert comm.get("key", 0) == b"value"
    comm.delete("key")
    assert comm.get("key", 0) is None
