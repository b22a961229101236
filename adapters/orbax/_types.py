"""Types that the format does not have: taken apart as JAX takes them apart, and made again where that is safe."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey, GetAttrKey

MOST_DEPTH = 256
TYPES_KEY = "orbax.types"
"""In a checkpoint's metadata: JSON, for each type the paths where it stood; see docs/orbax.md."""


class Level(NamedTuple):
    """A value of a registered type, one level taken apart."""

    names: list[Any] | None
    """The children's names; None if they have only numbers, or share a name."""
    children: list[Any]
    treedef: Any

    def plain(self) -> Any:
        """The children as a dict or a list."""
        return list(self.children) if self.names is None else dict(zip(self.names, self.children, strict=True))


def one_level(value: Any) -> Level | None:
    """Take a value apart as JAX does.

    Returns:
        Its children; None if JAX takes it for a leaf.
    """
    found, treedef = _one_level(value)
    if treedef.num_nodes == 1 and treedef.num_leaves == 1:
        return None
    keys = [path[0] for path, _ in found]
    names = [
        key.key if isinstance(key, DictKey) else key.name for key in keys if isinstance(key, (DictKey, GetAttrKey))
    ]
    named = len(set(names)) == len(keys)
    return Level(names if named else None, [child for _, child in found], treedef)


def _one_level(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)


def build(kind: Any, plain: Any) -> Any:
    """A value of a type, made of its children alone; raises whatever the type's constructor does."""
    if isinstance(plain, list):
        return kind(*plain)
    if issubclass(kind, Mapping):
        return kind(plain)
    return kind(**plain)


def type_name(kind: type) -> str:
    """The name under which :func:`type_named` finds a type."""
    return f"{kind.__module__}:{kind.__qualname__}"


def type_named(name: str) -> type | None:
    """The type of a name in a file, if this process has registered it with JAX.

    Nothing is imported: a module that is not loaded has registered nothing. Nothing is called either before the type is
    known to be registered; the file chooses among the types that this process has chosen to use as pytrees.
    """
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # No getattr: that may import.
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found if isinstance(found, type) and _is_registered(found) else None


def _is_registered(kind: type) -> bool:
    try:
        empty: Any = object.__new__(kind)
    except TypeError:
        return False  # built-in types, and abstract ones
    try:
        return one_level(empty) is not None
    except Exception:
        # Only the flattening of a registered type gets as far as to miss what the empty object lacks.
        return True


class TypeNotes:
    """Where which types stood in a state."""

    def __init__(self) -> None:
        self._paths: dict[str, list[list[Any]]] = {}

    def note(self, name: str, path: Iterable[Any]) -> None:
        """Remember one; paths with keys that are neither strings nor whole numbers are left out."""
        keys = list(path)
        if all([type(key) in (str, int) for key in keys]):
            self._paths.setdefault(name, []).append(keys)

    def to_metadata(self) -> dict[str, str]:
        """As strings for the checkpoint's metadata; nothing if there is nothing to remember."""
        return {TYPES_KEY: json.dumps(self._paths, separators=(",", ":"))} if self._paths else {}


class _Place:
    """Types at a place and below it."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.below: dict[Any, _Place] = {}


def with_types(state: Any, metadata: Mapping[str, str]) -> Any:
    """Make values of their types again where they are known here; the rest stays plain.

    Args:
        state: of plain containers, as loaded.
        metadata: the checkpoint's.
    """
    root = _Place()
    for name, path in _noted(metadata.get(TYPES_KEY)):
        place = root
        for key in path:
            place = place.below.setdefault(key, _Place())
        place.name = name
    return _typed(state, root, {}) if root.name or root.below else state


def _noted(text: str | None) -> Iterable[tuple[str, list[Any]]]:
    if text is None:
        return
    try:
        notes = json.loads(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(notes, dict):
        return
    for name, paths in notes.items():
        for path in paths if isinstance(paths, list) else ():
            if isinstance(path, list) and len(path) <= MOST_DEPTH and all([type(key) in (str, int) for key in path]):
                yield name, path


def _typed(value: Any, place: _Place, known: dict[str, type | None]) -> Any:
    if place.below:
        if isinstance(value, dict):
            for key, below in place.below.items():
                if key in value:
                    value[key] = _typed(value[key], below, known)
        elif isinstance(value, (list, tuple)):
            labels: Any = getattr(value, "_fields", range(len(value)))
            items = list(value)
            for number, label in enumerate(labels):
                found = place.below.get(number) or place.below.get(label)
                if found is not None:
                    items[number] = _typed(items[number], found, known)
            kind: Any = type(value)
            value = items if kind is list else tuple.__new__(kind, items)
    if place.name is None:
        return value
    if place.name not in known:
        known[place.name] = type_named(place.name)
    registered = known[place.name]
    if registered is not None:
        # Whatever a constructor raises: the class may have changed since. The plain form says all that was saved.
        with contextlib.suppress(Exception):
            return build(registered, value)
    return value
