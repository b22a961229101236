"""TorchComm over real processes: gloo, a store in torchrun's agent, in rank 0 and in a file."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
from multiprocess import die, run_torch

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from fp_multi._agree import SWEEP_ROUNDS, Session  # noqa: E402
from fp_multi._comm import VALUE_NBYTES, Comm  # noqa: E402
from fp_multi.adapters.torch.comm import TorchComm, _Connections, _get  # noqa: E402
from fp_multi.errors import CommError, CommTimeoutError, ConfigError  # noqa: E402


def check_rounds_leave_no_keys(session: Session, rounds: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    session.exchange("all are here", b"")
    before = store.num_keys()
    for _ in range(rounds):
        agree(session, b"x")
    session.exchange("all are done", b"")
    assert store.num_keys() <= before + session.comm.size + 3 * SWEEP_ROUNDS, store.num_keys()


def check_beside_training(session: Session) -> None:
    """An agreement in the background while the main thread runs collectives of its own."""
    done = threading.Event()

    def save() -> None:
        for _ in range(20):
            check_agreement(session)
        done.set()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(save)
        steps = torch.zeros(1)
        while True:
            # All ranks stop at the same step.
            steps[0] = float(done.is_set())
            dist.all_reduce(steps)
            if steps.item() == dist.get_world_size():
                break
        future.result(HANG_LIMIT_S)


def check_groups(world: TorchComm) -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([2, 0]), dist.new_group([1, 3])]
    group = pairs[rank % 2]
    comm, other = TorchComm(group), TorchComm(group)
    assert (comm.rank, comm.size) == (dist.get_group_rank(group, rank), 2)
    comm.put("key", b"%d" % (rank % 2))
    assert other.get("key", 0) is None
    assert world.get("key", 0) is None
    first, second = Session(comm), Session(other)
    assert first.nonce != second.nonce
    members = [b"of %d" % r for r in dist.get_process_group_ranks(group)]
    assert agree(second, b"of %d" % rank) == members
    assert first.exchange("topology", b"of %d" % rank) == members
    assert comm.get("key", 0) == b"%d" % (rank % 2)
    with pytest.raises(CommError, match="not in the process group"):
        TorchComm(pairs[1 - rank % 2])
    check_gather(comm)
    comm.close()
    assert comm.get("key", 0) == b"%d" % (rank % 2)


def check_groups_of_one() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    comm = TorchComm(alone)
    assert (comm.rank, comm.size) == (0, 1)
    session = Session(comm)
    check_store(comm)
    check_agreement(session)
    check_failures(session)
    check_gather(comm)


def check_killed_rank(session: Session) -> tuple[int, ...]:
    """Rank 3 is killed when it has posted half of a receipt; the others get its number in time."""
    round_ = session.round("save")
    if session.comm.rank == 3:
        session.comm.put(f"{round_._key}/r3/0", bytes(VALUE_NBYTES))
        die()
    round_.post(b"")
    if session.comm.rank == 0:
        for rank in (1, 2):  # however slow they are, they are not dead
            assert session.comm.get(f"{round_._key}/r{rank}", HANG_LIMIT_S) is not None
    with pytest.raises(CommTimeoutError) as caught:
        round_.collect(timeout_s=1.0) if session.comm.rank == 0 else round_.outcome()
    round_.close()
    return caught.value.ranks


def outcome_without_leader(session: Session) -> str:
    """The leader is killed between collecting and deciding."""
    try:
        with session.round("save") as round_:
            round_.post(b"")  # the leader may be gone before this returns
            if session.comm.rank == 0:
                round_.collect()
                die()
            round_.outcome()
    except CommError as error:
        return type(error).__name__
    return "committed"


def four_ranks() -> list[Any]:
    comm = TorchComm(timeout_s=HANG_LIMIT_S)
    assert isinstance(comm, Comm)
    assert (comm.rank, comm.size) == (dist.get_rank(), 4)
    session = Session(comm)
    check_store(comm)
    check_agreement(session)
    check_failures(session)
    check_long_values(session)
    check_threads(comm)
    check_gather(comm)
    check_groups(comm)
    check_groups_of_one()
    check_beside_training(session)
    check_rounds_leave_no_keys(session, 300)
    pair = dist.new_group([1, 2])
    pair_comm = TorchComm(pair, timeout_s=HANG_LIMIT_S) if comm.rank in (1, 2) else None
    pair_session = Session(pair_comm) if pair_comm is not None else None
    seen: list[Any] = [check_killed_rank(session)]
    if pair_comm is None or pair_session is None:
        return seen
    if pair_comm.rank == 1:
        # The store is the agent's and lives on, so that it is time that tells.
        pair_comm.timeout_s = 2.0
    return [*seen, outcome_without_leader(pair_session)]


def test_four_ranks_two_of_which_are_killed() -> None:
    job = run_torch(four_ranks, 4, dies=[1, 3])
    assert job.results == [[(3,)], None, [(3,), "CommTimeoutError"], None]
    assert job.codes == [0, -signal.SIGKILL, 0, -signal.SIGKILL]


def two_ranks() -> str:
    comm = TorchComm(timeout_s=HANG_LIMIT_S)
    session = Session(comm)
    check_agreement(session)
    check_gather(comm)
    return outcome_without_leader(session)


def test_a_killed_leader_that_hosts_the_store_is_noticed_at_once() -> None:
    # With a timeout_s as long as the hang limit: it is the lost connection that tells.
    job = run_torch(two_ranks, 2, store="rank0", dies=[0])
    assert job.results == [None, "CommError"]
    assert job.codes == [-signal.SIGKILL, 0]


@pytest.mark.parametrize("kind", ["file", "memory", "server"])
def test_any_kind_of_store(kind: str, tmp_path: Path) -> None:
    store: Any
    if kind == "file":
        store = dist.FileStore(str(tmp_path / "store"), 1)
    elif kind == "memory":
        store = dist.HashStore()
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connections = _Connections(dist.PrefixStore("job", store), 5.0)
    with connections.borrow() as one, connections.borrow() as other:
        one.set("key", b"value")
        assert _get(other, "key", HANG_LIMIT_S) == b"value"
        assert _get(other, "none", 0) is None
        assert _get(other, "none", 0.05) is None
        assert (one is other) == (kind != "server")
    with connections.borrow() as again:
        again.delete_key("key")
        assert _get(one, "key", 0) is None


def test_torch_distributed_has_to_be_set_up() -> None:
    with pytest.raises(CommError, match="init_process_group"):
        TorchComm()
    with pytest.raises(ConfigError, match="timeout_s"):
        TorchComm(timeout_s=0)
