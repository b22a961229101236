"""torch's element types and their names in the format: the one table for both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

VIEW_ATTR = "torch_dtype"
"""Attribute of a tensor whose type the format does not have: the torch type that its stored bytes are viewed as."""


class Element(NamedTuple):
    """How elements of a torch dtype are stored."""

    name: str
    """docs/format.md section 3.5."""
    itemsize: int
    attrs: Mapping[str, str] | None
    """``VIEW_ATTR`` where the name alone does not say which type it was."""


# In torch and in the format these have the same name. Which of them exist depends on torch's version.
_SHARED_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float4_e2m1fn_x2", "int1", "int2", "int4", "uint1", "uint2", "uint4"),
)
# Shells without arithmetic that kernels' authors put their own meaning into. Quantized types are not here: their scales
# are not in their bytes.
_VIEWED_NAMES = {
    **dict.fromkeys(("int3", "int5", "int6", "int7", "uint3", "uint5", "uint6", "uint7"), "uint8"),
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), "uint8"),
    "bits16": "uint16",
}


def _named(names: Mapping[str, str]) -> dict[torch.dtype, tuple[str, str]]:
    found = {}
    for name, stored in names.items():
        dtype = getattr(torch, name, None)
        if isinstance(dtype, torch.dtype):
            found[dtype] = (name, stored)
    return found


_SHARED = _named({name: name for name in _SHARED_NAMES})
_VIEWED = _named(_VIEWED_NAMES)

ELEMENTS: dict[torch.dtype, Element] = {
    **{dtype: Element(stored, dtype.itemsize, None) for dtype, (_, stored) in _SHARED.items()},
    **{dtype: Element(stored, dtype.itemsize, {VIEW_ATTR: name}) for dtype, (name, stored) in _VIEWED.items()},
}

TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, (name, _) in _SHARED.items()}
"""By the format's name."""

VIEWED_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, (name, _) in _VIEWED.items()}
"""By the value of ``VIEW_ATTR``."""

CARRIERS: dict[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""For each item size a type that every copy of torch moves bit by bit; some small float types have no copy kernel."""

ALL_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}
"""Every dtype of this torch by its own name, for values (not elements) of type ``torch.dtype``."""
