"""What a checkpoint is to torch.distributed.checkpoint: names, tensors, values, and DCP's ``Metadata`` for it.

Nothing is unpickled. A checkpoint that DCP did not write has the names that DCP's planner would have given its state.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from fp_multi.errors import KeyNotFoundError, ManifestError
from fp_multi.storage import Manifest, check_tree, decode

from ._convert_tensors import torch_dtype
from ._dcp_leaves import Leaves
from ._dcp_note import DCP_VERSION, NOTE, Note, Parts
from ._dcp_values import Path


class Entry(NamedTuple):
    """One name of DCP."""

    path: Path
    node: Any
    """The value's, or the tensor's index, or a list of tensors: parts of one."""
    is_tensor: bool


class _Part(NamedTuple):
    """A part of a tensor that the checkpoint does not have all of."""

    start: tuple[int, ...]
    tensor: int
    """Index in the manifest of what is the part."""


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
        self.parts: dict[str, list[_Part]] = {}
        """What there is of tensors that the checkpoint has only parts of."""
        self._whole = {} if self._note is None else {tuple(some.path): some for some in self._note.parts}
        leaves = Leaves(manifest, self._note, where)
        for path, node in leaves:
            fqn = ".".join(map(str, path))
            if fqn in self.entries:
                raise ManifestError(
                    f"{where}: two places of the state are {fqn!r} for torch.distributed.checkpoint, which joins keys "
                    "by dots; load it with fp_multi.load"
                )
            some = self._whole.get(path)
            if some is not None:
                self.parts[fqn] = self._parts_in(fqn, node, some)
            self.entries[fqn] = Entry(path, node, leaves.is_tensor(path, node))
        self.raw = frozenset(self._note.raw if self._note is not None else ())

    def locate(self, item: ReadItem) -> tuple[ReadItem, int]:
        """What an item of a plan reads: the item, its place counted in the tensor, and the tensor's index.

        Args:
            item: a tensor's.

        Raises:
            KeyNotFoundError: the checkpoint has no such part.
        """
        fqn, offset = item.storage_index.fqn, item.storage_index.offset
        if fqn not in self.parts:
            index: int = self.entries[fqn].node
            return item, index
        for part in self.parts[fqn]:
            if part.start == (None if offset is None else tuple(offset)):
                inside = dataclasses.replace(item.storage_index, offset=torch.Size([0] * len(part.start)))
                return dataclasses.replace(item, storage_index=inside), part.tensor
        raise KeyNotFoundError(f"{self._where}: it has no part of {fqn} that begins at {offset}")

    def value(self, fqn: str, value: Any) -> Any:
        """A value as it was saved."""
        at = None if self._note is None else self._note.streams.get(fqn)
        if at is None:
            return value
        stream = io.BytesIO(value)
        stream.seek(at)
        return stream

    def _parts_in(self, fqn: str, node: Any, some: Parts) -> list[_Part]:
        nodes = node[1] if type(node) is list and node[0] == "list" else [node]
        if nodes and len(nodes) == len(some.offsets) and all([type(one) is int for one in nodes]):
            parts = [_Part(tuple(start), one) for start, one in zip(some.offsets, nodes, strict=True)]
            if all([_lies_in(part.start, self.manifest.tensors[part.tensor].shape, some.shape) for part in parts]):
                return parts
        raise ManifestError(f"{self._where}: metadata {NOTE!r} and the tree do not agree about the parts of {fqn}")

    def metadata(self) -> Metadata:
        """What DCP asks for."""
        note = self._note or Note()
        pieces = set(note.pieces)
        known: dict[str, Any] = {}
        for fqn, entry in self.entries.items():
            if not entry.is_tensor:
                known[fqn] = BytesStorageMetadata()
                continue
            parts = self.parts.get(fqn)
            tensor = self.manifest.tensors[entry.node if parts is None else parts[0].tensor]
            shape = tensor.shape if parts is None else self._whole[entry.path].shape
            if parts is not None:
                chunks = [(list(part.start), self.manifest.tensors[part.tensor].shape) for part in parts]
            elif fqn in note.chunks:
                chunks = note.chunks[fqn]
            elif fqn in pieces:
                chunks = [piece.box for piece in tensor.pieces if piece.box is not None]
            else:
                chunks = [([0] * len(tensor.shape), tensor.shape)]
            known[fqn] = TensorStorageMetadata(
                TensorProperties(
                    dtype=torch_dtype(tensor) or torch.uint8, requires_grad=tensor.attrs.get("requires_grad") == "1"
                ),
                torch.Size(shape),
                [ChunkStorageMetadata(torch.Size(start), torch.Size(length)) for start, length in chunks],
            )
        metadata = Metadata(
            known, planner_data=self._planner_data(note), storage_meta=StorageMeta(save_id=note.save_id)
        )
        metadata.version = DCP_VERSION
        return metadata

    def _planner_data(self, note: Note) -> Any:
        if note.planner_data is not None:
            check_tree(note.planner_data, 0)
            return decode(note.planner_data, ())
        return None if note.flat else {fqn: entry.path for fqn, entry in self.entries.items()}


def _lies_in(start: Sequence[int], length: Sequence[int], shape: Sequence[int]) -> bool:
    if not len(start) == len(length) == len(shape):
        return False
    return all([a >= 0 and a + b <= c for a, b, c in zip(start, length, shape, strict=True)])
