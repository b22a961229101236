"""``writers="auto"``: as many writers as each drive takes, where they burden sockets least; and their shares. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from fp_multi._seats import Seat, seats_of
from fp_multi._topology import RankPlace, Topology
from fp_multi.config import MIB

COPY_BYTES_PER_S = 4e9
"""What one thread copies and checksums while it keeps the drive busy: the CPU time of the recorded saves into recycled
files, kernel and all, allows so much (docs/performance.md). Faster cores do more; a writer too many costs less than one
too few."""
BLOCK_NBYTES = 4 * MIB
"""Writers without a block of this size have nothing to write."""
_SLACK = 0.1
"""Another writer for a last tenth of a drive's rate is not worth it: rates are not known that well."""
_UNEQUAL = 1.5
"""Shares are weighted only if writers differ by more than this: less is the noise of the probe."""


class _Need(NamedTuple):
    """A drive of a host, who can write to it, and how many should."""

    seats: list[Seat]
    wanted: int
    drive_bytes_per_s: float | None
    writer_bytes_per_s: float


def auto(topology: Topology, nbytes: int | None, copy_bytes_per_s: float) -> tuple[list[int], str]:
    """The ranks, and the reason.

    Args:
        topology: all ranks' places.
        nbytes: size of what is written; None if not known.
        copy_bytes_per_s: what one thread copies and checksums.
    """
    hosts = [_needs(places, copy_bytes_per_s) for places in topology.hosts().values()]
    needs = [need for host in hosts for need in host]
    reason = _auto_reason(needs)
    # Every drive's first writer before any drive's second; the first drive of every host before any host's second.
    turns = sorted(
        (turn, drive, number, rank)
        for number, host in enumerate(hosts)
        for drive, picked in enumerate(_pick(host))
        for turn, rank in enumerate(picked)
    )
    ranks = [rank for *_, rank in turns]
    blocks = len(ranks) if nbytes is None else max(1, -(-nbytes // BLOCK_NBYTES))
    if len(ranks) > blocks:
        reason += f"; but {nbytes} bytes make only {blocks} blocks of {BLOCK_NBYTES} to share out"
        ranks = ranks[:blocks]
    return ranks, (
        f"auto: {len(ranks)} of {topology.size} ranks write (hosts: {len(hosts)}, drives: {len(needs)}); {reason}"
    )


def _needs(places: tuple[RankPlace, ...], copy_bytes_per_s: float) -> list[_Need]:
    """How many writers each drive of a host needs; drives in the order of their first ranks."""
    drives: dict[str, list[Seat]] = {}
    for seat in seats_of(places):
        drives.setdefault(seat.place.device.key, []).append(seat)
    return [_need(seats, copy_bytes_per_s) for seats in drives.values()]


def _need(seats: list[Seat], copy_bytes_per_s: float) -> _Need:
    # Whoever measured while others did has measured too little.
    drive = max((seat.place.drive_bytes_per_s or 0.0 for seat in seats), default=0.0) or None
    writer = copy_bytes_per_s * min(seat.place.copy_threads for seat in seats)
    wanted = 1 if drive is None else max(1, math.ceil(drive / writer - _SLACK))
    return _Need(seats, min(wanted, len(seats)), drive, writer)


def _pick(host: list[_Need]) -> Iterator[list[int]]:
    """For each drive of a host the ranks that write to it."""
    load: Counter[int] = Counter()
    for need in host:
        sockets: dict[int, list[Seat]] = {}
        for seat in need.seats:
            sockets.setdefault(seat.socket, []).append(seat)

        def order(item: tuple[int, list[Seat]], wanted: int = need.wanted) -> tuple[bool, bool, int, int, int]:
            socket, seats = item
            # One socket if one is enough; the drive's own; one that no other drive's writers burden.
            far = not any(seat.near or seat.place.drive_socket == socket for seat in seats)
            return len(seats) < wanted, far, load[socket], -len(seats), socket

        ordered = [
            seat
            for _, seats in sorted(sockets.items(), key=order)
            for seat in sorted(seats, key=lambda seat: (not seat.near, seat.place.rank))
        ]
        chosen = ordered[: need.wanted]
        load.update(seat.socket for seat in chosen)
        yield [seat.place.rank for seat in chosen]


def _auto_reason(needs: list[_Need]) -> str:
    known = [need.drive_bytes_per_s for need in needs if need.drive_bytes_per_s is not None]
    if not known:
        return "the drives' rates are not known, so each has one writer"
    wanted = [float(need.wanted) for need in needs]
    writer = [need.writer_bytes_per_s / 1e9 for need in needs]
    text = (
        f"a drive takes {_range([rate / 1e9 for rate in known])} GB/s and one writer gives up to {_range(writer)}, "
        f"so writers for each drive: {_range(wanted)}"
    )
    if len(known) < len(needs):
        text += f"; {len(needs) - len(known)} drives' rates are not known, they have one each"
    short = sum(need.wanted == len(need.seats) < _unbounded(need) for need in needs)
    return f"{text}; {short} drives have fewer ranks than that takes" if short else text


def _unbounded(need: _Need) -> float:
    return 0.0 if need.drive_bytes_per_s is None else need.drive_bytes_per_s / need.writer_bytes_per_s - _SLACK


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def weights_of(topology: Topology, ranks: tuple[int, ...], copy_bytes_per_s: float) -> tuple[float, ...]:
    """Shares by which all writers are done at the same time, where they differ enough to matter."""
    drive_of = [(topology.places[rank].host, topology.places[rank].device.key) for rank in ranks]
    writers = Counter(drive_of)
    needs = {
        (places[0].host, need.seats[0].place.device.key): need
        for places in topology.hosts().values()
        for need in _needs(places, copy_bytes_per_s)
    }
    rates = []
    for drive in drive_of:
        need = needs[drive]
        if need.drive_bytes_per_s is None:
            return ()
        rates.append(min(need.drive_bytes_per_s / writers[drive], need.writer_bytes_per_s))
    fastest = max(rates)
    return tuple(rate / fastest for rate in rates) if fastest > _UNEQUAL * min(rates) else ()
