"""What torch.distributed.checkpoint keeps as pickled bytes, kept as plain values instead.

DCP turns everything that is no tensor into the bytes of ``torch.save``. The format has forms of its own for numbers,
strings, lists, arrays and the like, which can be read without running anything; only those are stored, unless pickles
are allowed.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from fp_multi import LeafSource
from fp_multi.errors import UnsupportedLeafError
from fp_multi.storage import describe

from ._convert_tensors import without_classes

Path = tuple[str | int, ...]

_log = logging.getLogger("fp_multi")


class Value(NamedTuple):
    """A value taken apart."""

    node: Any
    """docs/format.md section 3.3; tensors are numbered as below."""
    names: list[str]
    sources: list[LeafSource]
    raw: bool
    """The planner's bytes as they are, because only the planner knows what they mean."""
    stream: int | None
    """Where it stood, if it was an ``io.BytesIO``; what is stored is its contents."""


def value_of(planner: SavePlanner, item: WriteItem, path: Path, *, allow_pickle: bool) -> Value:
    """Take the value of an item apart.

    Args:
        planner: of the save.
        item: not a tensor's.
        path: where it stands in the state.
        allow_pickle: pickle what the format has no form for, instead of refusing it.

    Raises:
        UnsupportedLeafError: the format has no form for it.
    """
    value, raw = _resolve(planner, item, allow_pickle=allow_pickle)
    stream = value.tell() if type(value) is io.BytesIO else None
    state = value if stream is None else value.getvalue()
    for key in reversed(path):
        state = {key: state}
    described = describe(state, allow_pickle=allow_pickle)
    node = described.tree
    for _ in path:
        node = node[2][0]
    return Value(node, described.names, described.sources, raw, stream)


def renumber(node: Any, numbers: Mapping[int, int]) -> Any:
    """A node whose tensors have other numbers."""
    if type(node) is int:
        return numbers[node]
    if type(node) is not list or node[0] not in _CHILDREN:
        return node
    at = _CHILDREN[node[0]]
    found = [*node]
    found[at] = [renumber(child, numbers) for child in node[at]]
    if node[0] == "ordereddict" and node[3] is not None:
        found[3] = renumber(node[3], numbers)
    return found


_CHILDREN = {"dict": 2, "ordereddict": 2, "list": 1, "tuple": 1, "namedtuple": 3}


def tensors_in(node: Any) -> list[int]:
    """The tensors of a node, each once, in tree order."""
    found: dict[int, None] = {}
    stack = [node]
    while stack:
        one = stack.pop()
        if type(one) is int:
            found[one] = None
        elif type(one) is list and one[0] in _CHILDREN:
            if one[0] == "ordereddict" and one[3] is not None:
                stack.append(one[3])
            stack.extend(reversed(one[_CHILDREN[one[0]]]))
    return list(found)


def _resolve(planner: SavePlanner, item: WriteItem, *, allow_pickle: bool) -> tuple[Any, bool]:
    kind = type(planner)
    if isinstance(planner, DefaultSavePlanner) and all(
        [getattr(kind, name) is getattr(DefaultSavePlanner, name) for name in ("resolve_data", "transform_object")]
    ):
        return planner.lookup_object(item.index), False
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        return data, False
    view = data.getvalue()
    try:
        return torch.load(io.BytesIO(view), map_location="cpu", weights_only=True), False
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        if allow_pickle:
            return view, True
        fqn = item.index.fqn
        raise UnsupportedLeafError(
            f"{fqn}: {kind.__qualname__} makes bytes of it that are not plain values ({_first_line(error)}); pass "
            "allow_pickle=True to store them as they are",
            fqn,
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def to_bytes(value: Any, fqn: str) -> io.BytesIO:
    """A value as a load planner expects it."""
    data = io.BytesIO()
    try:
        torch.save(value, data)
    except (pickle.PicklingError, AttributeError):
        # A named tuple whose class is not here.
        data = io.BytesIO()
        torch.save(without_classes(value, (fqn,), _Losses()), data)
    data.seek(0)
    return data


class _Losses:
    def add(self, what: str, path: Any) -> None:
        _log.warning("%s: %s", path[0], what)
