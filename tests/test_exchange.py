"""Ranks that want parts which lie between each other's read every byte once: columns, where rows were written."""

from __future__ import annotations

import errno
import os
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multiprocess import die, run_jax, run_torch
from ranks import config, make_comm, said
from support import assert_same, check_child, flip

import fp_multi as fp
from fp_multi import _assemble, _exchange, _host_memory, _memfd, _partial, errors
from fp_multi._types import Box

SHAPES = {"even": (512, 1024), "odd": (1009, 531), "deep": (7, 60, 300), "few": (8, 20_000), "tiny": (5, 6)}


def values(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).random(SHAPES[name], np.float32)


def cut(length: int, rank: int, size: int) -> slice:
    return slice(length * rank // size, length * (rank + 1) // size)


def part_of(name: str, axis: int, rank: int, size: int) -> fp.ShardOf:
    whole = values(name)
    start = [0] * whole.ndim
    at = cut(whole.shape[axis], rank, size)
    start[axis] = at.start
    return fp.ShardOf(np.ascontiguousarray(np.take(whole, range(at.start, at.stop), axis)), whole.shape, tuple(start))


def state_of(axis: int, rank: int, size: int) -> dict[str, Any]:
    """Parts of all tensors; axis -1 are columns."""
    parts = {name: part_of(name, len(shape) - 1 if axis < 0 else 0, rank, size) for name, shape in SHAPES.items()}
    return {**parts, "same": np.arange(100_000), "step": 7}


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: fp.ShardOf(np.zeros_like(one.array), one.shape, one.start) if isinstance(one, fp.ShardOf) else one
        for key, one in state.items()
    }


