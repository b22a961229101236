"""What one shard holds: its pieces, where they lie in the file, and its header. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fp_multi._collector import collector_paused
from fp_multi._dtypes import safetensors_code, stored_shape
from fp_multi._format import MAX_AXES, SHARD_METADATA, Piece, encode_header
from fp_multi._layout import DataLayout, chunk_count, lay_out
from fp_multi._types import Box, Described, Fetch, LeafSource


@dataclass(frozen=True, slots=True)
class Contents:
    """The pieces of one shard, in tree order; at most one of each tensor (docs/format.md rule P3)."""

    file: str
    """Name of the file."""
    tensors: Sequence[int]
    """For each piece the tensor's index in the manifest."""
    names: Sequence[str]
    """For each piece its tensor's name."""
    sources: Sequence[LeafSource]
    """For each piece its dtype, its shape (the box's) and its size; and its bytes, unless it is ``joined``."""
    boxes: Mapping[int, Box] = field(default_factory=dict)
    """By piece: which part of the tensor it is. What is missing is a whole tensor."""
    joined: Mapping[int, Sequence[LeafSource]] = field(default_factory=dict)
    """By piece: the sources whose bytes, one after the other, are the piece's."""

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum([source.nbytes for source in self.sources])


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Contents with their places in the file."""

    contents: Contents
    data: DataLayout
    header: bytes

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return len(self.header) + self.data.nbytes

    def parts(self) -> list[LeafSource]:
        """The sources in file order."""
        sources, joined = self.contents.sources, self.contents.joined
        if not joined:
            return [sources[i] for i in self.data.order]
        return [part for i in self.data.order for part in joined.get(i, (sources[i],))]

    def sizes(self) -> list[int]:
        """The pieces' sizes in file order."""
        sources = self.contents.sources
        return [sources[i].nbytes for i in self.data.order]

    def pieces(self, shard: int) -> list[Piece]:
        """The manifest's entries, in the order of the contents, without their checksums.

        Args:
            shard: the file's index.
        """
        boxes = self.contents.boxes
        begins = [0] * len(self.contents.sources)
        for i, begin in zip(self.data.order, self.data.begins, strict=True):
            begins[i] = len(self.header) + begin
        if not boxes:
            return [
                Piece(begin, source.nbytes, [], shard)
                for begin, source in zip(begins, self.contents.sources, strict=True)
            ]
        entries = []
        for i, (begin, source) in enumerate(zip(begins, self.contents.sources, strict=True)):
            box = boxes.get(i)
            cut = None if box is None else (list(box.start), list(box.length))
            entries.append(Piece(begin, source.nbytes, [], shard, cut))
        return entries

    def fill_checksums(self, pieces: Sequence[Piece], crcs: Sequence[int], chunk_nbytes: int) -> None:
        """Give each piece its checksums.

        Args:
            pieces: from :meth:`pieces`.
            crcs: of the chunks in file order, the header's first.
            chunk_nbytes: bytes of a chunk.
        """
        at = 1
        for i in self.data.order:
            count = chunk_count(pieces[i].nbytes, chunk_nbytes)
            pieces[i].crc32c = list(crcs[at : at + count])
            at += count


def lay_out_shard(contents: Contents) -> ShardLayout:
    """Give every piece of a shard its place, and make the header."""
    with collector_paused():
        data = lay_out([source.nbytes for source in contents.sources])
        entries = []
        codes: dict[str, str] = {}
        corners = [(0,) * axes for axes in range(MAX_AXES + 2)]
        names, sources, boxes = contents.names, contents.sources, contents.boxes
        for i, at in zip(data.order, data.begins, strict=True):
            source = sources[i]
            dtype = source.dtype
            code = codes.get(dtype)
            if code is None:
                code = codes[dtype] = safetensors_code(dtype)
            shape = stored_shape(dtype, source.shape)
            corner = corners[len(shape)]
            if i in boxes:
                corner = (*boxes[i].start, *corner[len(boxes[i].start) :])
            entries.append((names[i], code, shape, at, at + source.nbytes, corner))
        return ShardLayout(contents, data, encode_header(entries, SHARD_METADATA))


def shard_name(index: int, count: int, plane: int = 0) -> str:
    """File name of a shard.

    Args:
        index: number of the writer.
        count: number of writers.
        plane: a writer that has several pieces of one tensor puts them into as many files.
    """
    more = f".{plane}" if plane else ""
    return f"shard-{index:05d}-of-{count:05d}{more}.safetensors"


def whole_contents(described: Described) -> Contents:
    """The one shard of a state that is all here, in whole tensors."""
    return Contents(shard_name(0, 1), range(len(described.sources)), described.names, described.sources)


def narrowed(source: LeafSource, box: Box) -> LeafSource:
    """The source of a part of a tensor.

    Args:
        source: of the whole.
        box: relative to the source's corner; its bytes must follow each other in the source's C order.
    """
    steps = source.strides or c_strides(source.shape, source.itemsize)
    begin = sum([start * step for start, step in zip(box.start, steps, strict=True)])
    nbytes = source.itemsize
    for length in box.length:
        nbytes *= length
    if source.fetch is None:
        return source._replace(shape=box.length, nbytes=nbytes, address=source.address + begin)
    return source._replace(shape=box.length, nbytes=nbytes, fetch=_behind(source.fetch, begin))


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Bytes from one index to the next on each axis, of a tensor in C order."""
    return tuple(_c_steps(shape, itemsize))[::-1]


def _c_steps(shape: Sequence[int], itemsize: int) -> Iterator[int]:
    step = itemsize
    for length in reversed(shape):
        yield step
        step *= length


def _behind(fetch: Fetch, begin: int) -> Fetch:
    def shifted(address: int, start: int, nbytes: int) -> Callable[[], None]:
        return fetch(address, begin + start, nbytes)

    return shifted
