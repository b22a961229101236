"""CheckpointReader: parts of tensors into memory, for restores in which each process needs its own boxes."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from fp_multi import _assemble, _reader
from fp_multi._boxes import intersect
from fp_multi._collector import collector_paused
from fp_multi._dtypes import itemsize
from fp_multi._format import Manifest
from fp_multi._tree import TreeLeaf, decode, tree_paths
from fp_multi._types import Box
from fp_multi.config import LoadConfig
from fp_multi.errors import StorageError, TargetMismatchError

_Bytes = npt.NDArray[np.uint8]


class ReadRequest(NamedTuple):
    """A part of a tensor that is wanted."""

    tensor: int
    """Its index in the manifest."""
    box: Box | None = None
    """Which part; None for the whole tensor."""
    out: _Bytes | None = None
    """Memory to fill: 1-d, contiguous, writable, of the part's size. None for new memory."""


class CheckpointReader:
    """A checkpoint opened for reading parts of it.

    Args:
        directory: where it is.
        manifest: its checked manifest.
        config: how to read.
    """

    def __init__(self, directory: str, manifest: Manifest, config: LoadConfig = LoadConfig()) -> None:
        self.directory = directory
        self.manifest = manifest
        self.config = config
        self.wanted_nbytes = 0
        """Bytes of the parts read so far."""
        self.drive_nbytes = 0
        """What the drive gave for them: whole pages, and whole chunks to compare their checksums."""
        self._has_looked = False
        self._counting = threading.Lock()

    def leaves(self) -> Iterable[TreeLeaf]:
        """Every place of the state: readable path, and tensor index or plain value."""
        return tree_paths(self.manifest.tree)

    def build(self, values: Mapping[int, Any]) -> Any:
        """The state as it was saved, with these values for its tensors (by index) and None for others."""
        return decode(self.manifest.tree, [values.get(i) for i in range(len(self.manifest.tensors))])

    def refuse_pickle(self, *, allow_pickle: bool) -> None:
        """Refuse a checkpoint with pickled leaves before anything of it is read.

        Raises:
            PickleRefusedError: it has some, and the caller did not allow them.
        """
        _assemble.refuse_pickle(self.manifest, range(len(self.manifest.tensors)), allow_pickle=allow_pickle)

    def read(self, requests: Sequence[ReadRequest]) -> list[_Bytes]:
        """Read parts of tensors; every chunk that is touched is compared with its checksum.

        All requests together are one pass over the files, in large requests, several in flight. Parts that are asked
        for twice are read once.

        Args:
            requests: what to read.

        Returns:
            For each request its bytes in C order, 1-d: ``out``, or an array that owns its memory. Requests for the
            same part without ``out`` share one array.

        Raises:
            CorruptCheckpointError: a shard is missing (MissingShardError), cut (TruncatedShardError), or its bytes
                changed (ChecksumError); the message names tensor, file and chunk.
            StorageError: a system call failed.
            TargetMismatchError: a box is outside its tensor, or ``out`` does not fit.
        """
        if not requests:
            return []
        manifest = self.manifest
        look(self)
        known: dict[tuple[int, Box | None], int] = {}
        firsts = []
        for number, request in enumerate(requests):
            first = known.setdefault((request.tensor, request.box), number)
            firsts.append(first)
        distinct = [number for number, first in enumerate(firsts) if number == first]
        sizes = {number: self._nbytes_of(requests[number]) for number in distinct}
        buffers: dict[int, _Bytes] = {}
        with collector_paused():
            fresh = [number for number in distinct if requests[number].out is None]
            made = _reader.allocate([sizes[number] for number in fresh])
            buffers.update(zip(fresh, made, strict=True))
            for number in distinct:
                out = requests[number].out
                if out is not None:
                    buffers[number] = _checked(out, sizes[number], manifest.tensors[requests[number].tensor].name)
        for batch in _passes(distinct, requests):
            wanted = [number for number in batch if sizes[number]]
            places = _reader.addresses([buffers[number] for number in wanted]).tolist()
            pieces = [
                _assemble.Request(requests[number].tensor, address, requests[number].box)
                for number, address in zip(wanted, places, strict=True)
            ]
            fetch(self, pieces, buffers)
        with self._counting:
            self.wanted_nbytes += sum(sizes.values())
        return [
            self._result(request, requests[first].out is not None, buffers[first])
            for request, first in zip(requests, firsts, strict=True)
        ]

    def _result(self, request: ReadRequest, in_place: bool, buffer: _Bytes) -> _Bytes:
        if request.out is None:
            return buffer.copy() if in_place else buffer  # not what another request wanted to have filled
        if request.out is buffer:
            return buffer
        np.copyto(_checked(request.out, buffer.nbytes, self.manifest.tensors[request.tensor].name), buffer)
        return request.out

    def _nbytes_of(self, request: ReadRequest) -> int:
        if not 0 <= request.tensor < len(self.manifest.tensors):
            raise TargetMismatchError(
                f"{self.directory}: there is no tensor {request.tensor}, only {len(self.manifest.tensors)}"
            )
        tensor = self.manifest.tensors[request.tensor]
        box = request.box
        if box is None:
            return _assemble.nbytes_of(tensor)
        nbytes = itemsize(tensor.dtype)
        inside = len(box.start) == len(box.length) == len(tensor.shape)
        for start, length, extent in zip(*box, tensor.shape, strict=False):
            inside = inside and 0 <= start <= start + length <= extent
            nbytes *= length
        if not inside:
            raise TargetMismatchError(
                f"{tensor.name}: the box at {box.start} of {box.length} is not inside the shape {tuple(tensor.shape)}"
            )
        return nbytes


