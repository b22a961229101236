"""Look at a tree without its tensors: list its leaves, cut it down to what ``only=`` names."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from fp_multi._nodes import Cell, readable
from fp_multi._tree_decode import build, decode_key
from fp_multi._types import Path, Selection
from fp_multi.errors import ConfigError, KeyNotFoundError

_CANDIDATES = 5000
_NOTHING = object()


class TreeLeaf(NamedTuple):
    """A place in a tree where no further places are below."""

    path: str
    """Readable: ``model.layers[3].weight``."""
    tensor: int | None
    """Index of the tensor, None for a plain value."""
    value: Any
    """The plain value (an empty container counts as one), None for a tensor."""


def tree_paths(tree: Any) -> Iterator[TreeLeaf]:
    """List every leaf of a checked tree, in tree order."""
    stack: list[tuple[Any, Cell]] = [(tree, None)]
    while stack:
        node, cell = stack.pop()
        if type(node) is int:
            yield TreeLeaf(readable(cell), node, None)
            continue
        children = [(child, (cell, label)) for label, child in _children(node, attributes=True)]
        if children:
            stack.extend(reversed(children))
        else:
            yield TreeLeaf(readable(cell), None, build(node, ()))


def _children(node: Any, *, attributes: bool = False) -> Iterable[tuple[Any, Any]]:
    """Key elements and nodes below a container, an OrderedDict's attributes only if asked for."""
    tag = node[0] if type(node) is list else None
    if tag == "ordereddict" and attributes and node[3] is not None:
        extra = ((["attribute", name], child) for name, child in zip(*node[3][1:], strict=True))
        return itertools.chain(zip(node[1], node[2], strict=True), extra)
    if tag in ("dict", "ordereddict"):
        return zip(node[1], node[2], strict=True)
    if tag in ("list", "tuple"):
        return enumerate(node[1])
    if tag == "namedtuple":
        return zip(node[2], node[3], strict=True)
    return ()


def select(
    tree: Any, only: Selection, *, argument: str = "only", where: str = "the checkpoint"
) -> tuple[Any, set[int]]:
    """Cut a tree down to some of its subtrees.

    Args:
        tree: a checked tree.
        only: the paths wanted. A string is the path's keys and positions joined by dots, and
            selects every subtree of which that is true. A tuple is the keys and positions
            themselves.
        argument: what the caller's caller knows ``only`` as, for messages.
        where: what the tree is of.

    Returns:
        A tree with the same nesting that holds only those subtrees, and the indices of its tensors.
        Lists and tuples keep the selected elements in their order; the attributes of an OrderedDict
        are kept if it is selected as a whole.

    Raises:
        KeyNotFoundError: a path is not in the tree; the message shows similar ones.
        ConfigError: ``only`` is no collection of paths.
    """
    if not isinstance(only, Iterable):
        raise ConfigError(f"{argument}= must be a list of dotted paths and tuples of keys, found {only!r}")
    paths = [_normal(path, argument) for path in ([only] if isinstance(only, str) else only)]
    wanted = _Wanted(paths)
    pruned = wanted.prune(tree, None, wanted.root)
    for path in paths:
        if path not in wanted.found:
            raise KeyNotFoundError(_not_found(tree, path, argument, where))
    if pruned is _NOTHING:
        pruned = _rebuild(tree, [], [])
    return pruned, _tensors(pruned)


def _normal(path: Any, argument: str) -> str | Path:
    if isinstance(path, str):
        return path
    try:
        keys = tuple(path)
        hash(keys)
    except TypeError as error:
        raise KeyNotFoundError(f"{argument}= takes dotted paths and tuples of keys, found {path!r}: {error}") from error
    return keys


class _Step:
    """One step of the wanted key tuples; those that begin alike share their first steps."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.below: dict[Any, _Step] = {}


class _Wanted:
    def __init__(self, paths: list[str | Path]) -> None:
        self.texts = {path for path in paths if isinstance(path, str)}
        self.found: set[str | Path] = set()
        self.root = _Step()
        for path in paths:
            if not isinstance(path, str):
                step = self.root
                for key in path:
                    step = step.below.setdefault(key, _Step())
                step.path = path

    def prune(self, node: Any, text: str | None, step: _Step | None, *, at_root: bool = True) -> Any:
        """The selected part of a subtree, or ``_NOTHING``.

        ``text`` is the subtree's dotted path, None if a key on the way has no text (and at the
        root). ``step`` is where the key tuples have got to, None if they went elsewhere.
        """
        whole = False
        if text is not None and text in self.texts:
            self.found.add(text)
            whole = True
        if step is not None and step.path is not None:
            self.found.add(step.path)
            whole = True
        # Below a subtree that is selected as a whole, too: other paths may name parts of it.
        prefix = "" if at_root else None if text is None else text + "."
        labels, kept = [], []
        for label, child in _children(node):
            child_text = None if prefix is None or type(label) is list else f"{prefix}{label}"
            child_step = step.below.get(decode_key(label)) if step is not None and step.below else None
            part = self.prune(child, child_text, child_step, at_root=False)
            if part is not _NOTHING:
                labels.append(label)
                kept.append(part)
        if whole:
            return node
        return _rebuild(node, labels, kept) if kept else _NOTHING


def _rebuild(node: Any, labels: list[Any], nodes: list[Any]) -> Any:
    """A container like ``node`` with only some of its children."""
    tag = node[0] if type(node) is list else None
    if tag == "dict":
        return [tag, labels, nodes]
    if tag == "ordereddict":
        return [tag, labels, nodes, None]
    if tag in ("list", "tuple"):
        return [tag, nodes]
    if tag == "namedtuple":
        return [tag, node[1], labels, nodes]
    raise KeyNotFoundError("only= is empty and the state is a single value; leave only= out")


def _tensors(tree: Any) -> set[int]:
    found: set[int] = set()
    stack = [tree]
    while stack:
        node = stack.pop()
        if type(node) is int:
            found.add(node)
        else:
            stack.extend(child for _, child in _children(node, attributes=True))
    return found


def _not_found(tree: Any, path: str | Path, argument: str, where: str) -> str:
    text = path if isinstance(path, str) else ".".join(map(str, path))
    known = list(dict.fromkeys(itertools.islice(_texts(tree), _CANDIDATES)))
    import difflib  # for a message only, and dear to import

    close = difflib.get_close_matches(text, known, n=3)
    if close:
        way_out = f"similar: {', '.join(map(repr, close))}"
    else:
        top = [readable((None, label)) for label, _ in itertools.islice(_children(tree), 5)]
        way_out = f"at the top it has {', '.join(top) or 'nothing'}"
    return f"{argument}= names {path!r}, which {where} does not have; {way_out}"


def _texts(tree: Any) -> Iterator[str]:
    stack: list[tuple[Any, str]] = [(tree, "")]
    while stack:
        node, prefix = stack.pop()
        for label, child in _children(node):
            if type(label) is not list:
                text = f"{prefix}{label}"
                yield text
                stack.append((child, text + "."))
