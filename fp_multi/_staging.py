"""From tensors to the extents that the engine reads: host memory as it is, device memory through a pinned ring.

The engine copies host tensors into its huge-page blocks itself. A device tensor's bytes must first come to the host:
they
are cut into slices, each with a place in a ring of page-locked memory, and :func:`feed` keeps the device copies ahead
of
the engine, which never reads past what is ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fp_multi import _engine
from fp_multi._layout import align_up
from fp_multi._types import LeafSource

_SLICES_A_BLOCK = 2
_SLOT_ALIGNMENT = 64
_RING_BLOCKS = 4
# A block that the engine waits for needs all its slices at once, a slice before it that reaches into it and one
# behind; and a slice is not split at the ring's end. Aligned slots take at most twice their bytes when slices are
# tiny (see _assign_slots). So three blocks and a half would do; with less the engine and feed() could wait for each
# other for ever.


@dataclass(slots=True)
class _Slice:
    source: LeafSource
    start: int
    nbytes: int
    file_begin: int
    slot: int = 0
    after: int = 0
    """The slot is free once the engine has staged this many bytes of the file."""


@dataclass(slots=True)
class Extents:
    """What :meth:`Engine.submit_write` needs to know about the data, and what must stay alive meanwhile."""

    table: npt.NDArray[np.uint64]
    """(n, 3): address, nbytes, and the number of the layout (from 1) or 0."""
    layouts: list[tuple[int, list[int], list[int]]]
    keepalive: list[object]
    slices: list[_Slice] = field(default_factory=list)
    pins: ExitStack = field(default_factory=ExitStack)
    """Undoes the page locks of the ring, after the engine is done with it."""

    @property
    def ready_nbytes(self) -> int:
        """Bytes of the file that can be read before any device copy."""
        return self.slices[0].file_begin if self.slices else (1 << 64) - 1


def extents(header: bytes, sources: Sequence[LeafSource], block_bytes: int) -> Extents:
    """Describe a file: a header and the tensors behind it, in file order.

    Args:
        header: the first bytes of the file.
        sources: the tensors.
        block_bytes: the engine's block size.
    """
    head = np.frombuffer(header, np.uint8)
    address: list[int] = [_engine.address_of(head)]
    nbytes: list[int] = [len(header)]
    layout: list[int] = [0]
    layouts: list[tuple[int, list[int], list[int]]] = []
    slices: list[_Slice] = []
    at = len(header)
    for source in sources:
        if source.fetch is not None:
            for cut in _cut(source, at, block_bytes // _SLICES_A_BLOCK):
                slices.append(cut)
                address.append(0)  # known once the ring is planned
                nbytes.append(cut.nbytes)
                layout.append(0)
        else:
            if source.strides is not None and source.nbytes:
                layouts.append((source.itemsize, list(source.shape), list(source.strides)))
                layout.append(len(layouts))
            else:
                layout.append(0)
            address.append(source.address)
            nbytes.append(source.nbytes)
        at += source.nbytes
    keepalive: list[object] = [header, head]
    keepalive.extend(source.keepalive for source in sources)
    table = np.array([address, nbytes, layout], np.uint64).T.copy()
    if slices:
        ring = _engine.allocate(_RING_BLOCKS * block_bytes)
        _assign_slots(slices, _RING_BLOCKS * block_bytes, _engine.address_of(ring))
        keepalive.append(ring)
        device = iter(slices)
        for i, source_nbytes in enumerate(nbytes):
            if address[i] == 0 and source_nbytes and layout[i] == 0:
                table[i, 0] = next(device).slot
        return Extents(table, layouts, keepalive, slices, _pin(slices, ring))
    return Extents(table, layouts, keepalive)


def _cut(source: LeafSource, file_begin: int, slice_nbytes: int) -> list[_Slice]:
    return [
        _Slice(source, start, min(slice_nbytes, source.nbytes - start), file_begin + start)
        for start in range(0, source.nbytes, slice_nbytes)
    ]


def _assign_slots(slices: list[_Slice], ring_nbytes: int, base: int) -> None:
    occupied: deque[tuple[int, int]] = deque()  # begin in the ring, end in the file; the oldest first
    free = 0  # behind the newest; the oldest of the last lap are ahead
    for cut in slices:
        # Neither tiny slices in large slots nor large ones askew: the gap in front is shorter than the slice.
        at = align_up(free, min(_SLOT_ALIGNMENT, 1 << cut.nbytes.bit_length() - 1))
        if at + cut.nbytes > ring_nbytes:
            while occupied and occupied[0][0] >= free:
                cut.after = occupied.popleft()[1]
            at = free = 0
        while occupied and free <= occupied[0][0] < at + cut.nbytes:
            cut.after = occupied.popleft()[1]
        cut.slot = base + at
        occupied.append((at, cut.file_begin + cut.nbytes))
        free = at + cut.nbytes


def _pin(slices: list[_Slice], ring: npt.NDArray[np.uint8]) -> ExitStack:
    with ExitStack() as undo:
        for pin in {cut.source.pin: None for cut in slices if cut.source.pin is not None}:
            undo.callback(pin(_engine.address_of(ring), ring.nbytes))
        return undo.pop_all()


def feed(job: _engine.WriteJob, parts: Extents) -> None:
    """Copy device slices to the host, two under way at a time, until the engine has all it needs.

    Returns early if the job ends by an error; :func:`fp_multi._engines.wait` then tells which.
    """
    waiting: deque[tuple[Callable[[], None], int]] = deque()
    try:
        _feed(job, parts.slices, waiting)
    finally:
        # Copies under way end before their memory goes, whatever else happens.
        for finish, _ in waiting:
            with suppress(Exception):
                finish()


def _feed(job: _engine.WriteJob, slices: list[_Slice], waiting: deque[tuple[Callable[[], None], int]]) -> None:
    for i, cut in enumerate(slices):
        while cut.after and job.staged_nbytes < cut.after and not job.done:
            # The engine may need slices whose copies are under way before it can free this slot.
            if waiting:
                _arrive(job, waiting)
            else:
                job.wait_staged(cut.after, 0.1)
        if job.done:
            return
        fetch = cut.source.fetch
        if fetch is not None:
            ready = slices[i + 1].file_begin if i + 1 < len(slices) else (1 << 64) - 1
            waiting.append((fetch(cut.slot, cut.start, cut.nbytes), ready))
        if len(waiting) > 1:
            _arrive(job, waiting)
    while waiting:
        _arrive(job, waiting)


def _arrive(job: _engine.WriteJob, waiting: deque[tuple[Callable[[], None], int]]) -> None:
    finish, ready = waiting[0]
    finish()
    waiting.popleft()
    job.set_ready_nbytes(ready)


def release(parts: Extents) -> None:
    """Undo page locks; the job must be done."""
    parts.pins.close()
