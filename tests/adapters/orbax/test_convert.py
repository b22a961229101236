"""fp-multi convert between Orbax and ours, compared bit for bit through Orbax itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX")
ocp = pytest.importorskip("orbax.checkpoint", reason="needs Orbax: pip install 'fp_multi[orbax]'")
pytest.importorskip("typer", reason="needs the extra cli: pip install 'fp_multi[cli]'")

import jax.numpy as jnp  # noqa: E402
from conversions import CORRUPT, OK, OTHER, QUICK, convert, growth_mib  # noqa: E402
from support import flip  # noqa: E402

import fp_multi as fp  # noqa: E402
import fp_multi.adapters.orbax as adapter  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:orbax", "ignore::DeprecationWarning")

Pair = namedtuple("Pair", ("left", "right"))


def save(state: Any, path: Path, **options: Any) -> None:
    custom = options.pop("custom_metadata", None)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(state, custom_metadata=custom))


def restore(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ocp.StandardCheckpointer().restore(path)


def restore_v1(path: Path) -> Any:
    from orbax.checkpoint import v1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return v1.load(path, checkpointable_name=None)


def same(a: Any, b: Any, path: str = "state") -> None:
    """Types, structure, and every bit."""
    if isinstance(b, jax.Array):
        assert isinstance(a, jax.Array), path
        assert a.dtype == b.dtype, path
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
    assert type(a) is type(b), path
    if isinstance(b, dict):
        assert a.keys() == b.keys(), path
        for key in b:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(b, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}[{i}]")
    elif isinstance(b, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), path
    else:
        assert a == b or (a != a and b != b), path


def spread(array: Any, *spec: Any) -> Any:
    devices = jax.devices()
    if len(devices) < 4:
        return array
    mesh = jax.sharding.Mesh(np.array(devices[:4]).reshape(2, 2), ("a", "b"))
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))


def a_state() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    return {
        "params": {
            "w": jnp.asarray(rng.standard_normal((300, 257)), jnp.float32),
            "half": jnp.arange(15, dtype=jnp.bfloat16).reshape(3, 5),
            "scalar": jnp.float32(1.5),
            "f8": jnp.arange(4, dtype=jnp.float8_e4m3fn),
            "complex": jnp.array([1 + 2j], jnp.complex64),
        },
        "np": {"i64": rng.integers(-(1 << 62), 1 << 62, 7), "bool": np.array([True, False]), "zero": np.array(3.0)},
        "layers": [{"b": np.ones((2, 3), np.float16)}, np.arange(5, dtype=np.int8), [jnp.ones(2)]],
        "key": jax.random.key(7),
        "dots.and/slashes": {"x": np.ones(3)},
        "plain": {"step": 3, "lr": 0.1, "nan": float("nan"), "on": True, "none": None, "name": "a ü"},
        "empty": {"dict": {}, "list": [], "tuple": ()},
    }


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr3", [False, True])
def test_orbax_to_ours(tmp_path: Path, ocdbt: bool, zarr3: bool) -> None:
    state = a_state()
    save(state, tmp_path / "orbax", use_ocdbt=ocdbt, use_zarr3=zarr3, custom_metadata={"run": "a"})
    done = convert(tmp_path / "orbax", tmp_path / "ours")
    assert (done.exit_code, done.stderr) == (OK, ""), done.output
    fp.verify(tmp_path / "ours")
    same(adapter.load(tmp_path / "ours"), state)
    same(adapter.load(tmp_path / "ours"), restore(tmp_path / "orbax"))
    assert fp.read_manifest(tmp_path / "ours").metadata == {"run": "a"}


def test_ours_to_orbax_and_back(tmp_path: Path) -> None:
    state = a_state()
    fp.save(state, tmp_path / "ours", metadata={"run": "a"}, config=QUICK)
    done = convert(tmp_path / "ours", tmp_path / "orbax", "--to", "orbax")
    assert (done.exit_code, done.stderr) == (OK, ""), done.output
    assert done.stdout.count("\n") == 1, done.stdout
    same(restore(tmp_path / "orbax"), state)
    same(restore_v1(tmp_path / "orbax"), state)
    assert convert(tmp_path / "orbax", tmp_path / "back").exit_code == OK
    same(adapter.load(tmp_path / "back"), state)
    assert fp.read_manifest(tmp_path / "back").metadata == {"run": "a"}
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state["params"])
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(
            tmp_path / "orbax",
            args=ocp.args.PyTreeRestore(
                {"params": target},
                restore_args=ocp.checkpoint_utils.construct_restore_args({"params": target}),
                partial_restore=True,
            ),
        )
    same(found["params"], state["params"])
    assert {p.name for p in tmp_path.iterdir()} == {"ours", "orbax", "back"}


def test_checkpoints_of_managers_and_of_v1(tmp_path: Path) -> None:
    from orbax.checkpoint import v1

    state = a_state()
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.PyTreeSave(state))
    v1.save(tmp_path / "v1", state)
    for source in (tmp_path / "run" / "3", tmp_path / "v1"):
        target = tmp_path / f"ours_{source.name}"
        done = convert(source, target)
        assert (done.exit_code, done.stderr) == (OK, ""), done.output
        same(adapter.load(target), state)


_SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import sys
import jax, jax.numpy as jnp, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
whole = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
specs = {"rows": ("a",), "columns": (None, "b"), "grid": ("a", "b"), "all": (("a", "b"),), "whole": ()}
state = {n: jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*spec))) for n, spec in specs.items()}
save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1000), state)
with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    checkpointer.save(sys.argv[1], args=ocp.args.PyTreeSave(state))
    checkpointer.save(sys.argv[2], args=ocp.args.PyTreeSave(state, save_args=save_args))
"""


