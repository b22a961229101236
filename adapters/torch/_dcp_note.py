"""What DCP knows beside tensors and tree: an entry in the metadata of the manifest (docs/dcp.md)."""

from __future__ import annotations

from typing import Any

import msgspec
from torch.distributed.checkpoint import filesystem

NOTE = "torch.distributed.checkpoint"
"""Key in the manifest's metadata."""

DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)
"""What DCP's own storage puts into ``Metadata.version``; older ones have no such thing."""

Chunk = tuple[list[int], list[int]]


class Parts(msgspec.Struct, frozen=True):
    """The parts of one tensor that one rank has, each stored as a tensor of its own shape."""

    path: list[str | int]
    """Where they stand in the tree: one as a tensor, several as a list."""
    shape: list[int]
    """Of the whole tensor."""
    offsets: list[list[int]]
    """Of each part in it."""


class Note(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What DCP knows beside tensors and tree."""

    flat: bool = False
    """The tree has DCP's names as they are; otherwise a name is the keys on the way to its place, joined by dots."""
    values: list[list[str | int]] = msgspec.field(default_factory=list)
    """Where what DCP keeps as bytes stands in the tree."""
    raw: list[str] = msgspec.field(default_factory=list)
    """Names of those that are bytes of a planner's own."""
    pieces: list[str] = msgspec.field(default_factory=list)
    """Names of tensors whose chunks are the manifest's pieces."""
    chunks: dict[str, list[Chunk]] = msgspec.field(default_factory=dict)
    """Offsets and sizes of the chunks of others; a tensor that stands nowhere is one chunk."""
    planner_data: Any = None
    """A node (docs/format.md section 3.3), if the planner has something else than the tree says."""
    parts: list[Parts] = msgspec.field(default_factory=list)
    """Tensors of which the checkpoint has only some parts, because one rank saved what it had."""
    streams: dict[str, int] = msgspec.field(default_factory=dict)
    """Names of byte strings that were an ``io.BytesIO``, and where it stood."""
    save_id: str | None = None
    """DCP's name for the save."""
