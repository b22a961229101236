"""What a checkpoint holds, as a tree whose leaves know where their values are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from fp_multi import CheckpointReader

from ._shardings import saved_shardings

Tensor: TypeAlias = Any
"""A tensor's entry in a manifest; the class has no public name."""

MISSING = object()
_DICTS = (dict, OrderedDict)


@dataclass(frozen=True, slots=True, eq=False)
class StoredLeaf:
    """A place of the saved state."""

    path: tuple[Any, ...]
    """Keys and positions from the root."""
    tensor: int | None
    """Its tensor, None for a plain value."""
    value: Any = None
    """The plain value."""
    sharding: str | None = None
    """Where a JAX array was."""

    def __str__(self) -> str:
        return shown(self.path)


def shown(path: tuple[Any, ...]) -> str:
    """A path for messages."""
    return ".".join(map(str, path)) or "<root>"


class _Slot:
    __slots__ = ("tensor",)

    def __init__(self, tensor: int) -> None:
        self.tensor = tensor


class StoredTree:
    """The saved state's containers, with :class:`StoredLeaf` in them. None and empty containers stay as they are.

    Args:
        reader: the checkpoint.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        tensors = reader.manifest.tensors
        self._kinds = [tensor.kind for tensor in tensors]
        self._shardings = saved_shardings(reader.manifest.metadata)
        self.root = self._mark(reader.build({i: _Slot(i) for i in range(len(tensors))}), ())

    def _mark(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, _Slot):
            sharding = next(self._shardings) if self._kinds[value.tensor] == "jax" else None
            return StoredLeaf(path, value.tensor, None, sharding)
        if type(value) in _DICTS:
            for key, child in value.items():
                value[key] = self._mark(child, (*path, key))
            return value
        if _is_sequence(value):
            items = [self._mark(child, (*path, key)) for key, child in _labelled(value)]
            return items if type(value) is list else tuple.__new__(type(value), items)
        return None if value is None else StoredLeaf(path, None, value)


def _is_sequence(value: Any) -> bool:
    # Not what an extension made of one, such as a torch.Size: that is a value.
    return type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _labelled(value: Any) -> Iterator[tuple[Any, Any]]:
    labels: Any = getattr(value, "_fields", range(len(value)))
    return zip(labels, value, strict=True)


def leaves_below(node: Any) -> Iterator[StoredLeaf]:
    """Every leaf at or below a place, in tree order."""
    if isinstance(node, StoredLeaf):
        yield node
    elif isinstance(node, dict):
        for child in node.values():
            yield from leaves_below(child)
    elif isinstance(node, (list, tuple)):
        for child in node:
            yield from leaves_below(child)


def with_leaves(node: Any, values: dict[StoredLeaf, Any]) -> Any:
    """The tree with values in the place of its leaves."""
    if isinstance(node, StoredLeaf):
        return values[node]
    if isinstance(node, dict):
        return type(node)([(key, with_leaves(child, values)) for key, child in node.items()])
    if isinstance(node, (list, tuple)):
        items = [with_leaves(child, values) for child in node]
        kind: Any = type(node)
        return items if kind is list else tuple.__new__(kind, items)
    return node


def key_name(key: Any) -> Any:
    """What one of JAX's keys is called: a string, a number, or whatever the key of a dict is."""
    if isinstance(key, (DictKey, FlattenedIndexKey)):
        return key.key
    if isinstance(key, GetAttrKey):
        return key.name
    return key.idx if isinstance(key, SequenceKey) else key


def child_of(node: Any, name: Any) -> Any:
    """The child of a name: also where one side says ``1`` and the other ``"1"``, as after a conversion to dicts.

    Returns:
        The child, or ``MISSING``.
    """
    if isinstance(node, dict):
        if name in node:
            return node[name]
        other = _other_spelling(name)
        return MISSING if other is None else node.get(other, MISSING)
    if isinstance(node, (list, tuple)):
        fields = getattr(node, "_fields", ())
        if name in fields:
            return node[fields.index(name)]
        number = name if type(name) is int else _other_spelling(name)
        if type(number) is int and 0 <= number < len(node):
            return node[number]
    return MISSING


def _other_spelling(name: Any) -> Any:
    if type(name) is int:
        return str(name)
    if type(name) is str and name.isdecimal() and str(int(name)) == name:
        return int(name)
    return None
