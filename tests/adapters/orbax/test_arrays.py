"""JAX arrays: every dtype comes back, and nothing that JAX or NumPy may do tears a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import Gate
from support import check_child

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import fp_multi as fp  # noqa: E402
from fp_multi.adapters.orbax import load  # noqa: E402
from fp_multi.errors import TargetMismatchError, UnsupportedLeafError  # noqa: E402

QUICK = fp.SaveConfig(durable=False, block_bytes=64 << 10, queue_depth=2)
COUNT = 1 << 20
"""Elements: 4 MiB, far more than the engine reads ahead with these settings."""

DTYPES = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn"),
)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def bits(array: Any) -> tuple[Any, ...]:
    host = np.asarray(array)
    return host.dtype, host.shape, host.tobytes()


def round_trip(path: Path, state: Any, **how: Any) -> Any:
    fp.save(state, path / "saved", config=QUICK, overwrite=True)
    return load(path / "saved", **how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 3)])
def test_every_dtype_comes_back(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = jnp.asarray(np.random.default_rng(0).integers(0, 2, shape)).astype(dtype)
    found = round_trip(tmp_path, {"a": array})["a"]
    assert isinstance(found, jax.Array)
    assert bits(found) == bits(array)
    assert bits(fp.load(tmp_path / "saved")["a"]) == bits(array)


def test_wide_types_need_jax_to_have_them(tmp_path: Path) -> None:
    code = """
        import jax
        jax.config.update("jax_enable_x64", True)
        import jax.numpy as jnp
        from fp_multi.adapters.orbax import load
        state = {d: jnp.arange(5).astype(d) for d in ("int64", "uint64", "float64", "complex128")}
        fp.save(state, sys.argv[1])
        for dtype, array in load(sys.argv[1]).items():
            assert array.dtype == dtype and (array == state[dtype]).all()
    """
    check_child(code, tmp_path / "saved")
    with pytest.raises(UnsupportedLeafError, match="int64: JAX would make int64 narrower; set jax_enable_x64"):
        load(tmp_path / "saved", only=["int64"])
    assert fp.load(tmp_path / "saved")["float64"].dtype == np.float64


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_come_back(tmp_path: Path, impl: str) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), 4)
    found = round_trip(tmp_path, {"one": keys[0], "all": keys})
    assert found["all"].dtype == keys.dtype
    assert found["all"].shape == keys.shape
    for name, key in (("one", found["one"]), ("all", found["all"][0])):
        assert bits(jax.random.normal(key, (5,))) == bits(jax.random.normal(keys[0], (5,))), name
    assert bits(fp.load(tmp_path / "saved")["all"]) == bits(jax.random.key_data(keys))


def test_old_style_keys_stay_arrays(tmp_path: Path) -> None:
    key = jax.random.PRNGKey(3)
    found = round_trip(tmp_path, {"key": key})["key"]
    assert bits(found) == bits(key)


def test_one_array_at_two_places_stays_one(tmp_path: Path) -> None:
    array = jnp.arange(12.0)
    found = round_trip(tmp_path, {"a": array, "b": [array], "c": array + 1})
    assert found["a"] is found["b"][0]
    assert len(fp.read_manifest(tmp_path / "saved").tensors) == 2


def test_numpy_arrays_stay_numpy_arrays(tmp_path: Path) -> None:
    found = round_trip(tmp_path, {"jax": jnp.arange(3), "numpy": np.arange(3)})
    assert isinstance(found["jax"], jax.Array)
    assert type(found["numpy"]) is np.ndarray


def test_a_target_is_compared(tmp_path: Path) -> None:
    state = {"w": jnp.arange(6.0).reshape(2, 3), "key": jax.random.key(1)}
    found = round_trip(tmp_path, state, target=state)
    assert bits(found["w"]) == bits(state["w"])
    assert found["key"].dtype == state["key"].dtype
    with pytest.raises(TargetMismatchError, match="w"):
        load(tmp_path / "saved", target={**state, "w": jnp.zeros((3, 3))})


def test_what_has_no_values_is_refused(tmp_path: Path) -> None:
    array = jnp.arange(3.0)
    array.delete()
    with pytest.raises(UnsupportedLeafError, match=r"a\.b: the array was deleted"):
        fp.save({"a": {"b": array}}, tmp_path / "saved")

    def traced(array: Any) -> Any:
        fp.save({"a": array}, tmp_path / "saved")
        return array

    with pytest.raises(UnsupportedLeafError, match="a: cannot store a value of type jax"):
        jax.jit(traced)(jnp.arange(3.0))
    assert not (tmp_path / "saved").exists()


def test_arrays_spread_over_devices(tmp_path: Path) -> None:
    code = """
        import jax, jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from fp_multi.adapters.orbax import load
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
        base = jnp.arange(96.0).reshape(8, 12)
        shardings = [NamedSharding(mesh, P(*axes)) for axes in [(), ("x",), ("y", "x"), (None, "y"), (("x", "y"),)]]
        state = [jax.device_put(base, sharding) for sharding in shardings]
        keys = jax.device_put(jax.random.split(jax.random.key(1), 8), shardings[1])
        fp.save({"arrays": state, "again": state, "keys": keys}, sys.argv[1])
        assert len(fp.read_manifest(sys.argv[1]).tensors) == len(state) + 1
        found = load(sys.argv[1])
        assert all((array == base).all() for array in found["arrays"])
        assert (found["keys"] == keys).all()
        for array in load(sys.argv[1], only=["arrays"], device=shardings[1])["arrays"]:
            assert array.sharding == shardings[1] and (array == base).all()
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    check_child(code, tmp_path / "saved", env=environment)


