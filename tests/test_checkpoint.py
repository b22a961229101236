"""save, load and verify on real files: what goes in comes out, and nothing else."""

from __future__ import annotations

import collections
import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from support import flip

import fp_multi as fp
from fp_multi import errors

Point = collections.namedtuple("Point", "x y")

SHARD = "shard-00000-of-00001.safetensors"
ML_DTYPES = [
    *("bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"),
    *("int2", "int4", "uint2", "uint4"),
]
NUMPY_DTYPES = [*"?bBhHiIqQefdFD", "g", "G", "<M8[ns]", "<m8[s]", "S5", "U3", ">i4", ">f8", ">c16", "V3"]
RECORD = np.dtype([("a", "<i4"), ("b", ">f8", (2,)), ("c", "S3")])


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


def round_trip(state: Any, path: Path, **options: Any) -> Any:
    fp.save(state, path, **options)
    fp.verify(path)
    return fp.load(path, **{k: v for k, v in options.items() if k == "allow_pickle"})


def random_array(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, np.uint8)
    if dtype.kind == "?" or dtype.name.startswith(("int2", "int4", "uint2", "uint4", "float6", "float4")):
        raw &= 1
    if dtype.kind == "U":
        raw[:] = np.frombuffer("añ語".encode("utf-32-le") * count, np.uint8)[: len(raw)]
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", [*NUMPY_DTYPES, *ML_DTYPES])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (33, 129)])
def test_every_dtype_and_shape(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    array = random_array(getattr(ml_dtypes, name, name), shape)
    back = round_trip({"a": array}, tmp_path / "c")["a"]
    assert same(array, back)
    assert back.flags.writeable


def test_records(tmp_path: Path) -> None:
    array = random_array(RECORD, (5, 2))
    assert same(array, round_trip(array, tmp_path / "c"))


def test_layouts_of_memory(tmp_path: Path) -> None:
    base = np.arange(5 * 6 * 7, dtype=np.float32).reshape(5, 6, 7)
    state = {
        "transposed": base.T,
        "sliced": base[::2, 1:5, ::-3],
        "fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(base[:1], (4, 6, 7)),
        "window": np.lib.stride_tricks.sliding_window_view(base[0], (2, 3)),
        "row of much": np.zeros((1000, 1000))[3],
    }
    back = round_trip(state, tmp_path / "c")
    for name, array in state.items():
        assert back[name].tobytes() == np.ascontiguousarray(array).tobytes(), name
    assert back["fortran"].flags.f_contiguous
    assert os.path.getsize(tmp_path / "c" / SHARD) < 50_000, "a view stores what it shows, not its base"


def test_values_and_containers(tmp_path: Path) -> None:
    ordered = collections.OrderedDict(b=1, a=[np.float32(2.5)])
    ordered._metadata = {"version": 2}  # type: ignore[attr-defined]
    state = {
        "ints": [0, -1, 2**63 - 1, -(2**63), 2**63, -(10**400)],
        "floats": [0.0, -0.0, 5e-324, float("inf"), struct.unpack("<d", b"\x01\0\0\0\0\0\xf8\x7f")[0]],
        "others": (None, True, False, "", "語\n", "\ud800", b"", b"\0\xff", bytearray(b"x"), 1 - 2j),
        "empty": {"d": {}, "l": [], "t": ()},
        "named": Point(np.ones(2), (1,)),
        "ordered": ordered,
        1: {0: np.int8(3), "0": np.uint64(2**64 - 1)},
    }
    back = round_trip(state, tmp_path / "c")
    assert same(state, back)
    assert back["ordered"]._metadata == {"version": 2}


KEYS = [
    "/",
    ".",
    "",
    "..",
    "__metadata__",
    "a\nb",
    "k" * 300,
    "a.b",
    "~",
    '~["a"]',
    "__fp_multi__0",
    0,
    "0",
    -1,
    None,
    True,
]


def test_no_two_keys_collide(tmp_path: Path) -> None:
    state: dict[Any, Any] = {key: np.full(3, i) for i, key in enumerate(KEYS)}
    state["a"] = {"b": np.full(3, 99), "": {"": np.full(3, 98)}}
    state[("t", 1.5)] = np.full(3, 97)
    back = round_trip(state, tmp_path / "c")
    assert same(state, back)
    names = [tensor.name for tensor in fp.read_manifest(tmp_path / "c").tensors]
    assert len(set(names)) == len(names) == len(KEYS) + 3
    with safe_open(tmp_path / "c" / SHARD, "np") as stock:
        assert sorted(stock.keys()) == sorted(names)


def test_tied_arrays_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).random((100, 100))
    state = {"in": weight, "out": weight, "view": weight[:], "other": weight.T, "part": weight[:50]}
    report = fp.save(state, tmp_path / "c")
    assert report.tensors == 3
    back = fp.load(tmp_path / "c")
    assert back["in"] is back["out"] is back["view"]
    assert np.array_equal(back["other"], weight.T)
    assert np.array_equal(back["part"], weight[:50])
    assert not np.shares_memory(back["in"], back["part"]), "each loaded tensor owns its memory"


