"""Several processes save one checkpoint: real ones, over torch.distributed's store."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multiprocess import die, run_torch
from ranks import config, make_comm
from support import assert_same, hidden_names

import fp_multi as fp
from fp_multi import errors

MIB = 1 << 20


def odd_state(seed: int = 0) -> dict[str, Any]:
    """Awkward in size and shape, and large enough to be cut."""
    rng = np.random.default_rng(seed)
    return {
        "huge": rng.random((1009, 1031)),
        "experts": rng.random((3, 700, 311)).astype(np.float32),
        "wide": rng.random((1, 2_000_003)).astype(np.float32),
        "tiny": [np.full((3,), i) for i in range(50)],
        "scalar": np.float64(3.5),
        "zero_d": np.array(7),
        "empty": np.empty((0, 5)),
        "fortran": np.asfortranarray(rng.random((501, 703))),
        "big_endian": rng.random((100, 3)).astype(">f8"),
        "raw": b"bytes",
        "step": 3,
        ("tuple", 1): "key",
    }


def check_saves(directory: str) -> dict[str, Any]:
    comm = make_comm()
    rank, size = comm.rank, comm.size
    root = Path(directory)
    state = odd_state()

    # Replicas are divided, evenly.
    report = fp.save(state, root / "replicas", comm=comm, config=config())
    assert report.writers == tuple(range(size))
    assert report.tensor_nbytes == fp.read_manifest(root / "replicas").totals.tensor_nbytes
    assert_same(fp.load(root / "replicas"), state)
    fp.verify(root / "replicas")
    shares = [shard.nbytes for shard in fp.read_manifest(root / "replicas").shards]

    # The same bytes again; named writers; one writer.
    again = fp.save(state, root / "again", comm=comm, config=config())
    assert again.written_nbytes == report.written_nbytes
    for name in sorted(os.listdir(root / "replicas")):
        assert (root / "replicas" / name).read_bytes() == (root / "again" / name).read_bytes(), name
    one = fp.save(state, root / "one", comm=comm, config=config(writers=(size - 1,)))
    assert (one.written_nbytes > 0) == (rank == size - 1)
    assert_same(fp.load(root / "one"), state)
    auto = fp.save(state, root / "auto", comm=comm, config=fp.SaveConfig(drive_bytes_per_s=1e9))
    assert len(auto.writers) == 1
    assert "auto" in auto.writers_reason

    # Each rank has keys of its own, and a box of a larger tensor.
    rows = np.arange(1000 * 7.0).reshape(1000, 7)
    edges = [1000 * i // size for i in range(size + 1)]
    mine = {
        "shared": rows,
        "flat": fp.ShardOf(rows[edges[rank] : edges[rank + 1]], shape=(1000, 7), start=(edges[rank], 0)),
        "optimizer": {f"rank{rank}": {"m": np.full(1000, rank), "step": rank}, "common": np.ones(3)},
    }
    for step in range(2):  # the second time nothing is exchanged
        fp.save(mine, root / f"sharded_{step}", comm=comm, config=config())
    got = fp.load(root / "sharded_1")
    assert_same(got["flat"], rows)
    assert sorted(got["optimizer"]) == sorted(["common", *[f"rank{i}" for i in range(size)]])
    for i in range(size):
        assert_same(got["optimizer"][f"rank{i}"], {"m": np.full(1000, i), "step": i})

    # Overwriting, and not.
    fp.save({"v": np.zeros(10)}, root / "over", comm=comm)
    with pytest.raises((errors.CheckpointExistsError, errors.RankFailedError), match="exists"):
        fp.save({"v": np.ones(10)}, root / "over", comm=comm)
    fp.save({"v": np.ones(10)}, root / "over", comm=comm, overwrite=True)
    assert_same(fp.load(root / "over"), {"v": np.ones(10)})

    # What goes wrong on one rank goes wrong everywhere, and the next save works.
    bad = {"w": rows, "x": object() if rank == size - 1 else np.ones(2)}
    with pytest.raises(errors.FpMultiError) as caught:
        fp.save(bad, root / "bad", comm=comm)
    assert "UnsupportedLeafError" in str(caught.value) or isinstance(caught.value, errors.UnsupportedLeafError)
    assert not (root / "bad").exists()
    other_shape = {"w": np.ones((3, rank + 1))}
    with pytest.raises(errors.FpMultiError, match="shape"):
        fp.save(other_shape, root / "bad", comm=comm)
    fp.save(state, root / "good", comm=comm, config=config())

    # Each reads a share, all have everything.
    assert_same(fp.load(root / "good", comm=comm, broadcast=True), state)
    only = fp.load(root / "good", comm=comm, broadcast=True, only=["huge"])
    assert_same(only, {"huge": state["huge"]})
    target = odd_state(1)
    fp.load(root / "good", target=target, inplace=True, comm=comm, broadcast=True)
    assert_same(target["huge"], state["huge"])
    return {"shares": shares, "left": hidden_names(root)}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_saves_and_loads_of_several_ranks(tmp_path: Path, ranks: int) -> None:
    job = run_torch(check_saves, ranks, str(tmp_path))
    for result in job.results:
        assert result["left"] == []
        assert len(result["shares"]) >= ranks
    fp.verify(tmp_path / "replicas")


def check_checkpointer(directory: str, overlap: str) -> list[Any]:
    comm = make_comm()
    seen = []
    weights = np.random.default_rng(0).random((1024, 1024))
    with fp.Checkpointer(directory, overlap=overlap, keep=2, comm=comm, config=config()) as ckpt:  # type: ignore[arg-type]
        for step in range(5):
            weights += 1
            pending = ckpt.save(step, {"w": weights, "step": step})
            ckpt.wait_for_staging()
            weights += 0.5
            pending.wait()
            seen.append(pending.report.recycled)
        found, state = ckpt.restore()
        assert (found, state["step"]) == (4, 4)
        assert_same(state["w"], np.random.default_rng(0).random((1024, 1024)) + 1 + 4 * 1.5)
    return [seen, fp.Checkpointer(directory).steps()]


@pytest.mark.parametrize("overlap", ["hybrid", "borrow", "snapshot"])
def test_checkpointer_of_two_ranks(tmp_path: Path, overlap: str) -> None:
    job = run_torch(check_checkpointer, 2, str(tmp_path), overlap)
    for seen, steps in job.results:
        assert steps == [3, 4]
        assert seen == [False, False, False, True, True]
    assert hidden_names(tmp_path) == []
    for step in (3, 4):
        fp.verify(tmp_path / f"step_{step:08d}")


def check_death(directory: str, victim: int) -> str:
    from fp_multi import _save

    comm = make_comm(5.0)
    state = odd_state()
    fp.save(state, Path(directory) / "first", comm=comm, config=config())
    if comm.rank == victim:
        # In the middle of the save: its shard is being written.
        original = _save.PartWrite.finish
        _save.PartWrite.finish = lambda self, on_tick=None: die() or original(self, on_tick)  # type: ignore
    try:
        fp.save(state, Path(directory) / "second", comm=comm, config=config())
    except errors.CommError as error:
        return type(error).__name__
    return "saved"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_stops_the_save_everywhere(tmp_path: Path, victim: int) -> None:
    job = run_torch(check_death, 3, str(tmp_path), victim, dies=[victim])
    for rank, result in enumerate(job.results):
        if rank != victim:
            assert result == "CommTimeoutError"
    assert not (tmp_path / "second").exists()
    fp.verify(tmp_path / "first")
    # What the dead one left is swept by the next save.
    fp.save({"v": np.ones(3)}, tmp_path / "second")
    assert hidden_names(tmp_path) == []


def check_hosts(directory: str) -> list[Any]:
    """Each rank on a host of its own, as far as they know."""
    comm = make_comm()
    found = []
    for writers in (fp.per_node(1), "per_socket", "all"):
        path = Path(directory) / f"{len(found)}"
        report = fp.save(odd_state(), path, comm=comm, config=config(writers=writers))
        found.append((report.writers, report.writers_reason, report.written_nbytes))
        assert_same(fp.load(path), odd_state())
    return found


def test_writers_of_several_hosts(tmp_path: Path) -> None:
    job = run_torch(check_hosts, 4, str(tmp_path), env={"FP_MULTI_HOST_ID": "host{rank}"})
    for rank, found in enumerate(job.results):
        assert [writers for writers, _, _ in found] == [(0, 1, 2, 3)] * 3
        assert "hosts: 4" in found[0][1]
        assert all(nbytes for _, _, nbytes in found), f"rank {rank} has written nothing"


def check_full_drive(directory: str) -> list[str]:
    from fp_multi import _engine

    comm = make_comm()
    said = []
    for point, victim in (("fallocate", 1), ("write_completion", 0), ("fdatasync", 1)):
        if comm.rank == victim:
            _engine.inject_fault(point, error=errno.ENOSPC)
        try:
            fp.save(odd_state(), Path(directory) / "ckpt", comm=comm, config=config())
        except errors.FpMultiError as error:
            said.append(f"{type(error).__name__}: {error}")
        _engine.clear_faults()
        assert not (Path(directory) / "ckpt").exists()
    fp.save(odd_state(), Path(directory) / "ckpt", comm=comm, config=config())
    return said


def test_a_full_drive_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    job = run_torch(check_full_drive, 2, str(tmp_path))
    for rank, said in enumerate(job.results):
        assert len(said) == 3
        for victim, text in zip((1, 0, 1), said, strict=True):
            assert "No space left on device" in text
            assert text.startswith("StorageError" if rank == victim else "RankFailedError"), text
    fp.verify(tmp_path / "ckpt")
    assert hidden_names(tmp_path) == []
