"""The headers of safetensors files: ours, and any other's (docs/format.md section 2)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec

from fp_multi._arguments import require
from fp_multi._collector import collector_paused
from fp_multi._dtypes import CODE_BITS
from fp_multi._manifest import MAX_AXES, MAX_NBYTES
from fp_multi._nodes import count_text, is_unicode, shorten
from fp_multi.errors import ConfigError, CorruptCheckpointError

MAX_HEADER_NBYTES = 100_000_000
"""Stock readers refuse longer ones, and so do we: this much is read before it is checked."""

SHARD_METADATA: Mapping[str, str] = {"format": "pt", "fp_multi": "1"}
"""What the header of every shard says; ``encode_header`` adds the sharding info."""

_METADATA = "__metadata__"
_PREFIX_NBYTES = 8


class StoredTensor(NamedTuple):
    """One entry of a header to be written."""

    name: str
    code: str
    shape: tuple[int, ...]
    """As stored (rule 2.3)."""
    begin: int
    end: int
    saved_offsets: tuple[int, ...]
    """Position of the stored box in the global tensor, one number for each axis of ``shape``."""


class HeaderEntry(NamedTuple):
    """One tensor of a safetensors file."""

    code: str
    shape: tuple[int, ...]
    begin: int
    end: int
    """``[begin, end)`` counts from the end of the header."""


class _Entry(msgspec.Struct, gc=False):
    dtype: str
    shape: Sequence[int]
    data_offsets: tuple[int, int]


class _Saved(msgspec.Struct, gc=False):
    saved_offsets: Sequence[int]


def check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """A copy of what a user attached, refused before anything is written if it is not strings.

    Raises:
        ConfigError: a key or value is not a string of valid Unicode.
    """
    if metadata is None:
        return None
    require("metadata", metadata, Mapping)
    for key, value in metadata.items():
        if not (isinstance(key, str) and isinstance(value, str) and is_unicode(key) and is_unicode(value)):
            raise ConfigError(
                f"metadata: expected strings of valid Unicode, found {shorten(key)}: {shorten(value)}; "
                "put other values into the state"
            )
    return dict(metadata)


def encode_header(
    entries: Sequence[tuple[str, str, Sequence[int], int, int, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    align: int = 4096,
    sharding_info: bool = True,
) -> bytes:
    """Write the first bytes of a safetensors file.

    Args:
        entries: the tensors in the order of their bytes, see :class:`StoredTensor`.
        metadata: for ``__metadata__``; None leaves it out unless there is sharding info.
        align: the result's length is a multiple of it.
        sharding_info: whether to add ``DCP_SHARDING_INFO`` (rule 2.6).

    Returns:
        Length, JSON and padding.

    Raises:
        ConfigError: two entries have one name, or one has the reserved name ``__metadata__``.
    """
    members: dict[str, Any] = {}
    extra = dict(metadata) if metadata is not None else {}
    if sharding_info:
        saved = {name: _Saved(offsets) for name, _, _, _, _, offsets in entries}
        extra["DCP_SHARDING_INFO"] = msgspec.json.encode(saved).decode()
    if extra or metadata is not None:
        members[_METADATA] = extra
    fixed = len(members)
    for name, code, shape, begin, end, _ in entries:
        members[name] = _Entry(code, shape, (begin, end))
    if len(members) != len(entries) + fixed or (not fixed and _METADATA in members):
        raise ConfigError(_name_fault([entry[0] for entry in entries]))
    text = msgspec.json.encode(members)
    padding = -(_PREFIX_NBYTES + len(text)) % align
    return (len(text) + padding).to_bytes(_PREFIX_NBYTES, "little") + text + b" " * padding


def _name_fault(names: Iterable[str]) -> str:
    seen = {_METADATA}
    for name in names:
        if name in seen:
            return f"tensor {shorten(name)}: the name is reserved or used twice; choose another"
        seen.add(name)
    return "two tensors have one name"


def header_nbytes(prefix: bytes, file_nbytes: int, source: str) -> int:
    """Length of the header with its prefix, that is, where the data of a safetensors file starts.

    Args:
        prefix: at least the first 8 bytes of the file, unless it is shorter.
        file_nbytes: length of the file.
        source: its name, for messages.

    Raises:
        CorruptCheckpointError: the file cannot be a safetensors file.
    """
    if len(prefix) < _PREFIX_NBYTES:
        raise CorruptCheckpointError(f"{source}: expected a header of at least 8 bytes, found {len(prefix)}")
    length = int.from_bytes(prefix[:_PREFIX_NBYTES], "little")
    most = min(MAX_HEADER_NBYTES, file_nbytes - _PREFIX_NBYTES)
    if length > most:
        raise CorruptCheckpointError(
            f"{source}: expected a header length of at most {most}, found {length}; this is not a safetensors file"
        )
    return _PREFIX_NBYTES + length


def decode_header(head: bytes, file_nbytes: int, source: str) -> dict[str, HeaderEntry]:
    """The tensors of :func:`decode_whole_header`."""
    return decode_whole_header(head, file_nbytes, source)[0]


def decode_whole_header(head: bytes, file_nbytes: int, source: str) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Read the header of any safetensors file, trusting nothing in it.

    Args:
        head: the file's first bytes, ``header_nbytes(...)`` or more.
        file_nbytes: length of the file.
        source: its name, for messages.

    Returns:
        The tensors in the order of the header, whose ranges cover the data exactly, without overlap; and
        ``__metadata__``, empty if there is none.

    Raises:
        CorruptCheckpointError: what is wrong, expected and found.
    """
    data_nbytes = file_nbytes - header_nbytes(head, file_nbytes, source)
    with collector_paused():
        members, metadata = _parse(head, file_nbytes, source)
        try:
            entries = {name: _entry(name, member) for name, member in members.items()}
            _check_ranges(entries, data_nbytes)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{source}: {error}", tensor=error.tensor, shard=source) from error
    return entries, metadata


