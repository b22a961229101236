"""Who writes, on made-up clusters: every policy, the same on every rank, whatever the ranks are called."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp_multi._drive import Device
from fp_multi._topology import RankPlace, Topology, decode, encode, topology_of
from fp_multi._writers import WriterChoice, select
from fp_multi._writers_auto import BLOCK_NBYTES, COPY_BYTES_PER_S
from fp_multi.config import SaveConfig, per_node
from fp_multi.errors import ConfigError

GB = 1e9
MUCH = 1 << 50
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def disk(number: int, node: int | None = None) -> Device:
    return Device(f"nvme:nvme{number}", "nvme", f"nvme{number}n1", False, node)


def place(
    rank: int,
    host: str = "h0",
    sockets: Sequence[int] = (0,),
    drive: Device | None = None,
    rate: float | None = None,
    **more: Any,
) -> RankPlace:
    device = drive or disk(0)
    # one memory node for each socket, with the same number
    found = RankPlace(rank, host, host, "0-7", tuple(sockets), tuple(sockets), device, device.numa_node)
    return replace(found, drive_bytes_per_s=rate, **more)


def cluster(
    hosts: int = 2,
    sockets: int = 2,
    ranks: int = 8,
    drives: int = 1,
    *,
    rate: float | None = None,
    bound: bool = True,
    near: bool = True,
) -> Topology:
    """Hosts of so many ranks, numbered host by host and socket by socket; drive d hangs at node d if ``near``.

    With several drives a socket's ranks write to its own drive.
    """
    places = []
    for rank in range(hosts * ranks):
        local = rank % ranks
        socket = local * sockets // ranks
        drive = local * drives // ranks
        places.append(
            place(
                rank,
                f"h{rank // ranks}",
                [socket] if bound else range(sockets),
                disk(drive, drive if near else None),
                rate,
            )
        )
    return topology_of(places)


def ranks(topology: Topology, writers: Any = "auto", **more: Any) -> tuple[int, ...]:
    return select(topology, SaveConfig(writers=writers), **more).ranks


# Fixed policies


def test_all() -> None:
    choice = select(cluster(), SaveConfig(writers="all"))
    assert choice == WriterChoice(tuple(range(16)), "all: every one of 16 ranks writes")


@pytest.mark.parametrize("bound", [True, False])
def test_per_socket_takes_the_lowest_rank_of_each(bound: bool) -> None:
    choice = select(cluster(bound=bound), SaveConfig(writers="per_socket"))
    assert choice.ranks == (0, 4, 8, 12)
    assert choice.reason == "per_socket: 4 of 16 ranks write, the lowest of each socket (hosts: 2)"


def test_per_socket_where_nobody_knows_one() -> None:
    topology = topology_of([place(rank, f"h{rank % 2}", ()) for rank in range(6)])
    choice = select(topology, SaveConfig(writers="per_socket"))
    assert choice.ranks == (0, 1)
    assert "6 ranks do not know theirs" in choice.reason


def test_per_socket_with_fewer_ranks_than_sockets() -> None:
    topology = topology_of([place(rank, sockets=range(4)) for rank in range(2)])
    assert ranks(topology, "per_socket") == (0, 1)


@pytest.mark.parametrize(
    ("n", "expected"),
    [(1, (0, 8)), (2, (0, 4, 8, 12)), (3, (0, 1, 4, 8, 9, 12)), (8, tuple(range(16))), (99, tuple(range(16)))],
)
@pytest.mark.parametrize("drives", [1, 2])
def test_per_node_spreads_over_sockets_and_drives(n: int, expected: tuple[int, ...], drives: int) -> None:
    choice = select(cluster(drives=drives), SaveConfig(writers=per_node(n)))
    assert choice.ranks == expected
    assert ("2 hosts have fewer than 99 ranks" in choice.reason) == (n == 99)


def test_per_node_takes_every_drive_before_one_twice() -> None:
    # drives across the sockets: 0 1 0 1 | 0 1 0 1
    topology = topology_of([place(rank, sockets=[rank // 4], drive=disk(rank % 2)) for rank in range(8)])
    assert ranks(topology, per_node(2)) == (0, 5)
    assert ranks(topology, per_node(4)) == (0, 1, 4, 5)
    # drives and sockets are even either way; a new pair of them comes first
    pairs = enumerate([(0, 0), (0, 0), (1, 0), (0, 1), (1, 1)])
    topology = topology_of([place(rank, sockets=[socket], drive=disk(drive)) for rank, (drive, socket) in pairs])
    assert ranks(topology, per_node(3)) == (0, 2, 4)


def test_named_ranks() -> None:
    topology = cluster()
    choice = select(topology, SaveConfig(writers=(9, 0, 15)))
    assert choice.ranks == (0, 9, 15)
    assert choice.reason == "named: 3 of 16 ranks, as writers says"
    with pytest.raises(ConfigError, match=r"names rank 16; there are 16 ranks"):
        select(topology, SaveConfig(writers=(0, 16)))


@pytest.mark.parametrize("wrong", ["some", "", [0, 1], (), (0, 0), (-1,), (1.0,), (True,), None, 3, ("all",)])
def test_policies_that_are_none(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="writers"):
        SaveConfig(writers=wrong)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2", None])
def test_so_many_writers_make_no_sense(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="per_node"):
        per_node(wrong)


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan"), "fast", True])
def test_rates_that_no_drive_has(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="drive_bytes_per_s"):
        SaveConfig(drive_bytes_per_s=wrong)


# auto


@pytest.mark.parametrize("rate", [None, 0.1 * GB, 3.5 * GB, 4 * GB, 4.3 * GB])
def test_one_writer_reaches_most_drives(rate: float | None) -> None:
    assert ranks(cluster(rate=rate)) == (0, 8)
    assert ranks(cluster(drives=2, rate=rate)) == (0, 4, 8, 12)
    assert ranks(cluster(hosts=1, ranks=1, rate=rate)) == (0,)


def test_a_fast_drive_has_as_many_writers_as_it_takes_all_on_its_socket() -> None:
    assert ranks(cluster(rate=9 * GB)) == (0, 1, 2, 8, 9, 10)
    assert ranks(cluster(rate=14 * GB), copy_bytes_per_s=12 * GB) == (0, 1, 8, 9)
    # more than a socket has ranks for
    assert ranks(cluster(hosts=1, rate=23 * GB)) == (0, 1, 2, 3, 4, 5)
    choice = select(cluster(hosts=1, rate=99 * GB), SaveConfig())
    assert choice.ranks == tuple(range(8))
    assert "1 drives have fewer ranks than that takes" in choice.reason


def test_more_copy_threads_are_worth_more_writers() -> None:
    topology = topology_of([place(rank, rate=14 * GB, copy_threads=4) for rank in range(8)])
    assert ranks(topology) == (0,)


def test_writers_sit_where_the_drive_hangs() -> None:
    on_node_1 = [place(rank, sockets=[rank // 4], drive=disk(0, 1), rate=3 * GB) for rank in range(8)]
    assert ranks(topology_of(on_node_1)) == (4,)
    # ranks bound to nothing: the socket's place is all there is to go by
    unbound = [place(rank, sockets=[0, 1], drive=disk(0, 1), rate=3 * GB) for rank in range(8)]
    assert ranks(topology_of(unbound)) == (4,)
    # two nodes in a socket: first the drive's own
    split = [
        place(rank, sockets=[0], drive=disk(0, 1), rate=6 * GB, numa_nodes=(rank % 2,), drive_socket=0)
        for rank in range(8)
    ]
    assert ranks(topology_of(split)) == (1, 3)


def test_one_socket_if_one_is_enough() -> None:
    # the drive's own socket has one rank, the other three; two are needed
    few = [place(rank, sockets=[min(rank, 1)], drive=disk(0, 0), rate=8 * GB) for rank in range(4)]
    assert ranks(topology_of(few)) == (1, 2)


def test_two_drives_are_written_from_two_sockets() -> None:
    # all ranks may write to either drive's directory: ranks alternate, and no drive says where it hangs
    topology = topology_of([place(rank, sockets=[rank // 4], drive=disk(rank % 2), rate=3 * GB) for rank in range(8)])
    assert ranks(topology) == (0, 5)


def test_small_states_have_few_writers() -> None:
    topology = cluster(hosts=4, drives=2)
    assert len(ranks(topology, nbytes=MUCH)) == 8
    assert ranks(topology, nbytes=0) == ranks(topology, nbytes=1) == ranks(topology, nbytes=BLOCK_NBYTES) == (0,)
    # hosts before second drives
    assert ranks(topology, nbytes=4 * BLOCK_NBYTES) == (0, 8, 16, 24)
    assert ranks(topology, nbytes=4 * BLOCK_NBYTES + 1) == (0, 4, 8, 16, 24)
    fast = cluster(hosts=1, rate=14 * GB)
    assert ranks(fast, nbytes=3 * BLOCK_NBYTES) == (0, 1, 2)
    choice = select(fast, SaveConfig(), nbytes=2 * BLOCK_NBYTES)
    assert choice.ranks == (0, 1)
    assert "only 2 blocks of 4194304" in choice.reason


def test_hosts_of_a_network_file_system_all_write() -> None:
    shared = Device("nfs4:server:/export", "network", "server:/export")
    topology = topology_of([place(rank, f"h{rank // 4}", drive=shared, rate=2 * GB) for rank in range(12)])
    assert ranks(topology) == (0, 4, 8)


def test_a_declared_rate_counts_more_than_a_measured_one() -> None:
    topology = cluster(hosts=1, rate=3 * GB)
    choice = select(topology, SaveConfig(drive_bytes_per_s=8 * GB))
    assert choice.ranks == (0, 1)
    assert "a drive takes 8 GB/s" in choice.reason


def test_who_measured_beside_others_measured_too_little() -> None:
    rates = [1 * GB, 8 * GB, None, 2 * GB]
    topology = topology_of([place(rank, rate=rate) for rank, rate in enumerate(rates)])
    assert ranks(topology) == (0, 1)


def test_the_reason_has_the_numbers() -> None:
    assert select(cluster(drives=2, rate=3.54 * GB), SaveConfig()).reason == (
        "auto: 4 of 16 ranks write (hosts: 2, drives: 4); a drive takes 3.54 GB/s and one writer gives up to 4, "
        "so writers for each drive: 1"
    )
    assert select(cluster(), SaveConfig()).reason == (
        "auto: 2 of 16 ranks write (hosts: 2, drives: 2); the drives' rates are not known, so each has one writer"
    )
    mixed = topology_of([place(0, "a", rate=3 * GB), place(1, "b", rate=13 * GB), place(2, "b"), place(3, "c")])
    assert select(mixed, SaveConfig()).reason == (
        "auto: 4 of 4 ranks write (hosts: 3, drives: 3); a drive takes 3 to 13 GB/s and one writer gives up to 4, "
        "so writers for each drive: 1 to 2; 1 drives' rates are not known, they have one each; "
        "1 drives have fewer ranks than that takes"
    )


# Weights


def test_equal_drives_have_equal_shares() -> None:
    assert select(cluster(rate=3 * GB), SaveConfig()).weights == ()
    nearly = topology_of([place(0, "a", rate=3 * GB), place(1, "b", rate=4 * GB)])
    assert select(nearly, SaveConfig()).weights == ()
    half_known = topology_of([place(0, "a", rate=3 * GB), place(1, "b")])
    assert select(half_known, SaveConfig()).weights == ()


def test_slow_drives_have_smaller_shares() -> None:
    topology = topology_of([place(0, "a", rate=4 * GB), place(1, "b", rate=1 * GB), place(2, "b", rate=1 * GB)])
    assert select(topology, SaveConfig()).weights == (1.0, 0.25)
    # two writers on one drive have half of it each
    assert select(topology, SaveConfig(writers="all")).weights == (1.0, 0.125, 0.125)
    # a writer is no faster than its copying
    fast = topology_of([place(0, "a", rate=100 * GB), place(1, "b", rate=1.5 * GB)])
    assert select(fast, SaveConfig()).weights == (1.0, 1.5 * GB / COPY_BYTES_PER_S)


# Many


def test_a_thousand_hosts() -> None:
    topology = cluster(hosts=1000, drives=2, rate=9 * GB)
    messages = [encode(place) for place in topology.places]
    random.Random(0).shuffle(messages)
    begin = time.perf_counter()
    found = decode(messages)
    choice = select(found, SaveConfig(), nbytes=MUCH)
    elapsed_s = time.perf_counter() - begin
    assert found == topology
    assert len(choice.ranks) == 1000 * 2 * 3
    drives = Counter((topology.places[r].host, topology.places[r].device.key) for r in choice.ranks)
    assert set(drives.values()) == {3}
    assert elapsed_s < 60  # a hang, not a speed


places_of_a_host = st.lists(
    st.tuples(
        st.sampled_from([(), (0,), (1,), (0, 1), (0, 1, 2, 3)]),  # sockets
        st.integers(0, 2),  # drive
        st.sampled_from([None, 0.5 * GB, 3 * GB, 13 * GB, 40 * GB]),  # its rate
    ),
    min_size=1,
    max_size=9,
)
policies = st.one_of(
    st.sampled_from(["all", "per_socket", "auto"]),
    st.integers(1, 10).map(per_node),
    st.just((0,)),
)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    hosts = draw(st.lists(places_of_a_host, min_size=1, max_size=5))
    nodes = draw(st.lists(st.sampled_from([None, 0, 1]), min_size=3, max_size=3))
    flat = [(f"h{number}", *one) for number, host in enumerate(hosts) for one in host]
    order = draw(st.permutations(range(len(flat))))
    return topology_of(
        place(rank, host, sockets, disk(drive, nodes[drive]), rate)
        for rank, (host, sockets, drive, rate) in zip(order, flat, strict=True)
    )


@relaxed
@given(topologies(), policies, st.sampled_from([None, 0, 3 * BLOCK_NBYTES, MUCH]))
def test_every_choice(topology: Topology, policy: Any, nbytes: int | None) -> None:
    config = SaveConfig(writers=policy)
    choice = select(topology, config, nbytes=nbytes)
    assert choice.ranks
    assert list(choice.ranks) == sorted({*choice.ranks})
    assert {*choice.ranks} <= {*range(topology.size)}
    assert choice.reason
    assert len(choice.weights) in (0, len(choice.ranks))
    assert all(0 < weight <= 1 for weight in choice.weights)
    # every rank gathers the places in its own order
    messages = [encode(place) for place in topology.places]
    for order in (messages[::-1], messages[1::2] + messages[::2]):
        assert select(decode(order), config, nbytes=nbytes) == choice


@relaxed
@given(topologies())
def test_auto_covers_every_drive_with_enough(topology: Topology) -> None:
    chosen = {*ranks(topology)}
    drives = defaultdict(list)
    for one in topology.places:
        drives[one.host, one.device.key].append(one)
    for places in drives.values():
        writing = [one for one in places if one.rank in chosen]
        rate = max((one.drive_bytes_per_s or 0.0 for one in places), default=0.0)
        assert writing
        # enough, but for the last tenth of a writer; and none too many
        assert len(writing) == len(places) or len(writing) * COPY_BYTES_PER_S >= rate - 0.11 * COPY_BYTES_PER_S
        assert (len(writing) - 1) * COPY_BYTES_PER_S < max(rate, 1.0)
        sockets = Counter(one.socket for one in places)
        if all(one.socket is not None for one in places) and max(sockets.values()) >= len(writing):
            assert len({one.socket for one in writing}) == 1


@relaxed
@given(topologies(), st.integers(1, 10))
def test_per_node_is_even(topology: Topology, n: int) -> None:
    chosen = {*ranks(topology, per_node(n))}
    for places in topology.hosts().values():
        writing = [one for one in places if one.rank in chosen]
        assert len(writing) == min(n, len(places))
        on_drive = Counter(one.device.key for one in writing)
        for one in places:
            if one.rank not in chosen:
                # its drive has no fewer writers than any other, less one
                assert on_drive[one.device.key] >= max(on_drive.values()) - 1


@relaxed
@given(topologies())
def test_per_socket_covers_every_bound_rank_s_socket(topology: Topology) -> None:
    chosen = {*ranks(topology, "per_socket")}
    for places in topology.hosts().values():
        writing = [one for one in places if one.rank in chosen]
        for one in places:
            if one.socket is not None:
                assert any(one.socket in other.sockets for other in writing)
        assert len(writing) <= max(
            1, len({s for one in places for s in one.sockets}) + any(not o.sockets for o in places)
        )
