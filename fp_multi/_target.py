"""``load(..., target=)``: give a checkpoint the shape of an existing state, or put it into one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from fp_multi._dtypes import dtype_info, dtype_name
from fp_multi._engine import address_of
from fp_multi._format import Tensor
from fp_multi._nodes import Cell, readable
from fp_multi._registry import tensor_type_of
from fp_multi._tree_decode import build, decode_key
from fp_multi._types import Array, Box, LeafSource, ShardOf
from fp_multi.errors import TargetMismatchError, UnsupportedLeafError

_Leaf: TypeAlias = Callable[[Any, Any, Cell], Any]
_OPAQUE_KINDS = frozenset(("bytes", "bytearray", "pickle"))


class Place(NamedTuple):
    """A leaf of the target that takes a tensor, or the part of a leaf that takes a box of it."""

    leaf: Any
    path: str
    source: LeafSource | None
    """Its memory, if it is a registered tensor."""
    box: Box | None = None
    """None for the whole tensor."""


class Matched(NamedTuple):
    """Where the tensors of a checkpoint go."""

    places: dict[int, list[Place]]
    """For each tensor that is wanted whole the leaf, or the leaves that take it."""
    parts: list[tuple[int, Place]]
    """Tensor and place of each box that is wanted, in the order of the leaves."""


def _mismatch(cell: Cell, what: str, in_target: object, on_disk: object) -> NoReturn:
    raise TargetMismatchError(f"{readable(cell)}: {what}: {in_target} in target, {on_disk} on disk")


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def walk(node: Any, target: Any, leaf: _Leaf, cell: Cell = None) -> Any:
    """Walk a tree and a target side by side and rebuild the target's containers.

    Args:
        node: a checked tree.
        target: a state of the same structure.
        leaf: called with node, the target's leaf and its place; gives the new leaf.
        cell: where both stand.

    Raises:
        TargetMismatchError: the structures differ.
    """
    tag = node[0] if type(node) is list else None
    if tag in ("dict", "ordereddict"):
        return _walk_dict(node, target, leaf, cell)
    if tag == "namedtuple":
        if not isinstance(target, tuple) or list(getattr(target, "_fields", ())) != node[2]:
            _mismatch(cell, "structure", _kind(target), f"a named tuple of {node[2]}")
        make: Any = type(target)
        return make._make(_walk_items(node[3], target, node[2], leaf, cell))
    if tag in ("list", "tuple"):
        if not isinstance(target, list if tag == "list" else tuple) or hasattr(target, "_fields"):
            _mismatch(cell, "structure", _kind(target), f"a {tag}")
        items = _walk_items(node[1], target, range(len(target)), leaf, cell)
        return items if tag == "list" else tuple(items)
    return leaf(node, target, cell)


def _walk_items(nodes: list[Any], target: Sequence[Any], labels: Sequence[Any], leaf: _Leaf, cell: Cell) -> list[Any]:
    if len(target) != len(nodes):
        _mismatch(cell, "length", len(target), len(nodes))
    return [walk(node, value, leaf, (cell, label)) for node, value, label in zip(nodes, target, labels, strict=True)]


def _walk_dict(node: list[Any], target: Any, leaf: _Leaf, cell: Cell) -> Any:
    if not isinstance(target, dict):
        _mismatch(cell, "structure", _kind(target), "a dict")
    on_disk = {decode_key(key): (key, child) for key, child in zip(node[1], node[2], strict=True)}
    missing = [key for key in on_disk if key not in target]
    extra = [key for key in target if key not in on_disk]
    if missing or extra:
        _mismatch(
            cell,
            "keys",
            f"extra {extra[:5]!r}" if extra else "nothing extra",
            f"extra {missing[:5]!r}" if missing else "nothing extra",
        )
    pairs = [(key, walk(on_disk[key][1], value, leaf, (cell, on_disk[key][0]))) for key, value in target.items()]
    return OrderedDict(pairs) if isinstance(target, OrderedDict) else dict(pairs)


def match(tree: Any, target: Any, tensors: Sequence[Tensor], *, memory: bool) -> Matched:
    """Check that a target fits, and find the leaf (or leaves, of tied tensors) for each tensor, or for a box of it.

    Args:
        tree: a checked tree.
        target: a state.
        tensors: the manifest's tensors.
        memory: whether the leaves' memory matters too; without it tensors that have none (meta tensors) will do.

    Raises:
        TargetMismatchError: structure, shape or dtype differ; the message names the leaf.
    """
    places: dict[int, list[Place]] = {}
    parts: list[tuple[int, Place]] = []

    def check(node: Any, leaf: Any, cell: Cell) -> None:
        if type(node) is int:
            tensor = tensors[node]
            inner = _parts_of(leaf, cell)
            if inner is None:
                source = _check_tensor(tensor, leaf, tensor.shape, cell, memory=memory)
                places.setdefault(node, []).append(Place(leaf, readable(cell), source))
                return
            if tensor.kind in _OPAQUE_KINDS:
                _mismatch(cell, "structure", _kind(leaf), f"a leaf of kind {tensor.kind}")
            if tuple(leaf.shape) != tuple(tensor.shape):
                _mismatch(cell, "shape", tuple(leaf.shape), tuple(tensor.shape))
            for box, part in inner:
                source = _check_tensor(tensor, part, box.length, cell, memory=memory)
                parts.append((node, Place(part, readable(cell), source, box)))
        elif _is_tensor(leaf) or isinstance(leaf, (dict, list)):
            _mismatch(cell, "structure", _kind(leaf), "a plain value")

    walk(tree, target, check)
    return Matched(places, parts)


def _parts_of(leaf: Any, cell: Cell) -> Sequence[tuple[Box, Any]] | None:
    """The boxes of a tensor that a leaf consists of; None if it takes all of one."""
    if isinstance(leaf, ShardOf):
        return [(Box(tuple(leaf.start), tuple(leaf.array.shape)), leaf.array)]
    registered = tensor_type_of(type(leaf))
    if registered is None or registered.parts is None:
        return None
    try:
        return registered.parts(leaf, "")
    except UnsupportedLeafError:
        return registered.parts(leaf, readable(cell))  # only a refusal pays for the path


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, np.generic, ShardOf)) or tensor_type_of(type(leaf)) is not None


def _check_tensor(tensor: Tensor, leaf: Any, expected: Sequence[int], cell: Cell, *, memory: bool) -> LeafSource | None:
    if tensor.kind in _OPAQUE_KINDS:
        return None
    source = None
    registered = tensor_type_of(type(leaf))
    if registered is not None and registered.spec is not None and not memory:
        dtype, shape = registered.spec(leaf)
    elif registered is not None:
        source = registered.describe(leaf, readable(cell))
        shape, dtype = source.shape, source.dtype
    elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        shape = tuple(leaf.shape)
        try:
            dtype = dtype_name(np.dtype(leaf.dtype))
        except (TypeError, ValueError):
            _mismatch(cell, "dtype", leaf.dtype, tensor.dtype)
    else:
        _mismatch(cell, "structure", _kind(leaf), f"a tensor of shape {tuple(tensor.shape)}")
    if tuple(shape) != tuple(expected):
        _mismatch(cell, "shape", tuple(shape), tuple(expected))
    if dtype != tensor.dtype:
        _mismatch(cell, "dtype", dtype, tensor.dtype)
    return source


def memory(places: list[Place]) -> int | None:
    """The address that takes a tensor's bytes as they are, or None if they must be copied leaf by leaf."""
    found = {_address(place) for place in places}
    return found.pop() if len(found) == 1 else None


