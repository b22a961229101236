"""What adapters and users teach the core: tensor types and extension types."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from fp_multi._types import ExtensionType, TensorType
from fp_multi.errors import ConfigError

_K = TypeVar("_K")
_T = TypeVar("_T")


def _encode_counter(value: Counter[Any]) -> tuple[tuple[Any, int], ...]:
    return tuple(value.items())


def _decode_counter(value: Any) -> Counter[Any]:
    # dict() first: a Counter counts what it is given.
    pairs = dict(value)
    if len(pairs) != len(value):
        raise ValueError("a key stands twice")
    return Counter(pairs)


# The one value of the standard library: learning-rate schedulers keep one in their state.
_COUNTER = ExtensionType(_encode_counter, _decode_counter)

# Readers take no lock: a table is replaced as a whole, never changed in place.
_lock = threading.Lock()
_tensor_types: dict[type, TensorType] = {}
_extensions: dict[type, tuple[str, ExtensionType]] = {Counter: ("collections.Counter", _COUNTER)}
_extensions_by_name: dict[str, ExtensionType] = {"collections.Counter": _COUNTER}
_listeners: list[Callable[[], None]] = []


def register_tensor_type(type_: type, tensor_type: TensorType) -> None:
    """Teach :func:`fp_multi.save` a kind of tensor.

    Subclasses of the type are covered too, virtual ones (``abc``) included, unless they are
    registered themselves. Registering the same value again does nothing.

    Args:
        type_: the class of the tensors.
        tensor_type: how they are described.

    Raises:
        ConfigError: the class is registered with another value.

    Example:
        >>> register_tensor_type(MyTensor, TensorType(describe))  # doctest: +SKIP
    """
    global _tensor_types
    with _lock:
        _tensor_types = _with(_tensor_types, type_, tensor_type, f"tensor type {type_.__qualname__}")
        _changed()


def register_extension_type(type_: type, name: str, extension: ExtensionType) -> None:
    """Teach :func:`fp_multi.save` and :func:`fp_multi.load` a plain value, such as ``torch.Size``.

    The class itself is covered, its subclasses are not. Registering the same values again does
    nothing.

    Args:
        type_: the class of the values.
        name: the tag in the manifest, for example ``"torch.Size"``.
        extension: how a value becomes plain data and back.

    Raises:
        ConfigError: the class or the name is registered with other values.

    Example:
        >>> codec = ExtensionType(encode=str, decode=Color)  # doctest: +SKIP
        >>> register_extension_type(Color, "paint.Color", codec)  # doctest: +SKIP
    """
    global _extensions, _extensions_by_name
    with _lock:
        by_type = _with(_extensions, type_, (name, extension), f"extension type {type_.__qualname__}")
        _extensions_by_name = _with(_extensions_by_name, name, extension, f"extension name {name!r}")
        _extensions = by_type
        _changed()


def _with(table: dict[_K, _T], key: _K, value: _T, what: str) -> dict[_K, _T]:
    if table.get(key, value) != value:
        raise ConfigError(f"{what} is already registered with another value")
    return {**table, key: value}


def _changed() -> None:
    for listener in _listeners:
        listener()


def on_change(listener: Callable[[], None]) -> None:
    """Call ``listener`` after every registration, to forget what it derived from the tables."""
    _listeners.append(listener)


def tensor_type_of(type_: type) -> TensorType | None:
    """How tensors of a class are described: as the nearest registered base, else a virtual one."""
    table = _tensor_types
    for base in type_.__mro__:
        found = table.get(base)
        if found is not None:
            return found
    for base, found in table.items():
        if issubclass(type_, base):
            return found
    return None


def has_tensors_of(framework: str) -> bool:
    """Whether the tensors of a framework, named by its top package, are registered."""
    return any(type_.__module__.partition(".")[0] == framework for type_ in _tensor_types)


def extension_of(type_: type) -> tuple[str, ExtensionType] | None:
    """Name and codec of a class that is registered itself."""
    return _extensions.get(type_)


def extension_named(name: str) -> ExtensionType | None:
    """The codec of a tag in a manifest, None if no adapter knows it."""
    return _extensions_by_name.get(name)