def test_arrays_in_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-c", _SHARDED, tmp_path / "sharded", tmp_path / "cut"], check=True)
    import fp_multi.adapters.orbax._convert_read as reading

    whole = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    for source in ("sharded", "cut"):
        for band_nbytes in (1, 1000, 1 << 20):
            monkeypatch.setattr(reading, "_BAND_NBYTES", band_nbytes)
            done = convert(tmp_path / source, tmp_path / "ours", "--overwrite")
            assert done.exit_code == OK, done.output
            loaded = fp.load(tmp_path / "ours")
            assert loaded.keys() == {"rows", "columns", "grid", "all", "whole"}
            for array in loaded.values():
                same(array, whole)


def test_rich_types_come_back(tmp_path: Path) -> None:
    from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions

    state = {"t": (np.ones(2), [np.zeros(3), ()]), "pair": Pair(np.ones(1), (1, "x")), "category": {"x": 1}}
    save(state, tmp_path / "orbax", pytree_metadata_options=PyTreeMetadataOptions(support_rich_types=True))
    assert convert(tmp_path / "orbax", tmp_path / "ours").exit_code == OK
    loaded = fp.load(tmp_path / "ours")
    same(loaded["t"], state["t"])
    assert loaded["category"] == {"x": 1}
    assert loaded["pair"]._fields == ("left", "right")
    same(tuple(loaded["pair"]), tuple(state["pair"]))
    plain = {key: value for key, value in state.items() if key == "t"}
    save(plain, tmp_path / "plain")
    assert convert(tmp_path / "plain", tmp_path / "ours2").exit_code == OK
    same(fp.load(tmp_path / "ours2"), {"t": [np.ones(2), [np.zeros(3), ()]]})


def test_integer_keys_of_newer_metadata(tmp_path: Path) -> None:
    save({"a": {"5": np.ones(2)}, "l": [np.zeros(1)]}, tmp_path / "orbax")
    file = tmp_path / "orbax" / "_METADATA"
    text = file.read_text()
    assert '"key": "5"' in text
    file.write_text(text.replace('"key": "5"', '"key": 5').replace('"key": "0"', '"key": 0'))
    assert convert(tmp_path / "orbax", tmp_path / "ours").exit_code == OK
    same(fp.load(tmp_path / "ours"), {"a": {5: np.ones(2)}, "l": [np.zeros(1)]})


