"""Ranks of one host that read for each other in dcp.load: who reads what, what arrives, and what failures do."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from multiprocess import die, run_torch  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.planner import LoadPlan  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh  # noqa: E402

import fp_multi as fp  # noqa: E402
from fp_multi import _engine  # noqa: E402
from fp_multi.adapters.torch import _dcp_blocks, _dcp_peers, _dcp_shared_read  # noqa: E402
from fp_multi.adapters.torch._dcp_blocks import BLOCK_NBYTES, Shared, divide  # noqa: E402
from fp_multi.adapters.torch._dcp_peers import Listener, PeerLostError, Peers  # noqa: E402
from fp_multi.adapters.torch.dcp import StorageReader, StorageWriter  # noqa: E402

MIB = 1 << 20
QUICK = fp.SaveConfig(durable=False)


# Who reads what


@st.composite
def shared_boxes(draw: st.DrawFn) -> list[Shared]:
    groups = [(0, 1), (0, 1, 2, 5), (2, 5)]
    shapes = st.lists(st.integers(1, 120), min_size=0, max_size=2).map(tuple)
    found = []
    for tensor in range(draw(st.integers(1, 12))):
        shape = draw(shapes)
        shape = (draw(st.sampled_from([1, 4000])), *shape) if shape else shape
        box = fp.Box((3,) * len(shape), shape)
        found.append(Shared(tensor, box, draw(st.sampled_from([1, 4, 16])), draw(st.sampled_from(groups))))
    return found


@settings(deadline=None, max_examples=60)
@given(shared_boxes())
def test_everything_is_read_once_by_somebody_who_wants_it(shared: list[Shared]) -> None:
    total = sum(one.itemsize * int(np.prod(one.box.length, dtype=np.int64)) for one in shared)
    plan = divide(shared)
    if total < _dcp_blocks.LEAST_NBYTES:
        assert plan is None
        return
    assert plan is not None
    came = {number: 0 for number in range(len(shared))}
    turns: dict[int, int] = {}
    load: dict[int, int] = {}
    for block in plan.blocks:
        assert block.reader in block.takers
        assert block.turn == turns.get(block.reader, 0)
        turns[block.reader] = block.turn + 1
        free = 0
        for part in block.parts:
            tensor, box = plan.box(part.box)
            (wanted,) = [one for one in shared if one.tensor == tensor]
            assert (wanted.box, wanted.takers) == (box, block.takers)
            assert part.begin == came[part.box]
            came[part.box] += part.nbytes
            assert part.at >= free
            free = part.at + part.nbytes
            load[block.reader] = load.get(block.reader, 0) + part.nbytes
        assert _dcp_blocks.BEGIN_NBYTES + free <= plan.slot_nbytes <= BLOCK_NBYTES + 4096
    assert sum(came.values()) == total
    everybody = {rank for one in shared for rank in one.takers}
    if all(set(one.takers) == everybody for one in shared):
        assert max(load.values()) - min(load.get(rank, 0) for rank in everybody) <= BLOCK_NBYTES


def test_parts_are_the_bytes_that_they_say(tmp_path: Path) -> None:
    """Also of a box that is cut inside: what the reader reads is what the takers expect."""
    array = np.arange(4 * 5 * 300_000, dtype=np.float32).reshape(4, 5, 300_000)
    fp.save({"w": array}, tmp_path / "c", config=QUICK)
    box = fp.Box((1, 0, 10), (3, 5, 299_000))
    expected = array[1:, :, 10:299_010].tobytes()
    plan = divide([Shared(0, box, 4, (0, 1))])
    assert plan is not None
    assert len(plan.blocks) == 2

    def read(reader: fp.CheckpointReader) -> bytes:
        found = b""
        for part in [part for block in plan.blocks for part in block.parts]:
            assert part.begin == len(found)
            boxes = list(plan.boxes_of(part, reader.manifest))
            assert sum(nbytes for _, _, nbytes in boxes) == part.nbytes
            data = reader.read([fp.ReadRequest(tensor, box) for tensor, box, _ in boxes])
            found += b"".join(one.tobytes() for one in data)
        return found

    assert fp.read_checkpoint(tmp_path / "c", read) == expected


def test_a_plan_without_wishes_stays_as_it_is(tmp_path: Path) -> None:
    plans = [LoadPlan([]), LoadPlan([], storage_data="a planner's own")]
    assert StorageReader(tmp_path / "nothing here").prepare_global_plan(plans) == plans


# Connections


def test_strangers_are_not_welcome() -> None:
    token = os.urandom(16)
    listeners = [Listener(), Listener()]
    for hello, fds in ((b"", []), (b"x" * 24, []), (_dcp_peers._HELLO.pack(token, 7), []), (b"y" * 100, [0])):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(listeners[0].address)
            socket.send_fds(stranger, [hello], fds)
    peers = [Peers(rank, 8192) for rank in range(2)]
    threads = [
        threading.Thread(
            target=peers[rank].meet, args=(listeners[rank], token, {1 - rank: listeners[1 - rank].address}, 0)
        )
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peers[0].memory[:5] = list(b"bytes")
    peers[0].announce(3, (0, 1))
    assert bytes(peers[1].receive(3, 0)[:5]) == b"bytes"
    peers[1].taken(3, 0)
    peers[0].wait_taken(3, (1,))
    peers[0].close()
    with pytest.raises(PeerLostError, match="rank 0"):
        peers[1].receive(4, 0)
    peers[1].close()
    for listener in listeners:
        listener.close()


def test_a_rank_that_reads_alone_is_noticed_at_once() -> None:
    listener, other = Listener(), Listener()
    address = other.address
    other.close()
    peers = Peers(0, 0)
    with pytest.raises(PeerLostError, match="refused"):
        peers.meet(listener, b"t" * 16, {1: address}, 0)
    peers.close()
    other, peers = Listener(), Peers(0, 0)
    threading.Timer(0.1, other.close).start()
    with pytest.raises(PeerLostError, match="gone"):
        peers.meet(listener, b"t" * 16, {1: other.address}, 0)
    peers.close()
    listener.close()


def test_a_listener_closes_for_all_that_have_it() -> None:
    """Also where a process that was forked meanwhile has the socket; who waits to be let in is told."""
    listener, other = Listener(), Listener()
    forked = os.dup(other.fileno())
    peers = Peers(0, 0)
    threading.Timer(0.1, other.close).start()
    with pytest.raises(PeerLostError, match="gone"):
        peers.meet(listener, b"t" * 16, {1: other.address}, 0)
    peers.close()
    peers = Peers(0, 0)
    with pytest.raises(PeerLostError, match="refused"):
        peers.meet(listener, b"t" * 16, {1: other.address}, 0)
    peers.close()
    os.close(forked)
    listener.close()


STRANGER = """
import os, socket, sys
os.setuid(65534)
listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listening.bind("")
listening.listen()
print(listening.getsockname().hex(), flush=True)
print(len(listening.accept()[0].recv(100)), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_nothing_is_sent_to_another_user() -> None:
    """The name of a rank that is gone may have become somebody else's."""
    listener, peers = Listener(), Peers(0, 0)
    with subprocess.Popen([sys.executable, "-c", STRANGER], stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        address = bytes.fromhex(stranger.stdout.readline())
        with pytest.raises(PeerLostError, match="another user"):
            peers.meet(listener, b"t" * 16, {1: address}, 0)
        peers.close()
        assert stranger.stdout.readline() == "0\n"
    listener.close()


# In real processes


class Told(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def take(self) -> list[str]:
        found, self.texts = self.texts, []
        return found


TOLD = Told()


def start() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.getLogger("fp_multi").addHandler(TOLD)
    # Small blocks, so that much happens.
    _dcp_blocks.BLOCK_NBYTES = MIB


def values(seed: int, *shape: int, dtype: Any = torch.float32) -> Any:
    made = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int16)
    return made.to(dtype)


def state() -> dict[str, Any]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    found = {
        "large": values(1, 1100, 1031),
        "deep": values(2, 3, 2, 300_000, dtype=torch.int16),
        "bfloat16": values(3, 1 << 20, dtype=torch.bfloat16),
        "float8": values(4, 999, 77).to(torch.float8_e4m3fn),
        "complex": values(5, 33, 33, dtype=torch.complex128),
        "bool": values(6, 7, 7) > 0,
        "one": values(7, 1),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "many": {f"{i}": values(10 + i, 5, 51) for i in range(300)},
        "replicated": distribute_tensor(values(8, 2001, 401), mesh, [Replicate()]),
        "rows": distribute_tensor(values(9, 2001, 401), mesh, [Shard(0)]),
        "step": 17,
        "names": ["a", {"lr": 0.5}],
    }
    if size == 4:
        square = init_device_mesh("cpu", (2, 2))
        found["hybrid"] = distribute_tensor(values(11, 2000, 501), square, [Replicate(), Shard(0)])
        found["columns"] = distribute_tensor(values(12, 2000, 501), square, [Shard(1), Replicate()])
    return found


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def emptied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: emptied(one) for key, one in value.items()}
    if isinstance(value, list):
        return [emptied(one) for one in value]
    if isinstance(value, torch.Tensor):
        local(value).zero_()
        return value
    return None


def check_same(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        for key, value in expected.items():
            check_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, torch.Tensor):
        a, b = local(found), local(expected)
        assert a.shape == b.shape, where
        carrier = torch.uint8 if b.dtype.itemsize == 1 else b.dtype
        assert torch.equal(a.to(b.dtype).view(carrier), b.view(carrier)), where
    else:
        assert found == expected, where


def nbytes_in(value: Any) -> int:
    if isinstance(value, dict):
        return sum(nbytes_in(one) for one in value.values())
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def load(into: dict[str, Any], path: Path, reader: StorageReader | None = None, **how: Any) -> int:
    """Load, and tell how many bytes all ranks together got from the drive."""
    own = reader or StorageReader()
    dcp.load(into, checkpoint_id=path, storage_reader=own, **how)
    return drive_nbytes(own)


def drive_nbytes(reader: StorageReader) -> int:
    opened = reader._opened
    assert opened is not None
    found = torch.tensor(opened[0].drive_nbytes)
    dist.all_reduce(found)
    return int(found)


def check_shared(path: Path) -> None:
    """Every byte leaves the drive once, for whatever targets."""
    expected = state()
    dcp.save(expected, checkpoint_id=path, storage_writer=StorageWriter(config=QUICK))
    total = nbytes_in(expected)
    size = dist.get_world_size()
    for config in (fp.LoadConfig(), fp.LoadConfig(direct="off"), fp.LoadConfig(io_uring="off", direct="off")):
        found = emptied(state())
        # Whole checksum chunks and pages are read, and the chunks where a tensor is cut by both neighbours.
        assert load(found, path, StorageReader(config=config)) < 1.4 * total
        check_same(found, expected)
    alone = emptied(state())
    assert load(alone, path, StorageReader(share=False)) > 0.7 * size * total
    check_same(alone, expected)
    odd: dict[str, Any] = {
        "large": torch.zeros(1031, 1100, dtype=torch.float64).t(),
        "deep": torch.zeros(3, 2, 600_000, dtype=torch.int16)[:, :, ::2],
        "bfloat16": torch.zeros(1 << 20, dtype=torch.float32),
        "float8": torch.zeros(999, 154, dtype=torch.float8_e4m3fn)[:, 1::2],
        "many": {"3": torch.zeros(5, 51, dtype=torch.int32)},
    }
    # On some ranks plain, on others not.
    if dist.get_rank() == 1:
        odd["large"] = torch.zeros(1100, 1031)
    fds = len(os.listdir("/proc/self/fd"))
    load(odd, path)
    assert len(os.listdir("/proc/self/fd")) == fds
    check_same(odd, {key: expected[key] for key in odd if key != "many"})
    assert torch.equal(odd["many"]["3"], expected["many"]["3"].int())
    assert not TOLD.take()


def check_what_is_not_shared(path: Path) -> None:
    """Shards of one rank each, a process of its own, other hosts, and planners that do as they like."""
    calls = []
    original = _dcp_shared_read.Peers

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    _dcp_shared_read.Peers = counted  # type: ignore[assignment,misc]
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = state()
    rows = {"rows": emptied(state()["rows"]), "step": None}
    assert load(rows, path) < 1.5 * nbytes_in({"rows": expected["rows"]})
    check_same(rows, {"rows": expected["rows"], "step": 17})
    large = {"large": torch.zeros(1100, 1031)}
    if rank == 0:
        dcp.load(large, checkpoint_id=path, storage_reader=StorageReader(), no_dist=True)
        check_same(large, {"large": expected["large"]})
    os.environ["FP_MULTI_HOST_ID"] = f"host {rank}"
    large = {"large": torch.zeros(1100, 1031)}
    load(large, path)
    check_same(large, {"large": expected["large"]})
    assert not calls

    if size == 4:
        os.environ["FP_MULTI_HOST_ID"] = f"host {rank // 2}"
        large = {"large": torch.zeros(1100, 1031)}
        nbytes = nbytes_in(large)
        assert 2 * nbytes <= load(large, path) < 3 * nbytes
        check_same(large, {"large": expected["large"]})
        assert len(calls) == 1
    del os.environ["FP_MULTI_HOST_ID"]

    for planner in (Forgetful(), Changed(), Late()):
        large = {"large": torch.zeros(1100, 1031), "bfloat16": torch.zeros(1 << 20, dtype=torch.bfloat16)}
        load(large, path, planner=planner)
        if rank == 1 and isinstance(planner, Changed):
            assert not large.pop("bfloat16").any()
        check_same(large, {key: expected[key] for key in large})
        assert bool(TOLD.take()) == isinstance(planner, Forgetful) or rank == 1
    _dcp_shared_read.Peers = original  # type: ignore[misc]


class Forgetful(dcp.DefaultLoadPlanner):
    """One rank's planner makes a new plan of the one that it gets, so that its storage gets no orders."""

    def finish_plan(self, new_plan: Any) -> Any:
        return LoadPlan(new_plan.items) if dist.get_rank() == 1 else new_plan


class Changed(dcp.DefaultLoadPlanner):
    """One rank's planner leaves something out in the end."""

    def finish_plan(self, new_plan: Any) -> Any:
        if dist.get_rank() == 1:
            new_plan.items = [item for item in new_plan.items if item.dest_index.fqn != "bfloat16"]
        return new_plan


class Late(dcp.DefaultLoadPlanner):
    """One rank's planner takes its time."""

    def finish_plan(self, new_plan: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(0.2)
        return new_plan


def check_group(path: Path) -> None:
    """Ranks of a group that is not the whole job."""
    group = dist.new_group([1, 2])
    expected = state()["large"]
    if dist.get_rank() in (1, 2):
        reader, found = StorageReader(), {"large": torch.zeros(1100, 1031)}
        dcp.load(found, checkpoint_id=path, storage_reader=reader, process_group=group)
        check_same(found, {"large": expected})
        opened = reader._opened
        assert opened is not None
        assert opened[0].drive_nbytes < 0.8 * nbytes_in(found)
    dist.barrier()


def check_no_memory(path: Path) -> None:
    """A rank gets no shared memory: all read alone."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    check_one_reads_alone(path, "File too large")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.delattr(os, "memfd_create")  # as in Pythons that were built for an old C library
        check_one_reads_alone(path, "no os.memfd_create")


def check_one_reads_alone(path: Path, why: str) -> None:
    """Rank 1 does, and the others find out before it has read anything."""
    found, reader = emptied(state()), StorageReader()
    planner = Looks(reader)
    dcp.load(found, checkpoint_id=path, storage_reader=reader, planner=planner)
    check_same(found, state())
    assert planner.were_open == {False}
    (text,) = TOLD.take()
    assert (why in text) == (dist.get_rank() == 1), text


class Looks(dcp.DefaultLoadPlanner):
    """Whether the others could still reach this rank when its tensors were there."""

    def __init__(self, reader: StorageReader) -> None:
        super().__init__()
        self._reader = reader
        self.were_open: set[bool] = set()

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        listener = self._reader._listener
        assert listener is not None
        self.were_open.add(listener.close.alive)


def check_no_sockets(path: Path) -> None:
    """A rank cannot listen: the others share without it."""
    expected, rank = state()["large"], dist.get_rank()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = {"large": torch.zeros(1100, 1031)}
    reader = NoFiles() if rank == 1 else StorageReader()
    nbytes = nbytes_in(found)
    assert 2 * nbytes <= load(found, path, reader) < 2.7 * nbytes
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits
    check_same(found, {"large": expected})
    assert not TOLD.take()


class NoFiles(StorageReader):
    """Has no descriptors while it plans."""

    def prepare_local_plan(self, plan: Any) -> Any:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            return super().prepare_local_plan(plan)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def check_stopped(path: Path) -> None:
    """A rank that does not go on: the others do not wait for ever."""
    rank = dist.get_rank()
    expected = state()
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    found = emptied(state())
    if rank == 1:
        reader: StorageReader = StorageReader()
        planner: Any = Stops()
    else:
        _dcp_peers.PATIENCE_S = 1.0
        reader, planner = Wakes(pids[1]), None
    dcp.load(found, checkpoint_id=path, storage_reader=reader, planner=planner)
    _dcp_peers.PATIENCE_S = 60.0
    check_same(found, expected)
    assert TOLD.take()


class Stops(dcp.DefaultLoadPlanner):
    """Stops its process when the first tensor is there."""

    stopped = False

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        if not self.stopped:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)


class Wakes(StorageReader):
    """Wakes a process when it has all that it wants."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid = pid

    def read_data(self, plan: Any, planner: Any) -> Any:
        done = super().read_data(plan, planner)
        os.kill(self.pid, signal.SIGCONT)
        return done


class Refuses(dcp.DefaultLoadPlanner):
    """Finds something wrong when it hears what it is to read: DCP does not come to the storage any more."""

    def finish_plan(self, new_plan: Any) -> Any:
        raise ValueError("not this plan")


def check_refused_plan(path: Path) -> None:
    """A rank that never comes to the meeting: the others read alone, and all hear of its error."""
    planner: Any = Refuses() if dist.get_rank() == 1 else None
    _dcp_peers.MEETING_S = 0.1
    with pytest.raises(dcp.CheckpointException, match="not this plan"):
        dcp.load(emptied(state()), checkpoint_id=path, storage_reader=StorageReader(), planner=planner)
    _dcp_peers.MEETING_S = 5.0


def check_errors(path: Path) -> None:
    """A read that fails on one rank, and a planner that does."""
    rank, expected = dist.get_rank(), state()
    for at in (1, 3):
        if rank == 1:
            _engine.inject_fault("open", at=at, error=5)
        found = emptied(state())
        failed = failed_ranks(found, path)
        _engine.clear_faults()
        assert failed in (set(), {1})
        # What could not be read for all is read again alone, and may succeed then.
        texts = TOLD.take()
        assert texts
        if rank == 1:
            assert "Input/output error" in texts[0]
        if not failed:
            check_same(found, expected)
    with pytest.raises(CheckpointException, match="not this one") as caught:
        dcp.load(emptied(state()), checkpoint_id=path, storage_reader=StorageReader(), planner=Raises())
    assert set(caught.value.failures) == {1}
    TOLD.take()


def failed_ranks(into: dict[str, Any], path: Path) -> set[int]:
    try:
        dcp.load(into, checkpoint_id=path, storage_reader=StorageReader())
    except CheckpointException as error:
        return set(error.failures)
    return set()


class Raises(dcp.DefaultLoadPlanner):
    """Fails in the middle on one rank."""

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        if dist.get_rank() == 1 and read_item.dest_index.fqn.startswith("many"):
            raise ValueError("not this one")


def check_corrupt(path: Path) -> None:
    """A flipped byte fails the load on every rank, with the tensor's name."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        flip(path, "bfloat16")
    dist.barrier()
    with pytest.raises(CheckpointException) as caught:
        dcp.load(emptied(state()), checkpoint_id=path, storage_reader=StorageReader())
    assert set(caught.value.failures) == set(range(size))
    for error, _ in caught.value.failures.values():
        assert "tensor 'bfloat16'" in str(error)
        assert type(error).__name__ == "ChecksumError"
    TOLD.take()


def flip(path: Path, name: str) -> None:
    manifest = fp.read_manifest(path)
    (tensor,) = [one for one in manifest.tensors if one.name == name]
    piece = tensor.pieces[0]
    with (path / manifest.shards[piece.shard].file).open("r+b") as file:
        file.seek(piece.offset + 5)
        old = file.read(1)
        file.seek(piece.offset + 5)
        file.write(bytes([old[0] ^ 1]))


def check_killed(path: Path) -> None:
    """One rank is killed in the middle: the others read on, and DCP fails."""
    rank, expected = dist.get_rank(), state()
    found = emptied(state())
    with pytest.raises(RuntimeError, match=r"(?i)gloo|connection"):
        dcp.load(found, checkpoint_id=path, storage_reader=StorageReader(), planner=Dies() if rank == 1 else None)
    # Who had all that it wanted from the dead rank, and got its receipts, notices nothing.
    del found["step"], found["names"], expected["step"], expected["names"]
    check_same(found, expected)


class Dies(dcp.DefaultLoadPlanner):
    """Ends its process when a tensor in the middle is there."""

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        if read_item.dest_index.fqn == "large":
            die()


def check_all(path: Path) -> None:
    start()
    check_shared(path)
    check_what_is_not_shared(path)
    if dist.get_world_size() == 3:
        check_group(path)
        check_no_sockets(path)
    check_no_memory(path)
    check_stopped(path)
    check_refused_plan(path)
    check_errors(path)
    if dist.get_world_size() == 3:
        dist.barrier()
        check_killed(path)
    else:
        check_corrupt(path)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks(tmp_path: Path, size: int) -> None:
    job = run_torch(check_all, size, tmp_path / "saved", dies=(1,) if size == 3 else ())
    assert job.codes[1] == (-9 if size == 3 else 0), job.outputs[1]
