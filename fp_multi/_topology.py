"""Where every rank runs and which drive it writes to; gathered once, the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from fp_multi import _engines
from fp_multi._drive import Device, device_of
from fp_multi._kernel import REAL, Roots
from fp_multi._machine import cpus_of_nodes, host_of, ranges, sockets_of
from fp_multi.config import IOConfig, SaveConfig
from fp_multi.errors import CommError

HEADINGS = ("rank", "host", "NUMA", "socket", "CPUs", "device", "kind", "drive GB/s")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's place."""

    rank: int
    host: str
    """What tells hosts apart: the running kernel's boot id, or ``FP_MULTI_HOST_ID``."""
    host_name: str
    """For people."""
    cpus: str
    """CPUs that the process may use, as the kernel writes lists: ``0-31,64-95``."""
    numa_nodes: tuple[int, ...]
    """Memory nodes of those CPUs, ascending; empty if the kernel does not say."""
    sockets: tuple[int, ...]
    """Sockets of those CPUs, ascending; empty if the kernel does not say."""
    device: Device
    drive_socket: int | None = None
    """The socket that the drive hangs at; None if that is not known."""
    copy_threads: int = 1
    """Threads that copy and checksum when this rank writes."""
    drive_bytes_per_s: float | None = None
    """Rate of the drive as this host sees it, declared or measured; None if not known."""

    @property
    def numa_node(self) -> int | None:
        """The memory node, if all its CPUs are on one."""
        return self.numa_nodes[0] if len(self.numa_nodes) == 1 else None

    @property
    def socket(self) -> int | None:
        """The socket, if all its CPUs are on one."""
        return self.sockets[0] if len(self.sockets) == 1 else None

    def row(self) -> tuple[str, ...]:
        """For people, one text for each of ``HEADINGS``; a dash where something is not known."""
        rate = self.drive_bytes_per_s
        return (
            str(self.rank),
            self.host_name,
            ranges(self.numa_nodes) or "-",
            ranges(self.sockets) or "-",
            self.cpus,
            self.device.name,
            self.device.kind,
            "-" if rate is None else f"{rate / 1e9:.2f}",
        )


@dataclass(frozen=True, slots=True)
class Topology:
    """The places of all ranks."""

    places: tuple[RankPlace, ...]
    """By rank, from 0 on, none missing."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.places)

    def hosts(self) -> dict[str, tuple[RankPlace, ...]]:
        """The places on each host, in the order of their first ranks."""
        found: dict[str, list[RankPlace]] = {}
        for place in self.places:
            found.setdefault(place.host, []).append(place)
        return {host: tuple(places) for host, places in found.items()}

    def table(self) -> list[tuple[str, ...]]:
        """A row of texts for each rank, as headed by ``HEADINGS``."""
        return [place.row() for place in self.places]


def topology_of(places: Iterable[RankPlace]) -> Topology:
    """Put places together, in whichever order they come.

    Args:
        places: one for each rank.

    Raises:
        CommError: a rank is missing or came twice.
    """
    found = tuple(sorted(places, key=lambda place: place.rank))
    if [place.rank for place in found] != list(range(len(found))) or not found:
        missing = sorted({*range(max(len(found), 1))} - {place.rank for place in found})
        raise CommError(f"{len(found)} ranks told their places; rank {missing[0]} is not among them, or came twice")
    return Topology(found)


def encode(place: RankPlace) -> bytes:
    """A place as bytes, for a message: a few hundred."""
    return msgspec.msgpack.encode(place)


def decode(messages: Sequence[bytes]) -> Topology:
    """The topology, from what :func:`encode` gave on every rank.

    Args:
        messages: one from each rank, in any order.

    Raises:
        CommError: a message is not a place, or a rank is missing or came twice.
    """
    try:
        places = [msgspec.msgpack.decode(message, type=RankPlace) for message in messages]
    except msgspec.MsgspecError as error:
        raise CommError(f"not the place of a rank: {error}; do all ranks run one version?") from error
    return topology_of(places)


def local_place(
    rank: int,
    directory: str | os.PathLike[str],
    config: IOConfig | None = None,
    *,
    drive_bytes_per_s: float | None = None,
    cpus: Collection[int] | None = None,
    roots: Roots = REAL,
) -> RankPlace:
    """Where this process runs, and the drive behind a directory.

    Args:
        rank: of this process.
        directory: where the checkpoint goes; it need not exist yet.
        config: how it will be written; default that of a save.
        drive_bytes_per_s: rate of the drive, if known.
        cpus: CPUs of the process; default those that the calling thread may use.
        roots: where the kernel's files are.
    """
    cpus = os.sched_getaffinity(0) if cpus is None else cpus
    host, host_name = host_of(roots)
    device = device_of(directory, roots)
    nodes = cpus_of_nodes(roots)
    near = nodes.get(device.numa_node, frozenset()) if device.numa_node is not None else frozenset()
    near_sockets = sockets_of(near, roots)
    return RankPlace(
        rank=rank,
        host=host,
        host_name=host_name,
        cpus=ranges(cpus),
        numa_nodes=tuple(sorted(node for node, its in nodes.items() if not its.isdisjoint(cpus))),
        sockets=sockets_of(cpus, roots),
        device=device,
        drive_socket=near_sockets[0] if len(near_sockets) == 1 else None,
        copy_threads=_engines.options(config or SaveConfig())["copy_threads"],
        drive_bytes_per_s=drive_bytes_per_s,
    )
