"""What a checkpoint is to torch.distributed.checkpoint: names, tensors, values, and DCP's ``Metadata`` for it.

Nothing is unpickled. A checkpoint that DCP did not write has the names that DCP's planner would have given its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from fp_multi.errors import ManifestError
from fp_multi.storage import Manifest, Tensor, check_tree, decode

from ._convert_tensors import torch_dtype
from ._dcp_note import NOTE, Note
from ._dcp_values import Path

_OPAQUE = frozenset(("bytes", "bytearray", "pickle", "numpy.scalar"))


class Entry(NamedTuple):
    """One name of DCP."""

    path: Path
    node: Any
    """The value's, or the tensor's index."""
    is_tensor: bool


class Catalog:
    """A checkpoint by DCP's names.

    Args:
        manifest: checked.
        where: the checkpoint, for messages.

    Raises:
        ManifestError: what DCP noted is damaged, or two places of the state have one name in DCP.
    """

    def __init__(self, manifest: Manifest, where: str) -> None:
        self.manifest = manifest
        self._where = where
        self._note: Note | None = None
        text = manifest.metadata.get(NOTE)
        if text is not None:
            try:
                self._note = msgspec.json.decode(text, type=Note)
            except msgspec.MsgspecError as error:
                raise ManifestError(f"{where}: metadata {NOTE!r} cannot be read: {error}") from error
        self.entries: dict[str, Entry] = {}
        values = None if self._note is None else {tuple(path) for path in self._note.values}
        for path, node in self._leaves(values):
            fqn = ".".join(map(str, path))
            if fqn in self.entries:
                raise ManifestError(
                    f"{where}: two places of the state are {fqn!r} for torch.distributed.checkpoint, which joins keys "
                    "by dots; load it with fp_multi.load"
                )
            is_tensor = type(node) is int and self._holds_tensor(manifest.tensors[node])
            is_tensor = is_tensor and (values is None or path not in values)
            self.entries[fqn] = Entry(path, node, is_tensor)
        self.raw = frozenset(self._note.raw if self._note is not None else ())

    def metadata(self) -> Metadata:
        """What DCP asks for."""
        note = self._note or Note()
        pieces = set(note.pieces)
        known: dict[str, Any] = {}
        for fqn, entry in self.entries.items():
            if not entry.is_tensor:
                known[fqn] = BytesStorageMetadata()
                continue
            tensor = self.manifest.tensors[entry.node]
            if fqn in note.chunks:
                chunks = note.chunks[fqn]
            elif fqn in pieces:
                chunks = [piece.box for piece in tensor.pieces if piece.box is not None]
            else:
                chunks = [([0] * len(tensor.shape), tensor.shape)]
            known[fqn] = TensorStorageMetadata(
                TensorProperties(
                    dtype=torch_dtype(tensor) or torch.uint8, requires_grad=tensor.attrs.get("requires_grad") == "1"
                ),
                torch.Size(tensor.shape),
                [ChunkStorageMetadata(torch.Size(start), torch.Size(length)) for start, length in chunks],
            )
        return Metadata(known, planner_data=self._planner_data(note))

    def _planner_data(self, note: Note) -> Any:
        if note.planner_data is not None:
            check_tree(note.planner_data, 0)
            return decode(note.planner_data, ())
        return None if note.flat else {fqn: entry.path for fqn, entry in self.entries.items()}

    def _holds_tensor(self, tensor: Tensor) -> bool:
        return tensor.kind not in _OPAQUE and torch_dtype(tensor) is not None

    def _leaves(self, values: set[Path] | None) -> Iterator[tuple[Path, Any]]:
        tree, note = self.manifest.tree, self._note
        if note is not None and note.flat:
            if type(tree) is not list or tree[0] != "dict":
                raise ManifestError(f"{self._where}: expected a dict of names, as metadata {NOTE!r} says")
            for key, node in zip(tree[1], tree[2], strict=True):
                yield (_text_of(key),), node
            return
        yield from self._walk(tree, (), values)

    def _walk(self, node: Any, path: Path, values: set[Path] | None) -> Iterator[tuple[Path, Any]]:
        if (values is None or path not in values) and type(node) is list:
            if node[0] in ("dict", "ordereddict"):
                for key, child in zip(node[1], node[2], strict=True):
                    yield from self._walk(child, (*path, _text_of(key)), values)
                return
            if node[0] == "list" and (values is not None or not self._is_leaf(node)):
                for number, child in enumerate(node[1]):
                    # None where DCP had nothing is no value.
                    if values is None or child is not None or (*path, number) in values:
                        yield from self._walk(child, (*path, number), values)
                return
        if not path:
            raise ManifestError(f"{self._where}: expected a dict, as torch.distributed.checkpoint saves")
        yield path, node

    def _is_leaf(self, node: Any) -> bool:
        """Whether DCP's planner keeps a list as one value: it holds no tensor, no dict, and no list that does."""
        for child in node[1]:
            if type(child) is int and self._holds_tensor(self.manifest.tensors[child]):
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
