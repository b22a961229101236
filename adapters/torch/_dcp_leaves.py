"""The places of a checkpoint's tree at which torch.distributed.checkpoint has its names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp_multi.errors import ManifestError
from fp_multi.storage import Manifest, Tensor, decode

from ._convert_tensors import torch_dtype
from ._dcp_note import NOTE, Note
from ._dcp_values import Path

_OPAQUE = frozenset(("bytes", "bytearray", "pickle", "numpy.scalar"))


def holds_tensor(tensor: Tensor) -> bool:
    """Whether an entry of the manifest is a tensor for DCP, and not the bytes of a value."""
    return tensor.kind not in _OPAQUE and torch_dtype(tensor) is not None


class Leaves:
    """What stands where, in the order of the tree.

    Args:
        manifest: checked.
        note: what DCP noted; None for a checkpoint that it did not write.
        where: the checkpoint, for messages.
    """

    def __init__(self, manifest: Manifest, note: Note | None, where: str) -> None:
        self._manifest = manifest
        self._note = note
        self._where = where
        self._values = None if note is None else {tuple(path) for path in note.values}
        self._parted = set() if note is None else {tuple(some.path) for some in note.parts}

    def __iter__(self) -> Iterator[tuple[Path, Any]]:
        tree, note = self._manifest.tree, self._note
        if note is not None and note.flat:
            if type(tree) is not list or tree[0] != "dict":
                raise ManifestError(f"{self._where}: expected a dict of names, as metadata {NOTE!r} says")
            for key, node in zip(tree[1], tree[2], strict=True):
                yield (_text_of(key),), node
            return
        yield from self._walk(tree, ())

    def is_tensor(self, path: Path, node: Any) -> bool:
        """Whether a tensor, or parts of one, stands there, and no value."""
        if path in self._parted:
            return True
        if type(node) is not int or (self._values is not None and path in self._values):
            return False
        return holds_tensor(self._manifest.tensors[node])

    def _walk(self, node: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        values = self._values
        if (values is None or path not in values) and path not in self._parted and type(node) is list:
            if node[0] in ("dict", "ordereddict"):
                for key, child in zip(node[1], node[2], strict=True):
                    yield from self._walk(child, (*path, _text_of(key)))
                return
            if node[0] == "list" and (values is not None or not self._is_leaf(node)):
                for number, child in enumerate(node[1]):
                    # None where DCP had nothing is no value.
                    if values is None or child is not None or (*path, number) in values:
                        yield from self._walk(child, (*path, number))
                return
        if not path:
            raise ManifestError(f"{self._where}: expected a dict, as torch.distributed.checkpoint saves")
        yield path, node

    def _is_leaf(self, node: Any) -> bool:
        """Whether DCP's planner keeps a list as one value: it holds no tensor, no dict, and no list that does."""
        for child in node[1]:
            if type(child) is int and holds_tensor(self._manifest.tensors[child]):
                return False
            if type(child) is list and (
                child[0] in ("dict", "ordereddict") or (child[0] == "list" and not self._is_leaf(child))
            ):
                return False
        return True


def _text_of(key: Any) -> str:
    """A key as DCP's planner writes it."""
    if type(key) is list:
        return str(decode(["dict", [key], [None]], ()).popitem()[0])
    return str(key)
