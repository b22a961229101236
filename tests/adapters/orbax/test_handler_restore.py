"""What comes back for which target: the table of docs/orbax.md, and where Orbax's own handler would corrupt."""

from __future__ import annotations

import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
import jax.numpy as jnp  # noqa: E402

import fp_multi as fp  # noqa: E402
from fp_multi.adapters.orbax import FastPersistHandler, FastPersistRestore, FastPersistSave  # noqa: E402
from fp_multi.errors import ConfigError, TargetMismatchError, UnsupportedLeafError  # noqa: E402

CPU = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
QUICK = fp.SaveConfig(durable=False)
DTYPES = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64", "float8_e3m4", "float8_e4m3", "float8_e4m3fn"),
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn"),
)


def saved(directory: Path, state: Any, **how: Any) -> Path:
    handler = FastPersistHandler(config=QUICK)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    handler.save(directory, args=FastPersistSave(state, **how))
    handler.finalize(directory)
    return directory


def restore(directory: Path, item: Any = None, **how: Any) -> Any:
    return FastPersistHandler().restore(directory, args=FastPersistRestore(item, **how))


def round_trip(directory: Path, state: Any, item: Any = None, **how: Any) -> Any:
    return restore(saved(directory / "item", state), item, **how)


def sds(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


# Without a target


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 3)])
def test_every_dtype(tmp_path: Path, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    state = {}
    for dtype in DTYPES:
        array = rng.integers(0, 2, shape).astype(jnp.dtype(dtype))
        state[dtype] = {"jax": jnp.asarray(array), "numpy": array}
    found = round_trip(tmp_path, state)
    again = restore(tmp_path / "item", state)
    for dtype in DTYPES:
        for one in (found[dtype], again[dtype]):
            assert isinstance(one["jax"], jax.Array)
            assert one["jax"].sharding == CPU
            assert type(one["numpy"]) is np.ndarray
            for value in one.values():
                assert value.dtype == dtype
                assert value.shape == shape
                assert np.asarray(value).tobytes() == state[dtype]["numpy"].tobytes()


def test_wide_types_stay_numpy(tmp_path: Path) -> None:
    state = {"a": np.arange(3), "b": np.arange(3.0), "c": np.array(["x"]), "d": np.datetime64("2020-01-01")}
    found = round_trip(tmp_path, state)
    for name, value in state.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)
    with pytest.raises(UnsupportedLeafError, match="a: JAX would make int64 narrower"):
        restore(tmp_path / "item", {**state, "a": sds((3,), np.int64, CPU)})


PLAIN = {
    "int": 3,
    "big": 2**200,
    "negative": -(2**63) - 1,
    "float": 0.1,
    "nan": math.nan,
    "inf": -math.inf,
    "complex": 1 + 2j,
    "bool": True,
    "str": "ünï",
    "empty": "",
    "none": None,
    "bytes": b"\0\xff",
    "bytearray": bytearray(b"ab"),
    "containers": [{}, [], (), [None, (1, [2, {"a": ()}])]],
    "numpy": np.float32(1.5),
    "numpy bool": np.bool_(True),
}


def test_plain_values(tmp_path: Path) -> None:
    found = round_trip(tmp_path, PLAIN)
    assert repr(found) == repr(PLAIN)
    found = restore(tmp_path / "item", PLAIN)
    assert repr({name: found[name] for name in PLAIN}) == repr(PLAIN)  # JAX sorts the keys of dicts


