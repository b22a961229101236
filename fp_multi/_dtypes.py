"""Element types: their names in the format, in NumPy and in safetensors headers.

One table for docs/format.md section 3.5 and rule 2.3. Everything else is a cached look-up in it.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import msgspec
import numpy as np

from fp_multi.errors import ManifestError

DType: TypeAlias = np.dtype[Any]

# name: item size in bytes. Sub-byte types are one element a byte, as in ml_dtypes.
_ITEMSIZES: dict[str, int] = {
    **dict.fromkeys(("bool", "int8", "uint8", "int1", "uint1", "int2", "uint2", "int4", "uint4"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "bcomplex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4"), 1),
    **dict.fromkeys(("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"), 1),
    "float4_e2m1fn_x2": 1,
    **dict.fromkeys(("complex128", "longdouble63", "longdouble105", "longdouble112"), 16),
    **dict.fromkeys(("clongdouble63", "clongdouble105", "clongdouble112"), 32),
}

# The classic safetensors set. Whatever is missing here is stored as U8 with one more axis.
_CODES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}

CODE_BITS: dict[str, int] = {
    **{code: 8 * _ITEMSIZES[name] for name, code in _CODES.items()},
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "C64": 64,
}
"""Bits in an element of every code that a safetensors file may hold."""

_CODE_NAMES: dict[str, str] = {
    **{code: name for name, code in _CODES.items()},
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
}

_PLAIN_CODES: dict[str, str] = {name: code for code, name in _CODE_NAMES.items()}

_PREFIX = "numpy:"
# Only these kinds have a fixed byte layout that NumPy's own string describes; "|O8" and friends do
# not pass.
_DESCRIPTOR = re.compile(r"[<>|][bSUVmMiufc][0-9]{0,10}(\[[0-9A-Za-z/]{1,24}\])?")
_MAX_ITEMSIZE = 1 << 30
_CACHE_LIMIT = 1 << 14
_MAX_AXES = 64


class DTypeInfo(NamedTuple):
    """What a save needs to know about a NumPy dtype."""

    name: str
    itemsize: int
    swapped: bool
    """The elements are big-endian and have to be turned round before they are stored."""


def _numpy_table() -> dict[str, DType]:
    table: dict[str, DType] = {}
    for name in _ITEMSIZES:
        scalar = getattr(ml_dtypes, name, None) or getattr(np, name, None)
        if scalar is not None:
            table[name] = np.dtype(scalar)
    # np.longdouble has the same descriptor on every 64-bit machine and other bits on each, so its
    # name says which it is.
    digits = np.finfo(np.longdouble).nmant
    table[f"longdouble{digits}"] = np.dtype(np.longdouble)
    table[f"clongdouble{digits}"] = np.dtype(np.clongdouble)
    table["float4_e2m1fn_x2"] = np.dtype(np.uint8)
    # Stand-ins that keep the shape, for an ml_dtypes that does not have the half-precision complex
    # types yet.
    for name, half in (("complex32", np.float16), ("bcomplex32", ml_dtypes.bfloat16)):
        table.setdefault(name, np.dtype([("real", half), ("imag", half)]))
    return table


_NUMPY: dict[str, DType] = _numpy_table()
_NAMES: dict[DType, str] = {
    dtype: name for name, dtype in _NUMPY.items() if name != "float4_e2m1fn_x2" and dtype.names is None
}
_info_cache: dict[DType, DTypeInfo] = {}
_dtype_cache: dict[str, DType] = {}


def dtype_info(dtype: DType) -> DTypeInfo:
    """Describe a NumPy dtype.

    Args:
        dtype: any NumPy dtype, in either byte order.

    Returns:
        Its name in the format (that of the little-endian type), item size, and whether its bytes
        must be swapped.

    Raises:
        ValueError: the type's bytes do not say what the elements are (Python objects,
            variable-width strings), or NumPy has no exact descriptor for it.
    """
    info = _info_cache.get(dtype)
    if info is None:
        info = _describe(dtype)
        if len(_info_cache) >= _CACHE_LIMIT:
            _info_cache.clear()
        _info_cache[dtype] = info
    return info


def dtype_name(dtype: DType) -> str:
    """Name a NumPy dtype as docs/format.md section 3.5 does; byte order is not part of a name.

    Raises:
        ValueError: see :func:`dtype_info`.
    """
    return dtype_info(dtype).name


def _describe(dtype: DType) -> DTypeInfo:
    if dtype.hasobject:
        raise ValueError(f"elements of dtype {dtype!r} are Python objects or lie outside the array")
    if dtype.names is not None:
        return DTypeInfo(_record_name(dtype), dtype.itemsize, False)
    swapped = dtype.byteorder == ">"
    little = dtype.newbyteorder("<") if swapped else dtype
    name = _NAMES.get(little)
    if name is None:
        if dtype.kind not in "SUVmM" or dtype.itemsize == 0 or np.dtype(little.str) != little:
            raise ValueError(f"dtype {dtype!r} has no exact descriptor")
        name = f'{_PREFIX}"{little.str}"'
    return DTypeInfo(name, dtype.itemsize, swapped)


def _record_name(dtype: DType) -> str:
    # dtype.descr raises ValueError for overlapping fields, and says "V2" for a bfloat16 field: the
    # comparison finds that.
    descr: Any = dtype.descr
    if dtype.itemsize == 0 or np.lib.format.descr_to_dtype(descr) != dtype or _has_long_double(dtype):
        raise ValueError(f"record type {dtype!r} has no exact descriptor")
    return _PREFIX + msgspec.json.encode(descr).decode()


def _has_long_double(dtype: DType) -> bool:
    if dtype.subdtype is not None:
        return _has_long_double(dtype.subdtype[0])
    if dtype.fields is not None:
        return any(_has_long_double(field[0]) for field in dtype.fields.values())
    return dtype.type in (np.longdouble, np.clongdouble)


def numpy_dtype(name: str) -> DType:
    """Give the NumPy dtype of a name, little-endian.

    ``float4_e2m1fn_x2`` has no NumPy type and gives ``uint8``, two elements in a byte.
    ``complex32`` and ``bcomplex32`` give a record of ``real`` and ``imag`` where ml_dtypes does not
    know them.

    Args:
        name: a dtype name from a manifest; it may be hostile.

    Returns:
        The dtype, whose item size is ``itemsize(name)``.

    Raises:
        ManifestError: there is no such type, or this machine does not have it (another machine's
            long double).

    Example:
        >>> numpy_dtype("int16"), numpy_dtype('numpy:"<M8[ns]"')
        (dtype('int16'), dtype('<M8[ns]'))
    """
    dtype = _NUMPY.get(name, _dtype_cache.get(name))
    if dtype is not None:
        return dtype
    if name in _ITEMSIZES:
        raise ManifestError(
            f"dtype {name}: this machine's long double is "
            f"longdouble{np.finfo(np.longdouble).nmant}; load the checkpoint on the kind of "
            "machine that wrote it, or leave this tensor out with only="
        )
    dtype = _parse(name)
    if len(_dtype_cache) >= _CACHE_LIMIT:
        _dtype_cache.clear()
    _dtype_cache[name] = dtype
    return dtype


def _parse(name: str) -> DType:
    shown = name if len(name) <= 80 else name[:80] + "..."
    if not name.startswith(_PREFIX):
        raise ManifestError(f"unknown dtype {shown!r}")
    try:
        dtype = np.lib.format.descr_to_dtype(_descriptor(msgspec.json.decode(name[len(_PREFIX) :])))
        # One type has one name. This also refuses what NumPy reads generously.
        canonical = dtype_name(dtype) == name and dtype.itemsize <= _MAX_ITEMSIZE
    except Exception as error:
        # NumPy answers nonsense with TypeError, ValueError, OverflowError, SyntaxError ...: all of
        # it is a bad manifest.
        raise ManifestError(f"dtype {shown!r} is not a NumPy descriptor: {error}") from error
    if not canonical:
        raise ManifestError(f"dtype {shown!r} is not the canonical descriptor of a NumPy type")
    return dtype


def _descriptor(value: Any) -> Any:
    """Turn a decoded JSON descriptor into what ``descr_to_dtype`` takes, admitting nothing else."""
    if isinstance(value, str):
        if not _DESCRIPTOR.fullmatch(value):
            raise ValueError("not a type string")
        return value
    return [_field(field) for field in value]


def _field(field: Any) -> tuple[Any, ...]:
    name, form, *shape = field
    title = tuple(name) if isinstance(name, list) else name
    for axes in shape:
        if len(axes) > _MAX_AXES or not all(type(n) is int and 0 <= n < 1 << 31 for n in axes):
            raise ValueError("not a shape")
    return (title, _descriptor(form), *map(tuple, shape))


def itemsize(name: str) -> int:
    """Bytes of one element.

    Raises:
        ManifestError: there is no such type.
    """
    size = _ITEMSIZES.get(name)
    return int(numpy_dtype(name).itemsize) if size is None else size


def safetensors_code(name: str) -> str:
    """The dtype code in a shard's header; ``U8`` if stock safetensors lacks the type (rule 2.3)."""
    return _CODES.get(name, "U8")


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in a shard's header: with an axis of bytes for a type stored as ``U8``."""
    return shape if name in _CODES else (*shape, itemsize(name))


def plain_safetensors(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Code and shape of a tensor in a plain safetensors file, which may use the newer codes too.

    Raises:
        ValueError: safetensors has no code for the type.
    """
    if name == "float4_e2m1fn_x2" and shape:
        return "F4", (*shape[:-1], shape[-1] * 2)
    code = _PLAIN_CODES.get(name)
    if code is None:
        raise ValueError(f"safetensors has no dtype for {name}")
    return code, shape


def from_safetensors(code: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The dtype name and shape of an entry of any safetensors file.

    Args:
        code: one of :data:`CODE_BITS`.
        shape: the entry's shape, in elements.

    Returns:
        Name and shape; ``F4`` is packed, so its last axis is halved and the name is
        ``float4_e2m1fn_x2``.

    Raises:
        ValueError: elements of this code do not lie on byte boundaries (``F6_E2M3``, ``F6_E3M2``,
            an odd last axis of ``F4``).
    """
    if code == "F4" and shape and shape[-1] % 2 == 0:
        return "float4_e2m1fn_x2", (*shape[:-1], shape[-1] // 2)
    name = _CODE_NAMES.get(code)
    if name is None:
        raise ValueError(f"{code} elements of shape {list(shape)} do not lie on byte boundaries")
    return name, shape
