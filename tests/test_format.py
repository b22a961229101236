"""The manifest and the shard header: literal bytes, what valid ones look like, and both ways."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support import sealed

from fp_multi._engine import crc32c
from fp_multi._format import (
    FORMAT,
    SHARD_METADATA,
    VERSION,
    HeaderEntry,
    Manifest,
    Piece,
    Shard,
    Tensor,
    Totals,
    decode_header,
    decode_manifest,
    decode_whole_header,
    encode_header,
    encode_manifest,
    header_nbytes,
)
from fp_multi._format_check import check_manifest
from fp_multi.errors import ConfigError, FormatVersionError, ManifestError


def small_manifest() -> Manifest:
    """Two shards; one tensor in two pieces, one whole, one empty."""
    return Manifest(
        format=FORMAT,
        version=VERSION,
        writer="fp_multi 0",
        chunk_nbytes=4096,
        shards=[
            Shard("shard-00000-of-00002.safetensors", 4096 + 4800 + 4, 4096, 17),
            Shard("shard-00001-of-00002.safetensors", 4096 + 3200, 4096, 18, 1),
        ],
        tensors=[
            Tensor(
                "w",
                "float32",
                [100, 20],
                [
                    Piece(4096, 4800, [1, 2], 0, ([0, 0], [60, 20])),
                    Piece(4096, 3200, [3], 1, ([60, 0], [40, 20])),
                ],
                "torch",
                {"requires_grad": "1"},
            ),
            Tensor("s", "int32", [], [Piece(8896, 4, [4])], "numpy.scalar"),
            Tensor("e", "complex128", [0, 3], [Piece(8900, 0, [])]),
        ],
        tree=["dict", ["w", "s", "e"], [0, 1, 2]],
        metadata={"run": "é"},
        totals=Totals(3, 8004, 8900 + 7296),
    )


GOLDEN = (
    '{"format":"fp_multi","version":1,"writer":"fp_multi 0","chunk_nbytes":4096,"shards":['
    '{"file":"shard-00000-of-00002.safetensors","nbytes":8900,"header_nbytes":4096,"header_crc32c":17},'
    '{"file":"shard-00001-of-00002.safetensors","nbytes":7296,"header_nbytes":4096,"header_crc32c":18,'
    '"rank":1}],"tensors":['
    '{"name":"w","dtype":"float32","shape":[100,20],"pieces":['
    '{"offset":4096,"nbytes":4800,"crc32c":[1,2],"box":[[0,0],[60,20]]},'
    '{"offset":4096,"nbytes":3200,"crc32c":[3],"shard":1,"box":[[60,0],[40,20]]}],'
    '"kind":"torch","attrs":{"requires_grad":"1"}},'
    '{"name":"s","dtype":"int32","shape":[],"pieces":[{"offset":8896,"nbytes":4,"crc32c":[4]}],'
    '"kind":"numpy.scalar"},'
    '{"name":"e","dtype":"complex128","shape":[0,3],"pieces":[{"offset":8900,"nbytes":0,"crc32c":[]}]}],'
    '"tree":["dict",["w","s","e"],[0,1,2]],"metadata":{"run":"é"},'
    '"totals":{"tensors":3,"tensor_nbytes":8004,"shard_nbytes":16196}'
).encode()


def test_golden_manifest():
    data = encode_manifest(small_manifest(), crc32c)
    assert data[:-31] == GOLDEN
    assert data[-31:] == b',"manifest_crc32c":"%08x"}\n' % crc32c(GOLDEN)
    assert decode_manifest(data, crc32c, source="m") == small_manifest()
    assert json.loads(data)["manifest_crc32c"] == f"{crc32c(GOLDEN):08x}"


def test_the_reference_checksum_is_the_engine_s():
    # Loaded by its path: tests are no package.
    import importlib.util

    spec = importlib.util.spec_from_file_location("crc", Path(__file__).with_name("crc_reference.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.crc32c(b"123456789") == 0xE3069283 == crc32c(b"123456789")
    assert module.crc32c(GOLDEN) == crc32c(GOLDEN)
    assert module.crc32c(b"56789", module.crc32c(b"1234")) == 0xE3069283


def test_members_that_hold_their_default_may_be_written_out():
    value = json.loads(encode_manifest(small_manifest(), crc32c))
    del value["manifest_crc32c"]
    value["tensors"][1]["attrs"] = {}
    value["tensors"][1]["pieces"][0] |= {"shard": 0, "box": None}
    value["shards"][0]["rank"] = 0
    assert decode_manifest(sealed(value), crc32c, source="m") == small_manifest()


def test_a_newer_version_is_named_before_anything_else():
    value = {"format": "fp_multi", "version": 2, "shards": 7, "new": [[{}]]}
    with pytest.raises(FormatVersionError, match=r"dir/manifest\.json: .*version 2.*knows version 1; upgrade"):
        decode_manifest(sealed(value), crc32c, source="dir/manifest.json")


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 8192, 12289])
def test_number_of_checksums(nbytes):
    for chunks in range(5):
        manifest = one_tensor([nbytes], [Piece(4096, nbytes, [0] * chunks)], dtype="uint8")
        if chunks == -(-nbytes // 4096):
            check_manifest(manifest)
        else:
            with pytest.raises(ManifestError, match=f"expected {-(-nbytes // 4096)} checksums"):
                check_manifest(manifest)


def one_tensor(shape: list[int], pieces: list[Piece], dtype: str = "float32") -> Manifest:
    """A manifest of one tensor; every piece is alone in its shard."""
    return Manifest(
        format=FORMAT,
        version=VERSION,
        writer="w",
        chunk_nbytes=4096,
        shards=[Shard(f"s{i}", 4096 + piece.nbytes, 4096, 0) for i, piece in enumerate(pieces)],
        tensors=[Tensor("t", dtype, shape, pieces)],
        tree=0,
        totals=Totals(1, sum(p.nbytes for p in pieces), sum(4096 + p.nbytes for p in pieces)),
    )


def boxes(shape: list[int], *parts: tuple[list[int], list[int]]) -> Manifest:
    pieces = []
    for number, (start, length) in enumerate(parts):
        nbytes = 4 * int(np.prod(length))
        pieces.append(Piece(4096, nbytes, [0] * -(-nbytes // 4096), number, (start, length)))
    return one_tensor(shape, pieces)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ([7], [([0], [4]), ([4], [3])]),
        ([7, 2], [([0, 0], [3, 2]), ([3, 0], [3, 2]), ([6, 0], [1, 2])]),
        ([2, 5], [([0, 0], [1, 3]), ([0, 3], [1, 2]), ([1, 0], [1, 3]), ([1, 3], [1, 2])]),
        ([4, 4], [([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 0], [2, 2]), ([2, 2], [2, 2])]),
        ([1, 1, 5], [([0, 0, 3], [1, 1, 2]), ([0, 0, 0], [1, 1, 3])]),
        ([2, 3], [([0, 0], [2, 3])]),
        ([4, 5], [([0, 0], [2, 3]), ([0, 3], [2, 2]), ([2, 0], [2, 3]), ([2, 3], [2, 2])]),
        ([4, 4], [([0, 0], [2, 4]), ([2, 0], [2, 2]), ([2, 2], [2, 2])]),
        ([3, 3], [([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]), ([1, 1], [1, 1])]),
        ([], [([], [])]),
    ],
)
def test_boxes_that_tile(shape, parts):
    check_manifest(boxes(shape, *parts))


@pytest.mark.parametrize(
    ("shape", "parts", "message"),
    [
        ([7], [([0], [4]), ([5], [2])], r"index \[4\] lies in no box"),
        ([7], [([0], [4]), ([3], [4])], r"index \[3\] lies in 2 boxes"),
        ([7], [([0], [4]), ([4], [2])], r"index \[6\] lies in no box"),
        ([7], [([0], [4]), ([4], [4])], "reaches out of shape"),
        ([7], [([0], [7]), ([7], [0])], "is empty or reaches"),
        ([7], [([0], [7]), ([0], [7])], r"index \[0\] lies in 2 boxes"),
        ([4, 4], [([0, 0], [2, 2]), ([2, 2], [2, 2])], "lies in no box"),
        ([4, 4], [([0, 0], [2, 4]), ([2, 0], [2, 2]), ([2, 1], [2, 3])], r"index \[2, 1\] lies in 2 boxes"),
        (
            [2, 2],
            [([0, 0], [1, 1]), ([0, 0], [1, 1]), ([1, 0], [1, 1]), ([1, 1], [1, 1]), ([0, 1], [1, 1])],
            "lies in 2 boxes",
        ),
        ([7], [([0, 0], [7, 1]), ([0], [7])], "expected a box of 1 axes"),
    ],
)
def test_boxes_that_do_not_tile(shape, parts, message):
    with pytest.raises(ManifestError, match=f"tensor 't': .*({message})"):
        check_manifest(boxes(shape, *parts))


@given(st.data())
def test_boxes_against_counting_cells(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    part = st.tuples(*(st.integers(0, n - 1) for n in shape)).flatmap(
        lambda start: st.tuples(
            st.just(list(start)),
            st.tuples(*(st.integers(1, n - s) for n, s in zip(shape, start, strict=True))).map(list),
        )
    )
    parts = data.draw(st.lists(part, min_size=1, max_size=4))
    count = np.zeros(shape, int)
    for start, length in parts:
        count[tuple(slice(s, s + n) for s, n in zip(start, length, strict=True))] += 1
    try:
        check_manifest(boxes(shape, *parts))
    except ManifestError:
        return
    assert (count == 1).all()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_every_cut_by_the_rules_is_accepted(shape, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    cuts = []
    for number, extent in enumerate(shape):
        if number < axis:
            cuts.append([1] * extent)
        elif number == axis:
            q = data.draw(st.integers(1, extent))
            cuts.append([min(q, extent - at) for at in range(0, extent, q)])
        else:
            even = data.draw(st.sampled_from([n for n in range(1, extent + 1) if extent % n == 0]))
            cuts.append([even] * (extent // even))
    parts = [([], [])]
    for lengths in cuts:
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        parts = [([*s, a], [*n, b]) for s, n in parts for a, b in zip(starts, lengths, strict=True)]
    check_manifest(boxes(shape, *data.draw(st.permutations(parts))))


# Headers


def test_golden_header():
    entries = [
        ("big", "F32", (1024,), 0, 4096, (2048,)),
        ('~["a"]', "U8", (2, 16), 4096, 4128, (0, 0)),
        ("s", "BOOL", (), 4128, 4129, ()),
    ]
    head = encode_header(entries, SHARD_METADATA)
    text = (
        '{"__metadata__":{"format":"pt","fp_multi":"1","DCP_SHARDING_INFO":'
        r'"{\"big\":{\"saved_offsets\":[2048]},\"~[\\\"a\\\"]\":{\"saved_offsets\":[0,0]},'
        r'\"s\":{\"saved_offsets\":[]}}"},'
        '"big":{"dtype":"F32","shape":[1024],"data_offsets":[0,4096]},'
        r'"~[\"a\"]":{"dtype":"U8","shape":[2,16],"data_offsets":[4096,4128]},'
        '"s":{"dtype":"BOOL","shape":[],"data_offsets":[4128,4129]}}'
    )
    assert head == (4088).to_bytes(8, "little") + text.ljust(4088).encode()
    assert header_nbytes(head, 4096 + 4129, "f") == 4096
    entries, metadata = decode_whole_header(head, 4096 + 4129, "f")
    assert entries == {
        "big": HeaderEntry("F32", (1024,), 0, 4096),
        '~["a"]': HeaderEntry("U8", (2, 16), 4096, 4128),
        "s": HeaderEntry("BOOL", (), 4128, 4129),
    }
    assert list(metadata) == ["format", "fp_multi", "DCP_SHARDING_INFO"]
    assert json.loads(metadata["DCP_SHARDING_INFO"])["s"] == {"saved_offsets": []}


def test_plain_headers():
    assert encode_header([], None, 8, sharding_info=False) == b"\x08" + b"\0" * 7 + b"{}      "
    entry = ("a", "U8", (1,), 0, 1, (0,))
    head = encode_header([entry], {}, 8, sharding_info=False)
    assert b'"__metadata__":{}' in head
    assert len(head) % 8 == 0
    head = encode_header([entry], None, 8, sharding_info=False)
    assert decode_whole_header(head, len(head) + 1, "f") == ({"a": HeaderEntry("U8", (1,), 0, 1)}, {})


@pytest.mark.parametrize("sharding_info", [True, False])
@pytest.mark.parametrize("names", [("a", "a"), ("__metadata__",), ("a", "__metadata__")])
def test_impossible_names(names, sharding_info):
    entries = [(name, "U8", (1,), i, i + 1, (0,)) for i, name in enumerate(names)]
    with pytest.raises(ConfigError, match="reserved or used twice"):
        encode_header(entries, None, sharding_info=sharding_info)


names = st.text(max_size=8) | st.sampled_from(
    ["", ".", "..", "/", "a.b", '~["a.b"]', "__fp_multi__", "\n", "\x00", "x" * 300]
)


@given(st.lists(names, unique=True, max_size=6).filter(lambda n: "__metadata__" not in n), st.sampled_from([8, 4096]))
def test_headers_both_ways_and_through_stock_safetensors(tmp_path_factory, names, align):
    entries, at = [], 0
    for number, name in enumerate(names):
        nbytes = 4 * number
        entries.append((name, "F32", (number,), at, at + nbytes, (0,)))
        at += nbytes
    head = encode_header(entries, SHARD_METADATA, align)
    assert len(head) % align == 0
    decoded = decode_header(head, len(head) + at, "f")
    assert list(decoded.items()) == [(n, HeaderEntry(*rest[:-1])) for n, *rest in entries]
    path = tmp_path_factory.mktemp("header") / "f.safetensors"
    path.write_bytes(head + np.arange(at // 4, dtype="<f4").tobytes())
    with safe_open(path, "np") as stock:
        assert set(stock.keys()) == set(names)
        assert stock.metadata()["fp_multi"] == "1"
        for name, _, shape, begin, _, _ in entries:
            assert stock.get_tensor(name).tolist() == np.arange(begin // 4, begin // 4 + shape[0]).tolist()


# Speed: generous limits that catch a change of complexity, not a slow machine


def test_a_hundred_thousand_tensors():
    n = 100_000
    tensors = [Tensor(f"layers.{i}.w", "float32", [4, 4], [Piece(4096 + 64 * i, 64, [i])]) for i in range(n)]
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        writer="w",
        chunk_nbytes=4096,
        shards=[Shard("s", 4096 + 64 * n, 4096, 0)],
        tensors=tensors,
        tree=["list", list(range(n))],
        totals=Totals(n, 64 * n, 4096 + 64 * n),
    )
    data = encode_manifest(manifest, crc32c)
    assert decode_manifest(data, crc32c, source="m") == manifest
    entries = [(t.name, "F32", (4, 4), 64 * i, 64 * i + 64, (0, 0)) for i, t in enumerate(tensors)]
    head = encode_header(entries, SHARD_METADATA)
    assert len(decode_header(head, len(head) + 64 * n, "f")) == n


def test_many_pieces():
    n = 50_000
    manifest = boxes([n, 2], *(([i, 0], [1, 2]) for i in range(n)))
    check_manifest(manifest)


def test_strings_that_are_not_unicode():
    manifest = small_manifest()
    manifest.metadata = {"a": "\ud800"}
    with pytest.raises(ManifestError, match="not valid Unicode"):
        encode_manifest(manifest, crc32c)
    assert msgspec.json.decode(b'"\\ud83d\\ude00"') == "\U0001f600"
