"""Loading parts of tensors that lie between other ranks' parts: columns, where rows were written.

Who reads a few columns by itself reads the rows, as does every other rank. Here the ranks of a host read each byte
once: the tensors are cut into slabs, each rank reads its share of them into memory that all of them map, and takes what
it needs out of everybody's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from fp_multi import _assemble, _engine, _host_memory
from fp_multi._boxes import cut_rule, intersect, unit_boxes
from fp_multi._dtypes import itemsize
from fp_multi._format import Manifest, Tensor
from fp_multi._layout import BRIDGE_NBYTES, align_up
from fp_multi._machine import host_of
from fp_multi._messages import missing
from fp_multi._partial import CheckpointReader, ReadRequest, fetch, identity_of, look, room_for, size_of
from fp_multi._together import Together
from fp_multi._types import Box
from fp_multi.errors import CommError

_Bytes = npt.NDArray[np.uint8]

_WORTH = 1.25
"""Parts for which no more than this times their bytes is read are read by each rank for itself."""
_SLAB_NBYTES = 4 << 20
"""Smaller ones would cost more to plan than they take to read; larger ones are memory that has to be had first."""
_FILLERS = 2
"""Threads that fill a rank's slabs: one plans the next read while the drive works for the other's."""
_SLABS = 4
"""Of each rank, in memory: two are filled, one is emptied, and one is for who is late."""
_ALIGNMENT = 64
_LOOK_S = 0.2


class _Want(NamedTuple):
    """A part that a rank shares the reading of."""

    tensor: int
    start: tuple[int, ...]
    length: tuple[int, ...]
    touched_nbytes: int
    """What the rank would read for it alone."""

    @property
    def box(self) -> Box:
        return Box(self.start, self.length)


class _Said(NamedTuple):
    """What a rank tells the others."""

    host: str
    memory: _host_memory.Address | None
    """None: it shares nothing."""
    identity: int
    """Of the manifest."""
    wants: list[_Want]


class _Lot(NamedTuple):
    """A part of a tensor in a slab."""

    tensor: int
    box: Box
    begin: int
    """In the slab."""
    nbytes: int


def read_parts(reader: CheckpointReader, requests: Sequence[ReadRequest], team: Together) -> list[_Bytes]:
    """:meth:`CheckpointReader.read` for all ranks of a comm at once, each with requests of its own.

    Every rank of the comm calls this, also those that want nothing.

    Args:
        reader: the checkpoint.
        requests: what this rank wants.
        team: the ranks, and the round in which they read.

    Raises:
        CorruptCheckpointError: bytes that this rank read are not what was written.
        CommError: another rank failed, or is gone.
    """
    offered = _offered(reader, requests)
    memory: _host_memory.Owned | None = None
    if offered:
        with suppress(OSError):  # then each reads by itself
            memory = _host_memory.share(_SLABS * _SLAB_NBYTES)
    try:
        group = _meet(reader, memory, list(offered.values()), team)
    finally:
        if memory is not None:
            memory.close()
    shared = {number for number, want in offered.items() if want.tensor in group.tensors}
    found: dict[int, _Bytes] = {}
    if group.tensors:  # also who wants nothing of them: it has slabs to fill, and the others look at its counter
        found = _Exchange(reader, group, team).run({number: requests[number] for number in sorted(shared)})
    alone = [number for number in range(len(requests)) if number not in shared]
    if alone:
        found.update(zip(alone, reader.read([requests[number] for number in alone]), strict=True))
    return [found[number] for number in range(len(requests))]


def _offered(reader: CheckpointReader, requests: Sequence[ReadRequest]) -> dict[int, _Want]:
    """The requests that are worth sharing, by number."""
    offered = {}
    for number, request in enumerate(requests):
        nbytes, box = size_of(reader, request), request.box
        if box is not None and nbytes:
            touched = _touched_nbytes(reader.manifest.tensors[request.tensor], box)
            if touched > _WORTH * nbytes:
                offered[number] = _Want(request.tensor, tuple(box.start), tuple(box.length), touched)
    return offered


def _touched_nbytes(tensor: Tensor, box: Box) -> int:
    """What is read for a part, without the edges: gaps in a row are read along if they are short."""
    touched = 0
    for piece in tensor.pieces:
        start, length = ([0] * len(tensor.shape), tensor.shape) if piece.box is None else piece.box
        stored = Box(tuple(start), tuple(length))
        both = intersect(stored, box)
        if both is None:
            continue
        partial = [axis for axis, length in enumerate(both.length) if length != stored.length[axis]]
        axis = max(partial, default=0)
        run = itemsize(tensor.dtype) * prod(both.length[axis:])
        step = itemsize(tensor.dtype) * prod(stored.length[axis:])
        gaps = prod(both.length[:axis]) - 1
        touched += run + gaps * (step if step - run <= BRIDGE_NBYTES else run)
    return touched


class _Group(NamedTuple):
    """The ranks of one host that read together."""

    ranks: list[int]
    memories: list[_host_memory.HostMemory]
    """Each one's."""
    place: int
    """This rank's among them."""
    tensors: dict[int, Box]
    """What is read together: all of what they want of each tensor, and what lies between."""


