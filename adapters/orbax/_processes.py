"""The processes that save and restore together, and how they agree."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp

from fp_multi import Comm
from fp_multi.errors import ConfigError
from fp_multi.storage import Round, Session

from .comm import JaxComm

_lock = threading.Lock()
_sessions: dict[tuple[Any, ...], Session] = {}


class Processes:
    """The processes of one handler.

    Args:
        options: as for Orbax's own handlers. With ``primary_host=None`` every process keeps a checkpoint of its own.
        timeout_s: how long one process waits for another.

    Raises:
        ConfigError: the primary host is not active.
    """

    def __init__(self, options: ocp.options.MultiprocessingOptions, timeout_s: float) -> None:
        self._primary = options.primary_host
        self._active = options.active_processes
        self._prefix = options.barrier_sync_key_prefix or ""
        self._timeout_s = timeout_s
        if self._active is not None and self._primary is not None and self._primary not in self._active:
            raise ConfigError(f"primary_host {self._primary} is not one of active_processes {sorted(self._active)}")

    @property
    def ids(self) -> tuple[int, ...]:
        """JAX's indices of the processes that put one checkpoint together, ascending."""
        if self._primary is None:
            return (jax.process_index(),)
        return tuple(range(jax.process_count())) if self._active is None else tuple(sorted(self._active))

    @property
    def rank(self) -> int:
        """This process's place among them."""
        return self.ids.index(jax.process_index())

    def agreement(self, tag: str) -> Agreement:
        """The next agreement of all of them, which must be closed; all make it, in the same order.

        Args:
            tag: what it is about.
        """
        ids = self.ids
        if len(ids) == 1:
            return Agreement(None, 0)
        return Agreement(_session(ids, self._prefix, self._timeout_s).round(tag), self.rank)


class Agreement:
    """Whether all processes have done their parts. With one process it is there at once.

    Args:
        round_: of the processes; None for one process.
        rank: of this one.
    """

    def __init__(self, round_: Round | None, rank: int) -> None:
        self._round = round_
        self.is_leader = rank == 0

    def arrive(self, receipt: bytes = b"") -> list[bytes]:
        """This process has done its part; on the leader, wait for the others.

        Args:
            receipt: what the leader is to know.

        Returns:
            On the leader the receipts of all, by rank; elsewhere nothing.

        Raises:
            CommError: another process failed (RankFailedError, with its error), or does not answer.
        """
        if self._round is None:
            return [receipt]
        self._round.post(receipt)
        return self._round.collect() if self.is_leader else []

    def conclude(self) -> None:
        """The leader says that all is well; the others wait for that.

        Raises:
            CommError: another process failed (RankFailedError, with its error), or does not answer.
        """
        if self._round is None:
            return
        if self.is_leader:
            self._round.decide(b"")
        else:
            self._round.outcome()

    def fail(self, error: BaseException) -> None:
        """This process failed: the others are told."""
        if self._round is not None:
            self._round.fail(error)

    def close(self) -> None:
        """Remove what this process left in the store."""
        if self._round is not None:
            self._round.close()


def _session(ids: tuple[int, ...], prefix: str, timeout_s: float) -> Session:
    key = (ids, prefix, timeout_s)
    with _lock:
        found = _sessions.get(key)
        if found is None:
            comm = JaxComm(processes=ids, timeout_s=timeout_s)
            found = _sessions[key] = Session(_Prefixed(comm, prefix) if prefix else comm)
        return found


class _Prefixed:
    """A comm with keys of its own: saves of several managers go on at the same time, in any order."""

    def __init__(self, comm: Comm, prefix: str) -> None:
        self._comm = comm
        self._prefix = prefix + "/"
        self.rank, self.size, self.timeout_s = comm.rank, comm.size, comm.timeout_s

    def put(self, key: str, value: bytes) -> None:
        self._comm.put(self._prefix + key, value)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        return self._comm.get(self._prefix + key, timeout_s)

    def delete(self, key: str) -> None:
        self._comm.delete(self._prefix + key)

    def all_gather(self, part: npt.NDArray[np.uint8], whole: npt.NDArray[np.uint8]) -> None:
        self._comm.all_gather(part, whole)