# What may happen between save() and the last byte's leaving, with no fence anywhere


def step(weights: Any) -> Any:
    return weights * 2 + 1


def saved_while(tmp_path: Path, gate: Gate, array: Any, meanwhile: Callable[[], object], **options: Any) -> Any:
    """Save an array in borrow mode; when all is done but the reading, do something; return what was saved."""
    with fp.Checkpointer(tmp_path, overlap="borrow", config=QUICK) as ckpt:
        pending = ckpt.save(1, {"gate": gate, "array": array}, **options)
        kept = meanwhile()
        assert not pending.done
        gate.open()
        pending.wait()
        del kept
        return ckpt.restore()[1]["array"]


def test_donation_does_not_tear(tmp_path: Path, gate: Gate) -> None:
    donating = jax.jit(step, donate_argnums=0)
    array = jnp.arange(COUNT, dtype=jnp.float32)
    expected = bits(array)

    def train() -> Any:
        weights = array
        for _ in range(5):
            weights = donating(weights)
        return weights.block_until_ready()

    assert bits(saved_while(tmp_path, gate, array, train)) == expected


def test_donation_is_in_place_again_after_the_save(tmp_path: Path) -> None:
    donating = jax.jit(step, donate_argnums=0)
    array = jnp.arange(COUNT, dtype=jnp.float32)
    with fp.Checkpointer(tmp_path, overlap="borrow", config=QUICK) as ckpt:
        ckpt.save(1, {"array": array}).wait()
        place = array.unsafe_buffer_pointer()
        assert donating(array).unsafe_buffer_pointer() == place


@pytest.mark.parametrize("by", ["delete", "del"])
def test_deletion_does_not_tear(tmp_path: Path, gate: Gate, by: str) -> None:
    arrays = [jnp.arange(COUNT, dtype=jnp.float32)]
    expected = bits(arrays[0])

    def reuse_the_memory() -> Any:
        array = arrays.pop()
        if by == "delete":
            array.delete()
        del array
        return [jnp.full(COUNT, i, jnp.float32).block_until_ready() for i in range(8)]

    with fp.Checkpointer(tmp_path, overlap="borrow", config=QUICK) as ckpt:
        pending = ckpt.save(1, {"gate": gate, "array": arrays[0]})
        kept = reuse_the_memory()
        gate.open()
        pending.wait()
        assert len(kept) == 8
        assert bits(ckpt.restore()[1]["array"]) == expected


@pytest.mark.parametrize("make", [jnp.asarray, jnp.array])
def test_changing_the_numpy_array_it_was_made_of_does_not_tear(
    tmp_path: Path, gate: Gate, make: Callable[..., Any]
) -> None:
    base = np.arange(COUNT, dtype=np.float32)
    array = make(base)
    expected = bits(base)
    assert bits(saved_while(tmp_path, gate, array, lambda: base.fill(0))) == expected


def test_an_array_over_numpys_memory_can_be_copied_at_once(tmp_path: Path, gate: Gate) -> None:
    # device_put and from_dlpack take NumPy's memory as it is: JAX says not to change it any more.
    base = np.arange(COUNT + 16, dtype=np.float32)
    base = base[-base.ctypes.data % 64 // 4 :][:COUNT]
    array = jax.device_put(base)
    assert array.unsafe_buffer_pointer() == base.ctypes.data, "JAX has copied: this test is about nothing"
    expected = bits(base)
    found = saved_while(tmp_path, gate, array, lambda: base.fill(0), copy=["array"])
    assert bits(found) == expected


def test_the_view_that_is_held_cannot_be_written(tmp_path: Path) -> None:
    array = jnp.arange(12.0)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(array)[0] = 1