def _meet(reader: CheckpointReader, memory: _host_memory.Owned | None, wants: list[_Want], team: Together) -> _Group:
    """Find out who reads together, and what; nobody, if one of them cannot."""
    round_ = team.round
    mine = _Said("", None, 0, [])
    if memory is not None:
        mine = _Said(host_of()[0], memory.address, identity_of(reader.manifest), wants)
    told = round_.exchange("parts", msgspec.msgpack.encode(mine))
    said = [msgspec.msgpack.decode(one, type=_Said) for one in told]
    sharing = [rank for rank, one in enumerate(said) if one.memory is not None]
    nobody = _Group([], [], 0, {})
    if len(sharing) < 2:
        return nobody
    if len({said[rank].identity for rank in sharing}) > 1:
        raise CommError(f"{reader.directory}: with broadcast=True all ranks must load parts of one checkpoint")
    ranks = [rank for rank in sharing if said[rank].host == mine.host]
    memories: list[_host_memory.HostMemory] = []
    if memory is not None:
        with suppress(OSError):
            for rank in ranks:
                address = said[rank].memory
                if address is not None:
                    memories.append(memory if rank == team.team.comm.rank else _host_memory.attach(address))
    reached = memory is None or len(memories) == len(ranks)
    able = round_.exchange("memory of the ranks", b"1" if reached else b"")
    if memory is None or len(ranks) < 2 or not all([able[rank] for rank in ranks]):
        return nobody
    tensors = _hulls(reader.manifest, [want for rank in ranks for want in said[rank].wants])
    return _Group(ranks, memories, ranks.index(team.team.comm.rank), tensors)


def _hulls(manifest: Manifest, wants: Sequence[_Want]) -> dict[int, Box]:
    """For each tensor the box around what is wanted of it, where reading that is less than reading apart."""
    by_tensor: dict[int, list[_Want]] = {}
    for want in wants:
        by_tensor.setdefault(want.tensor, []).append(want)
    hulls = {}
    for index, these in sorted(by_tensor.items()):
        starts = np.array([want.start for want in these], np.int64)
        ends = starts + np.array([want.length for want in these], np.int64)
        start = starts.min(axis=0)
        hull = Box(tuple(start.tolist()), tuple((ends.max(axis=0) - start).tolist()))
        if _touched_nbytes(manifest.tensors[index], hull) < sum([want.touched_nbytes for want in these]):
            hulls[index] = hull
    return hulls


def _slabs(manifest: Manifest, tensors: dict[int, Box]) -> list[list[_Lot]]:
    """What is read at once by one rank, as much as a slab holds."""
    slabs: list[list[_Lot]] = []
    end = _SLAB_NBYTES
    for index, hull in tensors.items():
        element_nbytes = itemsize(manifest.tensors[index].dtype)
        cut = cut_rule(hull.length, element_nbytes, _SLAB_NBYTES)
        for unit in range(cut.units):
            for inner in unit_boxes(hull.length, cut, unit, unit + 1):
                start = tuple([a + b for a, b in zip(hull.start, inner.start, strict=True)])
                nbytes = element_nbytes * prod(inner.length)
                begin = align_up(end, _ALIGNMENT)
                if begin + nbytes > _SLAB_NBYTES:
                    slabs.append([])
                    begin = 0
                slabs[-1].append(_Lot(index, Box(start, inner.length), begin, nbytes))
                end = begin + nbytes
    return slabs


