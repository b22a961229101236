"""The leaves of a state: how each kind of tensor becomes a source, and what becomes of the rest."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import numpy as np

from fp_multi._dtypes import dtype_info
from fp_multi._engine import address_of
from fp_multi._nodes import MAX_DEPTH, Cell, readable
from fp_multi._registry import has_tensors_of
from fp_multi._types import Array, LeafSource, TensorType
from fp_multi.errors import UnsupportedLeafError

_ADAPTERS = {
    "torch": "import fp_multi.adapters.torch first",
    "jax": "import fp_multi.adapters.orbax first",
    "jaxlib": "import fp_multi.adapters.orbax first",
}


class Walk:
    """What one walk through a state collects."""

    __slots__ = ("active", "allow_pickle", "places", "seen", "sources")

    def __init__(self, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        # For each source its plain name (None if it has none) and its path.
        self.places: list[tuple[str | None, Cell]] = []
        self.sources: list[LeafSource] = []
        # Identity of a tensor -> its index. Every object whose id is part of a key stays alive
        # through its source.
        self.seen: dict[Any, int] = {}
        self.active: set[int] = set()

    def add(self, key: Any, source: LeafSource, text: str | None, cell: Cell) -> int:
        """Append a tensor; ``text`` is its plain name, None if it has none."""
        index = self.seen[key] = len(self.sources)
        self.sources.append(source)
        self.places.append((text, cell))
        return index

    def enter(self, container: Any, depth: int, cell: Cell) -> None:
        """Start with a container; refuse one inside itself and one too deep."""
        if id(container) in self.active:
            refuse(cell, "the container holds itself; break the cycle")
        check_depth(depth, cell)
        self.active.add(id(container))


# (walk, value, plain name of the place or None, path, depth) -> node
Handler: TypeAlias = Callable[[Walk, Any, "str | None", Cell, int], Any]


def refuse(cell: Cell, what: str) -> NoReturn:
    path = readable(cell)
    raise UnsupportedLeafError(f"{path}: {what}", path)


def check_depth(depth: int, cell: Cell) -> None:
    if depth > MAX_DEPTH:
        refuse(cell, f"nested deeper than {MAX_DEPTH}; flatten the state")


def array_leaf(walk: Walk, array: Array, text: str | None, cell: Cell, depth: int) -> Any:
    """The handler of ``np.ndarray``."""
    try:
        info = dtype_info(array.dtype)
    except ValueError as error:
        return _pickled(walk, array, text, cell, f"{error}; convert it")
    flags = array.flags
    shape = array.shape
    strides = None if flags.c_contiguous else array.strides
    nbytes = array.nbytes
    address = address_of(array)
    # Empty arrays have no memory of their own to tell them apart by.
    key = (address, shape, strides, array.dtype) if nbytes else ("object", id(array))
    index = len(walk.sources)
    known = walk.seen.setdefault(key, index)
    if known != index:
        return known
    attrs: dict[str, str] | None = None
    if strides is not None and flags.f_contiguous:
        attrs = {"order": "F"}
    keepalive: object = array
    if info.swapped:
        attrs = {"byteorder": "big", **(attrs or {})}
        little = array.astype(array.dtype.newbyteorder("<"), order="C")
        keepalive, strides, address = (array, little), None, address_of(little)
    # What LeafSource(...) does, in half the time: this runs for each of maybe 100,000 arrays while
    # the training loop waits.
    name, itemsize, _ = info
    source = tuple.__new__(
        LeafSource,
        (name, shape, nbytes, address, keepalive, "numpy", strides, attrs, None, itemsize, None, None, None),
    )
    walk.sources.append(source)
    walk.places.append((text, cell))
    return index


def scalar_leaf(walk: Walk, value: Any, text: str | None, cell: Cell, depth: int) -> Any:
    key = ("object", id(value))
    index = walk.seen.get(key)
    if index is not None:
        return index
    array = np.asarray(value)
    if array.dtype.kind in "SU" and array[()] != value:
        return _pickled(walk, value, text, cell, "NumPy drops trailing NULs; store bytes or str")
    try:
        info = dtype_info(array.dtype)
    except ValueError as error:
        return _pickled(walk, value, text, cell, f"{error}; convert it")
    address = address_of(array)
    source = LeafSource(
        info.name,
        (),
        array.nbytes,
        address,
        (value, array),
        "numpy.scalar",
        itemsize=info.itemsize,
    )
    return walk.add(key, source, text, cell)


def byte_string_handler(kind: str) -> Handler:
    def handler(walk: Walk, value: Any, text: str | None, cell: Cell, depth: int) -> Any:
        return _bytes_leaf(walk, value, value, kind, text, cell)

    return handler


def _bytes_leaf(walk: Walk, value: Any, data: bytes | bytearray, kind: str, text: str | None, cell: Cell) -> int:
    key = ("object", id(value))
    index = walk.seen.get(key)
    if index is not None:
        return index
    view = np.frombuffer(data, np.uint8)
    address = address_of(view)
    source = LeafSource("uint8", view.shape, view.nbytes, address, (value, view), kind)
    return walk.add(key, source, text, cell)


def tensor_handler(tensor_type: TensorType) -> Handler:
    def handler(walk: Walk, value: Any, text: str | None, cell: Cell, depth: int) -> Any:
        try:
            source = tensor_type.describe(value, text or "")
        except UnsupportedLeafError:
            # The readable path costs more than the rest of a description: only a refusal pays for it.
            source = tensor_type.describe(value, readable(cell))
        attrs = tuple(sorted(source.attrs.items())) if source.attrs else None
        identity = source.identity
        if identity is None:
            # Device memory has no address here, and empty tensors have none of their own.
            by_address = source.nbytes and source.fetch is None and source.sharded is None
            identity = (source.address, source.strides) if by_address else ("object", id(value))
        key = (identity, source.shape, source.dtype, source.kind, attrs)
        index = walk.seen.get(key)
        if index is not None:
            return index
        if source.fetch is not None:
            source = source._replace(pin=tensor_type.pin)
        if source.keepalive is not value:
            source = source._replace(keepalive=(value, source.keepalive))
        return walk.add(key, source, text, cell)

    return handler


def _pickled(walk: Walk, value: Any, text: str | None, cell: Cell, why: str) -> Any:
    """Pickle a value if that was allowed, else refuse it."""
    if not walk.allow_pickle:
        refuse(
            cell,
            f"cannot store a value of type {type_name(type(value))}: {why}, or pass allow_pickle=True",
        )
    key = ("object", id(value))
    index = walk.seen.get(key)
    if index is not None:
        return index
    try:
        data = pickle.dumps(value, protocol=5)
    except Exception as error:
        # Whatever a class's own reduction raises.
        path = readable(cell)
        raise UnsupportedLeafError(f"{path}: cannot be pickled: {error}", path) from error
    return _bytes_leaf(walk, value, data, "pickle", text, cell)


def unknown_leaf(walk: Walk, value: Any, text: str | None, cell: Cell, depth: int) -> Any:
    return _pickled(walk, value, text, cell, _way_out(type(value)))


def type_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _way_out(kind: type) -> str:
    if issubclass(kind, np.ndarray):
        return "the subclass would be lost; convert it with np.asarray()"
    framework = kind.__module__.partition(".")[0]
    if framework in _ADAPTERS and not has_tensors_of(framework):
        return _ADAPTERS[framework]
    for base in (np.generic, dict, list, tuple, str, int, float, complex, bytes, bytearray):
        if issubclass(kind, base):
            name = "a plain NumPy scalar" if base is np.generic else f"a plain {base.__name__}"
            return f"the subclass would be lost; convert it to {name}"
    if issubclass(kind, (set, frozenset)):
        return "convert it to a sorted list"
    if hasattr(kind, "state_dict"):
        return "save its state_dict()"
    if hasattr(kind, "get_state"):
        return "save its get_state()"
    return "convert it to arrays and plain values"