def look(reader: CheckpointReader, *, again: bool = False) -> None:
    """Compare the shards' sizes with the manifest, before the first part of a checkpoint is read.

    Raises:
        CorruptCheckpointError: a shard is missing, or has another size.
    """
    if again or not reader._has_looked:
        _assemble.raise_faults(_assemble.shard_faults(reader.directory, reader.manifest), reader.directory)
        reader._has_looked = True


def fetch(reader: CheckpointReader, requests: Sequence[_assemble.Request], keep: object) -> None:
    """Read into memory, count what the drive gave, and raise what is wrong.

    Args:
        reader: the checkpoint.
        requests: no two of them want the same byte.
        keep: owns the memory.

    Raises:
        CorruptCheckpointError: bytes are not what was written.
        StorageError: a system call failed.
    """
    try:
        faults, moved = _assemble.fetch(reader.directory, reader.manifest, requests, reader.config, keep)
    except StorageError:
        look(reader, again=True)  # a shard that was cut or removed since then is the better answer
        raise
    with reader._counting:  # several threads may read for one reader
        reader.drive_nbytes += moved
    if faults:
        look(reader, again=True)
        _assemble.raise_faults(faults, reader.directory)


def size_of(reader: CheckpointReader, request: ReadRequest) -> int:
    """Bytes of a part.

    Raises:
        TargetMismatchError: there is no such part.
    """
    return reader._nbytes_of(request)


def room_for(reader: CheckpointReader, request: ReadRequest) -> _Bytes:
    """Memory for a part: the caller's, or new one.

    Raises:
        TargetMismatchError: there is no such part, or the caller's memory does not fit.
    """
    nbytes = reader._nbytes_of(request)
    if request.out is None:
        return _reader.allocate([nbytes])[0]
    return _checked(request.out, nbytes, reader.manifest.tensors[request.tensor].name)


def identity_of(manifest: Manifest) -> int:
    """A number by which ranks see whether they read one checkpoint."""
    return zlib.crc32(msgspec.msgpack.encode(manifest))


def _checked(out: _Bytes, nbytes: int, name: str) -> _Bytes:
    if out.ndim != 1 or out.dtype != np.uint8 or out.nbytes != nbytes or not out.flags.c_contiguous:
        raise TargetMismatchError(
            f"{name}: out must be {nbytes} contiguous bytes, found {out.dtype} of shape {out.shape}"
        )
    if not out.flags.writeable:
        raise TargetMismatchError(f"{name}: out is read-only")
    return out


def _passes(numbers: Sequence[int], requests: Sequence[ReadRequest]) -> list[list[int]]:
    """Requests in groups in which no two want the same byte: the engine writes each byte of a file to one place."""
    by_tensor: dict[int, list[int]] = {}
    for number in numbers:
        by_tensor.setdefault(requests[number].tensor, []).append(number)
    passes: list[list[int]] = []
    for mine in by_tensor.values():
        for number, index in zip(mine, _layers([requests[number].box for number in mine]), strict=True):
            while index >= len(passes):
                passes.append([])
            passes[index].append(number)
    return passes


def _layers(boxes: Sequence[Box | None]) -> list[int]:
    """For each box of a tensor the first layer in which it meets no other; boxes are compared with their neighbours."""
    layers = [0] * len(boxes)
    begins = [box.start[0] if box is not None and box.start else 0 for box in boxes]
    ends = [box.start[0] + box.length[0] if box is not None and box.start else None for box in boxes]
    open_: list[int] = []
    for number in sorted(range(len(boxes)), key=begins.__getitem__):
        open_ = [other for other in open_ if (end := ends[other]) is None or end > begins[number]]
        taken = {layers[other] for other in open_ if _overlap(boxes[other], boxes[number])}
        while layers[number] in taken:
            layers[number] += 1
        open_.append(number)
    return layers


def _overlap(a: Box | None, b: Box | None) -> bool:
    return a is None or b is None or intersect(a, b) is not None
