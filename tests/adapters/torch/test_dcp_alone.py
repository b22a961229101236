"""dcp.save(use_collectives=False): every rank saves and loads a checkpoint of its own, in real processes."""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from multiprocess import run_torch  # noqa: E402
from torch.distributed._shard import sharded_tensor  # noqa: E402
from torch.distributed._shard.sharding_spec import ChunkShardingSpec  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh  # noqa: E402

import fp_multi as fp  # noqa: E402
from fp_multi import _engine  # noqa: E402
from fp_multi.adapters.torch.dcp import AsyncStager, StorageReader, StorageWriter  # noqa: E402
from fp_multi.errors import (  # noqa: E402
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ManifestError,
    TargetMismatchError,
)

QUICK = fp.SaveConfig(durable=False)
ROWS, COLUMNS = 384, 96
FULL = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)


def writer(**how: Any) -> StorageWriter:
    return StorageWriter(config=QUICK, **how)


def save(state: dict[str, Any], path: Path, **how: Any) -> Any:
    how.setdefault("storage_writer", writer())
    return dcp.save(state, checkpoint_id=path, use_collectives=False, **how)


def load(state: dict[str, Any], path: Path) -> None:
    dcp.load(state, checkpoint_id=path, storage_reader=StorageReader())


def hidden_in(path: Path) -> list[str]:
    return [name for name in os.listdir(path) if name.startswith(".")]


def pieces_of(full: Any) -> Any:
    """A ShardedTensor with two parts on every rank, not side by side."""
    ranks = dist.get_world_size()
    placements = [f"rank:{rank}/cpu" for rank in (*range(ranks), *range(ranks))]
    made = sharded_tensor.empty(ChunkShardingSpec(dim=0, placements=placements), *full.shape, init_rrefs=False)
    for shard in made.local_shards():
        begin, length = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        shard.tensor.copy_(full[begin : begin + length])
    return made


def state_of(seed: float) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    full = FULL + seed
    stream = io.BytesIO(b"%d of %d" % (rank, ranks))
    stream.seek(3)
    return {
        "same": full.clone(),
        # Under one name, but the rank's own: that is what this way of saving is for.
        "own": torch.full((2, 3), rank + seed, dtype=torch.bfloat16),
        "replicated": distribute_tensor(full * 2, mesh, [Replicate()]),
        "nested": {"rows": distribute_tensor(full * 3, mesh, [Shard(0)]), "list": [full[0].clone(), {"lr": seed}]},
        "columns": distribute_tensor(full * 4, mesh, [Shard(1)]),
        "few": distribute_tensor(full[: ranks - 1] * 5, mesh, [Shard(0)]),  # nothing of it is the last rank's
        "pieces": pieces_of(full * 6),
        "nothing": torch.empty(0, 4),
        "step": int(seed),
        "values": [rank, "x", None, (1, 2.5)],
        "stream": stream,
    }


def zeroed(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeroed(value) for value in state]
    if isinstance(state, sharded_tensor.ShardedTensor):
        return pieces_of(FULL * 0)
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def check_equal(a: Any, b: Any, path: str = "state") -> None:
    if isinstance(a, DTensor):
        a, b = a.to_local(), b.to_local()
    if isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            check_equal(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, sharded_tensor.ShardedTensor):
        for one, other in zip(a.local_shards(), b.local_shards(), strict=True):
            assert torch.equal(one.tensor, other.tensor), path
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(a, b), path
    elif isinstance(a, list):
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            check_equal(one, other, f"{path}.{number}")
    elif isinstance(a, io.BytesIO):
        assert (a.getvalue(), a.tell()) == (b.getvalue(), b.tell()), path
    else:
        assert a == b, path


