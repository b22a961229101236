"""dcp.save and dcp.load through our storage in real processes: who writes what, resharding, failures, killed ranks."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from multiprocess import run_torch  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh  # noqa: E402

import fp_multi as fp  # noqa: E402
import fp_multi.adapters.torch as adapter  # noqa: E402
from fp_multi import _engine  # noqa: E402
from fp_multi.adapters.torch.dcp import AsyncStager, StorageReader, StorageWriter  # noqa: E402

QUICK = fp.SaveConfig(durable=False)
ROWS, COLUMNS = 3 * 1024, 512  # 6 MiB of float32: is cut
FULL = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)


def writer(**how: Any) -> StorageWriter:
    return StorageWriter(config=QUICK, **how)


def hidden_in(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".")]


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def state_of(full: Any) -> dict[str, Any]:
    """Tensors of every kind that DCP knows, made of one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    more = {}
    if size == 4:
        square = init_device_mesh("cpu", (2, 2))
        more = {
            "hybrid": distribute_tensor(full * 10, square, [Replicate(), Shard(0)]),
            "grid": distribute_tensor(full * 11, square, [Shard(0), Shard(1)]),
            "twice": distribute_tensor(full * 12, square, [Shard(0), Shard(0)]),
        }
    return more | {
        "plain": full.clone(),
        "replicated": distribute_tensor(full * 2, mesh(), [Replicate()]),
        "rows": distribute_tensor(full * 3, mesh(), [Shard(0)]),
        "columns": distribute_tensor(full * 4, mesh(), [Shard(1)]),
        # Fewer rows than ranks, or not a multiple of them: some shards are short or empty.
        "few": distribute_tensor(full[: size - 1] * 5, mesh(), [Shard(0)]),
        "sharded": sharded_tensor(full * 6),
        "nested": {"scalar": torch.tensor(7.0), "list": [full[0] * 8, {"lr": 0.5}], "empty": torch.empty(0, 3)},
        "step": 9,
        f"own {rank}": torch.full((4,), float(rank)),
        f"value {rank}": [rank, None],
    }


def sharded_tensor(full: Any, rows: Callable[[int, int], tuple[int, int]] | None = None) -> Any:
    """A ShardedTensor of unequal rows, two shards a rank."""
    from torch.distributed._shard import sharded_tensor as module
    from torch.distributed._shard.metadata import ShardMetadata

    rank, size = dist.get_rank(), dist.get_world_size()
    count = 2 * size
    cuts = [i * full.shape[0] // (count + 1) for i in range(count)] + [full.shape[0]]
    shards = []
    for i in range(count):
        if i % size == rank:
            placed = ShardMetadata([cuts[i], 0], [cuts[i + 1] - cuts[i], full.shape[1]], f"rank:{rank}/cpu")
            shards.append(module.Shard(full[cuts[i] : cuts[i + 1]].clone(), placed))
    return module.init_from_local_shards(shards, list(full.shape))


def local_of(value: Any) -> list[Any]:
    if isinstance(value, DTensor):
        return [value.to_local()]
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    return [value]


def zeroed(state: Any) -> Any:
    """The same state with other values, to be loaded into."""
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeroed(value) for value in state]
    if isinstance(state, torch.Tensor):
        for local in local_of(state):
            local.zero_()
        return state
    return None


def check_equal(found: Any, expected: Any, where: str = "state") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            check_equal(found[key], value, f"{where}.{key}")
    elif isinstance(expected, torch.Tensor):
        for a, b in zip(local_of(found), local_of(expected), strict=True):
            assert a.dtype == b.dtype, where
            assert torch.equal(a, b), where
    elif isinstance(expected, list) and any(isinstance(one, torch.Tensor) for one in expected):
        for i, value in enumerate(expected):
            check_equal(found[i], value, f"{where}[{i}]")
    else:
        assert found == expected, (where, found, expected)


def round_trip(path: Path, **how: Any) -> None:
    dcp.save(state_of(FULL), checkpoint_id=path, storage_writer=writer(), **how)
    found = zeroed(state_of(FULL))
    dcp.load(found, checkpoint_id=path, storage_reader=StorageReader())
    check_equal(found, state_of(FULL))


def check_save(directory: Path) -> None:
    size = dist.get_world_size()
    path = directory / "saved"
    round_trip(path)
    if dist.get_rank() == 0:
        fp.verify(path)
        loaded = fp.load(path)
        assert loaded["step"] == 9
        assert torch.equal(torch.from_numpy(loaded["rows"]), FULL * 3)
        assert torch.equal(torch.from_numpy(loaded["sharded"]), FULL * 6)
        assert loaded["value 1"] == [1, None]
        assert loaded["own 1"].tolist() == [1.0] * 4
        # What all ranks have is divided among them: the files are of one size, but for a unit and the small things.
        written = {rank: 0 for rank in range(size)}
        for shard in fp.read_manifest(path).shards:
            written[shard.rank] += shard.nbytes
        assert max(written.values()) - min(written.values()) < 2 << 20, written
    dist.barrier()


