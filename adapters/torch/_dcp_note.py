"""What DCP knows beside tensors and tree: an entry in the metadata of the manifest (docs/dcp.md)."""

from __future__ import annotations

from typing import Any

import msgspec

NOTE = "torch.distributed.checkpoint"
"""Key in the manifest's metadata."""

Chunk = tuple[list[int], list[int]]


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