@pytest.mark.parametrize("key", ["a/b", "a//b", " ", "ü", ".", "..", "a\nb", "~", "a.b", "0"])
def test_keys_of_all_kinds(tmp_path: Path, key: str) -> None:
    state = {key: np.ones(2), "d": {key: jnp.zeros(3), "x": [np.arange(2)]}}
    fp.save(state, tmp_path / "ours", config=QUICK)
    done = convert(tmp_path / "ours", tmp_path / "orbax", "--to", "orbax")
    assert done.exit_code == OK, done.output
    same(restore(tmp_path / "orbax"), state)
    assert convert(tmp_path / "orbax", tmp_path / "back").exit_code == OK
    same(adapter.load(tmp_path / "back"), state)


def test_custom_metadata_of_any_form(tmp_path: Path) -> None:
    custom = {"a": [1, {"b": None}], "c": "d"}
    save({"w": np.ones(2)}, tmp_path / "orbax", custom_metadata=custom)
    assert convert(tmp_path / "orbax", tmp_path / "ours").exit_code == OK
    assert convert(tmp_path / "ours", tmp_path / "back", "--to", "orbax").exit_code == OK
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        assert checkpointer.metadata(tmp_path / "back").item_metadata.custom_metadata == custom


def test_what_orbax_keeps_otherwise_is_told(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    pytest.importorskip("fp_multi.adapters.torch", reason="needs PyTorch")
    w = np.arange(4.0)
    model = OrderedDict(w=w, tied=w)
    model._metadata = {"version": 1}  # type: ignore[attr-defined]
    state = {
        "model": model,
        "optimizer": {0: np.ones(2), 1: (np.zeros(2), 3)},
        "pair": Pair(np.ones(1), 2),
        "raw": b"\0\xff",
        "number": np.float32(1.5),
        "torch": torch.ones(2),
    }
    fp.save(state, tmp_path / "ours", config=QUICK)
    done = convert(tmp_path / "ours", tmp_path / "orbax", "--to", "orbax")
    assert done.exit_code == OK, done.output
    assert set(done.stdout.splitlines()[1:]) == {
        "attributes of an OrderedDict left out (1): model",
        "tied tensors were stored once more (1): model.tied",
        "integer keys became strings (2): optimizer[0], optimizer[1]",
        "tuples became lists (1): optimizer[1]",
        "named tuples became dicts (1): pair",
        "byte strings became arrays of uint8 (1): raw",
        "NumPy scalars became arrays (1): number",
        "PyTorch tensors became arrays (1): torch",
    }
    expected = {
        "model": {"w": w, "tied": w},
        "optimizer": {"0": np.ones(2), "1": [np.zeros(2), 3]},
        "pair": {"left": np.ones(1), "right": 2},
        "raw": np.array([0, 255], np.uint8),
        "number": np.array(1.5, np.float32),
        "torch": np.ones(2, np.float32),
    }
    same(restore(tmp_path / "orbax"), expected)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": {(1, 2): np.ones(1)}}, "a['(1, 2)']"),
        ({"a": {1: np.ones(1), "1": np.ones(1)}}, "a"),
        ({"a.b": np.ones(1), "a": {"b": np.zeros(1)}}, "a.b"),
        ({"z": {"when": np.zeros(2, "M8[s]")}}, "z.when"),
        ({"z": [np.zeros((0, 3))]}, "z[0]"),
        ({"z": [1 << 64]}, "z[0]"),
        ({"z": 1j}, "z"),
        ({"z": "\ud800"}, "z"),
        ({"~": "text"}, "['~']"),
        ({"z": np.zeros(2, np.longdouble)}, "z"),
        ({"z": np.zeros(2, fp.numpy_dtype("uint4"))}, "z"),
        ({}, "<root>"),
    ],
)
def test_what_orbax_cannot_hold_is_refused_by_path(tmp_path: Path, state: Any, place: str) -> None:
    fp.save(state, tmp_path / "ours", config=QUICK)
    done = convert(tmp_path / "ours", tmp_path / "orbax", "--to", "orbax")
    assert done.exit_code == OTHER, done.output
    assert done.stderr.startswith(f"fp-multi: {place}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]


def test_packed_and_viewed_types_are_not_taken_for_bytes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    pytest.importorskip("fp_multi.adapters.torch", reason="needs PyTorch")
    for dtype in (torch.float4_e2m1fn_x2, torch.bits8):
        fp.save({"t": torch.zeros(2, dtype=torch.uint8).view(dtype)}, tmp_path / "ours", config=QUICK, overwrite=True)
        done = convert(tmp_path / "ours", tmp_path / "orbax", "--to", "orbax")
        assert done.exit_code == OTHER, done.output
        assert done.stderr == f"fp-multi: t: Orbax has no arrays of {str(dtype).removeprefix('torch.')}; convert it\n"


_DTYPES = (
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn", "float8_e3m4"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)


def test_every_dtype_that_orbax_has(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    state: dict[str, Any] = {}
    for name in _DTYPES:
        dtype = fp.numpy_dtype(name)
        values = {"bool": 2, "int2": 4, "int4": 16, "float4_e2m1fn": 16}.get(name, 256)
        state[name] = rng.integers(0, values, 6 * dtype.itemsize, np.uint8).view(dtype).reshape(2, 3)
    with jax.enable_x64(True):
        both = {"numpy": state, "jax": {name: jnp.asarray(array) for name, array in state.items()}}
        fp.save(both, tmp_path / "ours", config=QUICK)
        assert convert(tmp_path / "ours", tmp_path / "orbax", "--to", "orbax").exit_code == OK
        same(restore(tmp_path / "orbax"), both)
        assert convert(tmp_path / "orbax", tmp_path / "back").exit_code == OK
        same(adapter.load(tmp_path / "back"), both)


@pytest.mark.parametrize("name", ["a [1] b", "ü*?", "..."])
def test_paths_that_look_like_patterns(tmp_path: Path, name: str) -> None:
    where = tmp_path / name
    where.mkdir()
    state = {"w": np.arange(6.0), "j": jnp.ones((2, 3))}
    fp.save(state, where / "ours", config=QUICK)
    assert convert(where / "ours", where / name, "--to", "orbax").exit_code == OK
    same(restore(where / name), state)
    assert convert(where / name, where / "back").exit_code == OK
    same(adapter.load(where / "back"), state)


def test_damage_is_found(tmp_path: Path) -> None:
    state = {"w": np.random.default_rng(0).standard_normal(50_000), "v": np.ones(3)}
    save(state, tmp_path / "orbax")
    (data,) = [p for p in (tmp_path / "orbax").rglob("d/*") if p.stat().st_size > 100_000]
    content = data.read_bytes()
    for damaged in (content[:1000], b""):
        data.write_bytes(damaged)
        done = convert(tmp_path / "orbax", tmp_path / "ours")
        assert done.exit_code == CORRUPT, done.output
        assert "w: cannot be read" in done.stderr
        assert done.stderr.count("\n") == 1
        assert [p.name for p in tmp_path.iterdir()] == ["orbax"]
    save(state, tmp_path / "files", use_ocdbt=False)
    os.unlink(tmp_path / "files" / "w" / "0")
    done = convert(tmp_path / "files", tmp_path / "ours")
    assert done.exit_code == CORRUPT
    assert "w: cannot be read" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"tree_metadata": 3}',
        '{"tree_metadata": {"x": {}}}',
        '{"tree_metadata": {"x": {"key_metadata": [{"key": "5", "key_type": 1}], '
        '"value_metadata": {"value_type": "None"}}}}',
        '{"tree_metadata": {"x": {"key_metadata": [{"key": "w", "key_type": 9}], '
        '"value_metadata": {"value_type": "None"}}}}',
        '{"tree_metadata": {}, "value_metadata_tree": "{"}',
        '{"tree_metadata": {}, "value_metadata_tree": "{\\"category\\": \\"custom\\"}"}',
    ],
)
def test_metadata_that_makes_no_sense_is_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax" / "_METADATA").write_text(text)
    done = convert(tmp_path / "orbax", tmp_path / "ours")
    assert done.exit_code == CORRUPT, done.output
    assert done.stderr.startswith(f"fp-multi: {tmp_path / 'orbax' / '_METADATA'}: ")
    assert done.stderr.count("\n") == 1


