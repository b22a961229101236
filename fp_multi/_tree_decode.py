"""Put a state together again from its tree and its tensors (docs/format.md section 3.3)."""

from __future__ import annotations

import keyword
import sys
import unicodedata
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Sequence
from typing import Any

from fp_multi._nodes import decode_scalar, shorten
from fp_multi._registry import extension_named
from fp_multi.errors import ManifestError


def build(tree: Any, tensors: Sequence[Any]) -> Any:
    """Rebuild a state.

    No class is imported or called that the checkpoint names: a named tuple takes the class of its
        hint only if that is
    loaded already and has the same fields.

    Args:
        tree: a tree that ``check_tree`` accepted or ``describe`` made.
        tensors: the value for each tensor index; those that the tree does not use may be anything.

    Returns:
        The state.

    Raises:
        ManifestError: a key or an extension value turns out to be impossible.
    """
    return _Decoder(tensors).build(tree)


def decode_key(key: Any) -> Any:
    """The Python key of a *Key*.

    Raises:
        ManifestError: the key's value cannot be the key of a dict.
    """
    if type(key) is not list:
        return key
    value = _Decoder(()).build(key[1])
    try:
        hash(value)
    except TypeError as error:
        raise ManifestError(f"tree: {shorten(key)} cannot be a key: {error}") from error
    return value


# Where a container node keeps its children.
_CHILDREN = {"dict": 2, "ordereddict": 2, "list": 1, "tuple": 1, "namedtuple": 3}


# Numbers with equal hashes are easily made up, and a dict of n of them takes n * n steps.
_MAX_COLLISIONS = 4096


class _Decoder:
    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = tensors
        self.classes: dict[tuple[str, ...], type] = {}

    def build(self, node: Any) -> Any:
        # One frame for each level, so that the deepest tree allowed fits on any stack.
        kind = type(node)
        if kind is int:
            return self.tensors[node]
        if kind is not list:
            return node
        tag = node[0]
        if tag == "ext":
            return self._extension(node[1], self.build(node[2]))
        if tag not in _CHILDREN:
            return decode_scalar(node)
        tensors, values = self.tensors, []
        for child in node[_CHILDREN[tag]]:
            values.append(tensors[child] if type(child) is int else self.build(child))
        attributes = None
        if tag == "ordereddict" and node[3] is not None:
            attributes = self.build(node[3])
        return self._container(node, values, attributes)

    def _container(self, node: list[Any], values: list[Any], attributes: Any) -> Any:
        tag = node[0]
        if tag == "list":
            return values
        if tag == "tuple":
            return tuple(values)
        if tag == "namedtuple":
            # What namedtuple._make does, without calling anything that the class may have
            # overridden.
            return tuple.__new__(self._class(node[1], node[2]), values)
        target: dict[Any, Any] = {} if tag == "dict" else OrderedDict()
        keys = node[1]
        if list in set(map(type, keys)):
            keys = [decode_key(key) for key in keys]
            if max(Counter(map(hash, keys)).values()) > _MAX_COLLISIONS:
                raise ManifestError("tree: the keys of a dict are made to have one hash")
        target.update(zip(keys, values, strict=True))
        if len(target) != len(keys):
            # 1, 1.0 and True differ in the file and are one key in Python.
            raise ManifestError("tree: two keys of a dict are equal in Python")
        if attributes is not None:
            vars(target).update(attributes)
        return target

    @staticmethod
    def _extension(name: str, value: Any) -> Any:
        extension = extension_named(name)
        if extension is None:
            return value
        try:
            return extension.decode(value)
        except Exception as error:
            # The decoder expects what its encoder gave; anything may go wrong with something else.
            raise ManifestError(f"tree: {shorten(value)} is not a {shorten(name)}: {error}") from error

    def _class(self, hint: str, fields: list[str]) -> type:
        key = (hint, *fields)
        found = self.classes.get(key)
        if found is None:
            found = self.classes[key] = _loaded_class(hint, fields) or _new_class(hint, fields)
        return found


def _loaded_class(hint: str, fields: list[str]) -> type | None:
    """The class that wrote the tuple, if it is loaded. No getattr: that may import modules."""
    module, _, qualname = hint.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        try:
            found = vars(found).get(part)
        except TypeError:
            return None
    if not isinstance(found, type) or not issubclass(found, tuple):
        return None
    return found if vars(found).get("_fields") == tuple(fields) or _inherited(found, fields) else None


def _inherited(kind: type, fields: list[str]) -> bool:
    return any(vars(base).get("_fields") == tuple(fields) for base in kind.__mro__)


def _new_class(hint: str, fields: list[str]) -> type:
    name = hint.rpartition(":")[2].rpartition(".")[2]
    if not name.isascii() or not name.isidentifier() or keyword.iskeyword(name):
        name = "NamedTuple"
    # namedtuple() renames what is no field name, but two names that Python's parser sees as one get
    # past it.
    safe = [field if unicodedata.normalize("NFKC", field) == field else "" for field in fields]
    made: type = namedtuple(name, safe, rename=True)  # type: ignore[misc]
    return made