def test_stock_safetensors_reads_every_classic_dtype(tmp_path: Path) -> None:
    state = {c: random_array(c, (5, 3)) for c in "?bBhHiIqQefd"} | {"F": random_array("F", (2,)), "0d": np.array(1.5)}
    fp.save(state, tmp_path / "c")
    with safe_open(tmp_path / "c" / SHARD, "np") as stock:
        for name, array in state.items():
            found = stock.get_tensor(name)
            if name == "F":  # no classic dtype: bytes, with the item size as the last axis
                assert found.dtype == np.uint8
                assert found.shape == (2, 8)
            else:
                assert found.dtype == array.dtype
            assert found.tobytes() == array.tobytes()
        info = json.loads(stock.metadata()["DCP_SHARDING_INFO"])
    assert info.keys() == state.keys()
    assert info["F"]["saved_offsets"] == [0, 0]


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    state = {"b": np.ones((300, 1000)), "a": [np.arange(5), 1.5], "odd": np.zeros(1001, np.int8)}
    for name in ("one", "two"):
        fp.save(state, tmp_path / name, metadata={"note": "x"})
    one, two = (sorted((tmp_path / name).iterdir()) for name in ("one", "two"))
    assert [p.name for p in one] == ["manifest.json", SHARD]
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]


def test_layout_keeps_whole_pages_first(tmp_path: Path) -> None:
    state = {"small": np.ones(3), "paged": np.ones(1024), "odd": np.ones(1500), "paged2": np.ones((2, 512))}
    fp.save(state, tmp_path / "c")
    manifest = fp.read_manifest(tmp_path / "c")
    offsets = {tensor.name: tensor.pieces[0].offset for tensor in manifest.tensors}
    assert manifest.shards[0].header_nbytes % 4096 == 0
    assert sorted(offsets, key=offsets.__getitem__) == ["paged", "paged2", "small", "odd"]
    assert offsets["paged"] % 4096 == offsets["paged2"] % 4096 == 0


def test_overwrite_replaces_only_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "c"
    fp.save({"v": np.zeros(10)}, path)
    with pytest.raises(errors.CheckpointExistsError, match="overwrite=True"):
        fp.save({"v": np.ones(10)}, path)
    fp.save({"v": np.ones(10)}, path, overwrite=True)
    assert fp.load(path)["v"].sum() == 10
    fp.save(fp.load(path), path, overwrite=True)  # what was loaded from there
    assert fp.load(path)["v"].sum() == 10
    assert os.listdir(tmp_path) == ["c"]
    for other in ("file", "full"):
        if other == "file":
            (tmp_path / other).write_text("mine")
        else:
            (tmp_path / other / "sub").mkdir(parents=True)
        with pytest.raises(errors.CheckpointExistsError, match="not a checkpoint"):
            fp.save({}, tmp_path / other, overwrite=True)
        assert (tmp_path / other).exists()


def test_unsupported_leaves_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for value, hint in ((object(), "allow_pickle"), ({1, 2}, "sorted list"), (np.array([{}]), "allow_pickle")):
        with pytest.raises(errors.UnsupportedLeafError, match=hint) as caught:
            fp.save({"m": [0, {"x": value}]}, tmp_path / "c")
        assert caught.value.path == "m[1].x"
    with pytest.raises(errors.ConfigError, match="metadata"):
        fp.save({}, tmp_path / "c", metadata={"epoch": 3})  # type: ignore[dict-item]
    assert os.listdir(tmp_path) == []


def test_pickle_only_when_asked_for_on_both_sides(tmp_path: Path) -> None:
    state = {"set": {1, 2}, "w": np.ones(3)}
    fp.save(state, tmp_path / "c", allow_pickle=True)
    with pytest.raises(errors.PickleRefusedError, match=r"set.*allow_pickle=True"):
        fp.load(tmp_path / "c")
    assert fp.load(tmp_path / "c", only=["w"])["w"].sum() == 3
    assert fp.load(tmp_path / "c", allow_pickle=True)["set"] == {1, 2}


