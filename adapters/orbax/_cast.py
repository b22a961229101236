"""Conversions on restore: what a target asks for, unless it would silently lose what a number says."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from fp_multi.errors import TargetMismatchError

_Array = npt.NDArray[Any]
_SMALL_INTEGERS = {"int1": 1, "uint1": 1, "int2": 2, "uint2": 2, "int4": 4, "uint4": 4}
"""Their bits; to NumPy they are neither integers nor numbers."""


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether the elements are whole numbers, the sub-byte ones included."""
    return dtype.kind in "iu" or _is_small_integer(dtype)


def _is_small_integer(dtype: np.dtype[Any]) -> bool:
    return dtype.name in _SMALL_INTEGERS


def cast(array: _Array, dtype: np.dtype[Any], where: str, *, lossy: bool) -> _Array:
    """Convert an array.

    To another floating type it is rounded: that is what a narrower target asks for. To whole numbers it is converted
    only if every element stays what it is.

    Args:
        array: as stored.
        dtype: as wanted.
        where: its path, for messages.
        lossy: the caller named the dtype for this array: convert whatever is lost.

    Raises:
        TargetMismatchError: elements would change, or there is no conversion.
    """
    if array.dtype == dtype:
        return array
    if array.dtype.kind in "SUMmV" and not _is_number(array.dtype):
        _refuse(where, array.dtype, dtype, "there is no conversion")
    with np.errstate(all="ignore"):
        if array.dtype.kind == "c" and dtype.kind != "c":
            if not lossy and np.any(array.imag):
                _refuse(where, array.dtype, dtype, "it would lose imaginary parts")
            array = array.real
        found = array.astype(dtype)
        if not lossy and (is_integer(dtype) or dtype.kind == "b") and not _same(array, found):
            _refuse(where, array.dtype, dtype, "elements would change")
    return found


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.isbuiltin == 2  # ml_dtypes: their kind is V


def _same(before: _Array, after: _Array) -> bool:
    if after.dtype.kind == "b":
        return bool(np.all((before == 0) | (before == 1)))
    if is_integer(before.dtype) or before.dtype.kind == "b":
        # Compared as Python does, whatever the widths: uint64 and int64 meet in float64 otherwise.
        wide_before, wide_after = _wide(before), _wide(after)
        return bool(np.all((wide_before == wide_after) & ((wide_before < 0) == (wide_after < 0))))
    exact = before.astype(np.float64) if before.dtype.itemsize < 8 or before.dtype.kind != "f" else before
    # The end of the range of 64 bits is no float: 2 ** 63 as int64 comes back as itself from its wrap.
    least, most = _limits(after.dtype)
    inside = (exact >= float(least)) & (exact < float(most) + 1)
    return bool(np.all(inside & (np.trunc(exact) == exact)))


def _limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    bits = _SMALL_INTEGERS.get(dtype.name)
    if bits is None:
        info = np.iinfo(dtype)
        return int(info.min), int(info.max)
    signed = not dtype.name.startswith("u")
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def _wide(array: _Array) -> _Array:
    return array if array.dtype.kind in "iu" else array.astype(np.int64)


def scalar(value: Any, kind: type, where: str, *, lossy: bool) -> Any:
    """A Python scalar of a kind.

    Args:
        value: a Python scalar, or a 0-d array.
        kind: ``int``, ``float``, ``bool``, ``complex`` or ``str``.
        where: its path, for messages.
        lossy: the caller named the type for this value.

    Raises:
        TargetMismatchError: the value would change, or is none of that kind.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        if value.size != 1:
            raise TargetMismatchError(
                f"{where}: the target is one {kind.__name__}, on disk is an array of shape {value.shape}"
            )
        if value.dtype.kind not in "biufcSU":
            value = value.astype(np.int64 if is_integer(value.dtype) else np.float64)
        value = value.reshape(()).item()
    if (kind is str) != isinstance(value, str) or isinstance(value, (bytes, bytearray)):
        raise TargetMismatchError(f"{where}: the target is a {kind.__name__}, on disk is {_short(value)}")
    if isinstance(value, complex) and kind is not complex:
        if value.imag and not lossy:
            raise TargetMismatchError(f"{where}: the target is a {kind.__name__}, on disk is {value}")
        value = value.real
    try:
        found = kind(value)
    except (ValueError, OverflowError, TypeError) as error:
        raise TargetMismatchError(f"{where}: {_short(value)} as {kind.__name__}: {error}") from error
    if kind in (int, bool) and not lossy and found != value:
        raise TargetMismatchError(
            f"{where}: {_short(value)} would become {found}: the target is a {kind.__name__}. Use a float target, or "
            f"name the type with restore_args: RestoreArgs(restore_type={kind.__name__})"
        )
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _refuse(where: str, stored: object, wanted: object, why: str) -> NoReturn:
    raise TargetMismatchError(
        f"{where}: {wanted} in target, {stored} on disk, and {why}. Name the dtype with restore_args "
        f"(RestoreArgs(dtype=...)) to convert all the same, or use a target of dtype {stored}"
    )