def test_keys_of_dicts(tmp_path: Path) -> None:
    state = {
        "dots": {"a.b": jnp.zeros(1), "a": {"b": jnp.ones(1)}, "a/b": jnp.full(1, 2.0), "": jnp.full(1, 3.0), "~": 4},
        "numbers": {5: jnp.full(1, 5.0), 10: 6, -1: 7},
        "both": {"1": jnp.full(1, 8.0), "01": jnp.full(1, 9.0)},
        "odd": {(1, "x"): jnp.full(1, 10.0), (2, "x"): 11},
    }
    for found in (round_trip(tmp_path, state), restore(tmp_path / "item", state)):
        assert jax.tree.structure(found) == jax.tree.structure(state)
        assert [np.sum(leaf) for leaf in jax.tree.leaves(found)] == [np.sum(leaf) for leaf in jax.tree.leaves(state)]
    # Mixed keys are beyond JAX, and so beyond targets.
    mixed = {"mixed": {1: 1, "1": 2, None: 4}}
    assert round_trip(tmp_path, mixed) == mixed


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys(tmp_path: Path, impl: str) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), 4).reshape(2, 2)
    state = {"one": keys[0, 0], "all": keys}
    targets: list[Any] = [None, state, {"one": sds((), keys.dtype), "all": sds((2, 2), keys.dtype, CPU)}]
    targets.append(
        {name: jax.random.split(jax.random.key(9, impl=impl), 1).reshape(()) for name in ("one",)} | {"all": keys}
    )
    for target in targets:
        found = round_trip(tmp_path, state, target)
        assert found["all"].dtype == keys.dtype
        assert found["all"].shape == (2, 2)
        assert (found["all"] == keys).all()
        assert found["one"] == keys[0, 0]
    args = ocp.checkpoint_utils.construct_restore_args(state)
    found = restore(tmp_path / "item", state, restore_args=args)
    assert (found["all"] == keys).all()
    data = restore(tmp_path / "item", {"one": None, "all": np.zeros_like(jax.random.key_data(keys))})["all"]
    np.testing.assert_array_equal(data, jax.random.key_data(keys))
    other = "rbg" if impl != "rbg" else "threefry2x32"
    with pytest.raises(TargetMismatchError, match=f"all: a {other} key in target, {impl} on disk"):
        restore(tmp_path / "item", {**state, "all": jax.random.split(jax.random.key(1, impl=other), 4)})
    with pytest.raises(TargetMismatchError, match="shape"):
        restore(tmp_path / "item", {**state, "all": keys[0]})
    with pytest.raises(TargetMismatchError, match="no typed key on disk"):
        round_trip(tmp_path, {"one": jax.random.key_data(keys)}, {"one": keys})


def test_one_object_stays_one(tmp_path: Path) -> None:
    array, tied = np.arange(4.0), jnp.arange(3)
    found = round_trip(tmp_path, {"a": array, "b": [array], "c": tied, "d": tied, "e": array.copy()})
    assert found["a"] is found["b"][0]
    assert found["c"] is found["d"]
    assert found["a"] is not found["e"]
    # Not where one of the two could be changed through the other.
    target = {"a": sds((4,), np.float32, CPU), "b": [array], "c": tied, "d": np.asarray(tied), "e": array}
    found = restore(tmp_path / "item", target)
    before = np.asarray(found["c"]).copy()
    found["d"][:] = -1
    found["b"][0][:] = -1
    np.testing.assert_array_equal(found["c"], before)
    np.testing.assert_array_equal(found["a"], np.arange(4.0))


# With a target


STATE = {"j": jnp.arange(6.0).reshape(2, 3), "n": np.arange(4, dtype=np.float64), "i": 3, "f": 2.5, "k": np.int32(4)}


