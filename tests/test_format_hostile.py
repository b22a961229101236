"""Manifests, trees and headers that somebody damaged, or made up to hurt us: always our errors, always soon."""

from __future__ import annotations

import copy
import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import sealed

from fp_multi._engine import crc32c
from fp_multi._format import (
    FORMAT,
    VERSION,
    Manifest,
    Piece,
    Shard,
    Tensor,
    Totals,
    decode_header,
    decode_manifest,
    encode_header,
    encode_manifest,
    header_nbytes,
)
from fp_multi._tree import check_tree, decode, select, tree_paths
from fp_multi.errors import CorruptCheckpointError, FormatVersionError, FpMultiError, ManifestError


def load(value: Any) -> Manifest:
    return decode_manifest(sealed(value), crc32c, source="dir/manifest.json")


def valid() -> dict[str, Any]:
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        writer="fp_multi 0",
        chunk_nbytes=4096,
        shards=[Shard("a.safetensors", 4096 + 4804, 4096, 17), Shard("b.safetensors", 7296, 4096, 18, 1)],
        tensors=[
            Tensor(
                "w",
                "float32",
                [100, 20],
                [
                    Piece(4096, 4800, [1, 2], 0, ([0, 0], [60, 20])),
                    Piece(4096, 3200, [3], 1, ([60, 0], [40, 20])),
                ],
            ),
            Tensor("s", "int32", [], [Piece(8896, 4, [4])], "numpy.scalar"),
            Tensor("e", "complex128", [0, 3], [Piece(8900, 0, [])]),
        ],
        tree=["dict", ["w", "s", 7], [0, ["tuple", [1, ["int", 5]]], 2]],
        metadata={"run": "1"},
        totals=Totals(3, 8004, 8900 + 7296),
    )
    value = json.loads(encode_manifest(manifest, crc32c))
    del value["manifest_crc32c"]
    load(value)
    return value


def edit(path: str, new: Any) -> Callable[[dict[str, Any]], None]:
    """``edit("tensors.0.shape", [1])`` sets a member, a new one too."""

    def change(value: Any) -> None:
        *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in way:
            value = value[part]
        value[last] = new

    return change