def test_what_orbax_lost_is_not_taken_for_data(tmp_path: Path) -> None:
    save({"a.b": np.ones(3), "a": {"b": np.zeros(3)}}, tmp_path / "orbax")
    done = convert(tmp_path / "orbax", tmp_path / "ours")
    assert done.exit_code == CORRUPT
    assert "two values under the one name 'a.b'" in done.stderr


def test_names_in_the_metadata_cannot_lead_elsewhere(tmp_path: Path) -> None:
    save({"w": np.ones(2)}, tmp_path / "secret", use_ocdbt=False)
    save({"v": np.ones(2)}, tmp_path / "orbax", use_ocdbt=False)
    file = tmp_path / "orbax" / "_METADATA"
    file.write_text(file.read_text().replace('"key": "v"', '"key": "../secret/w"'))
    done = convert(tmp_path / "orbax", tmp_path / "ours")
    assert done.exit_code == CORRUPT
    assert "not the name of a directory in it" in done.stderr


def test_a_value_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    save({"w": np.ones(2)}, tmp_path / "orbax")
    file = tmp_path / "orbax" / "_METADATA"
    metadata = json.loads(file.read_text())
    metadata["tree_metadata"]["('w',)"]["value_metadata"]["value_type"] = "my.Thing"
    file.write_text(json.dumps(metadata))
    done = convert(tmp_path / "orbax", tmp_path / "ours")
    assert done.exit_code == OTHER
    assert done.stderr.startswith("fp-multi: w: a value of Orbax's type 'my.Thing'")


