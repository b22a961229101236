"""Names of element types: NumPy, the format and safetensors."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp_multi._dtypes import (
    _CODES,
    _ITEMSIZES,
    dtype_info,
    dtype_name,
    from_safetensors,
    itemsize,
    numpy_dtype,
    safetensors_code,
    stored_shape,
)
from fp_multi.errors import ManifestError

RECORD = np.dtype([("a", ">i4"), ("b", "<f4", (2, 3)), ("c", [("d", "|S3")])])

GOLDEN = [
    ("?", "bool"),
    ("i1", "int8"),
    ("u2", "uint16"),
    ("<i8", "int64"),
    (">i8", "int64"),
    ("q", "int64"),
    ("f2", "float16"),
    (">f4", "float32"),
    ("c8", "complex64"),
    (">c16", "complex128"),
    (ml_dtypes.bfloat16, "bfloat16"),
    (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
    (ml_dtypes.float8_e8m0fnu, "float8_e8m0fnu"),
    (ml_dtypes.float4_e2m1fn, "float4_e2m1fn"),
    (ml_dtypes.int4, "int4"),
    ("<M8[ns]", 'numpy:"<M8[ns]"'),
    (">m8[25s]", 'numpy:"<m8[25s]"'),
    ("M8", 'numpy:"<M8"'),
    ("S5", 'numpy:"|S5"'),
    (">U3", 'numpy:"<U3"'),
    ("V7", 'numpy:"|V7"'),
    (RECORD, 'numpy:[["a",">i4"],["b","<f4",[2,3]],["c",[["d","|S3"]]]]'),
    (
        np.dtype([("a", "i1"), ("b", "f8")], align=True),
        'numpy:[["a","|i1"],["","|V7"],["b","<f8"]]',
    ),
    (np.dtype([(("title", "a"), "i1")]), 'numpy:[[["title","a"],"|i1"]]'),
]


@pytest.mark.parametrize(("dtype", "name"), GOLDEN)
def test_names_and_back(dtype, name):
    dtype = np.dtype(dtype)
    info = dtype_info(dtype)
    assert info.name == dtype_name(dtype) == name
    assert info.swapped == (dtype.byteorder == ">")
    little = dtype.newbyteorder("<") if info.swapped else dtype
    assert numpy_dtype(name) == little
    assert itemsize(name) == info.itemsize == dtype.itemsize


def test_every_name_of_the_table_has_a_numpy_type_of_its_size():
    for name, size in _ITEMSIZES.items():
        if "longdouble" not in name:
            assert numpy_dtype(name).itemsize == size == itemsize(name)
            if name != "float4_e2m1fn_x2":
                assert dtype_name(numpy_dtype(name)) == name
    assert numpy_dtype("float4_e2m1fn_x2") == np.uint8


def test_every_type_of_ml_dtypes_has_a_name():
    for name in ml_dtypes.__all__:
        scalar = getattr(ml_dtypes, name)
        if isinstance(scalar, type) and issubclass(scalar, np.generic):
            assert dtype_name(np.dtype(scalar)) == name


def test_half_complex_stands_in_when_ml_dtypes_lacks_it():
    code = (
        "import ml_dtypes; del ml_dtypes.complex32, ml_dtypes.bcomplex32\n"
        "from fp_multi._dtypes import numpy_dtype, dtype_name\n"
        "d = numpy_dtype('complex32'); assert d.names == ('real', 'imag') and d.itemsize == 4\n"
        "assert dtype_name(d).startswith('numpy:'), dtype_name(d)\n"
        "assert numpy_dtype('bcomplex32')['real'] == ml_dtypes.bfloat16\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_long_double_says_which_one_it_is():
    own = dtype_name(np.dtype(np.longdouble))
    assert own == f"longdouble{np.finfo(np.longdouble).nmant}"
    assert numpy_dtype(own) == np.longdouble
    assert numpy_dtype("c" + own) == np.clongdouble
    foreign = "longdouble112" if own != "longdouble112" else "longdouble63"
    assert itemsize(foreign) == 16
    with pytest.raises(ManifestError, match="this machine's long double"):
        numpy_dtype(foreign)


@pytest.mark.parametrize(
    "dtype",
    [
        object,
        np.dtypes.StringDType(),
        np.dtype([("a", object)]),
        np.dtype([("a", ml_dtypes.bfloat16)]),
        np.dtype([("a", np.longdouble)]),
        np.dtype([("n", [("a", np.longdouble, (2,))])]),
        np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 0]}),
        np.dtype([]),
        np.dtype("V0"),
    ],
)
def test_types_without_an_exact_descriptor_are_refused(dtype):
    with pytest.raises(ValueError, match=r"descriptor|Python objects|dtype\.descr"):
        dtype_info(np.dtype(dtype))


HOSTILE = [
    "",
    "float33",
    "object",
    "numpy:",
    'numpy:"O"',
    'numpy:"|O8"',
    'numpy:"<f4"',
    'numpy:"<f16"',
    'numpy:">M8[ns]"',
    'numpy: "<M8[ns]"',
    'numpy:"M8[ns]"',
    'numpy:"|S0"',
    'numpy:"|S99999999999"',
    'numpy:"|S2147483647"',
    'numpy:"<U9999999999"',
    'numpy:"f4,f4"',
    'numpy:"(9999,9999)f4"',
    'numpy:"<M8[' + "9" * 20 + 'ns]"',
    'numpy:"\\u0000"',
    "numpy:[]",
    "numpy:{}",
    "numpy:3",
    "numpy:null",
    'numpy:[["a","|O"]]',
    'numpy:[["a"]]',
    "numpy:[[1,2]]",
    'numpy:[["a","<f4"],["a","<f4"]]',
    'numpy:[["a","<f4",[2147483647,2147483647,2147483647]]]',
    'numpy:[["a","<f4",[-1]]]',
    'numpy:[["a","<f4",[0]]]',
    'numpy:[["a","<f4",3]]',
    'numpy:[["a","|V2000000000"],["b","|V2000000000"]]',
    "numpy:" + "[" * 100_000,
    "numpy:" + '[["a",' * 5000 + '"<f4"' + "]]" * 5000,
    "numpy:" + "9" * 10_000,
    'numpy:["' + "x" * 100_000,
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_manifest_errors(name):
    for function in (numpy_dtype, itemsize):
        with pytest.raises(ManifestError) as caught:
            function(name)
        assert len(str(caught.value)) < 1000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(["<f4", "|S3"]),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=2), child, max_size=2),
    max_leaves=8,
)


@given(st.text(max_size=20) | json_values.map(lambda v: "numpy:" + json.dumps(v, separators=(",", ":"))))
def test_any_name_is_a_type_or_a_manifest_error(name):
    try:
        dtype = numpy_dtype(name)
    except ManifestError:
        return
    assert name == "float4_e2m1fn_x2" or dtype_name(dtype) == name
    assert itemsize(name) == dtype.itemsize > 0


def test_stored_form_of_types_that_safetensors_has():
    assert {safetensors_code(name) for name in _CODES} == set(
        re.findall(r"\S+", "BOOL U8 I8 F8_E5M2 F8_E4M3 I16 U16 F16 BF16 I32 U32 F32 F64 I64 U64")
    )
    assert stored_shape("float32", (2, 3)) == (2, 3)
    assert stored_shape("uint8", ()) == ()


def test_stored_form_of_all_other_types_has_an_axis_of_bytes():
    for name, shape, stored in (
        ("complex128", (), (16,)),
        ("complex64", (2, 3), (2, 3, 8)),
        ("float8_e8m0fnu", (5,), (5, 1)),
        ("float4_e2m1fn_x2", (5,), (5, 1)),
        ("int4", (0,), (0, 1)),
        ('numpy:"<U3"', (2,), (2, 12)),
    ):
        assert safetensors_code(name) == "U8"
        assert stored_shape(name, shape) == stored


def test_foreign_safetensors_codes():
    assert from_safetensors("BF16", (2,)) == ("bfloat16", (2,))
    assert from_safetensors("C64", ()) == ("complex64", ())
    assert from_safetensors("F8_E8M0", (2,)) == ("float8_e8m0fnu", (2,))
    assert from_safetensors("F4", (3, 4)) == ("float4_e2m1fn_x2", (3, 2))
    for code, shape in (("F4", (3,)), ("F4", ()), ("F6_E2M3", (4,)), ("F6_E3M2", (4,))):
        with pytest.raises(ValueError, match="byte boundaries"):
            from_safetensors(code, shape)