FAULTS = [
    (edit("format", "other"), "expected format 'fp_multi', found 'other'"),
    (edit("format", None), "expected format"),
    (edit("version", 0), "expected version 1, found 0"),
    (edit("version", True), "expected version 1, found True"),
    (edit("version", "1"), "expected version 1, found '1'"),
    (edit("version", 1.5), "expected version"),
    (edit("extra", 1), "unknown field `extra`"),
    (edit("totals.extra", 1), "unknown field"),
    (edit("tensors.0.extra", 1), "unknown field"),
    (edit("chunk_nbytes", 0), "chunk_nbytes: expected a multiple of 4096 up to 16777216, found 0"),
    (edit("chunk_nbytes", 5000), "chunk_nbytes"),
    (edit("chunk_nbytes", (1 << 24) + 4096), "chunk_nbytes"),
    (edit("shards", []), "expected at least one"),
    (edit("shards.0.file", "b.safetensors"), "'b.safetensors' is listed twice"),
    (edit("shards.0.header_nbytes", 0), "header_nbytes.*found 0"),
    (edit("shards.0.header_nbytes", 4100), "header_nbytes.*found 4100"),
    (edit("shards.0.header_nbytes", 12288), "up to the file's 8900 bytes, found 12288"),
    (edit("shards.0.header_crc32c", 1 << 32), r"shards\[0\]\.header_crc32c"),
    (edit("shards.0.nbytes", 8904), "'a.safetensors': expected pieces up to its end at 8904"),
    (edit("shards.0.nbytes", 8899), r"tensor 's', piece 0: expected bytes in \[4096, 8899\)"),
    (edit("shards.0.nbytes", 1 << 63), r"shards\[0\]\.nbytes"),
    (edit("tensors.0.name", ""), "empty, reserved or used twice"),
    (edit("tensors.0.name", "__metadata__"), "empty, reserved or used twice"),
    (edit("tensors.0.name", "s"), "tensor 's': the name is empty, reserved or used twice"),
    (edit("tensors.0.dtype", "float33"), "tensor 'w': unknown dtype 'float33'"),
    (edit("tensors.0.dtype", 'numpy:"|O"'), "tensor 'w': dtype"),
    (edit("tensors.0.dtype", "float64"), "tensor 'w': expected 9600 bytes in box"),
    (edit("tensors.1.dtype", "float64"), r"tensor 's': expected 8 bytes for float64\[\].*found a piece of 4"),
    (edit("tensors.0.shape", [100, 21]), r"tensor 'w': boxes do not tile .*index \[0, 20\] lies in no box"),
    (edit("tensors.0.shape", [-100, -20]), r"tensors\[0\]\.shape"),
    (edit("tensors.0.shape", [1 << 62, 1 << 62, 4]), "tensor 'w': expected one piece without a box"),
    (edit("tensors.1.shape", [1 << 32, 1 << 32]), "tensor 's': expected more than 9223372036854775807 bytes"),
    (edit("tensors.1.shape", [1 << 62] * 64), "tensor 's': expected"),
    (edit("tensors.1.shape", [1] * 65), r"tensors\[1\]\.shape"),
    (edit("tensors.1.shape", [1 << 64]), r"tensors\[1\]\.shape"),
    (edit("tensors.1.shape", [0]), "tensor 's': expected 0 bytes"),
    (edit("tensors.0.pieces", []), "tensor 'w': expected one piece.*found 0 pieces"),
    (edit("tensors.0.pieces.0.box", None), "tensor 'w': expected a box of 2 axes"),
    (edit("tensors.0.pieces.0.box", [[0], [60]]), "tensor 'w': expected a box of 2 axes"),
    (edit("tensors.0.pieces.0.box", [[0, 0], [61, 20]]), "tensor 'w': expected 4880 bytes in box"),
    (edit("tensors.0.pieces.0.box", [[1, 0], [60, 20]]), "tensor 'w': boxes do not tile"),
    (edit("tensors.0.pieces.0.box", [[0, 0], [1 << 62, 1 << 62]]), "tensor 'w': expected"),
    (edit("tensors.0.pieces.1.shard", 0), r"tensor 'w': expected at most one piece in a shard \(rule P3\)"),
    (edit("tensors.0.pieces.1.shard", 2), "tensor 'w', piece 1: expected a shard below 2, found shard 2"),
    (edit("tensors.0.pieces.1.shard", -1), r"pieces\[1\]\.shard"),
    (edit("tensors.0.pieces.0.crc32c", [1]), "tensor 'w', piece 0: expected 2 checksums, found 1"),
    (edit("tensors.0.pieces.0.crc32c", [1, -1]), r"crc32c\[1\]"),
    (edit("tensors.2.pieces.0.crc32c", [1]), "tensor 'e', piece 0: expected 0 checksums, found 1"),
    (edit("tensors.2.pieces.0.box", [[0, 0], [0, 3]]), "tensor 'e': expected one piece without a box"),
    (edit("tensors.2.pieces.0.offset", 5000), "tensor 'e', piece 0: expected offset 8896|piece 0: expected offset"),
    (edit("tensors.1.pieces.0.offset", 8895), "tensor 's', piece 0: expected offset 8896.*found offset 8895"),
    (edit("tensors.1.pieces.0.offset", 4000), r"tensor 's', piece 0: expected bytes in \[4096, 8900\)"),
    (edit("tensors.1.pieces.0.offset", 1 << 62), "tensor 's', piece 0: expected bytes in"),
    (edit("tensors.1.pieces.0.offset", (1 << 62) + 1), r"pieces\[0\]\.offset"),
    (edit("tensors.1.pieces.0.nbytes", 1 << 62), "tensor 's': expected 4 bytes"),
    (edit("tree", 3), "tree at <root>: tensor 3 of 3 does not exist"),
    (edit("tree", 0), r"tensors\[1\] is used by no node"),
    (edit("tree", {}), "tree at <root>: {...} is not a node"),
    (edit("tree.1", ["w", "w", 7]), "tree at <root>: a key stands twice"),
    (edit("tree.1", ["w", "s"]), "number of values is not the number of keys"),
    (edit("tree.2.1.1", [1, ["int", "5"]]), r"tree at s\[1\]: \['int', '5'\] is not a node: not an integer"),
    (edit("metadata", {"a": 1}), r"metadata"),
    (edit("totals.tensors", 4), "totals.tensors: expected 3, found 4"),
    (edit("totals.tensor_nbytes", 1), "totals.tensor_nbytes: expected 8004, found 1"),
    (edit("totals.shard_nbytes", 1), "totals.shard_nbytes: expected 16196, found 1"),
    *(
        (edit("shards.0.file", name), "expected a file name")
        for name in ("", ".", "..", ".x", "/etc/passwd", "a/b", "..\\a", "a\0b", "../" * 1000)
    ),
    *(
        (lambda value, member=member: value.pop(member), "missing required field|expected format|expected version")
        for member in ("format", "version", "writer", "chunk_nbytes", "shards", "tensors", "tree", "totals")
    ),
]