@pytest.mark.parametrize(
    ("name", "target", "kind", "dtype"),
    [
        ("j", sds((2, 3), jnp.bfloat16, CPU), jax.Array, jnp.bfloat16),
        ("n", sds((4,), jnp.float32, CPU), jax.Array, np.float32),
        ("i", sds((), jnp.int32, CPU), jax.Array, np.int32),
        ("f", sds((), jnp.float32, CPU), jax.Array, np.float32),
        ("j", sds((2, 3), jnp.float16), jax.Array, np.float16),
        ("n", sds((4,), np.float32), np.ndarray, np.float32),
        ("i", sds((), np.float64), np.ndarray, np.float64),
        ("j", jnp.zeros((2, 3), jnp.float16), jax.Array, np.float16),
        ("n", jnp.zeros(4, jnp.bfloat16), jax.Array, jnp.bfloat16),
        ("j", np.zeros((2, 3), np.float64), np.ndarray, np.float64),
        ("f", np.zeros((), np.float32), np.ndarray, np.float32),
        ("k", np.float32(0), np.float32, np.float32),
        ("n", np.ndarray, np.ndarray, np.float64),
        ("j", jax.Array, jax.Array, np.float32),
        ("i", 0.0, float, None),
        ("f", 0.0, float, None),
        ("k", 0, int, None),
        ("k", True, None, None),
        ("i", int, int, None),
        ("i", jax.ShapeDtypeStruct, int, None),
        ("j", jax.ShapeDtypeStruct, jax.Array, np.float32),
        ("i", 0j, complex, None),
    ],
)
def test_one_leaf(tmp_path: Path, name: str, target: Any, kind: Any, dtype: Any) -> None:
    item = dict.fromkeys(STATE)
    item[name] = target
    if kind is None:
        with pytest.raises(TargetMismatchError, match="would become True"):
            round_trip(tmp_path, STATE, item)
        return
    found = round_trip(tmp_path, STATE, item)
    assert [key for key, value in found.items() if value is not None] == [name]
    value = found[name]
    assert isinstance(value, kind)
    if dtype is not None:
        assert value.dtype == dtype
        assert not isinstance(value, jax.Array) or value.sharding == CPU
    np.testing.assert_array_equal(np.asarray(value, np.complex128), np.asarray(STATE[name], np.complex128))


@pytest.mark.parametrize(
    ("value", "target", "match"),
    [
        (2.5, 0, "2.5 would become 2"),
        (jnp.float32(1.75), 0, "1.75 would become 1"),
        (math.nan, 0, "as int"),
        (math.inf, 0, "as int"),
        (2, True, "2 would become True"),
        (2**70, np.zeros((), np.int64), "an array in target, int"),
        (2**70, 0.0, None),
        (10**400, 0.0, "as float"),
        (1 + 2j, 0.0, "on disk is"),
        (1 + 0j, 0.0, None),
        ("text", 0, "on disk is 'text'"),
        (7, "", "the target is a str"),
        (b"ab", 0, "the target is a int"),
        (b"ab", np.zeros(2, np.uint8), "an array in target, bytes"),
        ("text", np.zeros(()), "an array in target, str"),
        (np.arange(3), 0, "on disk is an array of shape"),
        (np.array([1.0, 2.5]), np.zeros(2, int), "elements would change"),
        (np.array([1.0, 2.0]), np.zeros(2, int), None),
        (np.array([1.0, math.nan]), np.zeros(2, int), "elements would change"),
        (np.array([2.0**63]), np.zeros(1, np.int64), "elements would change"),
        (np.array([-(2.0**63)]), np.zeros(1, np.int64), None),
        (np.array([2**63], np.uint64), np.zeros(1, np.int64), "elements would change"),
        (np.array([-1]), np.zeros(1, np.uint64), "elements would change"),
        (np.array([300]), np.zeros(1, np.uint8), "elements would change"),
        (np.array([7]), np.zeros(1, ml_dtypes.int4), None),
        (np.array([8]), np.zeros(1, ml_dtypes.int4), "elements would change"),
        (np.array([-1], ml_dtypes.int4), np.zeros(1, np.uint8), "elements would change"),
        (np.array([0, 2]), np.zeros(2, bool), "elements would change"),
        (np.array([0, 1]), np.zeros(2, bool), None),
        (np.array([1.5 + 1j]), np.zeros(1), "imaginary"),
        (np.array([1.5 + 0j]), np.zeros(1), None),
        (np.array([0.1]), np.zeros(1, ml_dtypes.bfloat16), None),
        (jnp.array([1.5]), sds((1,), np.int32, CPU), "elements would change"),
        (np.array(["x"]), np.zeros(1), "no conversion"),
    ],
)
def test_nothing_is_lost_in_silence(tmp_path: Path, value: Any, target: Any, match: str | None) -> None:
    if match is None:
        found = round_trip(tmp_path, {"a": {"x": value}}, {"a": {"x": target}})["a"]["x"]
        np.testing.assert_allclose(np.asarray(found, complex), np.asarray(value, complex), rtol=0.01)
        return
    with pytest.raises(TargetMismatchError, match=rf"^a\.x: .*{match}"):
        round_trip(tmp_path, {"a": {"x": value}}, {"a": {"x": target}})


