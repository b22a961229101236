"""States taken apart and put together again."""

from __future__ import annotations

import enum
import gc
import math
import pickle
import struct
import sys
import types
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fp_multi import _registry
from fp_multi._dtypes import numpy_dtype
from fp_multi._registry import register_extension_type, register_tensor_type
from fp_multi._tree import TreeLeaf, check_tree, decode, describe, select, tree_paths
from fp_multi._types import ExtensionType, LeafSource, TensorType
from fp_multi.errors import (
    ConfigError,
    FpMultiError,
    KeyNotFoundError,
    ManifestError,
    UnsupportedLeafError,
)


class Point(NamedTuple):
    x: Any
    y: Any


def bits(value: float) -> bytes:
    return struct.pack(">d", value)


class _Memory:
    """Lets NumPy look at a source's memory as the engine would."""

    def __init__(self, source: LeafSource) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": source.shape,
            "typestr": f"|V{source.itemsize}",
            "data": (source.address, True),
            "strides": source.strides,
        }


def materialize(source: LeafSource) -> Any:
    """What loading the source's bytes gives."""
    data = np.asarray(_Memory(source)).tobytes() if source.nbytes else b""
    assert len(data) == source.nbytes
    if source.kind == "bytes":
        return data
    if source.kind == "bytearray":
        return bytearray(data)
    if source.kind == "pickle":
        return pickle.loads(data)
    array = np.frombuffer(data, numpy_dtype(source.dtype)).reshape(source.shape)
    attrs = source.attrs or {}
    if attrs.get("byteorder") == "big":
        array = array.astype(array.dtype.newbyteorder(">"))
    if attrs.get("order") == "F":
        array = np.asfortranarray(array)
    return array[()] if source.kind == "numpy.scalar" else array


def through_json(tree: Any, count: int) -> Any:
    tree = msgspec.json.decode(msgspec.json.encode(tree))
    check_tree(tree, count)
    return tree