class _Memory:
    """Memory of a leaf for NumPy, which keeps this alive, and this the leaf."""

    def __init__(self, address: int, nbytes: int, leaf: Any) -> None:
        self.leaf = leaf
        self.__array_interface__ = {"version": 3, "data": (address, False), "typestr": "|u1", "shape": (nbytes,)}


def room(place: Place) -> Array | None:
    """The memory that takes the bytes of a box as they are, 1-d; None if they must be copied."""
    address = _address(place)
    if address is None:
        return None
    nbytes = place.leaf.nbytes if place.source is None else place.source.nbytes
    return np.asarray(_Memory(address, nbytes, place.leaf))


def _address(place: Place) -> int | None:
    leaf, path, source, _ = place
    if isinstance(leaf, np.ndarray):
        if not leaf.flags.writeable:
            raise TargetMismatchError(f"{path}: the target's array is read-only, inplace=True cannot fill it")
        if leaf.flags.c_contiguous and leaf.nbytes and not dtype_info(leaf.dtype).swapped:
            return address_of(leaf)
    elif (
        source is not None
        and source.fetch is None
        and source.strides is None
        and source.nbytes
        # A description may be of a temporary copy; only the leaf's own memory will do.
        and source.keepalive is leaf
    ):
        return source.address
    return None


def fill(places: list[Place], value: Any) -> None:
    """Copy a loaded value into every leaf that holds a tensor."""
    for place in places:
        registered = tensor_type_of(type(place.leaf))
        if registered is not None and registered.assign is not None:
            registered.assign(place.leaf, value)
        elif isinstance(place.leaf, np.ndarray):
            np.copyto(place.leaf, value)


def fillable(leaf: Any) -> bool:
    """Whether a leaf can take bytes in place at all; others are replaced by new values."""
    registered = tensor_type_of(type(leaf))
    return isinstance(leaf, np.ndarray) or (registered is not None and registered.assign is not None)


def rebuild(tree: Any, target: Any, values: Mapping[int, Any], boxes: Iterable[Any], *, inplace: bool) -> Any:
    """The target's containers with loaded leaves (or, in place, its own tensors).

    Args:
        tree: a checked tree.
        target: what :func:`match` has accepted.
        values: for each tensor that is wanted whole.
        boxes: values for the boxes, in the order of :attr:`Matched.parts`.
        inplace: keep the leaves that have been filled.
    """
    made = iter(boxes)

    def leaf(node: Any, old: Any, cell: Cell) -> Any:
        if type(node) is not int:
            return build(node, ())
        inner = _parts_of(old, cell)
        if inner is None:
            return old if inplace and fillable(old) else values[node]
        mine = [next(made) for _ in inner]
        if inplace and all([fillable(part) for _, part in inner]):
            return old
        return _joined(old, mine)

    return walk(tree, target, leaf)


def _joined(leaf: Any, values: Sequence[Any]) -> Any:
    if isinstance(leaf, ShardOf):
        return ShardOf(values[0], leaf.shape, leaf.start)
    registered = tensor_type_of(type(leaf))
    return values[0] if registered is None or registered.join is None else registered.join(leaf, values)