def test_what_is_named_is_converted(tmp_path: Path) -> None:
    state = {"a": np.array([1.5, -2.5]), "b": 2.5, "c": jnp.array([3.7]), "d": 3}
    args = {
        "a": ocp.RestoreArgs(dtype=np.int32),
        "b": ocp.RestoreArgs(restore_type=int),
        "c": ocp.ArrayRestoreArgs(sharding=CPU, dtype=jnp.int32),
        "d": ocp.RestoreArgs(dtype=np.float32),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = round_trip(tmp_path, state, restore_args=args)
    assert found["a"].tolist() == [1, -2]
    assert found["b"] == 2
    assert found["c"].tolist() == [3]
    assert type(found["d"]) is float


def test_types_in_restore_args(tmp_path: Path) -> None:
    args = {
        "j": ocp.RestoreArgs(restore_type=np.ndarray),
        "n": ocp.RestoreArgs(restore_type=jax.Array, dtype=jnp.float32),
        "i": ocp.RestoreArgs(restore_type=float),
        "f": ocp.RestoreArgs(),
        "k": ocp.PLACEHOLDER,
    }
    found = round_trip(tmp_path, STATE, restore_args=args)
    half = ocp.RestoreArgs(dtype=np.float16)
    others = round_trip(tmp_path, {"s": "text", "b": b"ab"}, restore_args={"s": half, "b": half})
    assert others == {"s": "text", "b": b"ab"}
    with pytest.raises(TargetMismatchError, match=r"i: 10\d* on disk as int32"):
        round_trip(tmp_path, {"i": 10**30}, restore_args={"i": ocp.RestoreArgs(dtype=np.int32)})
    saved(tmp_path / "item", STATE)
    assert type(found["j"]) is np.ndarray
    assert isinstance(found["n"], jax.Array)
    assert found["i"] == 3.0
    assert found["f"] == 2.5
    assert found["k"] is ...
    with pytest.raises(TargetMismatchError, match="f: restore_args has str"):
        restore(tmp_path / "item", restore_args={"f": "x"})
    with pytest.raises(TargetMismatchError, match="restore_type"):
        restore(tmp_path / "item", restore_args={"f": ocp.RestoreArgs(restore_type=list)})


def test_shapes(tmp_path: Path) -> None:
    state = {"j": jnp.arange(12.0).reshape(3, 4), "n": np.arange(5)}
    with pytest.raises(TargetMismatchError, match=r"j: shape \(3, 3\) in target, \(3, 4\) on disk"):
        round_trip(tmp_path, state, {"j": sds((3, 3), np.float32, CPU), "n": None})
    with pytest.raises(TargetMismatchError, match="n: shape"):
        restore(tmp_path / "item", {"j": None, "n": np.zeros(4)})
    found = restore(tmp_path / "item", {"j": sds((2, 6), np.float32, CPU), "n": np.zeros(7)}, strict=False)
    expected = np.zeros((2, 6))
    expected[:, :4] = np.arange(8).reshape(2, 4)
    np.testing.assert_array_equal(found["j"], expected)
    assert found["n"].tolist() == [0, 1, 2, 3, 4, 0, 0]
    with pytest.raises(TargetMismatchError, match="as many axes"):
        restore(tmp_path / "item", {"j": sds((12,), np.float32, CPU), "n": None}, strict=False)
    args = {"j": ocp.ArrayRestoreArgs(sharding=CPU, global_shape=(1, 2), strict=False), "n": ocp.RestoreArgs()}
    assert restore(tmp_path / "item", restore_args=args)["j"].tolist() == [[0.0, 1.0]]
    args["j"] = ocp.ArrayRestoreArgs(sharding=CPU, global_shape=(1, 2))
    with pytest.raises(TargetMismatchError, match="shape"):
        restore(tmp_path / "item", restore_args=args)


def test_structures_that_differ(tmp_path: Path) -> None:
    state = {"a": {"x": 1, "y": 2}, "b": [3, 4], "c": None, "d": {}}
    saved(tmp_path / "item", state)
    whole = {"a": {"x": 0, "y": 0}, "b": [0, 0], "c": None, "d": {}}
    assert restore(tmp_path / "item", whole) == state
    for item, match in (
        ({**whole, "a": {"x": 0}}, r"on disk only: a\.y"),
        ({**whole, "e": 0}, "in target only: e"),
        ({**whole, "b": [0]}, r"on disk only: b\.1"),
        ({**whole, "a": 0}, "a: .*a leaf in target, a dict with leaves on disk"),
        ({**whole, "a": ...}, "User-provided restore item and on-disk value"),
        ({**whole, "b": [[0], 0]}, r"in target only: b\.0\.0; on disk only: b\.0"),
        ({**whole, "b": "text"}, "a leaf in target, a list"),
    ):
        with pytest.raises(ValueError, match=match):
            restore(tmp_path / "item", item)
    with pytest.raises(TargetMismatchError, match=r"cannot restore into a value of type builtins\.object"):
        restore(tmp_path / "item", {**whole, "a": {"x": object(), "y": 0}})
    # What was empty when it was saved has nothing to give.
    assert restore(tmp_path / "item", {**whole, "c": 5, "d": 6})["c"] is None


def test_parts(tmp_path: Path) -> None:
    state = {"a": {"x": np.arange(3), "y": 2}, "b": [3, 4]}
    saved(tmp_path / "item", state)
    found = restore(tmp_path / "item", {"a": {"x": None, "y": ...}, "b": None})
    assert found == {"a": {"x": None, "y": ...}, "b": None}
    found = restore(tmp_path / "item", {"a": {"y": 0, "new": "own"}}, partial_restore=True)
    assert found == {"a": {"y": 2, "new": "own"}}
    with pytest.raises(TargetMismatchError):
        restore(tmp_path / "item", {"a": {"y": 0, "new": "own"}})


def test_fallback_sharding(tmp_path: Path) -> None:
    saved(tmp_path / "item", {"a": jnp.arange(3.0)})
    manifest = (tmp_path / "item" / "manifest.json").read_bytes()
    assert b"cpu:0" in manifest
    from fp_multi import _engine

    body = manifest.replace(b"cpu:0", b"cpu:7")[:-31]
    text = b'%s,"manifest_crc32c":"%08x"}\n' % (body, _engine.crc32c(body))
    (tmp_path / "item" / "manifest.json").write_bytes(text)
    for item in (None, {"a": sds((3,), np.float32)}):
        with pytest.raises(ValueError, match="Topology mismatch"):
            restore(tmp_path / "item", item)
        assert restore(tmp_path / "item", item, fallback_sharding=CPU)["a"].sharding == CPU
    metadata = FastPersistHandler().metadata(tmp_path / "item")
    assert metadata["a"].sharding.device_str == "cpu:7"
    assert restore(tmp_path / "item", metadata, fallback_sharding=CPU)["a"].tolist() == [0, 1, 2]


def test_checkpoints_of_the_core(tmp_path: Path) -> None:
    fp.save({"a": jnp.arange(3.0), "n": np.arange(2)}, tmp_path / "ckpt", config=QUICK)
    found = restore(tmp_path / "ckpt")
    assert found["a"].sharding == CPU
    assert type(found["n"]) is np.ndarray


def test_transforms(tmp_path: Path) -> None:
    saved(tmp_path / "item", {"old": {"w": np.arange(3), "b": 1}, "kept": 2, "dropped": 3})
    transforms = {"new/(.*)": ocp.Transform(original_key=r"old/\1"), "fresh": ocp.Transform(use_fallback=True)}
    item = {"new": {"w": np.zeros(3, int), "b": 0}, "kept": 0, "fresh": "own"}
    found = restore(tmp_path / "item", item, transforms=transforms)
    assert found["new"]["w"].tolist() == [0, 1, 2]
    assert (found["new"]["b"], found["kept"], found["fresh"]) == (1, 2, "own")
    nested = {"new": {"w": ocp.Transform(original_key=("old", "w"))}}
    item = {"new": {"w": np.zeros(3, int)}, "kept": "own"}
    found = restore(tmp_path / "item", item, transforms=nested, transforms_default_to_original=False)
    assert found["new"]["w"].tolist() == [0, 1, 2]
    assert found["kept"] == "own"
    with pytest.raises(TargetMismatchError, match="in target only: x"):
        restore(tmp_path / "item", {"x": 0}, transforms={})
    for wrong, match in (
        ({"x": ocp.Transform(value_fn=lambda value: value)}, "x has a value_fn"),
        ({"x": "y"}, "x is a str"),
    ):
        with pytest.raises(ConfigError, match=match):
            restore(tmp_path / "item", {"x": 0}, transforms=wrong)
    with pytest.raises(ConfigError, match="legacy_transform_fn"):
        FastPersistRestore(legacy_transform_fn=lambda *trees: trees)


def test_layouts(tmp_path: Path) -> None:
    from jax.experimental.layout import Format, Layout

    array = jnp.arange(12.0).reshape(3, 4)
    turned = jax.device_put(array, Format(Layout(major_to_minor=(1, 0)), CPU))
    assert turned.format != array.format
    found = round_trip(tmp_path, {"a": array}, {"a": turned}, support_layout=True)["a"]
    assert found.format == turned.format
    np.testing.assert_array_equal(found, array)
    assert restore(tmp_path / "item", {"a": turned})["a"].format == array.format
    found = round_trip(tmp_path, {"a": turned})["a"]
    np.testing.assert_array_equal(found, array)


# Casts on save, metadata


def test_casts_on_save(tmp_path: Path) -> None:
    half = ocp.SaveArgs(dtype=np.float16)
    state = {"j": jnp.arange(3.0), "n": np.arange(3.0), "i": 3, "s": "text"}
    args = {"j": half, "n": half, "i": ocp.SaveArgs(dtype=np.float32), "s": None}
    found = restore(saved(tmp_path / "item", state, save_args=args))
    assert found["j"].dtype == np.float16
    assert found["n"].dtype == np.float16
    assert type(found["i"]) is float
    assert found["s"] == "text"
    assert state["n"].dtype == np.float64
    metadata = FastPersistHandler().metadata(tmp_path / "item")
    assert metadata["j"].dtype == np.float16


def test_metadata(tmp_path: Path) -> None:
    state = {"j": jnp.zeros((2, 3)), "n": np.zeros(4, np.int8), "i": 2**70, "f": 1.0, "s": "x", "none": None, "t": (1,)}
    saved(tmp_path / "item", {**state, "e": {}}, custom_metadata={"foo": [1, {"a": None}]})
    metadata = FastPersistHandler().metadata(tmp_path / "item")
    assert metadata.custom_metadata == {"foo": [1, {"a": None}]}
    tree = metadata.tree
    value = ocp.metadata.value
    assert {name: type(found) for name, found in tree.items()} == {
        **dict.fromkeys("jn", value.ArrayMetadata),
        **dict.fromkeys("if", value.ScalarMetadata),
        "s": value.StringMetadata,
        "none": type(None),
        "t": tuple,
        "e": dict,
    }
    assert (tree["j"].shape, tree["j"].dtype, tree["j"].name) == ((2, 3), np.float32, "j")
    assert tree["j"].sharding.to_jax_sharding() == CPU
    assert tree["n"].sharding is None
    assert tree["t"][0].name == "t.0"
    assert tree["f"].dtype == np.float64
    assert jax.tree.map(lambda leaf: getattr(leaf, "shape", None), metadata)["n"] == (4,)
    found = restore(tmp_path / "item", metadata)
    assert found["i"] == 2**70
    assert found["t"] == (1,)
    assert isinstance(found["j"], jax.Array)
    assert type(found["n"]) is np.ndarray
