"""Take a state apart into tensors and a tree that refers to them (docs/format.md 3.3, 3.4)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any

import msgspec
import numpy as np

from fp_multi._collector import collector_paused
from fp_multi._nodes import (
    INT64_MAX,
    INT64_MIN,
    MAX_FIELDS,
    RESERVED_ATTRIBUTES,
    Cell,
    bytes_node,
    complex_node,
    elements,
    float_node,
    int_node,
    is_unicode,
    str_node,
)
from fp_multi._registry import extension_of, on_change, tensor_type_of
from fp_multi._tree_leaves import (
    Handler,
    Walk,
    array_leaf,
    byte_string_handler,
    check_depth,
    refuse,
    scalar_leaf,
    tensor_handler,
    type_name,
    unknown_leaf,
)
from fp_multi._types import Box, Described, ExtensionType, Sharded, ShardOf
from fp_multi.errors import UnsupportedLeafError

_SCALAR_NODES: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: int_node,
    float: float_node,
    complex: complex_node,
    str: str_node,
}


def describe(state: Any, *, allow_pickle: bool = False) -> Described:
    """Take a state apart.

    Arrays are not copied, except those in big-endian order; the sources keep the memory alive. A
    ``bytearray`` cannot change its length as long as its source is alive.

    Args:
        state: dicts, lists, tuples and named tuples of tensors and plain values, in any nesting.
        allow_pickle: pickle values that the format has no form for, instead of refusing them.

    Returns:
        The tree, and name and source of every tensor, in tree order. A tensor that stands at
        several places is one.

    Raises:
        UnsupportedLeafError: a value or a key has no form in the format; the message says where,
            and the way out.

    Example:
        >>> described = describe({"w": np.zeros(3)})
        >>> described.tree, described.names
        (['dict', ['w'], [0]], ['w'])
    """
    with collector_paused():
        # In a function of its own: most of what it makes is gone before the collector may look.
        return _describe(state, allow_pickle)


def _describe(state: Any, allow_pickle: bool) -> Described:
    walk = Walk(allow_pickle)
    try:
        tree = _handler(type(state))(walk, state, "", None, 1)
    except RecursionError as error:
        raise UnsupportedLeafError(
            "<root>: nested too deeply for what is left of the interpreter's stack", "<root>"
        ) from error
    return Described(tree, name_tensors(walk.places), walk.sources)


def name_tensors(places: list[tuple[str | None, Cell]]) -> list[str]:
    """The names of tensors (docs/format.md 3.4).

    Args:
        places: for each its plain name, None if it has none, and its path.
    """
    texts = [text for text, _ in places]
    unique = set(texts)
    escaped = {text for text in unique if not text or (text[0] in "~_" and not _is_plain(text))}
    if len(unique) != len(texts):
        escaped.update(text for text, count in Counter(texts).items() if count > 1)
    return [
        "~" + msgspec.json.encode(elements(cell)).decode() if text is None or text in escaped else text
        for text, cell in places
    ]


def _is_plain(text: str) -> bool:
    return text != "__metadata__" and not text.startswith(("~", "__fp_multi__"))


# Containers


def _element(key: Any, cell: Cell, depth: int) -> tuple[Any, str | None]:
    """A dict's key as the format's *Key*, and its text in plain names."""
    if type(key) is str and is_unicode(key):
        return key, key
    if type(key) is int and INT64_MIN <= key <= INT64_MAX:
        return key, str(key)
    return ["key", _plain(key, cell, depth + 1, in_key=True)], None


def _items(walk: Walk, mapping: Any, text: str | None, cell: Cell, depth: int) -> list[Any]:
    walk.enter(mapping, depth, cell)
    prefix = "" if cell is None else None if text is None else text + "."
    handlers = _handlers
    keys, nodes = [], []
    for key, value in mapping.items():
        element: Any = key
        label: str | None = key
        if type(key) is not str or not key.isascii():
            element, label = _element(key, cell, depth)
        handler = handlers.get(type(value)) or _handler(type(value))
        child = None if prefix is None or label is None else prefix + label
        keys.append(element)
        nodes.append(handler(walk, value, child, (cell, element), depth + 1))
    walk.active.discard(id(mapping))
    return [keys, nodes]


def _dict(walk: Walk, mapping: Any, text: str | None, cell: Cell, depth: int) -> Any:
    return ["dict", *_items(walk, mapping, text, cell, depth)]


def _ordereddict(walk: Walk, mapping: Any, text: str | None, cell: Cell, depth: int) -> Any:
    attributes = vars(mapping)
    for name in attributes:
        if type(name) is not str or not is_unicode(name) or name in RESERVED_ATTRIBUTES:
            refuse(cell, f"the OrderedDict has an attribute {name!r}; delete it")
    node = ["ordereddict", *_items(walk, mapping, text, cell, depth), None]
    if attributes:
        check_depth(depth + 1, cell)
        nodes = []
        for name, value in attributes.items():
            place = (cell, ["attribute", name])
            nodes.append(_handler(type(value))(walk, value, None, place, depth + 2))
        node[3] = ["dict", list(attributes), nodes]
    return node


def _sequence(walk: Walk, values: Any, labels: Any, text: str | None, cell: Cell, depth: int) -> list[Any]:
    walk.enter(values, depth, cell)
    prefix = "" if cell is None else None if text is None else text + "."
    nodes = []
    for label, value in zip(labels, values, strict=True):
        child = None if prefix is None else f"{prefix}{label}"
        nodes.append(_handler(type(value))(walk, value, child, (cell, label), depth + 1))
    walk.active.discard(id(values))
    return nodes


def _list(walk: Walk, values: Any, text: str | None, cell: Cell, depth: int) -> Any:
    return ["list", _sequence(walk, values, range(len(values)), text, cell, depth)]


def _tuple(walk: Walk, values: Any, text: str | None, cell: Cell, depth: int) -> Any:
    return ["tuple", _sequence(walk, values, range(len(values)), text, cell, depth)]


def _namedtuple(walk: Walk, values: Any, text: str | None, cell: Cell, depth: int) -> Any:
    hint, fields = _record(values, cell)
    return ["namedtuple", hint, fields, _sequence(walk, values, fields, text, cell, depth)]


def _is_namedtuple(kind: type) -> bool:
    fields = getattr(kind, "_fields", None)
    return (
        issubclass(kind, tuple)
        and isinstance(fields, tuple)
        and len(set(fields)) == len(fields) <= MAX_FIELDS
        and all(type(field) is str and field.isidentifier() for field in fields)
    )


def _record(values: Any, cell: Cell) -> tuple[str, list[str]]:
    kind = type(values)
    fields: list[str] = list(kind._fields)
    if len(fields) != len(values) or getattr(values, "__dict__", None):
        refuse(cell, f"the {kind.__qualname__} has more to it than its fields; convert it to a dict")
    hint = f"{kind.__module__}:{kind.__qualname__}"
    return hint if is_unicode(hint) else "", fields


# Plain values


def _scalar(to_node: Callable[[Any], Any]) -> Handler:
    return lambda walk, value, text, cell, depth: to_node(value)


def _plain(value: Any, cell: Cell, depth: int, *, in_key: bool) -> Any:
    """The node of a key, or of what an extension's ``encode`` gave: no tensors, no dicts."""
    kind = type(value)
    to_node = _SCALAR_NODES.get(kind)
    if to_node is not None:
        if in_key and value != value:
            refuse(cell, "NaN as a key is not found again; use another key")
        return to_node(value)
    if kind is bytes and in_key:
        return bytes_node(value)
    check_depth(depth, cell)
    if kind is tuple or (kind is list and not in_key):
        nodes = [_plain(child, cell, depth + 1, in_key=in_key) for child in value]
        return [kind.__name__, nodes]
    extension = extension_of(kind)
    if extension is not None:
        name, codec = extension
        return ["ext", name, _plain(codec.encode(value), cell, depth + 1, in_key=False)]
    if _is_namedtuple(kind):
        nodes = [_plain(child, cell, depth + 1, in_key=in_key) for child in value]
        return ["namedtuple", *_record(value, cell), nodes]
    if in_key:
        what = f"cannot store a key of type {type_name(kind)}; use str, int, or another plain value"
    else:
        what = f"the extension's encode gave a value of type {type_name(kind)}"
    return refuse(cell, what)