def test_only(tmp_path: Path) -> None:
    state = {"m": {"a": np.ones(2), "b": [np.zeros(3), np.full(3, 5)]}, "m.a": np.full(1, 7), 3: {"x": 1}}
    fp.save(state, tmp_path / "c")
    assert same(fp.load(tmp_path / "c", only=["m.a"]), {"m": {"a": np.ones(2)}, "m.a": np.full(1, 7)})
    assert same(fp.load(tmp_path / "c", only=[("m", "b", 1)]), {"m": {"b": [np.full(3, 5)]}})
    assert same(fp.load(tmp_path / "c", only=[(3,), ("m", "a")]), {"m": {"a": np.ones(2)}, 3: {"x": 1}})
    with pytest.raises(errors.KeyNotFoundError, match=r"m\.c"):
        fp.load(tmp_path / "c", only=["m.c"])


def test_target_checks_and_fills(tmp_path: Path) -> None:
    state = {"w": np.arange(6.0).reshape(2, 3), "t": (np.int32(4), "s"), "p": Point(np.ones(70000), 2)}
    fp.save(state, tmp_path / "c")
    target = {"t": (np.int32(0), ""), "p": Point(np.zeros(70000), 0), "w": np.zeros((2, 3))}
    back = fp.load(tmp_path / "c", target=target)
    assert list(back) == ["t", "p", "w"]
    assert type(back["p"]) is Point
    assert back["t"] == (4, "s")
    assert target["w"].sum() == 0
    filled = fp.load(tmp_path / "c", target=target, inplace=True)
    assert filled["w"] is target["w"]
    assert filled["p"].x is target["p"].x
    assert same(filled["w"], state["w"])
    assert target["p"].x.sum() == 70000
    for wrong, message in (
        ({**target, "w": np.zeros((3, 2))}, r"w: shape: \(3, 2\) in target, \(2, 3\) on disk"),
        ({**target, "w": np.zeros((2, 3), np.float32)}, "w: dtype: float32 in target, float64 on disk"),
        ({**target, "x": 1}, "keys: extra .*'x'"),
        ({"w": target["w"]}, "keys"),
        ({**target, "t": [np.int32(0), ""]}, "t: structure: list in target, a tuple on disk"),
        ({**target, "p": (np.zeros(70000), 0)}, "p: structure"),
        ({**target, "w": 1.5}, "w: structure: float in target, a tensor"),
        ({**target, "t": (np.int32(0), np.zeros(2))}, r"t\[1\]: structure"),
    ):
        with pytest.raises(errors.TargetMismatchError, match=message):
            fp.load(tmp_path / "c", target=wrong)


def test_inplace_into_awkward_memory(tmp_path: Path) -> None:
    values = np.random.default_rng(1).random((300, 500))
    fp.save({"a": values, "b": values, "z": np.zeros((0, 3))}, tmp_path / "c")
    strided = np.zeros((500, 300)).T
    big = np.zeros((300, 500), ">f8")
    target = {"a": strided, "b": big[:, :].astype("<f8"), "z": np.zeros((0, 3))}
    back = fp.load(tmp_path / "c", target=target, inplace=True)
    assert back["a"] is strided
    assert np.array_equal(strided, values)
    assert np.array_equal(target["b"], values)
    frozen = np.zeros((300, 500))
    frozen.flags.writeable = False
    with pytest.raises(errors.TargetMismatchError, match="read-only"):
        fp.load(tmp_path / "c", target={"a": frozen, "b": big.astype("<f8"), "z": np.zeros((0, 3))}, inplace=True)


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c"
    state = {"big": np.random.default_rng(0).random(2_000_000), "small": np.arange(10), "last": np.arange(77)}
    fp.save(state, path, config=fp.SaveConfig(chunk_bytes=4 << 20))
    pieces = {tensor.name: tensor.pieces[0] for tensor in fp.read_manifest(path).tensors}
    flip(path / SHARD, pieces["big"].offset + (9 << 20))
    with pytest.raises(errors.ChecksumError, match="'big', chunk 2") as caught:
        fp.load(path)
    assert (caught.value.tensor, caught.value.shard, caught.value.chunk) == ("big", SHARD, 2)
    assert fp.load(path, only=["small"])["small"].sum() == 45
    flip(path / SHARD, pieces["small"].offset)
    flip(path / SHARD, 20)  # the header: our own reader does not need it, stock readers do
    with pytest.raises(errors.CorruptCheckpointError, match="3 faults") as several:
        fp.verify(path)
    assert {fault.tensor for fault in several.value.faults} == {"big", "small", None}
    assert fp.load(path, config=fp.LoadConfig(verify=False))["last"].sum() == state["last"].sum()


