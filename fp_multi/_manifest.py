"""The members of a manifest (docs/format.md section 3), one struct for each object."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

FORMAT = "fp_multi"
VERSION = 1
MAX_NBYTES = 1 << 62
MAX_AXES = 64
MAX_MANIFEST_NBYTES = 1 << 31

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_NBYTES)]
"""Also every offset, index and axis: sums of two still fit in 64 bits."""
Crc: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
Axes: TypeAlias = Annotated[list[Size], msgspec.Meta(max_length=MAX_AXES)]


class Shard(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A file of the checkpoint."""

    file: str
    nbytes: Size
    header_nbytes: Size
    header_crc32c: Crc
    rank: Size = 0


class Piece(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Where a part of a tensor is. ``crc32c`` is filled in while the bytes are written."""

    offset: Size
    nbytes: Size
    crc32c: list[Crc]
    shard: Size = 0
    box: tuple[Axes, Axes] | None = None


class Tensor(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One tensor."""

    name: str
    dtype: str
    shape: Axes
    pieces: list[Piece]
    kind: str = "numpy"
    attrs: dict[str, str] = msgspec.field(default_factory=dict)


class Totals(msgspec.Struct, forbid_unknown_fields=True):
    """Sums over the checkpoint."""

    tensors: Size
    tensor_nbytes: Size
    shard_nbytes: Size


class Manifest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """What a checkpoint contains and where every byte of it lies."""

    format: str
    version: int
    writer: str
    chunk_nbytes: Size
    shards: list[Shard]
    tensors: list[Tensor]
    tree: Any
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    totals: Totals
