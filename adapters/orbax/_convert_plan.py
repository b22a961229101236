"""What Orbax can take of a state, and what that costs: the tree that it is given instead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import tensorstore as ts

from fp_multi import numpy_dtype

_BYTE_STRINGS = frozenset(("bytes", "bytearray"))
_TORCH = frozenset(("torch", "torch.parameter"))

Place = tuple[Any, ...]


class ArrayPlace:
    """A tensor's place in the tree that Orbax saves."""

    def __init__(self, index: int, nbytes: int) -> None:
        self.index = index
        self.nbytes = nbytes


# Two classes side by side: Orbax chooses the handler by class, and a subclass would go to its base's.
class NumpyPlace(ArrayPlace):
    """One that shall be a NumPy array."""


class JaxPlace(ArrayPlace):
    """One that shall be a JAX array."""


class _Leaf:
    """A tensor's place in the state as it was saved."""

    def __init__(self, index: int) -> None:
        self.index = index


class Plan:
    """Makes of a state what Orbax takes, and says what that costs."""

    def __init__(self, reader: Any, losses: Any) -> None:
        self._reader = reader
        self._losses = losses
        self._refuse: Callable[[Place, str], NoReturn] = losses.refuse
        self._names: set[str] = set()
        self._seen: set[int] = set()
        self._dtypes: dict[str, bool] = {}

    def item(self) -> Any:
        """The tree.

        Raises:
            UnsupportedLeafError: something of it has no place.
        """
        leaves = {index: _Leaf(index) for index in range(len(self._reader.manifest.tensors))}
        state = self._reader.build(leaves)
        if isinstance(state, (dict, list, tuple)) and not state:
            self._refuse((), "Orbax saves nothing that is empty")
        return self._value(state, (), ())

    def _value(self, value: Any, path: Place, names: tuple[str, ...]) -> Any:
        if isinstance(value, _Leaf):
            self._name(path, names)
            return self._tensor(value.index, path)
        if isinstance(value, dict):
            return self._dict(value, path, names)
        if isinstance(value, (list, tuple)):
            return self._sequence(value, path, names)
        self._name(path, names)
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            self._refuse(path, "Orbax has no integers of more than 64 bits; save it as a string")
        if isinstance(value, str):
            self._text(value, path)
            if "~" in ".".join(names):
                self._refuse(path, "Orbax cannot find a string again whose name has a '~'; rename it")
        elif value is not None and not isinstance(value, (bool, int, float)):
            self._refuse(path, f"Orbax has no form for a {type(value).__qualname__}; leave it out, or save it as text")
        return value

    def _name(self, path: Place, names: tuple[str, ...]) -> None:
        name = ".".join(names)
        if name in self._names:
            self._refuse(path, f"Orbax would store two values under {name!r} and lose one; rename it")
        self._names.add(name)

    def _text(self, text: str, path: Place) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            self._refuse(path, "Orbax stores valid Unicode only")

    def _dict(self, value: dict[Any, Any], path: Place, names: tuple[str, ...]) -> dict[str, Any]:
        if type(value) not in (dict, OrderedDict):
            self._refuse(path, f"Orbax has no form for a {type(value).__qualname__}; make it a dict")
        if getattr(value, "__dict__", None):
            self._losses.add("attributes of an OrderedDict left out", path)
        found = {}
        for key, child in value.items():
            below = (*path, key)
            if type(key) is int:
                self._losses.add("integer keys became strings", below)
            elif type(key) is not str:
                self._refuse(below, "Orbax has string keys only; rename it")
            text = str(key)
            self._text(text, below)
            if text in found:
                self._refuse(below, f"Orbax would store two values under {text!r}; rename one")
            found[text] = self._value(child, below, (*names, text))
        return found

    def _sequence(self, value: Any, path: Place, names: tuple[str, ...]) -> Any:
        fields = getattr(value, "_fields", None)
        labels = range(len(value)) if fields is None else fields
        items = [
            self._value(child, (*path, label), (*names, str(label))) for label, child in zip(labels, value, strict=True)
        ]
        if fields is not None:
            self._losses.add("named tuples became dicts", path)
            return dict(zip(fields, items, strict=True))
        if isinstance(value, tuple) and items:
            self._losses.add("tuples became lists", path)
        return tuple(items) if isinstance(value, tuple) and not items else items

    def _tensor(self, index: int, path: Place) -> ArrayPlace:
        entry = self._reader.manifest.tensors[index]
        nbytes = sum(piece.nbytes for piece in entry.pieces)
        if entry.kind == "pickle":
            self._refuse(path, "Orbax has no pickles")
        if not nbytes:
            self._refuse(path, "Orbax stores no arrays of size 0; leave it out")
        viewed = entry.attrs.get("torch_dtype")
        if viewed is not None or not self._has_dtype(entry.dtype):
            self._refuse(path, f"Orbax has no arrays of {viewed or entry.dtype}; convert it")
        if index in self._seen:
            self._losses.add("tied tensors were stored once more", path)
        self._seen.add(index)
        if entry.kind == "jax":
            return JaxPlace(index, nbytes)
        if entry.kind in _BYTE_STRINGS:
            self._losses.add("byte strings became arrays of uint8", path)
        elif entry.kind == "numpy.scalar":
            self._losses.add("NumPy scalars became arrays", path)
        elif entry.kind in _TORCH:
            self._losses.add("PyTorch tensors became arrays", path)
        return NumpyPlace(index, nbytes)

    def _has_dtype(self, name: str) -> bool:
        found = self._dtypes.get(name)
        if found is None:
            spec = {"driver": "zarr", "kvstore": {"driver": "memory"}}
            dtype = numpy_dtype(name)
            try:
                ts.open(spec, create=True, dtype=ts.dtype(dtype), shape=[1]).result()
                found = dtype.name == name  # packed types are bytes to NumPy
            except (ValueError, TypeError):
                found = False
            self._dtypes[name] = found
        return found
