"""The socket that each rank of a host counts for."""

from __future__ import annotations

from typing import NamedTuple

from fp_multi._topology import RankPlace


class Seat(NamedTuple):
    """A rank, and the socket that it counts for."""

    place: RankPlace
    socket: int

    @property
    def near(self) -> bool:
        """Whether it sits at its drive's own memory node."""
        node = self.place.device.numa_node
        return node is not None and self.place.numa_node == node


def seats_of(places: tuple[RankPlace, ...]) -> list[Seat]:
    """The ranks of a host with a socket each.

    Processes that were not bound to CPUs may run on several sockets. Ranks follow the accelerators, which are mostly
    numbered socket by socket: so the first of them count for the first socket, and so on. Sockets that nobody knows
    count as one, number -1.
    """
    alike: dict[tuple[int, ...], list[RankPlace]] = {}
    for place in places:
        alike.setdefault(place.sockets, []).append(place)
    seats = [
        Seat(place, sockets[i * len(sockets) // len(group)] if sockets else -1)
        for sockets, group in alike.items()
        for i, place in enumerate(group)
    ]
    return sorted(seats, key=lambda seat: seat.place.rank)