def _parse(head: bytes, file_nbytes: int, source: str) -> tuple[dict[str, Any], dict[str, str]]:
    end = header_nbytes(head, file_nbytes, source)
    if len(head) < end:
        raise CorruptCheckpointError(f"{source}: expected a header of {end} bytes, found {len(head)}")
    try:
        # The standard library's parser: it is the one that can be asked about a member that stands
        # twice.
        members = json.loads(
            head[_PREFIX_NBYTES:end].decode(),
            object_pairs_hook=_once,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{source}: the header is not JSON as expected: {error}") from error
    if type(members) is not dict:
        raise CorruptCheckpointError(f"{source}: expected a JSON object, found {shorten(members)}")
    metadata = members.pop(_METADATA, {})
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise CorruptCheckpointError(f"{source}: expected {_METADATA} to map strings to strings")
    return members, metadata


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member stands twice in an object")
    return members


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_NBYTES


def _entry(name: str, member: Any) -> HeaderEntry:
    if not name.isascii() and name != name.encode(errors="replace").decode():
        raise _fault(name, "a name that is valid Unicode", "a lone surrogate")
    if type(member) is not dict:
        raise _fault(name, "an object", shorten(member))
    code, shape, offsets = member.get("dtype"), member.get("shape"), member.get("data_offsets")
    bits = CODE_BITS.get(code) if isinstance(code, str) else None
    if not isinstance(code, str) or bits is None:
        raise _fault(name, "a dtype of the safetensors format", shorten(code))
    if type(shape) is not list or len(shape) > MAX_AXES or not all(map(_is_size, shape)):
        raise _fault(name, f"a shape of at most {MAX_AXES} sizes", shorten(shape))
    if type(offsets) is not list or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise _fault(name, "two data_offsets", shorten(offsets))
    begin, end = offsets
    if (end - begin) * 8 != prod(shape) * bits:
        raise _fault(
            name, f"{count_text(prod(shape) * bits)} bits for {code}{str(shape)[:200]}", f"{end - begin} bytes"
        )
    return HeaderEntry(code, tuple(shape), begin, end)


def _check_ranges(entries: dict[str, HeaderEntry], data_nbytes: int) -> None:
    reached = 0
    for name, entry in sorted(entries.items(), key=_range):
        if entry.begin != reached:
            raise _fault(name, f"data from {reached} on, where the tensor before it ends", f"{entry.begin}")
        reached = entry.end
    if reached != data_nbytes:
        raise CorruptCheckpointError(f"expected {reached} bytes of data behind the header, found {data_nbytes}")


def _range(item: tuple[str, HeaderEntry]) -> tuple[int, int]:
    return item[1][2:]


def _fault(name: str, expected: str, found: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"tensor {shorten(name)}: expected {expected}, found {found}", tensor=name)