def assert_parts(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key, one in wanted.items():
        assert_same(got[key].array if isinstance(one, fp.ShardOf) else got[key], getattr(one, "array", one))


def jax_comm() -> Any:
    from fp_multi.adapters.orbax.comm import JaxComm

    return JaxComm(timeout_s=60.0)


class Counted:
    """What the readers of this process got from the drive, and how many parts they shared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drive_nbytes = self.wanted_nbytes = self.shared = 0
        original = _exchange.read_parts

        def counting(reader: Any, requests: Any, team: Any) -> Any:
            found = original(reader, requests, team)
            self.drive_nbytes += reader.drive_nbytes
            self.wanted_nbytes += reader.wanted_nbytes
            return found

        run = _exchange._Exchange.run

        def sharing(this: Any, requests: Any) -> Any:
            self.shared += len(requests)
            return run(this, requests)

        monkeypatch.setattr(_exchange, "read_parts", counting)
        monkeypatch.setattr(_exchange._Exchange, "run", sharing)


def check_columns_of_rows(directory: str, framework: str = "torch") -> tuple[int, int, int]:
    comm, root = make_comm() if framework == "torch" else jax_comm(), Path(directory)
    rank, size = comm.rank, comm.size
    rows, columns = state_of(0, rank, size), state_of(-1, rank, size)
    fp.save(rows, root / "rows", comm=comm, config=config(chunk_bytes=4096))
    fp.save(columns, root / "columns", comm=comm, config=config(chunk_bytes=4096))
    with pytest.MonkeyPatch.context() as patch:
        # So small that every place is used many times over.
        patch.setattr(_exchange, "_SLAB_NBYTES", 64 << 10)
        counted = Counted(patch)
        for inplace in (True, False):
            target = blank(columns)
            got = fp.load(root / "rows", target=target, inplace=inplace, comm=comm, broadcast=True)
            assert_parts(got, columns)
            assert not inplace or got["odd"].array is target["odd"].array
        result = counted.drive_nbytes, counted.wanted_nbytes, counted.shared

        # The other way round each reads what is its own, and nothing is shared.
        counted.shared = 0
        assert_parts(fp.load(root / "columns", target=blank(rows), comm=comm, broadcast=True), rows)
        assert not counted.shared

        # Ranks that want other things: nothing, all, the same columns.
        for first in ({}, {"even": part_of("even", 1, 0, 1)}, {"even": part_of("even", 1, 1, 2)}):
            mine = {"even": part_of("even", 1, rank, size)} if rank else first
            target = blank(mine) if mine else None
            assert_parts(fp.load(root / "rows", target=target, only=list(mine), comm=comm, broadcast=True), mine)
        # One rank alone wants columns of a tensor: not shared, but it reads a share of the others' all the same.
        if size > 2:
            halves = part_of("even", 1, rank - 1, size - 1) if rank else None
            mine = {"even": halves} if halves is not None else {"odd": part_of("odd", 1, 1, 3)}
            got = fp.load(root / "rows", target=blank(mine), only=list(mine), comm=comm, broadcast=True)
            assert_parts(got, mine)
    return result


@pytest.mark.parametrize("size", [2, 4])
def test_columns_of_rows_are_read_once(tmp_path, size):
    found = run_torch(check_columns_of_rows, size, tmp_path).results
    drive, wanted, shared = np.sum(found, axis=0).tolist()
    assert shared == 2 * size * len(SHAPES)
    assert drive <= 1.3 * wanted


def test_columns_of_rows_with_jax(tmp_path):
    run_jax(check_columns_of_rows, 2, tmp_path, "jax")


def check_trouble(directory: str) -> dict[str, str]:
    comm, root, found = make_comm(), Path(directory), {}
    rank, size = comm.rank, comm.size
    columns = state_of(-1, rank, size)
    fp.save(state_of(0, rank, size), root / "rows", comm=comm, config=config())

    def load() -> dict[str, Any]:
        got: dict[str, Any] = fp.load(root / "rows", target=blank(columns), comm=comm, broadcast=True)
        return got

    def no_memory(*arguments: Any) -> Any:
        raise OSError(errno.ENOSYS, "no memory to share")

    for name in ("share", "attach"):  # on one rank: all read by themselves then
        with pytest.MonkeyPatch.context() as patch:
            if rank == size - 1:
                patch.setattr(_host_memory, name, no_memory)
            assert_parts(load(), columns)
    with pytest.MonkeyPatch.context() as patch:
        if rank == size - 1:
            patch.delattr(os, "memfd_create")  # as in Pythons that were built for an old C library
        assert_parts(load(), columns)

    def together() -> None:
        comm.all_gather(np.zeros(1, np.uint8), np.zeros(size, np.uint8))

    shard = max((root / "rows").glob("shard-00001*"))
    for what in ("flipped", "whole again"):
        together()
        if rank == 0:
            flip(shard, os.path.getsize(shard) // 2)
        together()
        found[what] = said(load)
    assert_parts(load(), columns)
    return found


def test_trouble_on_one_rank(tmp_path):
    found = run_torch(check_trouble, 3, tmp_path).results
    errors_said = [one["flipped"] for one in found]
    assert sum("ChecksumError" in one for one in errors_said) >= 1
    assert all("CRC" in one for one in errors_said)
    assert [one["whole again"] for one in found] == ["fine"] * 3


def check_death(directory: str) -> str:
    comm, root = make_comm(timeout_s=5), Path(directory)
    rank, size = comm.rank, comm.size
    fp.save(state_of(0, rank, size), root / "rows", comm=comm, config=config())
    if rank == 1:
        _exchange._Exchange._fill = lambda self, first: die()  # type: ignore[method-assign]
    return said(lambda: fp.load(root / "rows", target=blank(state_of(-1, rank, size)), comm=comm, broadcast=True))


def test_a_rank_that_dies_meanwhile_is_missed(tmp_path):
    found = run_torch(check_death, 3, tmp_path, dies=[1]).results
    for one in (found[0], found[2]):
        assert "CommTimeoutError" in one or "RankFailedError" in one


# In one process


@pytest.fixture
def reader(tmp_path):
    fp.save({name: values(name) for name in SHAPES}, tmp_path / "c", config=config(chunk_bytes=4096))
    return fp.read_checkpoint(tmp_path / "c", lambda one: one)


def index_of(reader: Any, name: str) -> int:
    return [tensor.name for tensor in reader.manifest.tensors].index(name)


def test_only_what_lies_between_is_offered(reader):
    even = index_of(reader, "even")
    boxes = {
        None: False,  # all of it
        Box((0, 0), (512, 1024)): False,
        Box((100, 0), (50, 1024)): False,  # rows
        Box((0, 100), (512, 0)): False,  # nothing
        Box((7, 100), (1, 10)): False,  # inside one row
        Box((0, 0), (512, 1000)): False,  # hardly more than it is
        Box((0, 100), (512, 100)): True,
        Box((100, 0), (100, 512)): True,
    }
    for box, offered in boxes.items():
        found = _exchange._offered(reader, [fp.ReadRequest(even, box)])
        assert bool(found) == offered, box
    want = _exchange._offered(reader, [fp.ReadRequest(even, Box((100, 0), (100, 512)))])[0]
    assert want.touched_nbytes == 99 * 1024 * 4 + 512 * 4
    with pytest.raises(errors.TargetMismatchError, match="not inside"):
        _exchange._offered(reader, [fp.ReadRequest(even, Box((0, 0), (513, 1)))])


def test_what_is_far_apart_is_not_read_together(reader):
    even = index_of(reader, "even")

    def want(start: tuple[int, int], length: tuple[int, int]) -> Any:
        return next(iter(_exchange._offered(reader, [fp.ReadRequest(even, Box(start, length))]).values()))

    near = [want((0, 0), (100, 512)), want((0, 512), (100, 512))]
    assert _exchange._hulls(reader.manifest, near) == {even: Box((0, 0), (100, 1024))}
    far = [want((0, 0), (10, 512)), want((500, 512), (10, 512))]
    assert _exchange._hulls(reader.manifest, far) == {}


@pytest.mark.parametrize("slab_nbytes", [4096, 100_000, 1 << 30])
def test_slabs_are_all_of_it_once(reader, monkeypatch, slab_nbytes):
    monkeypatch.setattr(_exchange, "_SLAB_NBYTES", slab_nbytes)
    hulls = {index_of(reader, "odd"): Box((3, 100), (900, 431)), index_of(reader, "deep"): Box((1, 0, 5), (6, 60, 211))}
    for index, hull in hulls.items():
        seen = np.zeros(reader.manifest.tensors[index].shape, np.uint8)
        for lot in [lot for slab in _exchange._slabs(reader.manifest, {index: hull}) for lot in slab]:
            assert lot.nbytes == 4 * prod(lot.box.length)
            seen[tuple(slice(a, a + n) for a, n in zip(*lot.box, strict=True))] += 1
        inside = tuple(slice(a, a + n) for a, n in zip(*hull, strict=True))
        assert seen[inside].min() == seen[inside].max() == 1
        assert seen.sum() == prod(hull.length)
    together = _exchange._slabs(reader.manifest, hulls)
    assert [lot for slab in together for lot in slab if lot.tensor not in hulls] == []
    for slab in together:
        ends = [0, *[lot.begin + lot.nbytes for lot in slab]]
        assert all(lot.begin >= end for lot, end in zip(slab, ends, strict=False))
        assert ends[-1] <= slab_nbytes


def test_room_for_a_part(reader):
    even = index_of(reader, "even")
    out = np.zeros(40, np.uint8)
    box = Box((1, 1), (2, 5))
    assert _partial.room_for(reader, fp.ReadRequest(even, box, out)) is out
    assert _partial.room_for(reader, fp.ReadRequest(even, box)).nbytes == 40
    with pytest.raises(errors.TargetMismatchError, match="40 contiguous bytes"):
        _partial.room_for(reader, fp.ReadRequest(even, box, out[:39]))


ELSEWHERE = """
import sys
from fp_multi import _host_memory
pid, fd, token, nbytes = sys.argv[1:]
memory = _host_memory.attach(_host_memory.Address(int(pid), int(fd), bytes.fromhex(token), int(nbytes)))
assert memory.filled == 3
assert memory.data.sum() == 255
memory.data[:] = 1
memory.emptied = 9
"""


def test_the_shards_are_looked_at_once(reader, monkeypatch):
    looks = []
    look = _assemble.shard_faults
    monkeypatch.setattr(_assemble, "shard_faults", lambda *them: looks.append(them) or look(*them))
    for tensor in range(len(reader.manifest.tensors)):
        reader.read([fp.ReadRequest(tensor)])
    assert len(looks) == 1
    # And again when something is wrong, because that may be it.
    file = Path(reader.directory) / reader.manifest.shards[0].file
    os.truncate(file, 100)
    with pytest.raises(errors.TruncatedShardError):
        reader.read([fp.ReadRequest(0)])
    file.unlink()
    with pytest.raises(errors.MissingShardError):
        reader.read([fp.ReadRequest(0)])


@pytest.mark.parametrize("refused", [[], [errno.EINVAL]])
def test_memory_that_nobody_can_execute(monkeypatch, refused):
    """Where the system has it."""
    create, flags = os.memfd_create, []

    def one_that_may_be_old(name: str, flag: int) -> int:
        flags.append(flag)
        if len(flags) <= len(refused):
            raise OSError(refused[len(flags) - 1], "refused")
        return create(name, flag)

    monkeypatch.setattr(os, "memfd_create", one_that_may_be_old)
    os.close(_memfd.memfd())
    assert [bool(flag & 0x8) for flag in flags] == [True, False][: 1 + len(refused)]


def test_memory_of_another_process():
    memory = _host_memory.share(100_000)
    memory.data[-1] = 255
    memory.filled = 3
    pid, fd, token, nbytes = memory.address
    try:
        check_child(ELSEWHERE, pid, fd, token.hex(), nbytes)
    finally:
        memory.close()
    assert memory.emptied == 9
    assert memory.data.min() == 1


def test_other_memory_is_not_mapped(tmp_path):
    memory = _host_memory.share(4096)
    address = memory.address
    with open(tmp_path / "file", "wb") as file:
        others = [
            address._replace(token=bytes(16)),
            address._replace(nbytes=8192),
            address._replace(fd=file.fileno()),
            address._replace(fd=9999),
            address._replace(pid=2**22 + 1),
        ]
        for other in others:
            with pytest.raises(OSError, match=r"memory|No such"):
                _host_memory.attach(other)
    memory.close()
    with pytest.raises(OSError, match="No such"):
        _host_memory.attach(address)