class _Exchange:
    """One rank's part: threads fill this rank's slabs, the caller's thread empties all of them, in one order."""

    def __init__(self, reader: CheckpointReader, group: _Group, team: Together) -> None:
        self._reader = reader
        self._group = group
        self._team = team
        self._slabs = _slabs(reader.manifest, group.tensors)
        self._stop = False
        self._order = threading.Condition()
        """Of the fillers: slabs are shown in the order of their numbers."""
        self._error: BaseException | None = None
        self._next_look_s = 0.0
        self._late_s = 0.0

    def run(self, requests: dict[int, ReadRequest]) -> dict[int, _Bytes]:
        """Read; the bytes of each request by its number."""
        tensors = self._reader.manifest.tensors
        look(self._reader)
        outs: dict[int, _Bytes] = {}
        by_tensor: dict[int, list[tuple[Box, _Bytes]]] = {}
        for number, request in requests.items():
            box = request.box or Box((), ())
            outs[number] = room_for(self._reader, request)
            by_tensor.setdefault(request.tensor, []).append((box, outs[number]))
            self._reader.wanted_nbytes += outs[number].nbytes
        fillers = [threading.Thread(target=self._fill, args=(n,), name="fp_multi parts") for n in range(_FILLERS)]
        started: list[threading.Thread] = []
        try:
            for filler in fillers:
                filler.start()
                started.append(filler)
            for number, slab in enumerate(self._slabs):
                data = self._wait_for(number)
                for lot in slab:
                    for box, out in by_tensor.get(lot.tensor, ()):
                        bytes_here = data[lot.begin : lot.begin + lot.nbytes]
                        _copy(lot.box, bytes_here, box, out, itemsize(tensors[lot.tensor].dtype))
                self._mine.emptied = number + 1
        finally:
            self._stop = True  # first of all: an interrupt may come while the lock is waited for
            with self._order:
                self._order.notify_all()
            for filler in started:
                filler.join()
        if self._error is not None:
            raise self._error
        return outs

    @property
    def _mine(self) -> _host_memory.HostMemory:
        return self._group.memories[self._group.place]

    def _wait_for(self, number: int) -> _Bytes:
        """A slab's bytes, as soon as they are there."""
        turn, who = divmod(number, len(self._group.ranks))
        memory = self._group.memories[who]
        self._late_s = time.monotonic() + self._team.team.comm.timeout_s
        _host_memory.wait_for(lambda: memory.filled > turn, lambda: self._look(who))
        return _place_of(memory, turn)

    def _look(self, who: int) -> None:
        """Raise if there is no point in waiting for a rank."""
        if self._error is not None:
            raise self._error
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_S
        failure = self._team.round.failed()
        if failure is not None:
            raise failure
        if now_s > self._late_s:
            comm = self._team.team.comm
            raise missing(self._team.round.tag, [self._group.ranks[who]], comm.size, comm.timeout_s)

    def _fill(self, first: int) -> None:
        """Read every second slab of this rank's, as soon as there is room; runs in a thread of its own."""
        group, memory = self._group, self._mine
        slabs = self._slabs[group.place :: len(group.ranks)]
        try:
            for turn in range(first, len(slabs), _FILLERS):
                # The slab that was in this place has to be emptied by all.
                needed = (turn - _SLABS) * len(group.ranks) + group.place + 1
                _host_memory.wait_for(
                    lambda needed=needed: self._stop or all([m.emptied >= needed for m in group.memories]),  # type: ignore[misc]
                    lambda: None,
                )
                if self._stop:
                    return  # nobody takes it any more
                address = _engine.address_of(_place_of(memory, turn))
                requests = [_assemble.Request(lot.tensor, address + lot.begin, lot.box) for lot in slabs[turn]]
                fetch(self._reader, requests, memory)
                self._show(turn)
        except BaseException as error:  # raised by run()
            self._error = error

    def _show(self, turn: int) -> None:
        """Tell all that a slab is filled, when those before it are."""
        with self._order:
            self._order.wait_for(lambda: self._stop or self._mine.filled == turn)
            if self._mine.filled == turn:
                self._mine.filled = turn + 1
                self._order.notify_all()


def _place_of(memory: _host_memory.HostMemory, turn: int) -> _Bytes:
    begin = turn % _SLABS * _SLAB_NBYTES
    return memory.data[begin : begin + _SLAB_NBYTES]


def _copy(slab: Box, data: _Bytes, box: Box, out: _Bytes, element_nbytes: int) -> None:
    """Copy what a slab and a wanted box have in common."""
    both = intersect(slab, box)
    if both is not None:
        np.copyto(_within(out, box, both, element_nbytes), _within(data, slab, both, element_nbytes))


def _within(data: _Bytes, frame: Box, both: Box, element_nbytes: int) -> _Bytes:
    """The bytes of a box in those of one around it; the last axis counts bytes."""
    length = [*frame.length[:-1], frame.length[-1] * element_nbytes]
    at = [
        slice(begin - corner, begin - corner + count)
        for begin, corner, count in zip(both.start[:-1], frame.start[:-1], both.length[:-1], strict=True)
    ]
    begin = (both.start[-1] - frame.start[-1]) * element_nbytes
    last = slice(begin, begin + both.length[-1] * element_nbytes)
    return data[: prod(length)].reshape(length)[(*at, last)]
