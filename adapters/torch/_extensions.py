"""Plain values in the tree: torch's sizes, dtypes, devices, layouts and memory formats."""

from __future__ import annotations

from typing import Any

import torch

from fp_multi import ExtensionType, register_extension_type

from ._dtypes import ALL_DTYPES

_LAYOUTS = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.layout)
}
_MEMORY_FORMATS = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.memory_format)
}


def _short_name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _decode_size(value: Any) -> torch.Size:
    if type(value) is not tuple or not all(type(length) is int for length in value):
        raise ValueError("not a tuple of integers")
    return torch.Size(value)


def _decode_device(value: Any) -> torch.device:
    if type(value) is not str:
        raise ValueError("not the name of a device")
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _named(table: dict[str, Any], what: str) -> ExtensionType:
    def decode(value: Any) -> Any:
        found = table.get(value) if type(value) is str else None
        if found is None:
            raise ValueError(f"torch {torch.__version__} has no such {what}")
        return found

    return ExtensionType(_short_name, decode)


_EXTENSIONS: list[tuple[type, str, ExtensionType]] = [
    (torch.Size, "torch.Size", ExtensionType(tuple, _decode_size)),
    (torch.device, "torch.device", ExtensionType(str, _decode_device)),
    (torch.dtype, "torch.dtype", _named(ALL_DTYPES, "dtype")),
    (torch.layout, "torch.layout", _named(_LAYOUTS, "layout")),
    (torch.memory_format, "torch.memory_format", _named(_MEMORY_FORMATS, "memory format")),
]


def register_extensions() -> None:
    """Teach the core the values of this module; doing it again does nothing."""
    for type_, name, extension in _EXTENSIONS:
        register_extension_type(type_, name, extension)
