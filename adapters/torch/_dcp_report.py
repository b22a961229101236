"""What a rank tells the coordinator when it has written its part of a DCP save."""

from __future__ import annotations

from typing import Any

import msgspec

from fp_multi.errors import CommError
from fp_multi.storage import Part, Tensor


class Report(msgspec.Struct, frozen=True):
    """What a rank tells the coordinator."""

    part: Part
    """Its tensors are numbered as in ``heads``."""
    fqns: list[str | None]
    """For each tensor its name in DCP; None if it is inside of a value."""
    heads: list[Tensor]
    values: dict[str, Any]
    """Nodes by DCP's names."""
    raw: list[str]
    """Names of values that are a planner's own bytes."""
    streams: dict[str, int]
    """Names of values that were an ``io.BytesIO``, and where it stood."""
    parts: dict[str, tuple[list[int], list[list[int]]]]
    """By DCP's names, of tensors that the rank has parts of: the whole's shape, and each part's offsets. Their nodes
    are among ``values``."""


def decode_report(data: Any) -> Report:
    """Back from bytes.

    Raises:
        CommError: they are no report.
    """
    try:
        return msgspec.msgpack.decode(data, type=Report)
    except (msgspec.MsgspecError, TypeError) as error:
        raise CommError(f"a rank has written with another storage, or another version of this one: {error}") from error
