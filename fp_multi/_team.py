"""The ranks that save one checkpoint together: what they agree on once, and how each save of theirs is committed."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from fp_multi import _engine, _probe, _topology, _union, _writers
from fp_multi._agree import LEADER, Round, Session
from fp_multi._comm import Comm
from fp_multi._plan import Division, TeamPlan, divide, fingerprint
from fp_multi._types import Described
from fp_multi.config import SaveConfig

_TEAM = "_fp_multi_team"

_REMEMBERED = 16

_lock = threading.Lock()
_locks: WeakKeyDictionary[Comm, threading.Lock] = WeakKeyDictionary()


class Prepared(NamedTuple):
    """What a save knows of all ranks before it is planned; made by :meth:`Team.prepare`."""

    topology: _topology.Topology
    union: _union.Union | None
    """Of the ranks' states; None if they have the same."""
    fingerprint: int
    """Of the state of all of them."""


class Team:
    """The ranks of a comm; made by :func:`team_of`.

    Attributes:
        comm: as given.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._session = Session(comm)
        self._lock = threading.Lock()  # guards what is below: saves may be planned in several threads
        self._topologies: dict[tuple[Any, ...], _topology.Topology] = {}
        self._unions: dict[int, tuple[_union.Union | None, int]] = {}
        """By what this rank has: the union with the others' states, None if they have the same; its fingerprint."""
        self._division: tuple[Any, Division] | None = None
        """Of the last save: the next one mostly has the same structure."""

    @property
    def leads(self) -> bool:
        """Whether this rank commits."""
        return self.comm.rank == LEADER

    def round(self, tag: str) -> Round:
        """Begin a save or a restore; every rank does, in the same order, before anything that may fail."""
        return self._session.round(tag)

    def token(self, round_: Round) -> str:
        """16 hexadecimal digits that only this round has."""
        text = f"{self._session.nonce}/{round_.number}".encode()
        return f"{zlib.crc32(text):08x}{_engine.crc32c(text):08x}"

    def forget(self) -> None:
        """After a failure, which all ranks hear of, nobody knows what the others remember: all ask again."""
        with self._lock:
            self._topologies.clear()
            self._unions.clear()

    def prepare(self, described: Described, config: SaveConfig, parent: str, round_: Round) -> Prepared:
        """Learn what has to be known of the other ranks, where it is not known yet.

        The first time, and when the structure of the state changes (on all ranks at once), the ranks exchange what
        they have; otherwise nothing is said. Done in the order of the rounds, by all ranks.

        Args:
            described: this rank's state.
            config: who shall write.
            parent: the directory in which the checkpoint goes.
            round_: the save's.

        Returns:
            Where the ranks run, and what they have.

        Raises:
            UnsupportedLeafError: the ranks' tensors do not fit together.
            CommError: a rank is gone, or does something else.
        """
        key = parent, config.writers == "auto", config.drive_bytes_per_s, config.copy_threads
        topology = self._topologies.get(key)
        if topology is None:
            place = _topology.local_place(self.comm.rank, parent, config)
            if config.writers == "auto":
                rate = _probe.drive_rate(parent, place.device, place.host, config).bytes_per_s
                place = replace(place, drive_bytes_per_s=rate)
            places = round_.exchange(f"topology of {parent}", _topology.encode(place))
            topology = _topology.decode(places)
            self._remember(self._topologies, key, topology)
        mark = fingerprint(described)
        mine = _engine.crc32c(msgspec.msgpack.encode((mark, _union.skeleton(described.tree))))
        with self._lock:
            known = self._unions.get(mine)
        if known is None:
            all_of_them = round_.exchange("structure", mine.to_bytes(4, "little"))
            union = None
            alone = any([source.sharded is not None and not source.sharded.holders for source in described.sources])
            if alone or len({*all_of_them}) > 1:
                sketches = round_.exchange("paths", msgspec.msgpack.encode(_union.sketch(described)))
                union = _union.unite([msgspec.msgpack.decode(data, type=_union.Sketch) for data in sketches])
                mark = fingerprint(_union.in_union(described, union, self.comm.rank))
            known = union, mark
            self._remember(self._unions, mine, known)
        return Prepared(topology, *known)

    def _remember(self, known: dict[Any, Any], key: Any, value: Any) -> None:
        with self._lock:
            known[key] = value
            while len(known) > _REMEMBERED:  # all ranks ask for the same in the same order, and forget the same
                del known[next(iter(known))]

    def plan(self, described: Described, config: SaveConfig, prepared: Prepared) -> TeamPlan:
        """Divide a state among the ranks.

        Args:
            described: this rank's state.
            config: who shall write.
            prepared: what :meth:`prepare` said of it.
        """
        topology, union, mark = prepared
        whole = described if union is None else _union.in_union(described, union, self.comm.rank)
        nbytes = sum([source.nbytes for source in whole.sources])
        choice = _writers.select(topology, config, nbytes=nbytes)
        weights: list[float] | None = None
        if choice.weights:
            weights = [1.0] * self.comm.size
            for rank, weight in zip(choice.ranks, choice.weights, strict=True):
                weights[rank] = weight
        known = self._division
        if known is None or known[0] != (mark, choice):
            division = divide(whole, size=self.comm.size, writers=choice.ranks, weights=weights, mark=mark)
            self._division = known = (mark, choice), division
        part = known[1].part(whole, self.comm.rank)
        tree = None if union is None else described.tree
        return TeamPlan(whole, part, choice.ranks, choice.reason, union, tree)

    def tree_of_all(self, trees: Sequence[Any], plan: TeamPlan) -> Any:
        """The tree of a state that differs between the ranks, from those that all ranks have now."""
        return _union.merged_tree(trees, plan.union)


def team_of(comm: Comm) -> Team:
    """The team of a comm; the first call is the set-up, which all ranks take part in.

    Raises:
        CommError: the store cannot be reached.
    """
    with _lock:
        lock = _locks.setdefault(comm, threading.Lock())
    with lock:  # one for each comm: another one's set-up may wait for another rank
        team: Team | None = getattr(comm, _TEAM, None)
        if team is None:
            team = Team(comm)
            # On the comm itself: the team holds it, so nothing that holds the team by it would ever let go.
            setattr(comm, _TEAM, team)
        return team
