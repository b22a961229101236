"""What travels through a job's store: values of any length, and errors."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

from fp_multi._comm import VALUE_NBYTES, Comm
from fp_multi.errors import CommError, CommTimeoutError, RankFailedError

_WHOLE, _PARTS = b"v", b"p"
_COUNT = struct.Struct("<Q")
_PART_TIMEOUT_S = 60.0
_TEXT_LENGTH = 16 << 10
_NAMED_RANKS = 16


def put_value(comm: Comm, key: str, value: bytes) -> int:
    """Put a value of any length; the key itself appears last, so whoever sees it finds all of it.

    Args:
        comm: the job.
        key: the name; parts of a long value stand under ``key/0``, ``key/1`` and so on.
        value: the bytes.

    Returns:
        The number of parts, for :func:`delete_value`.
    """
    if len(value) < VALUE_NBYTES:
        comm.put(key, _WHOLE + value)
        return 0
    view = memoryview(value)
    count = -(-len(value) // VALUE_NBYTES)
    for number in range(count):
        comm.put(f"{key}/{number}", bytes(view[number * VALUE_NBYTES : (number + 1) * VALUE_NBYTES]))
    comm.put(key, _PARTS + _COUNT.pack(count))
    return count


def get_value(comm: Comm, key: str, timeout_s: float) -> bytes | None:
    """Get what :func:`put_value` put.

    Args:
        comm: the job.
        key: the name.
        timeout_s: how long to wait for it, in seconds; 0 only looks.

    Returns:
        The value, or None if the time was up.

    Raises:
        CommError: the store cannot be reached, or lost a part.
    """
    head = comm.get(key, timeout_s)
    if head is None or head[:1] == _WHOLE:
        return head if head is None else head[1:]
    (count,) = _COUNT.unpack(head[1:])
    parts = []
    for number in range(count):
        part = comm.get(f"{key}/{number}", min(_PART_TIMEOUT_S, comm.timeout_s))
        if part is None:
            raise CommError(f"the job's key-value store has lost part {number} of {count} of a value ({key})")
        parts.append(part)
    return b"".join(parts)


def delete_value(comm: Comm, key: str, parts: int) -> None:
    """Remove what :func:`put_value` put.

    Args:
        comm: the job.
        key: the name.
        parts: what :func:`put_value` returned.
    """
    comm.delete(key)  # first, so that nobody starts to read what is about to go
    for number in range(parts):
        comm.delete(f"{key}/{number}")


def encode_error(error: BaseException, rank: int, *, passed_on: bool = False) -> bytes:
    """An error as other ranks are to see it.

    Args:
        error: what happened; a :class:`~fp_multi.errors.RankFailedError` stays the failure of the rank that it names.
        rank: where it happened.
        passed_on: this is the leader's word on all ranks, so that a :class:`~fp_multi.errors.CommTimeoutError` stays
            one: whom the leader misses, everybody misses.

    Returns:
        JSON.
    """
    ranks = error.ranks if passed_on and isinstance(error, CommTimeoutError) else None
    kind, text = type(error).__name__, str(error)
    if isinstance(error, RankFailedError):
        rank, kind, text = error.rank, error.kind, error.text
    return json.dumps({"rank": rank, "kind": kind, "text": text[:_TEXT_LENGTH], "ranks": ranks}).encode()


def decode_error(message: bytes) -> CommError:
    """The error that :func:`encode_error` encoded.

    Args:
        message: its result.

    Returns:
        A RankFailedError or a CommTimeoutError.
    """
    said = json.loads(message)
    if said["ranks"] is not None:
        return CommTimeoutError(said["text"], said["ranks"])
    return RankFailedError(said["rank"], said["kind"], said["text"])


def missing(what: str, ranks: Sequence[int], size: int, timeout_s: float) -> CommTimeoutError:
    """The error for ranks that said nothing.

    Args:
        what: they should have taken part in.
        ranks: theirs.
        size: the number of all ranks.
        timeout_s: how long they were waited for.

    Returns:
        The error, not raised.
    """
    named = ", ".join(map(str, ranks[:_NAMED_RANKS])) + (", ..." if len(ranks) > _NAMED_RANKS else "")
    return CommTimeoutError(
        f"{what}: nothing from {len(ranks)} of {size} ranks ({named}) within {timeout_s:g} s, so nothing was "
        "committed; if they are not dead but slow, give the comm a longer timeout_s",
        ranks,
    )
