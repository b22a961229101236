"""JaxComm over real processes of jax.distributed on the CPU."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from comm_contract import (
    HANG_LIMIT_S,
    agree,
    check_agreement,
    check_failures,
    check_gather,
    check_long_values,
    check_store,
    check_threads,
)
from multiprocess import die, run_jax

jax = pytest.importorskip("jax")

from jax._src import distributed  # noqa: E402

from fp_multi._agree import SWEEP_ROUNDS, Session  # noqa: E402
from fp_multi._comm import Comm  # noqa: E402
from fp_multi.adapters.orbax.comm import JaxComm  # noqa: E402
from fp_multi.errors import CommError, CommTimeoutError, ConfigError  # noqa: E402


def check_rounds_leave_no_keys(session: Session) -> None:
    for _ in range(300):
        agree(session, b"x")
    session.exchange("all are done", b"")
    keys = distributed.global_state.client.key_value_dir_get_bytes("fp_multi/")
    assert 0 < len(keys) <= 10 + 3 * SWEEP_ROUNDS, [key for key, _ in keys]


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
    check_agreement(session)
    check_failures(session)
    check_long_values(session)
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