def check_planners(directory: Path) -> None:
    round_trip(directory / "lowest", planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    for number in range(3):
        # From the second save on DCP hands out the plan of the first one: with another place, and other dtypes.
        path = directory / f"cached-{number}"
        full = FULL[:512].to(torch.bfloat16 if number == 2 else torch.float32)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        state = {"w": full + number, "d": distribute_tensor(full, mesh(), [Shard(0)]), "step": number}
        metadata = dcp.save(state, checkpoint_id=path, storage_writer=writer(), planner=planner)
        assert metadata.state_dict_metadata["w"].properties.dtype == full.dtype
        found = {"w": torch.zeros_like(full), "d": zeroed(distribute_tensor(full, mesh(), [Shard(1)])), "step": None}
        dcp.load(found, checkpoint_id=path, storage_reader=StorageReader())
        assert found["step"] == number
        assert torch.equal(found["w"], full + number)
        assert torch.equal(found["d"].full_tensor(), full)
    # Another state, of which one rank's final plan is the same as before: nothing, both times.
    for rows in (512, 640):
        planner = LowestCached(dedup_save_to_lowest_rank=True, enable_plan_caching=True)
        dcp.save({"w": FULL[:rows].clone()}, checkpoint_id=directory / "l", storage_writer=writer(), planner=planner)
        out = {"w": torch.zeros(rows, COLUMNS)}
        dcp.load(out, checkpoint_id=directory / "l", storage_reader=StorageReader())
        assert torch.equal(out["w"], FULL[:rows])
    assert not hidden_in(directory)


class LowestCached(dcp.DefaultSavePlanner):
    """With a cache of its own."""


def check_writers(directory: Path) -> None:
    path = directory / "one-writer"
    some = StorageWriter(path, config=fp.SaveConfig(durable=False, writers=(1,)))
    dcp.save({"w": FULL.clone()}, storage_writer=some)
    assert {shard.rank for shard in fp.read_manifest(path).shards if shard.nbytes > 1 << 20} == {1}


def check_errors(directory: Path) -> None:
    """An error on one rank fails the save on all, and leaves nothing."""
    rank, size = dist.get_rank(), dist.get_world_size()
    path = directory / "failing"
    kept = {"w": FULL.clone(), "step": 1}
    dcp.save(kept, checkpoint_id=path, storage_writer=writer())
    for failing, point in ((0, "open"), (1, "open"), (0, "fallocate"), (1, "fallocate"), (0, "rename")):
        own = writer()
        if rank == failing:
            _engine.inject_fault(point, error=28)
        with pytest.raises(CheckpointException, match="No space left"):
            dcp.save({"w": FULL + 1, "step": 2}, checkpoint_id=path, storage_writer=own)
        _engine.clear_faults()
        assert not hidden_in(directory)
    for number, bad in enumerate((0, size - 1)):
        unsupported = {"w": FULL + 1, f"bad {rank}": object() if rank == bad else number}
        with pytest.raises(CheckpointException, match=rf"bad {bad}"):
            dcp.save(unsupported, checkpoint_id=path, storage_writer=writer())
        assert not hidden_in(directory)
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        dcp.save(kept, checkpoint_id=path, storage_writer=writer(overwrite=False))
    dist.barrier()
    found = {"w": torch.zeros_like(FULL), "step": 0}
    dcp.load(found, checkpoint_id=path, storage_reader=StorageReader())
    check_equal(found, kept)
    assert not hidden_in(directory)


def check_fsdp(directory: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    def made(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 7))
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        train(model, optimizer, seed)
        return model, optimizer

    def train(model: Any, optimizer: Any, steps: int = 1) -> Any:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 32) * (dist.get_rank() + 1)).square().sum().backward()
            optimizer.step()

    for flat in (False, True):
        path = directory / f"fsdp-{flat}"
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optimizer = made(1)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=path, storage_writer=writer())
        other, its = made(2)
        model_state, optimizer_state = get_state_dict(other, its, options=options)
        state = {"model": model_state, "optim": optimizer_state}
        dcp.load(state, checkpoint_id=path, storage_reader=StorageReader())
        set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
        train(model, optimizer)
        train(other, its)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local())
        assert its.param_groups[0]["lr"] == 0.1

    # The background save reads the parameters where they are; the step waits for it.
    stager = AsyncStager("hybrid")
    stager.attach(optimizer)
    state = {"model": get_state_dict(model, [])[0], "note": [1]}
    expected = {key: value.to_local().clone() for key, value in state["model"].items()}
    with dcp_group() as group:
        future = dcp.async_save(
            state,
            checkpoint_id=directory / "fsdp-async",
            storage_writer=writer(),
            async_stager=stager,
            process_group=group,
        )
        train(model, optimizer)
        state["note"][0] = 2
        future.result()
    stager.close()
    found = {"model": zeroed(get_state_dict(model, [])[0]), "note": None}
    dcp.load(found, checkpoint_id=directory / "fsdp-async", storage_reader=StorageReader())
    assert found["note"] == [1]
    for key, value in expected.items():
        assert torch.equal(found["model"][key].to_local(), value)


