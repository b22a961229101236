"""Whether a manifest can be true of its shards: docs/format.md section 4, step 2."""

from __future__ import annotations

from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fp_multi._dtypes import itemsize
from fp_multi._manifest import MAX_NBYTES, Manifest, Shard, Tensor
from fp_multi._nodes import check_tree, count_text, shorten
from fp_multi._tiling import tiles
from fp_multi.errors import ManifestError

_Ints: TypeAlias = npt.NDArray[np.int64]
_BLOCK = 4096


def check_manifest(manifest: Manifest) -> None:
    """Check everything that the types of the members do not say.

    Raises:
        ManifestError: what is wrong, with the shard or tensor, what was expected and what was
            found.
    """
    chunk = manifest.chunk_nbytes
    if chunk % _BLOCK or not _BLOCK <= chunk <= 1 << 24:
        raise ManifestError(f"chunk_nbytes: expected a multiple of {_BLOCK} up to {1 << 24}, found {chunk}")
    _check_shards(manifest.shards)
    tensor_nbytes = _check_tensors(manifest.tensors)
    _check_pieces(manifest)
    check_tree(manifest.tree, len(manifest.tensors))
    totals = manifest.totals
    for what, expected, found in (
        ("tensors", len(manifest.tensors), totals.tensors),
        ("tensor_nbytes", tensor_nbytes, totals.tensor_nbytes),
        ("shard_nbytes", sum(shard.nbytes for shard in manifest.shards), totals.shard_nbytes),
    ):
        if expected != found:
            raise ManifestError(f"totals.{what}: expected {expected}, found {found}")


def _check_shards(shards: list[Shard]) -> None:
    if not shards:
        raise ManifestError("shards: expected at least one, found none")
    names: set[str] = set()
    for shard in shards:
        name = shard.file
        if not name or name[0] == "." or any(c in name for c in "/\\\0"):
            raise ManifestError(f"shard {shorten(name)}: expected a file name without '/', '\\', NUL and leading dot")
        if name in names:
            raise ManifestError(f"shard {shorten(name)} is listed twice")
        names.add(name)
        head = shard.header_nbytes
        if head % _BLOCK or not _BLOCK <= head <= shard.nbytes:
            raise ManifestError(
                f"shard {shorten(name)}: expected header_nbytes to be a multiple of {_BLOCK} "
                f"up to the file's {shard.nbytes} bytes, found {head}"
            )


def _check_tensors(tensors: list[Tensor]) -> int:
    """Check names, sizes and boxes; gives the sum of the sizes."""
    itemsizes: dict[str, int] = {}
    names: set[str] = set()
    total = 0
    for tensor in tensors:
        name, dtype = tensor.name, tensor.dtype
        if not name or name == "__metadata__" or name in names:
            raise ManifestError(f"tensor {shorten(name)}: the name is empty, reserved or used twice")
        names.add(name)
        size = itemsizes.get(dtype)
        if size is None:
            try:
                size = itemsizes[dtype] = itemsize(dtype)
            except ManifestError as error:
                raise ManifestError(f"tensor {shorten(name)}: {error}") from error
        nbytes = prod(tensor.shape) * size
        total += nbytes
        pieces = tensor.pieces
        if len(pieces) == 1 and pieces[0].box is None:
            if pieces[0].nbytes != nbytes or nbytes > MAX_NBYTES:
                raise ManifestError(
                    f"tensor {shorten(name)}: expected {count_text(nbytes)} bytes for "
                    f"{dtype}{str(tensor.shape)[:200]} (at most {MAX_NBYTES}), found a piece of {pieces[0].nbytes}"
                )
        else:
            try:
                _check_boxes(tensor, nbytes, size)
            except ManifestError as error:
                raise ManifestError(f"tensor {shorten(name)}: {error}") from error
    return total


