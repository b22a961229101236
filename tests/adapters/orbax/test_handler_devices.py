"""Arrays over many devices: saved without a gather, restored on other meshes, only what is needed read."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support import check_child

pytest.importorskip("jax")
pytest.importorskip("orbax.checkpoint")

PRELUDE = """
    import itertools
    from pathlib import Path
    import jax, jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
    import orbax.checkpoint as ocp
    from fp_multi._partial import CheckpointReader
    from fp_multi.adapters.orbax import FastPersistHandler, FastPersistRestore, FastPersistSave, load
    from fp_multi.errors import TargetMismatchError

    root = Path(sys.argv[1])
    def mesh_of(*shape):
        return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("x", "y", "z")[: len(shape)])
    def on(array, mesh, *axes):
        return jax.device_put(array, NamedSharding(mesh, P(*axes)))
    def same(found, expected):
        assert type(found) is type(expected) and found.dtype == expected.dtype, (found, expected)
        assert found.sharding == expected.sharding, (found.sharding, expected.sharding)
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    base = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
    large = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
"""


def in_devices(count: int, code: str, *arguments: object) -> str:
    environment: Any = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
    return check_child(textwrap.dedent(PRELUDE) + textwrap.dedent(code), *arguments, env=environment)


SAVE = """
    mesh = mesh_of(4, 2)
    specs = [(), ("x",), ("y", "x"), (None, "y"), (("x", "y"),), (None, ("y", "x"))]
    state = {
        "small": [on(base + i, mesh, *spec) for i, spec in enumerate(specs)],
        "large": [on(large + i, mesh, *spec) for i, spec in enumerate(specs)],
        "one": jax.device_put(base, jax.devices()[3]),
        "key": on(jax.random.split(jax.random.key(1), 8), mesh, "x"),
        "empty": on(np.zeros((8, 0)), mesh, "x"),
        "scalar": on(np.float32(3), mesh),
        "bf16": on(jnp.asarray(base, jnp.bfloat16), mesh, "x", "y"),
        "cube": on(np.arange(64.0, dtype=np.float32).reshape(4, 4, 4), mesh_of(2, 2, 2), "x", "y", "z"),
    }
    with ocp.CheckpointManager(root / "run") as manager:
        manager.save(0, args=FastPersistSave(state))
        donated = [jax.jit(lambda a: a * 0 - 1, donate_argnums=0)(a) for a in (state["large"][2], state["large"][5])]
        jax.block_until_ready(donated)
        state["large"][4].delete()
        manager.wait_until_finished()
        state["large"] = [on(large + i, mesh, *spec) for i, spec in enumerate(specs)]
        fp.verify(root / "run" / "0" / "default")
        # As it was.
        found = manager.restore(0)
        key, own = found.pop("key"), state.pop("key")
        assert key.sharding == own.sharding and (key == own).all()
        jax.tree.map(same, found, state)
        # Nothing was gathered, and nothing is there twice.
        manifest = fp.read_manifest(root / "run" / "0" / "default")
        assert manifest.totals.shard_nbytes < manifest.totals.tensor_nbytes + 8192 * len(manifest.shards) + 65536
    plain = fp.load(root / "run" / "0" / "default")
    np.testing.assert_array_equal(plain["large"][2], large + 2)
    np.testing.assert_array_equal(plain["cube"], np.arange(64.0).reshape(4, 4, 4))