class dcp_group:
    """A group of its own for a background save: its collectives must not meet the training's."""

    def __enter__(self) -> Any:
        self.group = dist.new_group()
        return self.group

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group(self.group)


def check_load(directory: Path) -> None:
    """What other numbers of ranks have saved."""
    for path in sorted(directory.iterdir()):
        found = {
            "plain": torch.zeros(ROWS, COLUMNS),
            "replicated": distribute_tensor(FULL * 0, mesh(), [Shard(1)]),
            "rows": distribute_tensor(FULL * 0, mesh(), [Shard(1)]),
            "columns": distribute_tensor(FULL * 0, mesh(), [Shard(0)]),
            "sharded": distribute_tensor(FULL * 0, mesh(), [Replicate()]),
            **{name: torch.zeros_like(FULL) for name in ("hybrid", "grid", "twice")},
            "nested": {"list": [torch.zeros(COLUMNS, dtype=torch.float64), {"lr": None}]},
        }
        reader = StorageReader(path)
        dcp.load(found, storage_reader=reader, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        assert torch.equal(found["plain"], FULL)
        for number, name in enumerate(("hybrid", "grid", "twice")):
            assert torch.equal(found[name], FULL * (10 + number)), name
        for number, name in ((2, "replicated"), (3, "rows"), (4, "columns"), (6, "sharded")):
            assert torch.equal(found[name].full_tensor(), FULL * number), name
        assert torch.equal(found["nested"]["list"][0], FULL[0].double() * 8)
        assert found["nested"]["list"][1] == {"lr": 0.5}


def check_process(directory: Path) -> None:
    """In a process beside the training, to which the writer is pickled."""
    torch.manual_seed(0)
    model = torch.nn.Linear(COLUMNS, 64)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stager = AsyncStager()
    stager.attach(optimizer)
    for number in range(2):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        path = directory / f"process-{number}"
        future = dcp.async_save(
            {"model": model.state_dict(), "step": number},
            checkpoint_id=path,
            storage_writer=writer(),
            async_stager=stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        optimizer.step()
        future.result()
        loaded = fp.load(path)
        assert loaded["step"] == number
        for key, value in before.items():
            assert torch.equal(torch.from_numpy(loaded["model"][key]), value)
    future = dcp.async_save(
        {"step": 1},
        checkpoint_id=path,
        storage_writer=writer(overwrite=False),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        future.result()
    stager.close()


def check_killed(directory: Path) -> None:
    """One rank is killed in the middle of its write."""
    path, own = directory / "killed", writer()
    dcp.save({"w": FULL.clone()}, checkpoint_id=path, storage_writer=writer())
    if dist.get_rank() == 1:
        _engine.inject_fault("fallocate", kill=True)
    with pytest.raises(RuntimeError, match="gloo"):
        dcp.save({"w": FULL + 1}, checkpoint_id=path, storage_writer=own)
    assert len(hidden_in(directory)) == 1
    del own
    gc.collect()
    assert not hidden_in(directory)
    assert torch.equal(torch.from_numpy(fp.load(path)["w"]), FULL)


def start() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def check_and_save(directory: Path) -> None:
    start()
    round_trip(directory / "four")


def check_all(directory: Path, saved: Path) -> None:
    start()
    check_load(saved)
    check_save(directory)
    check_planners(directory)
    check_writers(directory)
    check_errors(directory)
    check_fsdp(directory)
    check_process(directory)
    assert not hidden_in(directory)
    dist.barrier()
    check_killed(directory)


def test_ranks(tmp_path: Path) -> None:
    saved, directory = tmp_path / "saved", tmp_path / "two"
    saved.mkdir()
    directory.mkdir()
    run_torch(check_and_save, 4, saved)
    fp.verify(saved / "four")
    job = run_torch(check_all, 2, directory, saved, dies=(1,))
    assert job.codes[1] == -9, job.outputs[1]
    # One process reads what two and four have saved.
    for path, count in ((saved / "four", 4), (directory / "saved", 2)):
        loaded = adapter.load(path)
        assert torch.equal(loaded["columns"], FULL * 4)
        assert torch.equal(loaded["few"], FULL[: count - 1] * 5)
        found = {"columns": torch.zeros_like(FULL), "sharded": torch.zeros_like(FULL), f"value {count - 1}": None}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(found, storage_reader=StorageReader(path))
        assert torch.equal(found["columns"], FULL * 4)
        assert torch.equal(found["sharded"], FULL * 6)
        assert found[f"value {count - 1}"] == [count - 1, None]
