"""The same calls with Orbax's StandardSave and with FastPersistSave: the same results, kind by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
import jax.numpy as jnp  # noqa: E402

from fp_multi.adapters.orbax import FastPersistRestore, FastPersistSave  # noqa: E402

STATE = {
    "a": jnp.arange(12.0).reshape(3, 4),
    "b": {"n": np.arange(5, dtype=np.int16), "f": 4.5, "i": 3, "e": {}, "none": None},
    "c": [jnp.int32(7), jnp.float32(2.5), jnp.arange(3, dtype=jnp.bfloat16)],
    "k": jax.random.key(1),
}
CPU = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def sds(leaf: Any, sharding: Any = CPU, dtype: Any = None) -> Any:
    if not hasattr(leaf, "shape"):
        return leaf
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        dtype = None
    return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding)


def half(leaf: Any) -> Any:
    return sds(leaf, dtype=jnp.float16)


TARGETS = {
    "as it was": lambda: None,
    "itself": lambda: STATE,
    "abstract": lambda: jax.tree.map(sds, STATE),
    "abstract, nowhere": lambda: jax.tree.map(lambda leaf: sds(leaf, None), STATE),
    "narrower": lambda: jax.tree.map(half, STATE),
    "numpy": lambda: {**STATE, "a": np.zeros((3, 4), np.float64)},
    "left out": lambda: {**STATE, "a": None, "b": {**STATE["b"], "f": None}},
    "number kinds": lambda: {**STATE, "b": {**STATE["b"], "f": 1.0, "i": 2.0}, "c": [1, 1.0, STATE["c"][2]]},
    "arrays of numbers": lambda: {**STATE, "b": {**STATE["b"], "f": jnp.float32(0), "i": np.zeros(())}},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("parity")
    for name, save in (("orbax", ocp.args.StandardSave), ("ours", FastPersistSave)):
        with ocp.CheckpointManager(root / name) as manager:
            manager.save(0, args=save(STATE, custom_metadata={"x": 1}))
    return root


def shown(leaf: Any) -> Any:
    """What of a leaf must be the same."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return "key", str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tolist()
        return "jax", str(leaf.dtype), leaf.sharding, np.asarray(leaf, np.float64).tolist()
    if isinstance(leaf, (np.ndarray, np.generic)):
        return "numpy", str(leaf.dtype), np.asarray(leaf, np.float64).tolist()
    return type(leaf).__name__, leaf


@pytest.mark.parametrize("target", TARGETS)
def test_restore(saved: Path, target: str) -> None:
    item = TARGETS[target]()
    found = {}
    for name, restore in (("orbax", ocp.args.StandardRestore), ("ours", FastPersistRestore)):
        with ocp.CheckpointManager(saved / name) as manager:
            found[name] = manager.restore(0, args=restore(item))
    ours, orbax = (jax.tree.map(shown, found[name], is_leaf=lambda x: x is None) for name in ("ours", "orbax"))
    assert ours == orbax


def test_metadata(saved: Path) -> None:
    found = {}
    for name in ("orbax", "ours"):
        with ocp.CheckpointManager(saved / name) as manager:
            assert manager.item_metadata(0) is None  # both: the handler is known when it has been used
            manager.restore(0)
            found[name] = manager.item_metadata(0)
    assert found["ours"].custom_metadata == found["orbax"].custom_metadata
    ours, orbax = (
        jax.tree.map(
            lambda leaf: (leaf.name, leaf.shape, leaf.dtype, leaf.sharding, leaf.storage and leaf.storage.chunk_shape),
            found[name].tree,
        )
        for name in ("ours", "orbax")
    )
    assert ours == orbax


@pytest.mark.parametrize(
    "item",
    [
        {**STATE, "extra": 1},
        {name: value for name, value in STATE.items() if name != "a"},
        {**STATE, "a": jax.ShapeDtypeStruct((4, 4), np.float32, sharding=CPU)},
        {**STATE, "b": 1},
    ],
    ids=["more", "less", "shape", "leaf"],
)
def test_refusals(saved: Path, item: Any) -> None:
    with ocp.CheckpointManager(saved / "ours") as manager, pytest.raises(ValueError, match=r"\ba\b|\bb\b|extra"):
        manager.restore(0, args=FastPersistRestore(item))
    if item["b"] == 1 or "a" not in item or "extra" in item:
        # Orbax refuses shapes, too, but leaves coroutines behind that nobody awaits.
        with ocp.CheckpointManager(saved / "orbax") as manager, pytest.raises(ValueError, match="do not match"):
            manager.restore(0, args=ocp.args.StandardRestore(item))


def test_the_arguments_are_theirs() -> None:
    import dataclasses

    def names(kind: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    save = names(ocp.args.StandardSave) | names(ocp.args.PyTreeSave)
    assert save - {"ocdbt_target_data_file_size", "partial_save_mode"} <= names(FastPersistSave)
    assert names(ocp.args.StandardRestore) | names(ocp.args.PyTreeRestore) <= names(FastPersistRestore)