def test_missing_and_cut_shards(tmp_path: Path) -> None:
    path = tmp_path / "c"
    fp.save({"w": np.ones(100_000), "v": np.ones(3)}, path)
    size = (path / SHARD).stat().st_size
    with open(path / SHARD, "r+b") as file:
        file.truncate(size - 30)
    for check in (fp.load, fp.verify):
        with pytest.raises(errors.CorruptCheckpointError, match=f"expected {size} bytes, found {size - 30}") as caught:
            check(path)
        assert isinstance(caught.value.faults[0], errors.TruncatedShardError)
    assert {fault.tensor for fault in caught.value.faults} == {None, "w", "v"}
    (path / SHARD).unlink()
    for check in (fp.load, fp.verify):
        with pytest.raises(errors.MissingShardError, match="missing"):
            check(path)
    with pytest.raises(FileNotFoundError, match="found nothing"):
        fp.load(tmp_path / "nowhere")
    with pytest.raises(errors.CheckpointNotFoundError, match=r"manifest\.json"):
        fp.load(tmp_path)


def test_manifest_faults(tmp_path: Path) -> None:
    path = tmp_path / "c"
    fp.save({"w": np.ones(10)}, path)
    good = (path / "manifest.json").read_bytes()
    flip(path / "manifest.json", 40)
    with pytest.raises(errors.ManifestError, match=r"damaged"):
        fp.load(path)
    from fp_multi._engine import crc32c

    body = good[:-31].replace(b'"version":1', b'"version":2')
    (path / "manifest.json").write_bytes(body + b',"manifest_crc32c":"%08x"}\n' % crc32c(body))
    with pytest.raises(errors.FormatVersionError, match="version 2"):
        fp.verify(path)


def test_shards_of_several_writers_and_boxes(tmp_path: Path) -> None:
    """A directory as several ranks would write it, made by hand from docs/format.md."""
    from fp_multi._engine import crc32c
    from fp_multi._format import SHARD_METADATA, Manifest, Piece, Shard, Tensor, Totals, encode_header, encode_manifest

    whole = np.arange(7 * 6, dtype=np.int32).reshape(7, 6)
    parts = [((0, 0), whole[:4]), ((4, 0), whole[4:])]
    columns = [((0, 0), whole[:, :3]), ((0, 3), whole[:, 3:])]
    shards, rows, cols = [], [], []
    for number in range(2):
        pieces, data, entries = [], b"", []
        for name, (start, values) in (("rows", parts[number]), ("cols", columns[number])):
            raw = np.ascontiguousarray(values).tobytes()
            entries.append((name, "I32", values.shape, len(data), len(data) + len(raw), start))
            pieces.append((start, values.shape, len(data), raw))
            data += raw
        head = encode_header(entries, SHARD_METADATA)
        file = f"shard-{number:05d}-of-00002.safetensors"
        (tmp_path / file).write_bytes(head + data)
        shards.append(Shard(file, len(head) + len(data), len(head), crc32c(head), number))
        for target, (start, shape, at, raw) in zip((rows, cols), pieces, strict=True):
            target.append(Piece(len(head) + at, len(raw), [crc32c(raw)], number, (list(start), list(shape))))
    manifest = Manifest(
        format="fp_multi",
        version=1,
        writer="a stranger",
        chunk_nbytes=4096,
        shards=shards,
        tensors=[Tensor("rows", "int32", [7, 6], rows), Tensor("cols", "int32", [7, 6], cols)],
        tree=["dict", ["rows", "cols"], [0, 1]],
        totals=Totals(2, 2 * whole.nbytes, sum(shard.nbytes for shard in shards)),
    )
    (tmp_path / "manifest.json").write_bytes(encode_manifest(manifest, crc32c))
    fp.verify(tmp_path)
    assert same(fp.load(tmp_path), {"rows": whole, "cols": whole})


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.complex_numbers(),
)
arrays = st.builds(
    random_array,
    st.sampled_from(["f4", "i8", "u1", "f2", ">i2", "?", ml_dtypes.bfloat16]),
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.integers(0, 1000),
)
states = st.recursive(
    leaves | arrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4) | st.integers(-3, 3), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(state=states)
def test_any_state(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "c"
    assert same(state, round_trip(state, path, config=fp.SaveConfig(block_bytes=64 << 10, queue_depth=2)))
