"""Which ranks write: a policy made into a list of ranks. Pure; every rank computes the same list from the same facts.

The policies are those of FastPersist (arXiv 2406.13768, section 4.2: replicas, sockets), and ``auto``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fp_multi._seats import Seat, seats_of
from fp_multi._topology import Topology
from fp_multi._writers_auto import COPY_BYTES_PER_S, auto, weights_of
from fp_multi.config import PerNode, SaveConfig
from fp_multi.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WriterChoice:
    """Who writes, and why."""

    ranks: tuple[int, ...]
    """Ascending, at least one."""
    reason: str
    """For the report."""
    weights: tuple[float, ...] = ()
    """For each of the ranks its share in relation to the others', the largest 1.0; empty: all equal."""


def select(
    topology: Topology,
    config: SaveConfig,
    *,
    nbytes: int | None = None,
    copy_bytes_per_s: float = COPY_BYTES_PER_S,
) -> WriterChoice:
    """Choose the ranks that write what several ranks hold; who alone holds something writes it in any case.

    Args:
        topology: all ranks' places, with the rates of their drives as far as they are known.
        config: the policy is ``config.writers``.
        nbytes: size of what is written, all ranks together; None if not known yet.
        copy_bytes_per_s: what one thread copies and checksums.

    Returns:
        The choice: the same on every rank that asks with the same arguments.

    Raises:
        ConfigError: the policy names a rank that there is not.
    """
    policy = config.writers
    if config.drive_bytes_per_s is not None:
        declared = float(config.drive_bytes_per_s)
        topology = Topology(tuple(replace(place, drive_bytes_per_s=declared) for place in topology.places))
    ranks: Iterable[int]
    if policy == "auto":
        ranks, reason = auto(topology, nbytes, copy_bytes_per_s)
    elif policy == "all":
        ranks, reason = range(topology.size), f"all: every one of {topology.size} ranks writes"
    elif policy == "per_socket":
        ranks, reason = _per_socket(topology)
    elif isinstance(policy, PerNode):
        ranks, reason = _per_node(topology, policy.n)
    else:
        ranks, reason = _named(topology, policy)
    chosen = tuple(sorted(ranks))
    return WriterChoice(chosen, reason, weights_of(topology, chosen, copy_bytes_per_s))


def _named(topology: Topology, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    if max(ranks) >= topology.size:
        raise ConfigError(f"writers names rank {max(ranks)}; there are {topology.size} ranks, counted from 0")
    return ranks, f"named: {len(ranks)} of {topology.size} ranks, as writers says"


def _per_socket(topology: Topology) -> tuple[list[int], str]:
    hosts = topology.hosts()
    ranks: list[int] = []
    for places in hosts.values():
        lowest: dict[int, int] = {}
        for seat in seats_of(places):
            lowest.setdefault(seat.socket, seat.place.rank)
        ranks += lowest.values()
    unknown = sum(not place.sockets for place in topology.places)
    return ranks, (
        f"per_socket: {len(ranks)} of {topology.size} ranks write, the lowest of each socket (hosts: {len(hosts)})"
        + (f"; {unknown} ranks do not know theirs, which count as one for each host" if unknown else "")
    )


def _per_node(topology: Topology, n: int) -> tuple[list[int], str]:
    hosts = topology.hosts()
    ranks = [seat.place.rank for places in hosts.values() for seat in _spread(seats_of(places), n)]
    short = sum(len(places) < n for places in hosts.values())
    return ranks, (
        f"per_node({n}): {len(ranks)} of {topology.size} ranks write (hosts: {len(hosts)})"
        + (f"; {short} hosts have fewer than {n} ranks" if short else "")
    )


def _spread(seats: list[Seat], n: int) -> Iterator[Seat]:
    """So many of a host's ranks, as evenly over its drives and sockets as can be, low ranks first."""
    if n >= len(seats):
        yield from seats
        return
    left = list(seats)
    drives: Counter[str] = Counter()
    sockets: Counter[int] = Counter()
    both: Counter[tuple[str, int]] = Counter()
    for _ in range(n):
        best = min(
            left,
            key=lambda seat: (
                drives[seat.place.device.key],
                sockets[seat.socket],
                both[seat.place.device.key, seat.socket],
                not seat.near,
                seat.place.rank,
            ),
        )
        left.remove(best)
        drives[best.place.device.key] += 1
        sockets[best.socket] += 1
        both[best.place.device.key, best.socket] += 1
        yield best
