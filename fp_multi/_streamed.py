"""StreamedTensor: a tensor that is nowhere in memory as a whole; a save pulls its bytes band by band."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fp_multi import _engine
from fp_multi._dtypes import itemsize
from fp_multi._registry import register_tensor_type
from fp_multi._types import LeafSource, TensorType
from fp_multi.errors import CorruptCheckpointError

Band = npt.NDArray[np.uint8]


class StreamedTensor:
    """A leaf whose bytes are made while they are written: a tensor of another format, or one larger than memory.

    Its bytes in C order are cut into bands. A save asks for one band after the other, each once, and holds one at a
    time: that, and the save's own staging memory, is all that it takes.

    Args:
        dtype: name as in docs/format.md section 3.5.
        shape: its shape.
        edges: where bands begin and end, in bytes: 0 first, the tensor's size last, ascending.
        read: ``read(i)`` gives band ``i``, 1-d ``uint8``, contiguous, little-endian. Called in the saving thread.
        kind: what the tensor was (docs/format.md section 3.6).
        attrs: what its kind needs.
        moved: called with the number of bytes, each time some have been handed over.

    Raises:
        ManifestError: there is no such dtype.

    Example:
        >>> import numpy as np, fp_multi as fp
        >>> rows = StreamedTensor("int64", (4, 1 << 10), [0, 1 << 14, 1 << 15], lambda i: np.full(1 << 14, i, np.uint8))
        >>> _ = fp.save({"rows": rows}, "ckpt/streamed", overwrite=True)
        >>> fp.load("ckpt/streamed")["rows"].shape
        (4, 1024)
    """

    __slots__ = ("_at", "_band", "_edges", "_moved", "_read", "attrs", "dtype", "kind", "shape")

    def __init__(
        self,
        dtype: str,
        shape: Sequence[int],
        edges: Sequence[int],
        read: Callable[[int], Band],
        *,
        kind: str = "numpy",
        attrs: Mapping[str, str] | None = None,
        moved: Callable[[int], None] | None = None,
    ) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)
        self.kind = kind
        self.attrs = attrs
        self._edges = list(edges)
        self._read = read
        self._moved = moved
        self._band: Band | None = None
        self._at = -1

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self._edges[-1]

    def fetch(self, address: int, start: int, nbytes: int) -> Callable[[], None]:
        """Copy bytes to memory; see ``LeafSource.fetch``."""
        end = start + nbytes
        while start < end:
            band, begin, edge = self._band_at(start)
            stop = min(edge, end)
            ctypes.memmove(address, _engine.address_of(band) + start - begin, stop - start)
            address += stop - start
            start = stop
            if stop == edge:
                self._band = None  # before the next one is made: they need not be there at once
        if self._moved is not None:
            self._moved(nbytes)
        return _arrived

    def _band_at(self, start: int) -> tuple[Band, int, int]:
        number = bisect_right(self._edges, start) - 1
        begin, edge = self._edges[number], self._edges[number + 1]
        if self._band is None or self._at != number:
            self._band = None
            band = self._read(number)
            if band.nbytes != edge - begin:
                raise CorruptCheckpointError(f"band {number}: expected {edge - begin} bytes, found {band.nbytes}")
            self._band, self._at = band, number
        return self._band, begin, edge


def groups(sizes: Sequence[int], most_nbytes: int) -> Iterator[range]:
    """Cut a sequence of things into runs that are small enough to be in memory together.

    Args:
        sizes: bytes of each.
        most_nbytes: bytes of a run; something larger is a run of its own.
    """
    begin = held = 0
    for i, nbytes in enumerate(sizes):
        if i > begin and held + nbytes > most_nbytes:
            yield range(begin, i)
            begin, held = i, 0
        held += nbytes
    if begin < len(sizes):
        yield range(begin, len(sizes))


def _arrived() -> None:
    """Nothing is under way when ``fetch`` returns."""


def describe(tensor: StreamedTensor, path: str) -> LeafSource:
    """Say where the bytes of a streamed tensor come from."""
    return LeafSource(
        tensor.dtype,
        tensor.shape,
        tensor.nbytes,
        0,
        tensor,
        tensor.kind,
        attrs=tensor.attrs,
        fetch=tensor.fetch if tensor.nbytes else None,
        itemsize=itemsize(tensor.dtype),
    )


register_tensor_type(StreamedTensor, TensorType(describe))