def test_failing_and_overwriting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp.save({"w": np.ones(30_000), "v": np.zeros(3)}, tmp_path / "ours", config=QUICK)
    save({"old": np.ones(2)}, tmp_path / "orbax")
    done = convert(tmp_path / "ours", tmp_path / "orbax", "--to", "orbax")
    assert done.exit_code == OTHER
    assert "--overwrite" in done.stderr
    done = convert(tmp_path / "ours", tmp_path / "orbax", "--to", "dcp", "--overwrite")
    assert done.exit_code == OTHER
    assert "nothing is replaced" in done.stderr
    same(restore(tmp_path / "orbax"), {"old": np.ones(2)})

    piece = fp.read_manifest(tmp_path / "ours").tensors[0].pieces[0]
    shard = tmp_path / "ours" / "shard-00000-of-00001.safetensors"
    good = shard.read_bytes()
    flip(shard, piece.offset)
    done = convert(tmp_path / "ours", tmp_path / "new", "--to", "orbax")
    assert done.exit_code == CORRUPT
    assert "chunk 0" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["orbax", "ours"]

    shard.write_bytes(good)
    assert convert(tmp_path / "ours", tmp_path / "orbax", "--to", "orbax", "--overwrite").exit_code == OK
    same(restore(tmp_path / "orbax"), {"w": np.ones(30_000), "v": np.zeros(3)})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["orbax", "ours"]


@pytest.mark.slow
@pytest.mark.parametrize(("to", "bound_mib"), [("fp_multi", 96), ("orbax", 160)])
def test_peak_memory_is_bounded(tmp_path: Path, to: str, bound_mib: int) -> None:
    rng = np.random.default_rng(0)
    make = np.asarray if to == "fp_multi" else jnp.asarray
    state = {f"t{i}": make(rng.standard_normal((10, 1 << 18), np.float32)) for i in range(40)}  # 400 MiB
    save({"t": state["t0"]}, tmp_path / "small")
    if to == "fp_multi":
        save(state, tmp_path / "source")
    else:
        fp.save(state, tmp_path / "source", config=QUICK)
    assert growth_mib(tmp_path / "source", tmp_path / "target", tmp_path / "small", to) < bound_mib
