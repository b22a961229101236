"""Loading what every rank needs whole: each reads a share, and all give each other theirs.

Each byte leaves the drive once. Large tensors are read into their own memory and gathered in place; small ones travel
together, each read by one rank.
"""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from fp_multi._assemble import Request, fetch, nbytes_of, raise_faults
from fp_multi._boxes import cut_rule, unit_boxes, unit_offsets
from fp_multi._comm import Comm
from fp_multi._dtypes import itemsize
from fp_multi._format import Manifest
from fp_multi._partial import identity_of
from fp_multi._together import Together
from fp_multi.config import LoadConfig
from fp_multi.errors import CommError

_UNIT_NBYTES = 256 << 10
_SMALL_NBYTES = 4 << 20
"""Smaller tensors are read whole by one rank: a collective for each would take longer than its bytes."""
_BUNDLE_NBYTES = 64 << 20


def fetch_shared(
    directory: str,
    manifest: Manifest,
    where: Mapping[int, int],
    config: LoadConfig,
    keepalive: object,
    *,
    team: Together,
) -> None:
    """Read tensors into the memory of every rank, a share of them from the drive.

    Every rank of the comm calls this for the same tensors, in the thread in which it calls its framework's collectives.

    Args:
        directory: the checkpoint.
        manifest: its checked manifest.
        where: for each wanted tensor the address of its memory.
        config: how to read.
        keepalive: what owns the memory.
        team: the ranks, and the round in which they agree that all have read.

    Raises:
        CorruptCheckpointError: bytes that this rank read are not what was written.
        CommError: another rank failed, or the ranks want different things.
    """
    ranks, round_ = team.team, team.round
    comm = ranks.comm
    tensors = manifest.tensors
    sizes = {index: nbytes_of(tensors[index]) for index in sorted(where)}
    large = [index for index, nbytes in sizes.items() if nbytes >= _SMALL_NBYTES]
    bundles = _bundles({index: n for index, n in sizes.items() if 0 < n < _SMALL_NBYTES}, comm.size)
    requests = [Request(index, where[index]) for bundle in bundles for index in bundle[comm.rank]]
    shares: list[tuple[int, int, int]] = []
    for index in large:
        tensor = tensors[index]
        cut = cut_rule(tensor.shape, itemsize(tensor.dtype), _UNIT_NBYTES)
        ends = [cut.units * rank // comm.size for rank in range(comm.size + 1)]
        first, last = ends[comm.rank : comm.rank + 2]
        begin, end = unit_offsets(cut, np.array([first, last], np.int64)).tolist()
        shares.append((index, begin, end))
        at = where[index] + begin
        for box in unit_boxes(tensor.shape, cut, first, last):
            requests.append(Request(index, at, box))
            at += int(np.prod(box.length, dtype=np.int64)) * itemsize(tensor.dtype)

    raise_faults(fetch(directory, manifest, requests, config, keepalive)[0], directory)
    # Nobody enters a collective before all have read: one that failed would leave the others waiting in it.
    round_.post(msgspec.msgpack.encode((list(sizes), identity_of(manifest))))
    if ranks.leads:
        if len({*round_.collect()}) > 1:
            raise CommError(f"{directory}: with broadcast=True all ranks must load the same parts of one checkpoint")
        round_.decide(b"")
    round_.outcome()
    for index, begin, end in shares:
        whole = _memory(where[index], sizes[index])
        comm.all_gather(whole[begin:end], whole)
    for bundle in bundles:
        _gather_bundle(bundle, sizes, where, comm)


def _bundles(sizes: Mapping[int, int], size: int) -> list[list[list[int]]]:
    """Small tensors in bundles, and in each bundle the tensors that each rank reads."""
    bundles: list[list[list[int]]] = []
    least = [(0, rank) for rank in range(size)]  # a heap: ascending from the start
    filled = _BUNDLE_NBYTES
    for index, nbytes in sizes.items():
        if filled + nbytes > _BUNDLE_NBYTES:
            bundles.append([[] for _ in range(size)])
            filled = 0
        load, rank = least[0]
        heapq.heapreplace(least, (load + nbytes, rank))
        bundles[-1][rank].append(index)
        filled += nbytes
    return bundles


def _gather_bundle(
    bundle: Sequence[Sequence[int]], sizes: Mapping[int, int], where: Mapping[int, int], comm: Comm
) -> None:
    order = [index for mine in bundle for index in mine]
    whole = np.empty(sum([sizes[index] for index in order]), np.uint8)
    places: dict[int, npt.NDArray[np.uint8]] = {}
    at = 0
    edges = [0]
    for mine in bundle:
        for index in mine:
            places[index] = whole[at : at + sizes[index]]
            at += sizes[index]
        edges.append(at)
    for index in bundle[comm.rank]:
        places[index][:] = _memory(where[index], sizes[index])
    comm.all_gather(whole[edges[comm.rank] : edges[comm.rank + 1]], whole)
    for rank, mine in enumerate(bundle):
        if rank != comm.rank:
            for index in mine:
                _memory(where[index], sizes[index])[:] = places[index]


def _memory(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
