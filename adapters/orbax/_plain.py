"""From any pytree to what the format has: dicts, lists, tuples, named tuples; the names of other types beside them."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias

import jax
import numpy as np

from fp_multi.errors import UnsupportedLeafError

from ._types import MOST_DEPTH, Level, TypeNotes, build, one_level, type_name

_Cell: TypeAlias = "tuple[_Cell, Any] | None"
"""A path as a linked list: (the parent's, key)."""

_AS_THEY_ARE = frozenset({type(None), bool, int, float, complex, str, bytes})
_BASES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int),
    (float, float),
    (complex, complex),
    (str, str.__str__),  # not str(): an enumeration's says more than its value
)


class Plain:
    """A pytree in the containers that the format has.

    Args:
        item: the pytree.
        copy: copy what the caller can change afterwards: NumPy arrays and byte arrays. JAX arrays never change.

    Attributes:
        state: what to save.
        types: the names of the types that became plain containers.
        arrays: the JAX arrays in tree order, those that stand at several places several times.

    Raises:
        UnsupportedLeafError: nested too deeply.
    """

    def __init__(self, item: Any, *, copy: bool) -> None:
        self.types = TypeNotes()
        self.arrays: list[jax.Array] = []
        self._copy = copy
        self._copies: dict[int, Any] = {}
        self._kept: list[Any] = []  # what an id in _copies is of must not go meanwhile
        self._verdicts: dict[Any, bool] = {}
        self._walks: dict[type, Callable[[Any, _Cell, int], Any]] = {
            dict: self._dict,
            OrderedDict: self._dict,
            defaultdict: lambda value, cell, depth: self._dict(dict(value), cell, depth),
            list: self._list,
            tuple: self._tuple,
            np.ndarray: self._array,
            bytearray: self._bytearray,
        }
        try:
            self.state = self._walk(item, None, 0)
        except RecursionError as error:
            _refuse(None, "nested too deeply for what is left of the interpreter's stack", error)

    def _walk(self, value: Any, cell: _Cell, depth: int) -> Any:
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        walk = self._walks.get(kind)
        if walk is None:
            walk = self._walks[kind] = self._walk_for(value)
        return walk(value, cell, depth)

    def _walk_for(self, value: Any) -> Callable[[Any, _Cell, int], Any]:
        if isinstance(value, jax.Array):
            return self._jax
        if isinstance(value, np.generic):
            return _as_it_is
        # Before what else a value may be: whoever registers a type with JAX says what its children are.
        if one_level(value) is not None:
            return self._named_tuple if isinstance(value, tuple) and hasattr(value, "_fields") else self._registered
        for base, convert in _BASES:
            if isinstance(value, base):
                # An enumeration, say. Orbax saves the number, too.
                return lambda found, cell, depth: convert(found)
        # A mask would be lost; the core says so.
        if hasattr(value, "__array__") and not isinstance(value, np.ma.MaskedArray):
            return lambda found, cell, depth: self._array(np.asarray(found), cell, depth)
        return _as_it_is  # the core knows it, or says why not

    def _dict(self, value: Any, cell: _Cell, depth: int) -> Any:
        # Loops, not comprehensions, here and below: each level of the state takes as few frames as it can.
        _check_depth(depth, cell)
        plain = type(value)()
        for key, child in value.items():
            plain[key] = child if type(child) in _AS_THEY_ARE else self._walk(child, (cell, key), depth + 1)
        return plain

    def _list(self, value: Any, cell: _Cell, depth: int) -> Any:
        _check_depth(depth, cell)
        items = []
        for number, child in enumerate(value):
            items.append(self._walk(child, (cell, number), depth + 1))
        return items

    def _tuple(self, value: Any, cell: _Cell, depth: int) -> Any:
        return tuple(self._list(value, cell, depth))

    def _named_tuple(self, value: Any, cell: _Cell, depth: int) -> Any:
        return tuple.__new__(type(value), self._list(value, cell, depth))

    def _registered(self, value: Any, cell: _Cell, depth: int) -> Any:
        _check_depth(depth, cell)
        level = one_level(value)
        if level is None:
            return value
        plain: Any
        if level.names is None:
            plain = self._list(level.children, cell, depth)
        else:
            plain = self._dict(level.plain(), cell, depth)
        if self._comes_back(type(value), level):
            self.types.note(type_name(type(value)), _path(cell))
        return plain

    def _comes_back(self, kind: type, level: Level) -> bool:
        """Whether the type and the children are all there is to a value."""
        key: Any = (kind, level.treedef)
        with contextlib.suppress(TypeError):  # fields that are not children may have no hash
            known = self._verdicts.get(key)
            if known is not None:
                return known
        verdict = False
        # Whatever a class's constructor raises if it is given the children alone.
        with contextlib.suppress(Exception):
            again = one_level(build(kind, level.plain()))
            verdict = again is not None and again.treedef == level.treedef and _same(again.children, level.children)
        with contextlib.suppress(TypeError):
            self._verdicts[key] = verdict
        return verdict

    def _jax(self, value: Any, cell: _Cell, depth: int) -> Any:
        self.arrays.append(value)
        return value

    def _array(self, value: Any, cell: _Cell, depth: int) -> Any:
        return self._copied(value, lambda: np.array(value, order="K")) if self._copy else value

    def _bytearray(self, value: Any, cell: _Cell, depth: int) -> Any:
        return self._copied(value, lambda: bytearray(value)) if self._copy else value

    def _copied(self, value: Any, make: Callable[[], Any]) -> Any:
        """One copy of one object, so that what is one in the state stays one."""
        found = self._copies.get(id(value))
        if found is None:
            self._kept.append(value)
            found = self._copies[id(value)] = make()
        return found


def _same(found: list[Any], expected: list[Any]) -> bool:
    """Whether the children are the same; containers may be copies, as those of a FrozenDict."""
    if all([a is b for a, b in zip(found, expected, strict=True)]):
        return True
    leaves, others = jax.tree.leaves(found), jax.tree.leaves(expected)
    structures: list[Any] = [jax.tree.structure(found), jax.tree.structure(expected)]
    return structures[0] == structures[1] and all([a is b for a, b in zip(leaves, others, strict=True)])


def _as_it_is(value: Any, cell: _Cell, depth: int) -> Any:
    return value


def _check_depth(depth: int, cell: _Cell) -> None:
    if depth >= MOST_DEPTH:
        _refuse(cell, f"nested deeper than {MOST_DEPTH}, or in itself; flatten the state")


def _path(cell: _Cell) -> list[Any]:
    return list(_upwards(cell))[::-1]


def _upwards(cell: _Cell) -> Iterator[Any]:
    while cell is not None:
        cell, key = cell
        yield key


def _refuse(cell: _Cell, what: str, cause: BaseException | None = None) -> NoReturn:
    path = ".".join(map(str, _path(cell)[:20])) or "<root>"
    raise UnsupportedLeafError(f"{path}: {what}", path) from cause