def round_trip(state: Any, **kwargs: Any) -> Any:
    described = describe(state, **kwargs)
    assert len(described.names) == len(set(described.names)) == len(described.sources)
    tree = through_json(described.tree, len(described.sources))
    return decode(tree, [materialize(source) for source in described.sources])


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure and every bit."""
    if isinstance(a, np.generic):  # np.longlong is np.int64 by another name
        if not isinstance(b, np.generic) or a.dtype != b.dtype:
            return False
        # A long double scalar has padding bytes that belong to nobody.
        return a.tobytes() == b.tobytes() or (a.dtype.char in "gG" and bool(a == b))
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return bits(a) == bits(b)
    if isinstance(a, complex):
        return bits(a.real) == bits(b.real) and bits(a.imag) == bits(b.imag)
    if isinstance(a, dict):
        return (
            len(a) == len(b)
            and all(same(p, q) for p, q in zip(a, b, strict=True))
            and all(same(p, q) for p, q in zip(a.values(), b.values(), strict=True))
            and getattr(a, "__dict__", None) == getattr(b, "__dict__", None)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(p, q) for p, q in zip(a, b, strict=True))
    return a == b


# The tree and the names, literally


def test_golden_tree():
    weights = np.zeros((2, 3), np.float32)
    state = {
        "model": OrderedDict([("w", weights), ("tied", weights)]),
        "opt": [Point(1, -1.5), (None, True, "text")],
        7: {2**63: 1j},
        "raw": b"abc",
    }
    state["model"]._metadata = {"version": 1}
    described = describe(state)
    assert described.tree == [
        "dict",
        ["model", "opt", 7, "raw"],
        [
            ["ordereddict", ["w", "tied"], [0, 0], ["dict", ["_metadata"], [["dict", ["version"], [["int", 1]]]]]],
            [
                "list",
                [
                    ["namedtuple", f"{__name__}:Point", ["x", "y"], [["int", 1], ["float", "bff8000000000000"]]],
                    ["tuple", [None, True, "text"]],
                ],
            ],
            [
                "dict",
                [["key", ["bigint", "0x8000000000000000"]]],
                [["complex", "0000000000000000", "3ff0000000000000"]],
            ],
            1,
        ],
    ]
    assert described.names == ["model.w", "raw"]
    first = described.sources[0]
    assert first[:4] == ("float32", (2, 3), 24, weights.ctypes.data)
    assert (first.kind, first.strides, first.attrs, first.itemsize) == ("numpy", None, None, 4)
    assert described.sources[1].kind == "bytes"


X = np.zeros(1)


def names(state: Any) -> list[str]:
    """The names, each tensor a different one."""
    return describe(state).names


def t() -> np.ndarray:
    return np.zeros(1)


def test_plain_names():
    assert names({"a": {"b": [t(), (t(),)]}, 3: t(), "p": Point(t(), {-1: t()})}) == [
        "a.b.0",
        "a.b.1.0",
        "3",
        "p.x",
        "p.y.-1",
    ]
    assert names({"": {"a": t()}, "/": t(), "..": t(), "é\n": t(), "k" * 300: t(), "_x": t()}) == [
        ".a",
        "/",
        "..",
        "é\n",
        "k" * 300,
        "_x",
    ]


def test_escaped_names():
    assert names(t()) == ["~[]"]
    assert names({"a.b": t(), "a": {"b": t()}}) == ['~["a.b"]', '~["a","b"]']
    assert names({"1": t(), 1: t()}) == ['~["1"]', "~[1]"]
    assert names({"": t(), "__metadata__": t(), "~[": t(), "__fp_multi__x": t()}) == [
        '~[""]',
        '~["__metadata__"]',
        '~["~["]',
        '~["__fp_multi__x"]',
    ]
    assert names({True: t(), None: t(), 2**63: t(), ("a", 1): t(), b"k": t(), 1.5: t()}) == [
        '~[["key",true]]',
        '~[["key",null]]',
        '~[["key",["bigint","0x8000000000000000"]]]',
        '~[["key",["tuple",["a",["int",1]]]]]',
        '~[["key",["bytes","aw=="]]]',
        '~[["key",["float","3ff8000000000000"]]]',
    ]
    assert names({"\ud800": t(), '\x1f\t"é': {None: t()}}) == [
        '~[["key",["surrogates","ANg="]]]',
        '~["\\u001f\\t\\"é",["key",null]]',
    ]


def test_attributes_and_keys_cannot_share_a_name():
    od = OrderedDict({("attribute", "x"): t()})
    od.x = t()
    assert names(od) == ['~[["key",["tuple",["attribute","x"]]]]', '~[["attribute","x"]]']


def test_alias_keeps_its_first_name_and_does_not_collide():
    a = t()
    assert names({"a.b": a, "a": {"b": a}}) == ["a.b"]


def test_names_are_deterministic():
    state = {"b": t(), "a": {"c": t(), (1, 2): t()}}
    assert describe(state).tree == describe(state).tree
    assert names(state) == names(state) == ["b", "a.c", '~["a",["key",["tuple",[["int",1],["int",2]]]]]']


# Values


NAN_PAYLOADS = [struct.unpack(">d", bytes.fromhex(h))[0] for h in ("7ff8000000000001", "fff8000000000000")]

VALUES = [
    None,
    True,
    False,
    0,
    -(2**63),
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**5000,
    0.0,
    -0.0,
    math.inf,
    5e-324,
    *NAN_PAYLOADS,
    complex(-0.0, math.nan),
    "",
    "é\n\0\U0001f600",
    "\ud800",
    "a\udfff\U0001f600",
    b"",
    b"\0abc",
    bytearray(b""),
    bytearray(b"abc"),
    {},
    OrderedDict(),
    [],
    (),
    Point(None, ()),
    {"": 1, 1: 2, "1": 3, None: 4, 2.5: 5, b"1": 6, (1, ("a", None)): 7, Point(1, 2): 8, 1j: 9, "\ud800": 10},
    {True: 1, "true": 2},
    [[], {}, (), [None]],
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_back(value):
    assert same(round_trip(value), value)
    assert same(round_trip({"k": [value]}), {"k": [value]})


DTYPES = [
    *"?bBhHiIlLqQefdgFDG",
    "<M8[ns]",
    "M8",
    "m8[D]",
    "S3",
    "U2",
    "V5",
    np.dtype([("a", ">i4"), ("b", "<f8", (2,))]),
    *(
        name
        for name in ml_dtypes.__all__
        if isinstance(getattr(ml_dtypes, name), type) and hasattr(getattr(ml_dtypes, name), "dtype")
    ),
]


def filled(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    dtype = np.dtype(getattr(ml_dtypes, dtype) if isinstance(dtype, str) and hasattr(ml_dtypes, dtype) else dtype)
    array = np.zeros(shape, dtype)
    if dtype.type in (np.longdouble, np.clongdouble):  # not every bit pattern is a number
        array.flat = range(array.size)
        return array
    raw = np.arange(array.nbytes, dtype=np.uint8) % 2
    return raw.view(dtype).reshape(shape) if array.nbytes else array


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_and_scalars_of_every_dtype(dtype):
    array = filled(dtype, (3, 4))
    state = {"a": array, "0d": filled(dtype, ()), "empty": np.zeros((0, 2), array.dtype), "s": array[0, 1]}
    back = round_trip(state)
    assert same(back, state)
    assert back["0d"].shape == ()
    described = describe(state)
    assert [source.kind for source in described.sources] == ["numpy"] * 3 + ["numpy.scalar"]


@pytest.mark.parametrize(
    "dtype", [">f4", ">i8", ">c16", ">U3", ">M8[s]", np.dtype(ml_dtypes.bfloat16).newbyteorder(">")], ids=str
)
def test_big_endian_arrays_are_stored_little_endian(dtype):
    dtype = np.dtype(dtype)
    array = np.frombuffer(
        bytes(range(6 * dtype.itemsize)) if dtype.kind != "U" else "abcdef".encode("utf-32-be") * 3, dtype
    ).reshape(2, 3)
    described = describe([array, array, array.T])
    assert described.tree == ["list", [0, 0, 1]]
    source = described.sources[0]
    assert source.attrs == {"byteorder": "big"}
    assert source.strides is None
    stored = np.asarray(_Memory(source)).tobytes()
    assert stored == array.byteswap().tobytes()
    assert described.sources[1].attrs == {"byteorder": "big", "order": "F"}
    back = round_trip([array, array.T])
    assert back[0].dtype == dtype
    assert same(back, [array, array.T])


def test_signalling_nan_bits_survive_the_byte_swap():
    array = np.frombuffer(bytes.fromhex("7f800001ff800001"), ">f4")
    assert np.asarray(_Memory(describe(array).sources[0])).tobytes().hex() == "0100807f010080ff"


@pytest.mark.parametrize(
    ("view", "attrs"),
    [
        (lambda a: a.T, {"order": "F"}),
        (lambda a: a[::2], None),
        (lambda a: a[::-1, ::-1], None),
        (lambda a: a[1:, 2:], None),
        (lambda a: np.broadcast_to(a[0], (5, 6)), None),
        (lambda a: a[:, :1], None),
        (lambda a: np.lib.stride_tricks.sliding_window_view(a[0], 3), None),
    ],
)
def test_strided_memory(view, attrs):
    array = view(np.arange(24, dtype=np.int32).reshape(4, 6))
    source = describe(array).sources[0]
    assert source.strides == array.strides
    assert source.attrs == attrs
    back = round_trip(array)
    assert same(np.ascontiguousarray(back), np.ascontiguousarray(array))
    assert attrs is None or back.flags.f_contiguous


def test_arrays_are_not_copied_and_stay_alive():
    array = np.arange(3.0)
    described = describe([array])
    array[0] = 9
    assert materialize(described.sources[0])[0] == 9
    del array
    gc.collect()
    assert materialize(described.sources[0]).tolist() == [9, 1, 2]


def test_numpy_scalars_are_not_python_numbers():
    state = [np.float64(0.5), np.int64(3), np.bool_(True), np.str_("ab"), np.bytes_(b"ab"), np.complex128(1j)]
    back = round_trip(state)
    assert same(back, state)
    assert [type(value) for value in back] == [type(value) for value in state]


def test_aliases():
    a = np.arange(6.0).reshape(2, 3)
    e1, e2 = np.zeros((0, 3)), np.zeros((0, 3))
    b = bytearray(b"xy")
    state = [a, a, a[:], a[:1], a.T, a.reshape(6), a.view(np.int64), e1, e2, e1, b, b]
    assert describe(state).tree == ["list", [0, 0, 0, 1, 2, 3, 4, 5, 6, 5, 7, 7]]
    back = round_trip(state)
    assert back[0] is back[1] is back[2]
    assert back[10] is back[11]
    assert back[7] is not back[8]


def test_ordereddict_keeps_what_is_set_on_it():
    state = OrderedDict(w=np.ones(2))
    state._metadata = OrderedDict([("", {"version": 1}), ("layer", {"t": t()})])
    state._metadata.note = "deep"
    back = round_trip(state)
    assert type(back) is OrderedDict
    assert same(back._metadata, state._metadata)
    assert back._metadata.note == "deep"


@pytest.mark.parametrize("name", ["items", "__class__", "keys"])
def test_attributes_that_hide_methods_are_refused(name):
    state = OrderedDict()
    state.__dict__[name] = 1
    with pytest.raises(UnsupportedLeafError, match="attribute"):
        describe({"model": state})
    with pytest.raises(ManifestError, match="not the name of an attribute"):
        check_tree(["ordereddict", [], [], ["dict", [name], [None]]], 0)


# Named tuples


def test_namedtuple_takes_the_loaded_class():
    back = round_trip(Point(1, 2))
    assert type(back) is Point


def test_namedtuple_without_its_class_gets_a_new_one():
    for hint in (
        "no.such.module:Thing",
        "",
        ":",
        "a:b:c",
        "builtins:tuple",
        "os:path",
        "sys:modules",
        f"{__name__}:Point.x",
        f"{__name__}:t",
    ):
        back = decode(["namedtuple", hint, ["x", "z"], [None, True]], [])
        assert isinstance(back, tuple)
        assert type(back) is not Point
        assert back._fields == ("x", "z")
        assert back == (None, True)


def test_namedtuple_hint_runs_no_code(monkeypatch):
    module = types.ModuleType("fake_module")

    def fail(name: str) -> Any:
        raise RuntimeError("looked up")

    module.__getattr__ = fail

    class Evil(namedtuple("Evil", ["x"])):
        def __new__(cls, *args: Any) -> Any:
            raise RuntimeError("called")

        @classmethod
        def _make(cls, values: Any) -> Any:
            raise RuntimeError("made")

    module.Evil = Evil
    monkeypatch.setitem(sys.modules, "fake_module", module)
    assert decode(["namedtuple", "fake_module:lazy.Thing", ["x"], [None]], [])._fields == ("x",)
    assert type(decode(["namedtuple", "fake_module:Evil", ["x"], [None]], [])) is Evil


@pytest.mark.parametrize(
    "fields",
    [
        ["class", "def"],
        ["_x", "__class__"],
        ["1", "a b"],
        ["", "é"],
        ["ﬁ", "fi"],
        ["x\n):import os#", "y"],
        ["count", "index"],
    ],
)
def test_namedtuple_with_impossible_field_names(fields):
    node = ["namedtuple", "m:Bad name", fields, [None, True]]
    check_tree(node, 0)
    back = decode(node, [])
    assert tuple(back) == (None, True)
    assert len(back._fields) == 2


def test_namedtuple_with_more_than_its_fields_is_refused():
    class Sub(namedtuple("Sub", ["x"])):
        pass

    assert same(tuple(round_trip(Sub(1))), (1,))
    value = Sub(1)
    value.extra = 2
    with pytest.raises(UnsupportedLeafError, match="more to it than its fields"):
        describe([value])


# Refusals


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class MyDict(dict):
    pass


class MyFloat(float):
    pass


class MyArray(np.ndarray):
    pass


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


REFUSED = [
    (MyDict(a=1), "plain dict"),
    (defaultdict(list), "plain dict"),
    (MyFloat(1), "plain float"),
    (Level.LOW, "plain int"),
    (Color.RED, "arrays and plain values"),
    (np.float64.__new__(type("F", (np.float64,), {}), 1.0), "plain NumPy scalar"),
    (np.ma.masked_array([1], [True]), r"np\.asarray"),
    (np.zeros(2).view(MyArray), r"np\.asarray"),
    (np.rec.array([(1,)], dtype=[("a", int)]), r"np\.asarray"),
    (np.array([None]), "Python objects"),
    (np.array(["a"], np.dtypes.StringDType()), "outside the array"),
    (np.array([(1,)], [("a", ml_dtypes.bfloat16)]), "descriptor"),
    (np.bytes_(b"a\0"), "trailing NULs"),
    ({1, 2}, "sorted list"),
    (frozenset(), "sorted list"),
    (object(), "arrays and plain values"),
    (range(3), "arrays and plain values"),
    (memoryview(b""), "arrays and plain values"),
]


@pytest.mark.parametrize(("value", "way_out"), REFUSED, ids=range(len(REFUSED)))
def test_refused_values_name_the_path_and_the_way_out(value, way_out):
    with pytest.raises(UnsupportedLeafError, match=way_out) as caught:
        describe({"model": {"layers": [0, 1, 2, {"hook": value}]}})
    assert caught.value.path == "model.layers[3].hook"
    assert str(caught.value).startswith("model.layers[3].hook: ")
    assert "allow_pickle=True" in str(caught.value)
    with pytest.raises(UnsupportedLeafError) as caught:
        describe(value)
    assert caught.value.path == "<root>"


def test_readable_paths():
    for state, path in (
        ({"a.b": {1: [object()]}}, "['a.b'][1][0]"),
        ({None: {("x", 1.5): object()}}, "[None][('x', 1.5)]"),
        ({(1,): Point(object(), 1)}, "[(1,)].x"),
        ({b"k": {"\ud800": object()}}, "[b'k']['\\ud800']"),
    ):
        with pytest.raises(UnsupportedLeafError) as caught:
            describe(state)
        assert caught.value.path == path
    od = OrderedDict()
    od._metadata = {"x": object()}
    with pytest.raises(UnsupportedLeafError) as caught:
        describe({"m": od})
    assert caught.value.path == "m.__dict__['_metadata'].x"


def test_a_counter_keeps_its_type():
    described = describe({"milestones": Counter({3: 2, 7: 1})})
    back = decode(described.tree, described.sources)
    assert type(back["milestones"]) is Counter
    assert back == {"milestones": Counter({3: 2, 7: 1})}


def test_the_adapter_to_import_is_named():
    jax_like = type("Array", (), {"__module__": "jaxlib._jax"})()
    with pytest.raises(UnsupportedLeafError, match=r"import fp_multi\.adapters\.orbax"):
        describe([jax_like])


@pytest.mark.parametrize(
    "key",
    [
        Color.RED,
        Level.LOW,
        np.int64(1),
        np.str_("a"),
        frozenset(),
        MyFloat(1),
        math.nan,
        (1, math.nan),
        complex(0, math.nan),
        (1, (object(),)),
    ],
    ids=repr,
)
def test_refused_keys(key):
    for allow_pickle in (False, True):
        with pytest.raises(UnsupportedLeafError, match="key"):
            describe({"a": {key: 1}}, allow_pickle=allow_pickle)


def test_pickle_takes_the_rest_when_allowed():
    s = {1, 2}
    state = [s, s, Color.RED, Level.LOW, np.array([None, "x"]), defaultdict(list, a=[1]), 3]
    described = describe(state, allow_pickle=True)
    assert [source.kind for source in described.sources] == ["pickle"] * 5
    assert described.tree[1][0] == described.tree[1][1]
    back = round_trip(state, allow_pickle=True)
    assert back[0] is back[1]
    assert back[:4] == state[:4]
    assert back[4].tolist() == [None, "x"]
    assert back[5] == state[5]
    with pytest.raises(UnsupportedLeafError, match="a: cannot be pickled: no"):
        describe({"a": Unpicklable()}, allow_pickle=True)


def nested(depth: int, make: Any) -> Any:
    value: Any = None
    for _ in range(depth):
        value = make(value)
    return value


@pytest.mark.parametrize(
    "make",
    [
        lambda v: [v],
        lambda v: (v,),
        lambda v: {"k": v},
        lambda v: {1: v},
        lambda v: OrderedDict(k=v),
        lambda v: Point(v, 1),
    ],
)
def test_nesting(make):
    deepest = nested(256, make)
    back = round_trip(deepest)
    for _ in range(256):
        assert type(back) is type(deepest)
        back, deepest = (v.popitem()[1] if isinstance(v, dict) else v[0] for v in (back, deepest))
    for depth in (257, 100_000):
        with pytest.raises(UnsupportedLeafError, match="nested deeper than 256"):
            describe(nested(depth, make))


def test_deep_keys():
    good = {nested(255, lambda v: (v,)): 1}
    assert round_trip(good) == good
    with pytest.raises(UnsupportedLeafError, match="nested deeper than 256"):
        describe({nested(256, lambda v: (v,)): 1})


def test_deep_attributes():
    def make(value: Any) -> Any:
        od = OrderedDict()
        od.a = value
        return od

    assert same(round_trip(nested(128, make)).a.a, nested(126, make))
    with pytest.raises(UnsupportedLeafError, match="nested deeper than 256"):
        describe(nested(129, make))


def test_cycles():
    a: list[Any] = [1]
    a.append({"x": a})
    with pytest.raises(UnsupportedLeafError, match=r"^a\[1\]\.x: the container holds itself"):
        describe({"a": a})
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]


def test_little_stack_is_no_recursion_error():
    state = nested(200, lambda v: [v])

    def sink(depth: int) -> Any:
        return describe(state) if depth == 0 else sink(depth - 1)

    with pytest.raises(UnsupportedLeafError, match="stack"):
        sink(sys.getrecursionlimit() - 400)
    assert gc.isenabled()


# Registration


@pytest.fixture
def clean_registry():
    saved = (_registry._tensor_types, _registry._extensions, _registry._extensions_by_name)
    yield
    _registry._tensor_types, _registry._extensions, _registry._extensions_by_name = saved
    _registry._changed()


class FakeTensor:
    def __init__(self, array: np.ndarray, address: int | None = None, grad: str = "") -> None:
        self.array, self.address, self.grad = array, address, grad


def describe_fake(tensor: Any, path: str) -> LeafSource:
    if tensor.array is None:
        raise UnsupportedLeafError(f"{path}: no data", path)
    array = tensor.array
    device = tensor.address is None
    return LeafSource(
        "float64",
        array.shape,
        array.nbytes,
        0 if device else tensor.address,
        tensor,
        "fake",
        None,
        {"grad": tensor.grad} if tensor.grad else None,
        (lambda *args: lambda: None) if device else None,
        8,
    )


@pytest.mark.usefixtures("clean_registry")
def test_tensor_types():
    fake = TensorType(describe_fake)
    with pytest.raises(UnsupportedLeafError):
        describe(FakeTensor(X))
    register_tensor_type(FakeTensor, fake)
    register_tensor_type(FakeTensor, TensorType(describe_fake))
    with pytest.raises(ConfigError, match="FakeTensor is already registered"):
        register_tensor_type(FakeTensor, TensorType(lambda tensor, path: describe_fake(tensor, path)))
    sub = type("Sub", (FakeTensor,), {})
    a = X.ctypes.data
    empty = np.zeros(0)
    tensors = [
        FakeTensor(X, a),
        sub(X, a),
        FakeTensor(X, a, grad="1"),
        FakeTensor(X),
        FakeTensor(X),
        FakeTensor(empty, 0),
        FakeTensor(empty, 0),
    ]
    assert describe([*tensors, tensors[3], tensors[5]]).tree == ["list", [0, 0, 1, 2, 3, 4, 5, 2, 4]]
    with pytest.raises(UnsupportedLeafError, match=r"^a\[0\]: no data"):
        describe({"a": [FakeTensor(None)]})


@pytest.mark.usefixtures("clean_registry")
def test_virtual_subclasses_are_tensors_too():
    import abc

    class Abstract(abc.ABC):  # noqa: B024
        pass

    Abstract.register(FakeTensor)
    register_tensor_type(Abstract, TensorType(describe_fake))
    assert describe(FakeTensor(X)).tree == 0


@pytest.mark.usefixtures("clean_registry")
def test_extensions():
    class Size(tuple):
        pass

    class SubSize(Size):
        pass

    extension = ExtensionType(encode=tuple, decode=Size)
    state = {"s": Size((1, 2)), Size((3,)): [1], "n": None}
    with pytest.raises(UnsupportedLeafError, match="plain tuple"):
        describe(Size((1,)))
    register_extension_type(Size, "test.Size", extension)
    register_extension_type(Size, "test.Size", ExtensionType(tuple, Size))
    for args in ((Size, "other", extension), (SubSize, "test.Size", ExtensionType(list, Size))):
        with pytest.raises(ConfigError, match="already registered"):
            register_extension_type(*args)
    described = describe(state)
    assert described.tree[2][0] == ["ext", "test.Size", ["tuple", [["int", 1], ["int", 2]]]]
    assert same(round_trip(state), state)
    with pytest.raises(UnsupportedLeafError):
        describe(SubSize((1,)))
    for node in (None, True, ["int", 3]):
        with pytest.raises(ManifestError, match="is not a"):
            decode(["ext", "test.Size", node], [])
    assert decode(["ext", "unknown", ["tuple", [None]]], []) == (None,)
    assert decode(["dict", [["key", ["ext", "unknown", "k"]]], [None]], []) == {"k": None}
    with pytest.raises(ManifestError, match="cannot be a key"):
        decode(["dict", [["key", ["ext", "unknown", ["list", []]]]], [None]], [])


@pytest.mark.usefixtures("clean_registry")
def test_extension_that_encodes_to_something_else_is_refused():
    register_extension_type(Color, "test.Color", ExtensionType(lambda c: {"v": c.value}, Color))
    with pytest.raises(UnsupportedLeafError, match="encode gave a value of type dict"):
        describe(Color.RED)


# Selection


STATE = {
    "a.b": t(),
    "a": {"b": t(), "c": [t(), t(), {"d": t()}]},
    "step": 3,
    1: {"x": t()},
    (1, 2): t(),
    "p": Point(t(), t()),
    "": {"": t()},
    "od": OrderedDict(k=t(), j=t()),
    "e": {},
}
STATE["od"]._metadata = {"m": t()}


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["a.b"], {"a.b": 0, "a": {"b": 1}}),
        ([("a.b",)], {"a.b": 0}),
        ([("a", "b")], {"a": {"b": 1}}),
        (["a.c.0", "a.c.2.d"], {"a": {"c": [2, {"d": 4}]}}),
        (["a.c", "a.c.1"], {"a": {"c": [2, 3, {"d": 4}]}}),
        ([("a", "c", 1)], {"a": {"c": [3]}}),
        (["step"], {"step": 3}),
        (["1.x"], {1: {"x": 5}}),
        ([(1,)], {1: {"x": 5}}),
        ([((1, 2),)], {(1, 2): 6}),
        (["p.y"], {"p": (8,)}),
        ([""], {"": {"": 9}}),
        (["."], {"": {"": 9}}),
        (["od.j"], {"od": OrderedDict(j=11)}),
        (["e"], {"e": {}}),
        ("step", {"step": 3}),
        ([["a", "b"]], {"a": {"b": 1}}),
        ([], {}),
    ],
)
def test_select(only, expected):
    described = describe(STATE)
    tree = through_json(described.tree, len(described.sources))
    got = decode(tree, range(100), only=only)
    assert got == expected
    pruned, indices = select(tree, only)
    assert decode(pruned, range(100)) == expected
    leaves = {leaf.tensor for leaf in tree_paths(pruned)} - {None}
    assert indices == leaves


def test_select_keeps_types():
    tree = describe(STATE).tree
    got = decode(tree, range(100), only=["p.y", "od"])
    assert got["p"]._fields == ("y",)
    assert type(got["od"]) is OrderedDict
    assert got["od"]._metadata == {"m": 12}
    assert decode(tree, range(100), only=[()])["p"] == Point(7, 8)
    assert type(decode(tree, range(100), only=["p"])["p"]) is Point
    assert decode(0, ["root"], only=[()]) == "root"


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (["a.c.7"], r"only= names 'a\.c\.7'.*similar: .*'a\.c\.0'"),
        (["steps"], "similar: 'step'"),
        ([("a", "d")], r"\('a', 'd'\).*similar"),
        (["a.b", "zzzzz"], r"'zzzzz'.*at the top it has \['a\.b'\], a, step"),
        ([("a", "c", "0")], "names"),
        ([(1, 2)], "names"),
        (["a.c.1.0"], "names"),
        ([("a", [])], "unhashable"),
        ([3], "not iterable"),
    ],
)
def test_select_what_is_not_there(only, message):
    with pytest.raises(KeyNotFoundError, match=message):
        select(describe(STATE).tree, only)


def test_select_nothing_of_a_single_value():
    with pytest.raises(KeyNotFoundError, match="only= is empty"):
        select(0, [])


def test_tree_paths():
    od = OrderedDict(k=1.5)
    od._metadata = t()
    state = {"a": [t(), "x"], 1: od, "e": {}, "n": None}
    assert list(tree_paths(describe(state).tree)) == [
        TreeLeaf("a[0]", 0, None),
        TreeLeaf("a[1]", None, "x"),
        TreeLeaf("[1].k", None, 1.5),
        TreeLeaf("[1].__dict__['_metadata']", 1, None),
        TreeLeaf("e", None, {}),
        TreeLeaf("n", None, None),
    ]
    assert list(tree_paths(0)) == [TreeLeaf("<root>", 0, None)]


# Properties

texts = st.text(st.characters(), max_size=6) | st.sampled_from(
    [
        "",
        ".",
        "..",
        "/",
        "a",
        "b",
        "a.b",
        "0",
        "1",
        "__metadata__",
        "__fp_multi__",
        "~",
        '~["a"]',
        "~[",
        "\n",
        "x" * 300,
    ]
)
surrogate_texts = st.text(st.characters(categories=["Cs", "L"]), min_size=1, max_size=3)
floats = st.floats(allow_nan=False)
key_scalars = st.none() | st.booleans() | st.integers() | floats | texts | surrogate_texts | st.binary(max_size=3)
keys = st.integers(0, 3) | texts | key_scalars | st.tuples(key_scalars) | st.tuples(key_scalars, st.tuples(key_scalars))
arrays = hnp.arrays(
    st.sampled_from(["<f4", ">f4", "?", "<i8", "<M8[s]", "S2", ">u2"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
) | hnp.arrays("<f8", hnp.array_shapes(min_dims=2, max_dims=2, max_side=3)).map(np.transpose)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | texts
    | surrogate_texts
    | st.binary(max_size=4)
    | arrays
)
states = st.recursive(
    leaves,
    lambda child: (
        st.lists(child, max_size=4)
        | st.lists(child, max_size=3).map(tuple)
        | st.dictionaries(keys, child, max_size=4)
        | st.dictionaries(keys, child, max_size=3).map(OrderedDict)
        | st.builds(Point, child, child)
    ),
    max_leaves=20,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(states)
def test_any_state_comes_back(state):
    assert same(round_trip(state), state)


@settings(deadline=None)
@given(
    st.recursive(
        st.builds(t),
        lambda child: st.dictionaries(keys, child, max_size=5) | st.lists(child, max_size=3),
        max_leaves=20,
    )
)
def test_names_never_collide(state):
    described = describe(state)
    assert len(set(described.names)) == len(described.names)
    for name in described.names:
        name.encode()
        assert name
        assert name != "__metadata__"
        assert not name.startswith("__fp_multi__")
        if name.startswith("~"):
            assert isinstance(msgspec.json.decode(name[1:]), list)


@settings(deadline=None)
@given(states, st.data())
def test_any_leaf_can_be_selected_alone(state, data):
    described = describe(state)
    paths = list(tree_paths(described.tree))
    assert {leaf.tensor for leaf in paths} - {None} == set(range(len(described.sources)))
    if isinstance(state, dict) and state:
        key = data.draw(st.sampled_from(list(state)))
        assert list(decode(described.tree, described.sources, only=[(key,)])) == [key]


def test_a_hundred_thousand_tensors():
    state = {f"layers.{i}.weight": np.zeros(4, np.float32) for i in range(100_000)}
    described = describe(state)
    back = decode(described.tree, described.sources)
    check_tree(described.tree, 100_000)
    assert len(back) == 100_000
    with pytest.raises(FpMultiError):
        select(described.tree, ["layers.5.weigh"])