def check_round_trip(directory: Path) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    path = directory / "saved"
    for seed in (1.0, 2.0):  # the second one replaces the first
        state = state_of(seed)
        save(state, path)
        assert sorted(os.listdir(path)) == [f"rank-{number:05d}" for number in range(ranks)]
        found = zeroed(state)
        load(found, path)
        check_equal(found, state)
        dist.barrier()
    # An ordinary checkpoint, in which a part of a tensor is a tensor.
    own = path / f"rank-{rank:05d}"
    fp.verify(own)
    loaded = fp.load(own)
    assert loaded["values"] == [rank, "x", None, (1, 2.5)]
    assert torch.equal(torch.from_numpy(loaded["nested"]["rows"]), state["nested"]["rows"].to_local())
    assert torch.equal(torch.from_numpy(loaded["columns"]), state["columns"].to_local())
    assert loaded["few"].shape == ((1, COLUMNS) if rank < ranks - 1 else (0, COLUMNS))
    assert [part.shape[1] for part in loaded["pieces"]] == [COLUMNS, COLUMNS]
    assert loaded["replicated"].shape == (ROWS, COLUMNS)
    # Without flattening the tree is DCP's names.
    plain = {"a.rows": state["nested"]["rows"], "own": state["own"], "values": {"rank": rank}}
    save(plain, directory / "flat", planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    found = {"a.rows": torch.zeros_like(plain["a.rows"]), "own": torch.zeros_like(state["own"]), "values": None}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(found, checkpoint_id=directory / "flat", storage_reader=StorageReader(), planner=planner)
    check_equal(found, plain)
    # Another rank's, by its own path.
    other = {"own": torch.zeros(2, 3, dtype=torch.bfloat16)}
    dcp.load(other, storage_reader=StorageReader(path / f"rank-{ranks - 1 - rank:05d}"), no_dist=True)
    assert other["own"][0, 0] == ranks + 1 - rank
    dist.barrier()


def check_refusals(directory: Path) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    path, together = directory / "saved", directory / "together"
    state = state_of(2.0)
    with pytest.raises(CheckpointExistsError, match="already exists"):
        save(state, path, storage_writer=writer(overwrite=False))
    with pytest.raises(CheckpointException, match="holds other directories"):
        dcp.save(state, checkpoint_id=path, storage_writer=writer())
    dcp.save({"w": FULL.clone()}, checkpoint_id=together, storage_writer=writer())
    with pytest.raises(CheckpointExistsError, match="a checkpoint of all ranks is here"):
        save(state, together)
    dist.barrier()
    mesh = init_device_mesh("cpu", (ranks,))
    for placement in (Shard(1), Replicate()):
        other = {"nested": {"rows": distribute_tensor(FULL * 0, mesh, [placement])}}
        with pytest.raises(TargetMismatchError, match=r"nested\.rows: .* of them are here"):
            load(other, path)
        dist.barrier()
    # A planner's cached plan is for one way of saving.
    planner = Cached(enable_plan_caching=True)
    save({"w": FULL.clone()}, directory / "mixed", planner=planner)
    with pytest.raises(CheckpointException, match="the other use_collectives"):
        dcp.save({"w": FULL.clone()}, checkpoint_id=directory / "mixed-2", storage_writer=writer(), planner=planner)
    assert not hidden_in(directory)
    dist.barrier()
    # A byte that changed.
    if rank == 1:
        (shard,) = (path / "rank-00001").glob("*.safetensors")
        with shard.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(CorruptCheckpointError):
            fp.verify(path / "rank-00001")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path / "rank-00001")
    dist.barrier()
    with pytest.raises(CheckpointException, match="this rank has saved nothing here"):
        load(zeroed(state), path)
    dist.barrier()


class Cached(dcp.DefaultSavePlanner):
    """With a cache of its own."""


class CachedAgain(dcp.DefaultSavePlanner):
    """With a cache of its own."""


