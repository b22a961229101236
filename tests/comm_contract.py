"""What every comm has to keep, whatever framework carries it; each function runs in every process of a job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support import random_bytes

from fp_multi._agree import Session
from fp_multi._comm import VALUE_NBYTES
from fp_multi.errors import CommError, RankFailedError

HANG_LIMIT_S = 60.0


def agree(session: Session, value: bytes, fail: int | None = None) -> list[bytes]:
    """A save's round: every rank hands in its value, or one of them fails."""
    rank = session.comm.rank
    with session.round("save") as round_:
        if rank == fail:
            raise OSError(f"drive of rank {rank} is full")
        round_.post(value)
        if rank == 0:
            round_.decide(b"|".join(round_.collect()))
        return round_.outcome().split(b"|")


def check_agreement(session: Session) -> None:
    size, rank = session.comm.size, session.comm.rank
    expected = [b"of %d" % r for r in range(size)]
    assert agree(session, b"of %d" % rank) == expected
    assert session.exchange("topology", b"of %d" % rank) == expected


def check_failures(session: Session) -> None:
    for failing in range(session.comm.size):
        if session.comm.rank == failing:
            with pytest.raises(OSError, match="is full"):
                agree(session, b"", failing)
        else:
            with pytest.raises(RankFailedError) as caught:
                agree(session, b"", failing)
            found = caught.value
            assert (found.rank, found.kind, found.text) == (failing, "OSError", f"drive of rank {failing} is full")
    check_agreement(session)


def check_long_values(session: Session) -> None:
    values = [random_bytes(20 * VALUE_NBYTES + rank, seed=rank).tobytes() for rank in range(session.comm.size)]
    with session.round("long") as round_:
        round_.post(values[session.comm.rank])
        if session.comm.rank == 0:
            assert round_.collect() == values
            round_.decide(values[-1])
        assert round_.outcome() == values[-1]


def check_threads(comm: Any) -> None:
    """A wait in one thread holds up neither another thread's wait nor its put."""
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(comm.get, f"thread {i}", HANG_LIMIT_S) for i in range(2)]
        running = pool.submit(comm.get, "never", 0.3)
        if comm.rank == 0:
            comm.put("thread 1", b"1")
            assert waits[1].result(HANG_LIMIT_S) == b"1"
            comm.put("thread 0", b"0")
        assert [wait.result(HANG_LIMIT_S) for wait in waits] == [b"0", b"1"]
        assert running.result(HANG_LIMIT_S) is None


def check_store(comm: Any) -> None:
    key = f"of {comm.rank}"
    assert comm.get(key, 0) is None
    assert comm.get(key, 0.01) is None
    assert comm.get(key, 1.1) is None  # longer than an implementation may look again and again
    comm.put(key, b"")
    assert comm.get(key, 0) == b""
    comm.put(key, b"\0binary\xff")
    assert comm.get(key, 2.0) == b"\0binary\xff"
    comm.put(key, bytes(VALUE_NBYTES))
    assert comm.get(key, 0) == bytes(VALUE_NBYTES)
    comm.put(f"{key}/1", b"")
    comm.put(f"{key}/10", b"")
    comm.delete(f"{key}/1")
    assert comm.get(f"{key}/10", 0) == b""
    comm.delete(key)
    comm.delete(key)
    assert comm.get(key, 0) is None


def check_gather(comm: Any) -> None:
    first_only = [9 << 20, *[5] * comm.size][: comm.size]
    for sizes in ([1000] * comm.size, [rank * 70_001 for rank in range(comm.size)], [0] * comm.size, first_only):
        parts = [random_bytes(size, seed=rank) for rank, size in enumerate(sizes)]
        expected = np.concatenate(parts)
        whole = np.zeros(expected.size, np.uint8)
        comm.all_gather(parts[comm.rank], whole)
        assert np.array_equal(whole, expected)
        # In place.
        whole = np.zeros(expected.size, np.uint8)
        start = sum(sizes[: comm.rank])
        mine = whole[start : start + sizes[comm.rank]]
        mine[:] = parts[comm.rank]
        comm.all_gather(mine, whole)
        assert np.array_equal(whole, expected)
    # One rank's mistake is everybody's error.
    with pytest.raises(CommError, match="bytes together"):
        comm.all_gather(np.zeros(3, np.uint8), np.zeros(3 * comm.size + (comm.rank == 0), np.uint8))
