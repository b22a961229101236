"""Manifest and shard header (docs/format.md): to bytes and back, also from hostile bytes.

The members are in ``_manifest``, the checks that need more than one of them in ``_format_check``,
the headers of shards in ``_header``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fp_multi._collector import collector_paused
from fp_multi._format_check import check_manifest
from fp_multi._header import SHARD_METADATA as SHARD_METADATA
from fp_multi._header import HeaderEntry as HeaderEntry
from fp_multi._header import StoredTensor as StoredTensor
from fp_multi._header import check_metadata as check_metadata
from fp_multi._header import decode_header as decode_header
from fp_multi._header import decode_whole_header as decode_whole_header
from fp_multi._header import encode_header as encode_header
from fp_multi._header import header_nbytes as header_nbytes
from fp_multi._manifest import FORMAT as FORMAT
from fp_multi._manifest import MAX_AXES as MAX_AXES
from fp_multi._manifest import MAX_MANIFEST_NBYTES as MAX_MANIFEST_NBYTES
from fp_multi._manifest import VERSION as VERSION
from fp_multi._manifest import Manifest as Manifest
from fp_multi._manifest import Piece as Piece
from fp_multi._manifest import Shard as Shard
from fp_multi._manifest import Tensor as Tensor
from fp_multi._manifest import Totals as Totals
from fp_multi._nodes import shorten
from fp_multi.errors import FormatVersionError, ManifestError

_TRAILER = b',"manifest_crc32c":"%08x"}\n'
_TRAILER_NBYTES = len(_TRAILER % 0)


class _Head(msgspec.Struct):
    """All that may be looked at before the version is known."""

    format: Any = None
    version: Any = None


_head_decoder = msgspec.json.Decoder(_Head)
_manifest_decoder = msgspec.json.Decoder(Manifest)


def encode_manifest(manifest: Manifest, crc32c: Callable[[bytes], int]) -> bytes:
    """The bytes of ``manifest.json``.

    Args:
        manifest: complete, with all checksums filled in; it is not checked.
        crc32c: the checksum function.

    Returns:
        JSON and trailer; the same for the same manifest.

    Raises:
        ManifestError: it is longer than the format allows, or holds a string that is not valid
            Unicode.
    """
    try:
        body = msgspec.json.encode(manifest)[:-1]
    except UnicodeEncodeError as error:
        raise ManifestError(f"the manifest holds a string that is not valid Unicode: {error}") from error
    if len(body) + _TRAILER_NBYTES > MAX_MANIFEST_NBYTES:
        raise ManifestError(
            f"expected a manifest of at most {MAX_MANIFEST_NBYTES} bytes, found {len(body)}; "
            "save fewer tensors, or choose larger chunk_bytes"
        )
    return body + _TRAILER % crc32c(body)


def decode_manifest(data: bytes, crc32c: Callable[[bytes], int], *, source: str) -> Manifest:
    """Read and check a manifest that anybody may have written.

    Args:
        data: the bytes of ``manifest.json``.
        crc32c: the checksum function.
        source: its path, for messages.

    Returns:
        A manifest whose every number has been checked against the others.

    Raises:
        FormatVersionError: it is of a newer version of the format.
        ManifestError: it is damaged, or contradicts itself; the message says where, what was
            expected and what was found.
    """
    body = _checked_body(data, crc32c, source)
    with collector_paused():
        manifest = _parse(body, source)
        try:
            check_manifest(manifest)
        except ManifestError as error:
            raise ManifestError(f"{source}: {error}") from error
    return manifest


def manifest_fault(manifest: Manifest) -> str | None:
    """What contradicts itself in a manifest that several writers have made together, None if nothing does."""
    try:
        check_manifest(manifest)
    except ManifestError as error:
        return str(error)
    return None


def _parse(body: bytes, source: str) -> Manifest:
    try:
        _check_version(_head_decoder.decode(body), source)
        return _manifest_decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, ManifestError):
            raise
        raise ManifestError(f"{source}: not a manifest of version {VERSION}: {error}") from error


def _checked_body(data: bytes, crc32c: Callable[[bytes], int], source: str) -> bytes:
    """The manifest without its trailer, as a JSON object of its own."""
    if not _TRAILER_NBYTES < len(data) <= MAX_MANIFEST_NBYTES:
        raise ManifestError(
            f"{source}: expected {_TRAILER_NBYTES + 1} to {MAX_MANIFEST_NBYTES} bytes, found {len(data)}"
        )
    body, found = data[:-_TRAILER_NBYTES], data[-_TRAILER_NBYTES:]
    expected = _TRAILER % crc32c(body)
    if found != expected:
        raise ManifestError(
            f"{source}: the manifest is damaged or cut off: expected it to end with {expected!r}, found {found!r}"
        )
    return body + b"}"


def _check_version(head: _Head, source: str) -> None:
    if head.format != FORMAT:
        raise ManifestError(f"{source}: expected format {FORMAT!r}, found {shorten(head.format)}")
    if type(head.version) is not int or head.version < 1:
        raise ManifestError(f"{source}: expected version {VERSION}, found {shorten(head.version)}")
    if head.version > VERSION:
        raise FormatVersionError(
            f"{source}: written in version {shorten(head.version)} of the format, this software "
            f"knows version {VERSION}; upgrade fp_multi to read it"
        )