"""

RESTORE = """
    handler = FastPersistHandler()
    item = root / "run" / "0" / "default"
    count = len(jax.devices())
    def target(a, dtype=np.float32, **how):
        return jax.ShapeDtypeStruct(a.shape, dtype, **how)
    meshes = [mesh_of(count), mesh_of(1, count)] + ([mesh_of(count // 2, 2)] if count > 2 else [])
    for mesh in meshes:
        axes = [None, *mesh.axis_names]
        for spec in [*itertools.product(axes, axes), (tuple(mesh.axis_names), None)]:
            if spec[0] is not None and spec[0] == spec[1]:
                continue
            where = NamedSharding(mesh, P(*spec))
            found = handler.restore(item, args=FastPersistRestore({
                "small": [target(base, sharding=where) for _ in range(6)],
                "bf16": target(base, jnp.float32, sharding=where),
            }, partial_restore=True))
            for i, array in enumerate(found["small"]):
                same(array, jax.device_put(base + i, where))
            assert found["bf16"].sharding == where
    where = NamedSharding(mesh_of(count), P("x"))
    reads = []
    read = CheckpointReader.read
    def counted(reader, requests):
        done = read(reader, requests)
        reads.append((len(requests), reader.wanted_nbytes, reader.drive_nbytes))
        return done
    CheckpointReader.read = counted
    wanted_key = jax.ShapeDtypeStruct((8,), jax.random.key(0).dtype, sharding=where)
    found = handler.restore(item, args=FastPersistRestore(
        {"large": [target(large, sharding=where)] * 6, "key": wanted_key}, partial_restore=True))
    for i, array in enumerate(found["large"]):
        same(array, jax.device_put(large + i, where))
    assert found["key"].sharding == where and (found["key"] == jax.random.split(jax.random.key(1), 8)).all()
    ((_, wanted, drive),) = reads
    assert wanted == 6 * large.nbytes + 64
    assert drive < 1.05 * wanted + (1 << 20), (drive, wanted)
    reads.clear()
    # Replicas are read once.
    found = handler.restore(item, args=FastPersistRestore(
        {"large": [target(large, sharding=NamedSharding(mesh_of(count), P()))]}, partial_restore=True))
    ((requests, wanted, drive),) = reads
    assert (requests, wanted) == (1, large.nbytes)
    for shard in found["large"][0].addressable_shards:
        np.testing.assert_array_equal(shard.data, large)
    # One that is given away does not take the others with it.
    parts = [shard.data for shard in found["large"][0].addressable_shards]
    jax.jit(lambda a: a * 0 - 1, donate_argnums=0)(parts[0]).block_until_ready()
    for part in parts[1:]:
        np.testing.assert_array_equal(part, large)
    uneven = jax.ShapeDtypeStruct((15, 24), np.float32, sharding=where)
    try:
        handler.restore(item, args=FastPersistRestore({"small": [uneven]}, partial_restore=True, strict=False))
    except ValueError as error:
        assert "15" in str(error), error
    else:
        assert count == 1, "15 rows do not divide evenly"
    found = handler.restore(item, args=FastPersistRestore(
        {"large": [jax.ShapeDtypeStruct((2048, 512), np.float32, sharding=where)]}, partial_restore=True, strict=False))
    expected = np.zeros((2048, 512), np.float32)
    expected[:1024] = large[:, :512]
    same(found["large"][0], jax.device_put(expected, where))
    # The devices it was saved on may not be here.
    if count < 8:
        try:
            handler.restore(item)
        except TargetMismatchError as error:
            assert "Topology mismatch" in str(error)
        else:
            raise AssertionError("restored on devices that are not here")
        found = handler.restore(item, args=FastPersistRestore(fallback_sharding=NamedSharding(mesh_of(count), P())))
        np.testing.assert_array_equal(found["large"][3], large + 3)
    np.testing.assert_array_equal(load(item)["large"][4], large + 4)
"""


def test_other_meshes(tmp_path: Path) -> None:
    in_devices(8, SAVE, tmp_path)
    for count in (8, 2, 1):
        in_devices(count, RESTORE, tmp_path)


def test_many_boxes_and_the_core(tmp_path: Path) -> None:
    """fp_multi.save and its Checkpointer take the same description."""
    code = """
        from fp_multi.adapters.orbax._spread import spread_of
        mesh = mesh_of(4, 2)
        state = {"a": on(large, mesh, "y", "x"), "b": on(base, mesh, "x"), "n": np.arange(3)}
        assert [box.length for box in spread_of(state["a"]).boxes] == [(512, 256)] * 8
        assert spread_of(state["a"]) is spread_of(on(large + 1, mesh, "y", "x"))
        fp.save(state, root / "a")
        np.testing.assert_array_equal(fp.load(root / "a")["a"], large)
        for overlap in ("borrow", "snapshot", "hybrid"):
            with fp.Checkpointer(root / overlap, overlap=overlap) as ckpt:
                ckpt.save(1, state)
                ckpt.wait_for_staging()
                ckpt.wait()
                np.testing.assert_array_equal(ckpt.restore()[1]["a"], large)
                np.testing.assert_array_equal(ckpt.restore()[1]["b"], base)
                ckpt.save(2, state, copy=["a"]).wait()
                np.testing.assert_array_equal(ckpt.restore()[1]["a"], large)
    """
    in_devices(8, code, tmp_path)


def test_describing_does_not_copy(tmp_path: Path) -> None:
    code = """
        from fp_multi._tree import describe
        array = on(large, mesh_of(4, 2), "x", "y")
        (source,) = describe({"a": array}).sources
        addresses = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
        assert {local.address for _, local in source.sharded.local} == addresses
    """
    in_devices(8, code, tmp_path)


def test_the_path_of_accelerators(tmp_path: Path) -> None:
    """The copies through pinned memory, on a CPU that is said to be none."""
    code = """
        from fp_multi.adapters.orbax import _arrays
        _arrays.is_in_host_memory = lambda array: False
        state = {
            "a": on(large, mesh_of(4, 2), "y", "x"), "b": jnp.asarray(base), "c": jnp.arange(3, dtype=jnp.int4),
            "d": jnp.float32(5), "e": jnp.zeros((0, 3)), "r": on(large, mesh_of(8)), "k": jax.random.key(3),
        }
        with ocp.CheckpointManager(root / "run") as manager:
            manager.save(0, args=FastPersistSave(state))
            for name in "abr":
                state[name].delete()
            manager.wait_until_finished()
            found = manager.restore(0)
        np.testing.assert_array_equal(found["a"], large)
        np.testing.assert_array_equal(found["b"], base)
        np.testing.assert_array_equal(found["r"], large)
        assert found["c"].tolist() == [0, 1, 2] and found["d"] == 5 and found["k"] == state["k"]
        fp.save({"x": state["c"], "y": jnp.arange(1 << 18)}, root / "plain")
        assert fp.load(root / "plain")["y"][-1] == (1 << 18) - 1
    """
    in_devices(8, code, tmp_path)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp

    from fp_multi.adapters.orbax import FastPersistSave

    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    array = jnp.arange(1 << 22, dtype=jnp.float32)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=FastPersistSave({"a": array, "b": jnp.float32(2), "k": jax.random.key(1)}))
        jax.jit(lambda a: a * 0, donate_argnums=0)(array).block_until_ready()
        manager.wait_until_finished()
        found = manager.restore(0)
    np.testing.assert_array_equal(np.asarray(found["a"]), np.arange(1 << 22, dtype=np.float32))
    assert found["a"].devices() == {jax.devices()[0]}
    assert found["k"] == jax.random.key(1)