def _extension(name: str, codec: ExtensionType) -> Handler:
    def handler(walk: Walk, value: Any, text: str | None, cell: Cell, depth: int) -> Any:
        check_depth(depth, cell)
        return ["ext", name, _plain(codec.encode(value), cell, depth + 1, in_key=False)]

    return handler


def _shard(walk: Walk, value: ShardOf, text: str | None, cell: Cell, depth: int) -> Any:
    inner = Walk(walk.allow_pickle)
    _handler(type(value.array))(inner, value.array, text, cell, depth)
    source = inner.sources[0] if len(inner.sources) == 1 else None
    if source is None or source.sharded is not None or source.kind in ("bytes", "bytearray", "pickle"):
        refuse(cell, f"ShardOf takes an array or a tensor, found {type_name(type(value.array))}")
    shape, start = tuple(value.shape), tuple(value.start)
    inside = len(shape) == len(start) == len(source.shape)
    for first, length, extent in zip(start, source.shape, shape, strict=False):
        inside = inside and first >= 0 and length > 0 and first + length <= extent
    if not inside:
        refuse(
            cell,
            f"ShardOf: the box at {start} of {source.shape} is empty or not inside the shape {shape}; a rank that has "
            "nothing of a tensor leaves its key out",
        )
    key = ("shard", id(value))
    known = walk.seen.get(key)
    if known is not None:
        return known
    whole = source._replace(
        shape=shape,
        nbytes=source.itemsize * prod(shape),
        address=0,
        keepalive=value,
        strides=None,
        fetch=None,
        sharded=Sharded((Box(start, source.shape),), (), ((0, source),)),
    )
    return walk.add(key, whole, text, cell)


_BASE_HANDLERS: dict[type, Handler] = {
    **{kind: _scalar(to_node) for kind, to_node in _SCALAR_NODES.items()},
    dict: _dict,
    OrderedDict: _ordereddict,
    list: _list,
    tuple: _tuple,
    bytes: byte_string_handler("bytes"),
    bytearray: byte_string_handler("bytearray"),
    np.ndarray: array_leaf,
    ShardOf: _shard,
}
_handlers: dict[type, Handler] = dict(_BASE_HANDLERS)


def _handler(kind: type) -> Handler:
    handler = _handlers.get(kind)
    if handler is None:
        handler = _handlers[kind] = _resolve(kind)
    return handler


def _resolve(kind: type) -> Handler:
    extension = extension_of(kind)
    if extension is not None:
        return _extension(*extension)
    tensor_type = tensor_type_of(kind)
    if tensor_type is not None:
        return tensor_handler(tensor_type)
    if issubclass(kind, np.generic) and kind is not np.record and np.dtype(kind).type is kind:
        return scalar_leaf
    return _namedtuple if _is_namedtuple(kind) else unknown_leaf


def _forget() -> None:
    # A new dict: a walk in another thread goes on with the one it holds.
    global _handlers
    _handlers = dict(_BASE_HANDLERS)


on_change(_forget)
