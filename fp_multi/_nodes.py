"""The grammar of a manifest's tree (docs/format.md section 3.3): scalars, keys, paths, the check.

Encoding and decoding of whole states are in ``_tree_encode`` and ``_tree_decode``.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections import OrderedDict
from typing import Any, TypeAlias

import msgspec

from fp_multi.errors import ManifestError

Cell: TypeAlias = "tuple[Cell | None, Any] | None"
"""A path as a linked list, one tuple a leaf: (the parent's cell, element); None for the root.

An element is a *Key* of the format, a position, or ``["attribute", NAME]``.
"""

MAX_DEPTH = 256
MAX_FIELDS = 4096
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1

RESERVED_ATTRIBUTES = frozenset(dir(OrderedDict))
"""A value set under one of these names would hide a method of the OrderedDict."""

_BIGINT = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_BITS = re.compile(r"[0-9a-f]{16}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_double = struct.Struct(">d")


def is_unicode(text: str) -> bool:
    """Whether a string can be written as UTF-8, that is, has no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def int_node(value: int) -> list[Any]:
    """The node of an integer of any size."""
    return ["int", value] if INT64_MIN <= value <= INT64_MAX else ["bigint", hex(value)]


def float_node(value: float) -> list[Any]:
    """The node of a float: its exact bits."""
    return ["float", _double.pack(value).hex()]


def complex_node(value: complex) -> list[Any]:
    """The node of a complex number: the exact bits of both parts."""
    return ["complex", _double.pack(value.real).hex(), _double.pack(value.imag).hex()]


def str_node(value: str) -> Any:
    """The node of a string; one with lone surrogates is not Unicode and goes through UTF-16."""
    if is_unicode(value):
        return value
    return ["surrogates", base64.b64encode(value.encode("utf-16-le", "surrogatepass")).decode()]


def bytes_node(value: bytes) -> list[Any]:
    """The node of a byte string inside a key; elsewhere byte strings are tensors."""
    return ["bytes", base64.b64encode(value).decode()]


def decode_scalar(node: list[Any]) -> Any:
    """The value of a scalar node that JSON does not hold itself.

    Args:
        node: a non-empty list; it may be hostile.

    Raises:
        ManifestError: it is not a scalar node, or not the canonical one of its value.
    """
    try:
        decoder, arity = _SCALARS[node[0]]
        if len(node) != arity:
            raise ValueError("it has the wrong number of members")
        return decoder(*node[1:])
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        why = "unknown tag" if isinstance(error, KeyError) else str(error)
        raise ManifestError(f"{shorten(node)} is not a node: {why}") from error


def _decode_int(value: Any) -> int:
    if type(value) is not int or not INT64_MIN <= value <= INT64_MAX:
        raise ValueError("not an integer of 64 bits")
    return value


def _decode_bigint(text: str) -> int:
    if not _BIGINT.fullmatch(text):
        raise ValueError("not a hexadecimal integer")
    value = int(text, 16)
    if INT64_MIN <= value <= INT64_MAX:
        raise ValueError("the integer fits in 64 bits")
    return value


def _decode_float(bits: str) -> float:
    if not _BITS.fullmatch(bits):
        raise ValueError("not 16 hexadecimal digits")
    value: float = _double.unpack(bytes.fromhex(bits))[0]
    return value


def _decode_complex(real: str, imag: str) -> complex:
    return complex(_decode_float(real), _decode_float(imag))


def _decode_surrogates(text: str) -> str:
    value = base64.b64decode(text, validate=True).decode("utf-16-le", "surrogatepass")
    if is_unicode(value):
        raise ValueError("the string is valid Unicode")
    return value


def _decode_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_SCALARS: dict[str, tuple[Any, int]] = {
    "int": (_decode_int, 2),
    "bigint": (_decode_bigint, 2),
    "float": (_decode_float, 2),
    "complex": (_decode_complex, 3),
    "surrogates": (_decode_surrogates, 2),
    "bytes": (_decode_bytes, 2),
}


def shorten(value: Any, limit: int = 80) -> str:
    """A value from a hostile file, fit for a message."""
    if isinstance(value, list):
        # Never the repr of the whole: it may be millions of nodes, or deeper than the stack.
        inner = ", ".join("[...]" if isinstance(v, (list, dict)) else shorten(v, 24) for v in value[:3])
        return f"[{inner}{', ...' if len(value) > 3 else ''}]"
    if isinstance(value, dict):
        return "{...}"
    if isinstance(value, int) and not INT64_MIN <= value <= INT64_MAX:
        return "an integer of more than 64 bits"
    if isinstance(value, str) and len(value) > limit:
        return repr(value[:limit] + "...")
    return repr(value)


def count_text(value: int) -> str:
    """A count from a hostile file, fit for a message."""
    return str(value) if value <= INT64_MAX else f"more than {INT64_MAX}"


def elements(cell: Cell) -> list[Any]:
    """The path's elements from the root on."""
    path: list[Any] = []
    while cell is not None:
        cell, element = cell
        path.append(element)
    path.reverse()
    return path


def readable(cell: Cell) -> str:
    """The path for people: ``model.layers[3].hook``, ``<root>`` for the root."""
    text = ""
    for element in elements(cell):
        if isinstance(element, str):
            if _IDENTIFIER.fullmatch(element):
                text += f".{element}" if text else element
            else:
                text += f"[{element!r}]"
        elif isinstance(element, int):
            text += f"[{element}]"
        elif element[0] == "attribute":
            text += f".__dict__[{element[1]!r}]"
        else:
            text += f"[{_show(element[1])}]"
    return text or "<root>"


def _show(node: Any) -> str:
    if not isinstance(node, list):
        return repr(node)
    if node[0] in ("tuple", "list"):
        return f"({', '.join(map(_show, node[1]))}{',' if len(node[1]) == 1 else ''})"
    if node[0] == "namedtuple":
        return f"({', '.join(map(_show, node[3]))})"
    if node[0] == "ext":
        return _show(node[2])
    return repr(decode_scalar(node))


def check_tree(tree: Any, tensor_count: int) -> None:
    """Check a tree from a manifest completely, so that decoding it needs no further thought.

    Args:
        tree: what the JSON decoder made of it; it may be hostile.
        tensor_count: how many tensors the manifest has.

    Raises:
        ManifestError: the tree is not what section 3.3 describes, or leaves a tensor unused. The
            message names the path.
    """
    checker = _Checker(tensor_count)
    checker.check(tree)
    unused = checker.used.find(0)
    if unused >= 0:
        raise ManifestError(f"tree: tensors[{unused}] is used by no node")


_STATE, _KEY, _EXT = "the state", "a key", "an extension"


class _Checker:
    """Checks with a stack of its own: a file must not choose how deep the interpreter's gets."""

    def __init__(self, tensor_count: int) -> None:
        self.used = bytearray(tensor_count)
        self.stack: list[tuple[Any, int, str, Cell]] = []

    def check(self, tree: Any, depth: int = 1, where: str = _STATE, cell: Cell = None) -> None:
        self.stack.append((tree, depth, where, cell))
        while self.stack:
            node, depth, where, cell = self.stack.pop()
            kind = type(node)
            if kind is int and where is _STATE:
                self._use([node], cell)
            elif kind is list and node and type(node[0]) is str:
                self._container(node, depth, where, cell)
            elif node is not None and kind is not bool and kind is not str:
                raise self._error(cell, f"{shorten(node)} is not a node in {where}")

    @staticmethod
    def _error(cell: Cell, what: str) -> ManifestError:
        return ManifestError(f"tree at {shorten_path(cell)}: {what}")

    def _use(self, indices: list[int], cell: Cell) -> None:
        if min(indices) < 0 or max(indices) >= len(self.used):
            wrong = next(i for i in indices if not 0 <= i < len(self.used))
            raise self._error(cell, f"tensor {shorten(wrong)} of {len(self.used)} does not exist")
        for index in indices:
            self.used[index] = 1

    def _container(self, node: list[Any], depth: int, where: str, cell: Cell) -> None:
        tag, arity = node[0], len(node)
        if tag in ("dict", "ordereddict") and where is _STATE and arity == (4 if tag[0] == "o" else 3):
            self._children(self._keys(node[1], depth, cell), node[2], depth, where, cell)
            if arity == 4 and node[3] is not None:
                self._attributes(node[3], depth, cell)
        elif (tag == "tuple" or (tag == "list" and where is not _KEY)) and arity == 2:
            self._children(None, node[1], depth, where, cell)
        elif tag == "namedtuple" and arity == 4 and type(node[1]) is str:
            self._children(self._fields(node[2], cell), node[3], depth, where, cell)
        elif tag == "ext" and arity == 3 and type(node[1]) is str:
            self._nest(depth, cell)
            self.stack.append((node[2], depth + 1, _EXT, cell))
        elif tag in _SCALARS and (tag != "bytes" or where is _KEY):
            try:
                value = decode_scalar(node)
            except ManifestError as error:
                raise self._error(cell, str(error)) from error
            if where is _KEY and value != value:
                raise self._error(cell, "a key is not a number (NaN)")
        else:
            raise self._error(cell, f"{shorten(node)} is not a node in {where}")

    def _nest(self, depth: int, cell: Cell) -> None:
        if depth > MAX_DEPTH:
            raise self._error(cell, f"nested deeper than {MAX_DEPTH}")

    def _children(self, keys: Any, nodes: Any, depth: int, where: str, cell: Cell) -> None:
        self._nest(depth, cell)
        if type(nodes) is not list or (keys is not None and len(keys) != len(nodes)):
            raise self._error(cell, "the number of values is not the number of keys")
        if where is _STATE and set(map(type, nodes)) == {int}:
            self._use(nodes, cell)
            return
        # Reversed, so that faults are found in tree order.
        labels = range(len(nodes)) if keys is None else keys
        self.stack.extend(
            (node, depth + 1, where, (cell, label))
            for label, node in zip(reversed(labels), reversed(nodes), strict=True)
        )

    def _keys(self, keys: Any, depth: int, cell: Cell) -> list[Any]:
        if type(keys) is not list:
            raise self._error(cell, "the keys are not an array")
        plain: set[Any] = {key for key in keys if type(key) is str}
        others: set[Any] = set()
        for key in keys:
            if type(key) is str:
                continue
            if type(key) is int and INT64_MIN <= key <= INT64_MAX:
                plain.add(key)
                continue
            self._key(key, depth, cell)
            others.add(msgspec.json.encode(key))
        if len(plain) + len(others) != len(keys):
            raise self._error(cell, "a key stands twice in a dict")
        return keys

    def _key(self, key: Any, depth: int, cell: Cell) -> None:
        if type(key) is not list or len(key) != 2 or key[0] != "key":
            raise self._error(cell, f"{shorten(key)} is not a key")
        node = key[1]
        if type(node) is str or (type(node) is list and node[:1] == ["int"]):
            raise self._error(cell, f"key {shorten(key)} must stand for itself")
        # At once, so that a key is known to be well formed before it becomes part of a path.
        _Checker(0).check(node, depth + 1, _KEY, cell)

    def _fields(self, fields: Any, cell: Cell) -> list[Any]:
        if (
            type(fields) is not list
            or len(fields) > MAX_FIELDS
            or not all(type(field) is str for field in fields)
            or len(set(fields)) != len(fields)
        ):
            raise self._error(cell, f"the fields are not at most {MAX_FIELDS} different strings")
        return fields

    def _attributes(self, node: Any, depth: int, cell: Cell) -> None:
        if type(node) is not list or len(node) != 3 or node[0] != "dict" or type(node[1]) is not list:
            raise self._error(cell, "the attributes are neither null nor a dict")
        for name in node[1]:
            if type(name) is not str or name in RESERVED_ATTRIBUTES:
                raise self._error(cell, f"{shorten(name)} is not the name of an attribute")
        if len(set(node[1])) != len(node[1]):
            raise self._error(cell, "an attribute stands twice")
        labels = [["attribute", name] for name in node[1]]
        self._children(labels, node[2], depth + 1, _STATE, cell)


def shorten_path(cell: Cell, limit: int = 200) -> str:
    """The readable path, fit for a message about a hostile file."""
    text = readable(cell)
    return text if len(text) <= limit else text[:limit] + "..."