def check_cached_plans(directory: Path) -> None:
    for number in range(3):
        path = directory / f"cached-{number}"
        full = FULL.to(torch.bfloat16 if number == 2 else torch.float32) + number
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = {"w": full, "d": distribute_tensor(full, mesh, [Shard(0)]), "step": number}
        metadata = save(state, path, planner=CachedAgain(enable_plan_caching=True))
        assert metadata.state_dict_metadata["d"].properties.dtype == full.dtype
        found = zeroed(state)
        load(found, path)
        check_equal(found, state)


def check_async(directory: Path) -> None:
    path = directory / "async"
    for stager in (AsyncStager("hybrid"), None):
        state, expected = state_of(3.0), state_of(3.0)
        future = dcp.async_save(
            state, checkpoint_id=path, storage_writer=writer(), async_stager=stager, use_collectives=False
        )
        state["same"].zero_()
        for shard in state["pieces"].local_shards():
            shard.tensor.zero_()
        future.result()
        if stager is not None:
            stager.close()
        found = zeroed(expected)
        load(found, path)
        check_equal(found, expected)
        dist.barrier()


def check_killed(directory: Path) -> None:
    """One rank is killed in the middle of its write; the others go on."""
    path = directory / "killed"
    save(state_of(1.0), path)
    if dist.get_rank() == 1:
        _engine.inject_fault("fallocate", kill=True)
    with pytest.raises(RuntimeError, match="gloo"):
        save(state_of(2.0), path)


def check_all(directory: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    check_round_trip(directory)
    check_refusals(directory)
    check_cached_plans(directory)
    check_async(directory)
    check_killed(directory)


@pytest.mark.parametrize("ranks", [2, 3])
def test_alone(tmp_path: Path, ranks: int) -> None:
    job = run_torch(check_all, ranks, tmp_path, dies=(1,))
    assert job.codes[1] == -9, job.outputs[1]
    path = tmp_path / "killed"
    for rank in range(ranks):
        fp.verify(path / f"rank-{rank:05d}")
        assert fp.load(path / f"rank-{rank:05d}")["step"] == (1 if rank == 1 else 2)
    # What the dead rank left goes with the next save there; that may be one of the others', if it began late.
    assert len(hidden_in(path)) <= 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"step": 3}, path)
    assert not hidden_in(path)
    assert fp.load(path / "rank-00000")["step"] == 3


def test_one_process(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"w": FULL.clone(), "step": 1}, tmp_path / "c")
        found = {"w": torch.zeros_like(FULL), "step": None}
        load(found, tmp_path / "c")
        assert torch.equal(found["w"], FULL)
        assert found["step"] == 1
        with pytest.raises(CheckpointNotFoundError, match="every rank saved for itself"):
            StorageReader(tmp_path / "c").read_metadata()


@pytest.mark.parametrize(
    "part",
    [
        {"shape": [4, 3], "offsets": [[0, 0]]},  # there are two
        {"shape": [4, 3], "offsets": [[0, 0], [3, 0]]},
        {"shape": [4, 3], "offsets": [[0, 0], [-1, 0]]},
        {"shape": [4], "offsets": [[0], [2]]},
    ],
)
def test_damaged_note(tmp_path: Path, part: dict[str, Any]) -> None:
    note = json.dumps({"parts": [{"path": ["w"], **part}]})
    two = [np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)]
    fp.save({"w": two}, tmp_path / "c", metadata={"torch.distributed.checkpoint": note})
    with pytest.raises(ManifestError, match="do not agree about the parts of w"):
        StorageReader(tmp_path / "c").read_metadata()


def test_parts_of_one_tensor(tmp_path: Path) -> None:
    note = json.dumps({"parts": [{"path": ["w"], "shape": [4, 3], "offsets": [[2, 0], [0, 0]]}]})
    two = [np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)]
    fp.save({"w": two}, tmp_path / "c", metadata={"torch.distributed.checkpoint": note})
    found = {"w": torch.full((4, 3), 5.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, storage_reader=StorageReader(tmp_path / "c"))
    assert found["w"][:, 0].tolist() == [0, 0, 1, 1]
