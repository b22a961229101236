"""The handler in real processes of jax.distributed on the CPU: who writes what, who reads what, who hears of errors."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from multiprocess import run_jax

jax = pytest.importorskip("jax")
pytest.importorskip("orbax.checkpoint")

import fp_multi as fp  # noqa: E402
from fp_multi import _engine  # noqa: E402
from fp_multi.errors import RankFailedError  # noqa: E402

SOON_S = 30.0
"""Far less than Orbax's own time limit of 20 minutes."""


def mesh_of(shape: tuple[int, ...]) -> Any:
    devices = np.array(jax.devices()[: int(np.prod(shape))])
    return jax.sharding.Mesh(devices.reshape(shape), ("x", "y")[: len(shape)])


def spread(array: Any, mesh: Any, *axes: Any) -> Any:
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


BASE = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
BIG = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)


def state_of(mesh: Any) -> dict[str, Any]:
    return {
        "rows": spread(BASE, mesh, "x"),
        "grid": spread(BASE + 1, mesh, "x", "y"),
        "columns": spread(BASE + 2, mesh, None, "x"),
        "replicas": spread(BIG, mesh),
        "half": spread(BIG + 3, mesh, "y"),
        "numpy": BASE + 4,
        "step": 7,
        "name": "run",
        "local": jax.numpy.ones(3),
    }


def whole(value: Any) -> np.ndarray[Any, Any]:
    """The values of an array, as far as they are here: elsewhere zeros."""
    found = np.zeros(value.shape, value.dtype)
    for shard in value.addressable_shards:
        found[shard.index] = np.asarray(shard.data)
    return found


def check_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, jax.Array):
        assert found.sharding == expected.sharding
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(whole(found), whole(expected))
    else:
        np.testing.assert_array_equal(found, expected)


def save(manager: Any, step: int, state: Any) -> None:
    from fp_multi.adapters.orbax import FastPersistSave

    assert manager.save(step, args=FastPersistSave(state))
    manager.wait_until_finished()


def check_everything(directory: str) -> dict[str, Any]:
    """One job: save, restore in several ways, fail here and there. What the test looks at afterwards is returned."""
    import orbax.checkpoint as ocp

    from fp_multi.adapters.orbax import FastPersistHandler, FastPersistRestore, FastPersistSave

    rank, count = jax.process_index(), jax.process_count()
    mesh = mesh_of((count, 2))
    state = state_of(mesh)
    with ocp.CheckpointManager(directory) as manager:
        save(manager, 0, state)
        found = manager.restore(0)
        for name in state:
            check_same(found[name], state[name])
        target = {
            **state,
            "rows": jax.ShapeDtypeStruct(
                BASE.shape,
                jax.numpy.bfloat16,
                sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x")),
            ),
            "grid": spread(np.zeros_like(BASE), mesh_of((2 * count,)), "x"),
        }
        found = manager.restore(0, args=FastPersistRestore(target))
        assert found["rows"].dtype == jax.numpy.bfloat16
        np.testing.assert_array_equal(whole(found["grid"]), whole(spread(BASE + 1, mesh_of((2 * count,)), "x")))
        # One process cannot describe its state, or cannot write: all hear of it, soon, from that process.
        for step, failing in ((1, 0), (2, count - 1)):
            begin_s = time.monotonic()
            _engine.clear_faults()
            if rank == failing:
                _engine.inject_fault("write_completion", at=1, error=5)
            kind: Any = OSError if rank == failing else RankFailedError
            with pytest.raises(kind) as caught:
                save(manager, step, state)
            _engine.clear_faults()
            assert time.monotonic() - begin_s < SOON_S
            if rank != failing:
                assert isinstance(caught.value, RankFailedError)
                assert caught.value.rank == failing
        save(manager, 3, state)
        assert manager.all_steps() == [0, 3]
    with pytest.raises((TypeError, RankFailedError)):
        FastPersistHandler().save(Path(directory), args=FastPersistSave({"a": object() if rank == 0 else 1}))
    return {"rank": rank}


def check_some(directory: str) -> None:
    """Two of the processes have a manager of their own; and each has a checkpoint of its own."""
    import orbax.checkpoint as ocp

    from fp_multi.adapters.orbax import FastPersistHandler, FastPersistRestore, FastPersistSave

    rank = jax.process_index()
    own = ocp.options.MultiprocessingOptions(primary_host=None)
    handler = FastPersistHandler(multiprocessing_options=own)
    place = Path(directory) / f"own-{rank}"
    place.mkdir()
    handler.save(place, args=FastPersistSave({"a": jax.numpy.full(3, float(rank)), "b": rank}))
    handler.finalize(place)
    assert handler.restore(place)["a"].tolist() == [rank] * 3
    with pytest.raises(TypeError, match="do not take part in the save"):
        handler.save(place, args=FastPersistSave({"a": spread(BASE, mesh_of((4, 2)), "x")}))

    active = {1, 3}
    if rank not in active:
        return
    devices = np.array([device for device in jax.devices() if device.process_index in active])
    mesh = jax.sharding.Mesh(devices.reshape(2, 2), ("x", "y"))
    state = {"grid": spread(BASE, mesh, "x", "y"), "rows": spread(BASE + 1, mesh, "y"), "n": np.arange(3)}
    some = ocp.options.MultiprocessingOptions(primary_host=1, active_processes=active, barrier_sync_key_prefix="some")
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=some)
    handlers = FastPersistHandler(multiprocessing_options=some)
    with ocp.CheckpointManager(Path(directory) / "some", options=options, item_handlers=handlers) as manager:
        save(manager, 0, state)
        found = manager.restore(0, args=FastPersistRestore(state))
        for name in state:
            check_same(found[name], state[name])


def test_some_of_the_processes(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    run_jax(check_some, 4, str(tmp_path), devices=2)
    np.testing.assert_array_equal(fp.load(tmp_path / "some" / "0" / "default")["grid"], BASE)
    assert {shard.rank for shard in fp.read_manifest(tmp_path / "some" / "0" / "default").shards} == {0, 1}
    assert [fp.load(tmp_path / f"own-{rank}")["b"] for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("processes", [2, 4])
def test_processes(tmp_path: Path, processes: int) -> None:
    run_jax(check_everything, processes, str(tmp_path / "run"), devices=2)
    item = tmp_path / "run" / "0" / "default"
    assert not [name for name in os.listdir(item) if name.startswith(".part")]
    found = fp.load(item)
    np.testing.assert_array_equal(found["grid"], BASE + 1)
    np.testing.assert_array_equal(found["replicas"], BIG)
    np.testing.assert_array_equal(found["half"], BIG + 3)
    fp.verify(item)
    # Written once, and by all: replicas are divided, and no byte stands twice.
    manifest = fp.read_manifest(item)
    sizes = {shard.rank: 0 for shard in manifest.shards}
    for shard in manifest.shards:
        sizes[shard.rank] += shard.nbytes
    assert sorted(sizes) == list(range(processes))
    assert sum(sizes.values()) < 1.05 * manifest.totals.tensor_nbytes + 8192 * len(manifest.shards)
    assert max(sizes.values()) - min(sizes.values()) < 1.2 * (1 << 20)