@contextmanager
def frugally(nbytes: int = 96 << 20) -> Iterator[None]:
    """Refusing costs little memory, whatever sizes the bytes speak of."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("change", "message"), FAULTS, ids=range(len(FAULTS)))
def test_every_fault_is_named(change, message):
    value = valid()
    change(value)
    with pytest.raises(ManifestError, match=message) as caught:
        load(value)
    assert str(caught.value).startswith("dir/manifest.json: ")
    assert len(str(caught.value)) < 2000


def test_damage_and_truncation():
    data = sealed(valid())
    for cut in (0, 1, 30, 31, len(data) // 2, len(data) - 1):
        with pytest.raises(ManifestError, match="expected"):
            decode_manifest(data[:cut], crc32c, source="m")
    for at in range(0, len(data), 7):
        bad = bytearray(data)
        bad[at] ^= 4
        with pytest.raises(ManifestError, match="damaged or cut off"):
            decode_manifest(bytes(bad), crc32c, source="m")
    with pytest.raises(ManifestError, match="damaged"):
        decode_manifest(data + b"\n", crc32c, source="m")


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]}",
        b"null}",
        b"\xff\xfe}",
        b"\xef\xbb\xbf{}",
        b'{"format":"fp_multi","version":' + b"9" * 100_000 + b"}",
        b'{"format":"fp_multi","version":1e999}',
        b'{"format":"fp_multi","version":NaN}',
        b'{"format":"\\ud800","version":1}',
        b'{"format":"fp_multi","version":1,"tree":' + b"[" * 1_000_000,
        b'{"format":"fp_multi","version":1,"tree":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"x":' * 100_000 + b"1" + b"}" * 100_000,
    ],
    ids=range(12),
)
def test_what_is_no_manifest_at_all(body):
    with frugally(), pytest.raises(ManifestError):
        load(body)


def test_a_version_that_is_only_a_little_too_large():
    with pytest.raises(FormatVersionError, match="more than 64 bits"):
        load(b'{"format":"fp_multi","version":%d}' % 10**30)


def test_sizes_cost_no_memory():
    value = valid()
    value["tensors"][1]["shape"] = [1 << 62]
    value["shards"][0]["nbytes"] = 1 << 62
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError):
            load(value)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


# Trees


def chain(depth: int, wrap: Callable[[Any], Any], end: Any = None) -> Any:
    for _ in range(depth):
        end = wrap(end)
    return end


BAD_TREES = [
    [],
    [[]],
    [1],
    [None],
    ["unknown", 1],
    ["dict"],
    ["dict", [], [], []],
    ["dict", {}, []],
    ["dict", [], {}],
    ["dict", "ab", "ab"],
    ["dict", ["a"], []],
    ["dict", [True], [None]],
    ["dict", [None], [None]],
    ["dict", [1.5], [None]],
    ["dict", [2**63], [None]],
    ["dict", [["key"]], [None]],
    ["dict", [["key", "a"]], [None]],
    ["dict", [["key", ["int", 1]]], [None]],
    ["dict", [["key", 0]], [None]],
    ["dict", [["key", ["dict", [], []]]], [None]],
    ["dict", [["key", ["list", []]]], [None]],
    ["dict", [["key", ["tuple", [["list", []]]]]], [None]],
    ["dict", [["key", ["tuple", [0]]]], [None]],
    ["dict", [["key", ["float", "7ff8000000000000"]]], [None]],
    ["dict", [["key", ["tuple", [["complex", "7ff8000000000000", "0" * 16]]]]], [None]],
    ["dict", [["key", None], ["key", None]], [None, None]],
    ["dict", [["lock", None]], [None]],
    ["dict", [{}], [None]],
    ["dict", ["a", "a"], [None, None]],
    ["ordereddict", [], []],
    ["ordereddict", [], [], []],
    ["ordereddict", [], [], ["list", []]],
    ["ordereddict", [], [], ["dict", [1], [None]]],
    ["ordereddict", [], [], ["dict", ["a", "a"], [None, None]]],
    ["ordereddict", [], [], ["dict", ["a"], []]],
    ["list"],
    ["list", 3],
    ["list", [], []],
    ["list", {"a": 1}],
    ["list", "abc"],
    ["list", [1.5]],
    ["tuple", None],
    ["namedtuple", "m:N", ["x"], []],
    ["namedtuple", "m:N", ["x", "x"], [None, None]],
    ["namedtuple", None, [], []],
    ["namedtuple", "m:N", [1], [None]],
    ["namedtuple", "m:N", "x", [None]],
    ["namedtuple", "m:N", [f"f{i}" for i in range(5000)], [None] * 5000],
    ["ext", "x"],
    ["ext", 1, None],
    ["ext", "x", 0],
    ["ext", "x", ["dict", [], []]],
    ["ext", "x", ["bytes", ""]],
    ["int"],
    ["int", True],
    ["int", 1.0],
    ["int", "1"],
    ["int", 2**63],
    ["int", 1, 2],
    ["bigint", "1"],
    ["bigint", "0x1"],
    ["bigint", "0x08000000000000000"],
    ["bigint", "0X8000000000000000"],
    ["bigint", 5],
    ["float", 1.5],
    ["float", "3ff"],
    ["float", "3FF8000000000000"],
    ["float", "3ff800000000000g"],
    ["complex", "0" * 16],
    ["complex", "0" * 16, None],
    ["surrogates", "YQA="],
    ["surrogates", "!!!!"],
    ["surrogates", "YQ=="],
    ["surrogates", None],
    ["surrogates", "é"],
    ["bytes", "YQ=="],
    1.5,
    {},
    5,
    -1,
    2**70,
    True,
]


@pytest.mark.parametrize("tree", BAD_TREES, ids=range(len(BAD_TREES)))
def test_bad_trees(tree):
    with frugally(), pytest.raises(ManifestError, match="tree"):
        check_tree(["list", [["dict", ["k"], [tree]], 0]], 1) if tree is not True else check_tree(tree, 1)


def test_the_path_of_a_bad_node_is_named():
    tree = ["dict", ["a", 1], [["list", [None, ["namedtuple", "", ["f"], [["nope"]]]]], None]]
    with pytest.raises(ManifestError, match=r"tree at a\[1\]\.f: \['nope'\] is not a node"):
        check_tree(tree, 0)
    tree = ["ordereddict", [], [], ["dict", ["m"], [["nope"]]]]
    with pytest.raises(ManifestError, match=r"tree at <root>|\.__dict__\['m'\]"):
        check_tree(tree, 0)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda n: ["list", [n]],
        lambda n: ["tuple", [n]],
        lambda n: ["dict", ["k"], [n]],
        lambda n: ["dict", [["key", ["tuple", []]]], [n]],
        lambda n: ["ordereddict", [], [], ["dict", ["a"], [n]]],
        lambda n: ["namedtuple", "", ["f"], [n]],
    ],
)
def test_deep_trees(wrap):
    with frugally(), pytest.raises(ManifestError, match="nested deeper than 256"):
        check_tree(chain(100_000, wrap), 0)


def test_deep_keys_and_extensions():
    for wrap in (lambda n: ["tuple", [n]], lambda n: ["ext", "x", n]):
        with frugally(), pytest.raises(ManifestError, match="nested deeper than 256"):
            check_tree(["dict", [["key", chain(100_000, wrap)]], [None]], 0)
    with frugally(), pytest.raises(ManifestError, match="nested deeper than 256"):
        check_tree(chain(100_000, lambda n: ["ext", "x", n]), 0)


def test_the_deepest_tree_allowed_is_read():
    for wrap in (
        lambda n: ["list", [n]],
        lambda n: ["dict", ["k"], [n]],
        lambda n: ["namedtuple", "", ["f"], [n]],
        lambda n: ["ext", "x", n],
    ):
        value = valid()
        value["tree"] = ["list", [0, 1, 2, chain(255, wrap)]]
        manifest = load(value)
        decode(manifest.tree, range(3))
        assert len(list(tree_paths(manifest.tree))) == 4
        select(manifest.tree, [(0,)])


def test_keys_that_are_equal_in_python_only():
    tree = ["dict", [1, ["key", True]], [None, None]]
    check_tree(tree, 0)
    with pytest.raises(ManifestError, match="equal in Python"):
        decode(tree, [])


def test_keys_with_one_hash():
    keys = [["key", ["bigint", hex(k * (2**61 - 1))]] for k in range(8, 50_000)]
    tree = ["dict", keys, [None] * len(keys)]
    check_tree(tree, 0)
    with frugally(), pytest.raises(ManifestError, match="one hash"):
        decode(tree, [])


def test_wide_trees():
    n = 300_000
    with frugally(), pytest.raises(ManifestError, match="twice"):
        check_tree(["dict", [*map(str, range(n)), "5"], [None] * (n + 1)], 0)
    with frugally(), pytest.raises(ManifestError, match="does not exist"):
        check_tree(["list", [0] * n + [1]], 1)
    with frugally():
        check_tree(["list", [["tuple", [0]]] * n], 1)


# Mutations

junk = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 4096, 1 << 31, 1 << 32, 1 << 62, 1 << 63, 1 << 64])
    | st.text(max_size=5)
    | st.sampled_from(["dict", "list", "tuple", "int", "float", "key", "ext", "namedtuple", "bytes", "numpy:[]"])
    | st.floats(allow_nan=False, allow_infinity=False)
)
nodes = st.recursive(
    junk,
    lambda child: st.lists(child, max_size=4) | st.dictionaries(st.text(max_size=3), child, max_size=2),
    max_leaves=8,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    found = []
    if isinstance(value, (dict, list)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            found += [(value, key), *places(child)]
    return found


def mutate(value: Any, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(value)))
        action = data.draw(st.integers(0, 3))
        if action == 0:
            container[key] = data.draw(nodes)
        elif action == 1:
            del container[key]
        elif action == 2 and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif type(container[key]) is int:
            container[key] += data.draw(st.integers(-2, 2))
        if not places(value):
            return


VALID = valid()
MUTATIONS = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MUTATIONS
@given(st.data())
def test_mutated_manifests(data):
    value = copy.deepcopy(VALID)
    mutate(value, data)
    try:
        manifest = load(value)
        decode(manifest.tree, range(len(manifest.tensors)))
        list(tree_paths(manifest.tree))
    except FpMultiError:
        return
    # Whatever got through is coherent.
    assert sum(s.nbytes - s.header_nbytes for s in manifest.shards) == manifest.totals.tensor_nbytes


@MUTATIONS
@given(st.data())
def test_mutated_trees(data):
    tree = [
        "ordereddict",
        ["a", 1, ["key", ["tuple", [["float", "3ff8000000000000"], ["bytes", "YQ=="]]]]],
        [0, ["list", [1, ["namedtuple", "m:N", ["x", "y"], [None, ["ext", "e", ["tuple", ["s"]]]]]]], True],
        ["dict", ["_metadata"], [["dict", ["v"], [["bigint", "0x8000000000000000"]]]]],
    ]
    check_tree(tree, 2)
    mutate(tree, data)
    try:
        check_tree(tree, 2)
        decode(tree, range(2))
        list(tree_paths(tree))
    except FpMultiError:
        return


@given(nodes)
def test_any_json_is_a_tree_or_refused(tree):
    try:
        check_tree(tree, 1)
        decode(tree, [None])
    except FpMultiError:
        return


@given(st.binary(max_size=200))
def test_any_bytes(data):
    for body in (data, b'{"format":"fp_multi","version":1,' + data):
        with pytest.raises(FpMultiError):
            decode_manifest(sealed(body), crc32c, source="m")
    with pytest.raises(FpMultiError):
        decode_manifest(data, crc32c, source="m")


# Safetensors headers


def raw_header(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return len(data).to_bytes(8, "little") + data


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> str:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})


HEADERS = [
    ("", "not JSON"),
    ("[]", r"expected a JSON object, found \[\]"),
    ("null", "expected a JSON object, found None"),
    ("{", "not JSON"),
    ("{} x", "not JSON"),
    (b"\xff{}", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ('{"a":' * 100_000, "not JSON"),
    ('{"a":' + "9" * 100_000 + "}", "not JSON"),
    ('{"a":NaN}', "NaN is not JSON"),
    ('{"a":1}', "tensor 'a': expected an object, found 1"),
    ('{"\\ud800":1}', "lone surrogate"),
    ('{"__metadata__":{"a":1}}', "map strings to strings"),
    ('{"__metadata__":[]}', "map strings to strings"),
    ('{"__metadata__":{},"__metadata__":{}}', "stands twice"),
    (entry()[:-1] + "," + entry()[1:], "stands twice"),
    (entry()[:-2] + ',"dtype":"I8"}}', "stands twice"),
    (entry(dtype="F33"), "expected a dtype of the safetensors format, found 'F33'"),
    (entry(dtype=None), "expected a dtype"),
    (entry(dtype=["U8"]), "expected a dtype"),
    (entry(shape=[-4]), "expected a shape"),
    (entry(shape=[True] * 4), "expected a shape"),
    (entry(shape=[4.0]), "expected a shape"),
    (entry(shape=4), "expected a shape"),
    (entry(shape=[1] * 65), "expected a shape of at most 64"),
    (entry(shape=[1 << 63]), "expected a shape"),
    (entry(shape=[1 << 62] * 64), "tensor 'a': expected .* bits for U8"),
    (entry(shape=[5]), r"tensor 'a': expected 40 bits for U8\[5\], found 4 bytes"),
    (entry(dtype="F4", shape=[3], offsets=[0, 2]), "expected 12 bits"),
    (entry(offsets=[4, 0]), "expected 32 bits for .*, found -4 bytes"),
    (entry(offsets=[-4, 0]), "expected two data_offsets"),
    (entry(offsets=[0]), "expected two data_offsets"),
    (entry(offsets=[0, 4.0]), "expected two data_offsets"),
    (entry(offsets=[1, 5]), "tensor 'a': expected data from 0 on.*found 1"),
    (entry(offsets=[1 << 62, (1 << 62) + 4]), "two data_offsets"),
    (entry(shape=[3], offsets=[0, 3]), "expected 3 bytes of data behind the header, found 4"),
    (entry(shape=[5], offsets=[0, 5]), "expected 5 bytes of data behind the header, found 4"),
    ("{}", "expected 0 bytes of data"),
    (
        '{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}',
        "tensor 'b': expected data from 3 on, where the tensor before it ends, found 2",
    ),
]


@pytest.mark.parametrize(("text", "message"), HEADERS, ids=range(len(HEADERS)))
def test_bad_headers(text, message):
    head = raw_header(text)
    with frugally(), pytest.raises(CorruptCheckpointError, match=message) as caught:
        decode_header(head, len(head) + 4, "dir/x.safetensors")
    assert str(caught.value).startswith("dir/x.safetensors: ")
    assert len(str(caught.value)) < 2000


def test_headers_that_are_too_short_or_too_long():
    head = raw_header(entry())
    for cut in (0, 7, 8, len(head) - 1):
        with pytest.raises(CorruptCheckpointError, match="expected a header"):
            decode_header(head[:cut], len(head) + 4, "f")
        with pytest.raises(CorruptCheckpointError, match="expected a header"):
            decode_header(head[:cut], cut, "f")
    for length in (100_000_001, 1 << 40, (1 << 64) - 1):
        with pytest.raises(CorruptCheckpointError, match="at most 100000000, found"):
            header_nbytes(length.to_bytes(8, "little"), 1 << 62, "f")
    assert list(decode_header(head + b"data", len(head) + 4, "f")) == ["a"]


def test_extra_members_of_an_entry_are_ignored():
    head = raw_header(entry()[:-2] + ',"extra":1}}')
    assert list(decode_header(head, len(head) + 4, "f")) == ["a"]


@MUTATIONS
@given(st.data())
def test_mutated_headers(data):
    value = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "U8", "shape": [0], "data_offsets": [24, 24]},
        "c": {"dtype": "F4", "shape": [2, 2], "data_offsets": [24, 26]},
    }
    mutate(value, data)
    head = raw_header(json.dumps(value))
    try:
        entries = decode_header(head, len(head) + 26, "f")
    except CorruptCheckpointError:
        return
    assert sum(e.end - e.begin for e in entries.values()) == 26


@MUTATIONS
@given(st.data())
def test_flipped_bytes_in_headers(data):
    head = bytearray(encode_header([("a", "F32", (2,), 0, 8, (0,)), ("b", "U8", (), 8, 9, ())], {"k": "v"}, 8))
    nbytes = len(head) + 9
    for _ in range(data.draw(st.integers(1, 4))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    try:
        entries = decode_header(bytes(head), nbytes, "f")
    except CorruptCheckpointError:
        return
    assert all(0 <= e.begin <= e.end <= 9 for e in entries.values())


@given(st.binary(max_size=100))
def test_any_bytes_as_a_header(data):
    for head in (data, raw_header(data)):
        try:
            decode_header(head, len(head), "f")
        except CorruptCheckpointError:
            continue
        assert head[8:].strip() in (b"{}",) or b"__metadata__" in head or b"data_offsets" in head
