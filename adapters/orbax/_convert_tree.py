"""The tree in Orbax's ``_METADATA``: its entries, and the containers that they make."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fp_multi.errors import CorruptCheckpointError

METADATA = "_METADATA"
EMPTY: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "Dict": dict,
    "List": list,
    "Tuple": tuple,
    "NamedTuple": tuple,
}
"""Leaves that are nothing but what they are called."""
_SEQUENCE, _DICT = 1, 2

Path_ = tuple[str, ...]


class Entry(NamedTuple):
    """A leaf as the metadata has it."""

    path: Path_
    keys: tuple[Any, ...]
    """The path with integers where the metadata has them; of this Orbax it has strings only."""
    kinds: tuple[int, ...]
    """For each key whether it is one of a dict or a place in a list."""
    value_type: str

    @property
    def name(self) -> str:
        """What Orbax calls the parameter."""
        return ".".join(self.path)


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        CorruptCheckpointError: it is none.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: not readable: {error}") from error


def read_tree(directory: Path, metadata: Any) -> tuple[list[Entry], Any]:
    """The entries, and the containers as rich types have them (None without).

    Args:
        directory: for messages.
        metadata: the content of ``_METADATA``.

    Raises:
        CorruptCheckpointError: it is not what Orbax writes, or two entries have one name.
    """
    try:
        entries = [_entry(found) for found in metadata["tree_metadata"].values()]
        rich = metadata.get("value_metadata_tree")
        rich = None if rich is None else json.loads(rich)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{directory / METADATA}: not the metadata of Orbax: {error!r}") from error
    _refuse_collisions(directory, entries)
    return entries, rich


def build(directory: Path, entries: list[Entry], rich: Any, leaves: Mapping[Path_, Any]) -> Any:
    """The state.

    Args:
        directory: for messages.
        entries: see :func:`read_tree`.
        rich: see :func:`read_tree`.
        leaves: the value of each entry, by its path.

    Raises:
        CorruptCheckpointError: the entries make no tree.
    """
    try:
        return _plain(entries, leaves) if rich is None else _rich(rich, (), leaves)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptCheckpointError(f"{directory / METADATA}: its tree makes no sense: {error!r}") from error


def _entry(found: Any) -> Entry:
    keys = found["key_metadata"]
    value_type = found["value_metadata"]["value_type"]
    if not isinstance(value_type, str):
        raise ValueError("a value without a type")
    kinds = tuple(key["key_type"] for key in keys)
    if not set(kinds) <= {_SEQUENCE, _DICT}:
        raise ValueError(f"key types {kinds}")
    names = tuple(key["key"] for key in keys)
    if not {type(name) for name in names} <= {str, int}:
        raise ValueError(f"keys {names}")
    return Entry(tuple(map(str, names)), names, kinds, value_type)


def _refuse_collisions(directory: Path, entries: list[Entry]) -> None:
    stored = [entry.name for entry in entries if entry.value_type not in EMPTY]
    if len(set(stored)) != len(stored):
        twice = next(name for i, name in enumerate(stored) if name in stored[:i])
        raise CorruptCheckpointError(
            f"{directory}: Orbax stored two values under the one name {twice!r}; one of them is lost", tensor=twice
        )


def _plain(entries: list[Entry], leaves: Mapping[Path_, Any]) -> Any:
    """Dicts and lists, which is all that the keys tell."""
    if len(entries) == 1 and not entries[0].path:
        return leaves[()]
    root: Any = [] if entries and entries[0].kinds[0] == _SEQUENCE else {}
    for entry in entries:
        at = root
        for i, (key, kind) in enumerate(zip(entry.keys, entry.kinds, strict=True)):
            last = i + 1 == len(entry.path)
            value = leaves[entry.path] if last else [] if entry.kinds[i + 1] == _SEQUENCE else {}
            at = _put(at, key, kind, value, last=last)
    return root


def _put(at: Any, key: Any, kind: int, value: Any, *, last: bool) -> Any:
    if kind == _DICT:
        if not isinstance(at, dict) or (last and key in at):
            raise ValueError(f"no place for {key!r}")
        return at.setdefault(key, value)
    index = int(key)
    # In order, so that each new place is the next one.
    if not isinstance(at, list) or not 0 <= index <= len(at) or (last and index < len(at)):
        raise ValueError(f"no place for {key!r}")
    if index == len(at):
        at.append(value)
    return at[index]


def _rich(node: Any, path: Path_, leaves: Mapping[Path_, Any]) -> Any:
    """The containers as they were, if the checkpoint was saved with support for rich types."""
    if isinstance(node, list):
        return [_rich(child, (*path, str(i)), leaves) for i, child in enumerate(node)]
    category = node.get("category")
    if not isinstance(category, str):
        return {key: _rich(child, (*path, key), leaves) for key, child in node.items()}
    if category == "namedtuple":
        fields = [entry["key"] for entry in node["entries"]]
        made: Any = namedtuple(node["clazz"], fields)  # type: ignore[misc]
        made.__module__ = node["module"]
        return made(*(_rich(entry["value"], (*path, entry["key"]), leaves) for entry in node["entries"]))
    if node["clazz"] == "tuple":
        return tuple(_rich(child, (*path, str(i)), leaves) for i, child in enumerate(node["entries"]))
    return leaves[path]