def _check_boxes(tensor: Tensor, nbytes: int, itemsize: int) -> None:
    """Rules P1 and P3 for a tensor in several pieces, in time proportional to their number."""
    shape, pieces = tensor.shape, tensor.pieces
    if not pieces or not 0 < nbytes <= MAX_NBYTES:
        raise ManifestError(
            f"expected one piece without a box for {count_text(nbytes)} bytes (at most {MAX_NBYTES}), "
            f"found {len(pieces)} pieces"
        )
    if len({piece.shard for piece in pieces}) != len(pieces):
        raise ManifestError("expected at most one piece in a shard (rule P3), found several")
    boxes = [piece.box for piece in pieces]
    for piece, box in zip(pieces, boxes, strict=True):
        if box is None or len(box[0]) != len(shape) or len(box[1]) != len(shape):
            raise ManifestError(f"expected a box of {len(shape)} axes for every piece, found {str(box)[:200]}")
        if prod(box[1]) * itemsize != piece.nbytes:
            raise ManifestError(
                f"expected {count_text(prod(box[1]) * itemsize)} bytes in box {str(box)[:200]}, found {piece.nbytes}"
            )
    fault = tiles(shape, [box for box in boxes if box is not None])
    if fault is not None:
        raise ManifestError(f"boxes do not tile the shape {shorten(shape)} (rule P1): {fault}")


def _check_pieces(manifest: Manifest) -> None:
    """Rule P5 and the numbers of checksums, for all pieces at once."""
    pieces = [piece for tensor in manifest.tensors for piece in tensor.pieces]
    shard = np.array([piece.shard for piece in pieces], np.int64)
    offset = np.array([piece.offset for piece in pieces], np.int64)
    nbytes = np.array([piece.nbytes for piece in pieces], np.int64)
    chunks = np.array([len(piece.crc32c) for piece in pieces], np.int64)
    file_nbytes = np.array([shard.nbytes for shard in manifest.shards], np.int64)
    heads = np.array([shard.header_nbytes for shard in manifest.shards], np.int64)

    wrong = _first(shard >= len(manifest.shards))
    if wrong is not None:
        raise _piece_error(manifest, wrong, f"a shard below {len(manifest.shards)}", f"shard {pieces[wrong].shard}")
    wrong = _first(chunks != -(-nbytes // manifest.chunk_nbytes))
    if wrong is not None:
        expected = -(-int(nbytes[wrong]) // manifest.chunk_nbytes)
        raise _piece_error(manifest, wrong, f"{expected} checksums", f"{chunks[wrong]}")
    # In this order no sum can overflow: a piece that passes here ends inside its file.
    wrong = _first((offset < heads[shard]) | (offset > file_nbytes[shard] - nbytes))
    if wrong is not None:
        inside = manifest.shards[pieces[wrong].shard]
        raise _piece_error(
            manifest,
            wrong,
            f"bytes in [{inside.header_nbytes}, {inside.nbytes}) of {shorten(inside.file)}",
            f"offset {offset[wrong]} and {nbytes[wrong]} bytes",
        )
    _check_cover(manifest, np.lexsort((nbytes, offset, shard)), shard, offset, offset + nbytes)


def _check_cover(manifest: Manifest, order: npt.NDArray[np.intp], shard: _Ints, start: _Ints, end: _Ints) -> None:
    reached = np.array([shard.header_nbytes for shard in manifest.shards], np.int64)
    if len(order):
        home = shard[order]
        before = np.empty(len(order), np.int64)
        before[0], before[1:] = -1, end[order][:-1]
        first = np.empty(len(order), np.bool_)
        first[0], first[1:] = True, home[1:] != home[:-1]
        before[first] = reached[home[first]]
        wrong = _first(start[order] != before)
        if wrong is not None:
            raise _piece_error(
                manifest,
                int(order[wrong]),
                f"offset {before[wrong]}, where the bytes before it end",
                f"offset {start[order[wrong]]}",
            )
        last = np.append(first[1:], True)
        reached[home[last]] = end[order][last]
    for description, covered in zip(manifest.shards, reached.tolist(), strict=True):
        if covered != description.nbytes:
            raise ManifestError(
                f"shard {shorten(description.file)}: expected pieces up to its end at "
                f"{description.nbytes}, found none behind {covered}"
            )


def _first(wrong: npt.NDArray[np.bool_]) -> int | None:
    return int(wrong.argmax()) if wrong.any() else None


def _piece_error(manifest: Manifest, number: int, expected: str, found: str) -> ManifestError:
    for tensor in manifest.tensors:
        if number < len(tensor.pieces):
            return ManifestError(f"tensor {shorten(tensor.name)}, piece {number}: expected {expected}, found {found}")
        number -= len(tensor.pieces)
    return ManifestError(f"expected {expected}, found {found}")
