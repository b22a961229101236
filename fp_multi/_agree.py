"""How the processes of a job agree whether a checkpoint is complete.

A :class:`Session` belongs to a comm; each save is a :class:`Round` of it, which may run in a background thread, because
it uses the comm's key-value store and no collective::

    every rank                   rank 0, the leader
    post(receipt), or fail(e)
                                 collect() -> receipts of all, or the error of the first that failed
                                 ... writes the manifest, renames ...
                                 decide(value), or reject(e)
    outcome() -> value, or the error
    close()                      close()

Every rank makes a handful of calls, whatever the number of ranks, and a waiting rank waits for one key. Only the
leader's calls grow with the number of ranks.

Keys, behind the session's nonce: ``K/rN`` the receipt of rank N in round K, ``K/failed`` the error of whoever failed
first, ``K/done`` the leader's word, ``closed/N`` the first round that rank N has not closed yet. A rank removes its
own receipts. The leader removes the rest of a round once all have closed it, which it looks up every
``SWEEP_ROUNDS`` rounds, so the store holds a bounded number of keys however many rounds there are.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from fp_multi._comm import Comm
from fp_multi._messages import delete_value
from fp_multi._round import LEADER as LEADER
from fp_multi._round import Round as Round
from fp_multi.errors import CommTimeoutError

SWEEP_ROUNDS = 16

_sessions: WeakKeyDictionary[Comm, Iterator[int]] = WeakKeyDictionary()
_sessions_lock = threading.Lock()


class Session:
    """What the ranks of a comm have agreed on for all their saves: a nonce, and the numbers of the rounds.

    All ranks of the comm make it, in the same order if they make several.

    Args:
        comm: the job.

    Attributes:
        comm: as given.
        nonce: 16 hexadecimal digits, the same on every rank and never the same twice.

    Raises:
        CommTimeoutError: rank 0 does not make one.
        CommError: the store cannot be reached.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        with _sessions_lock:
            count = next(_sessions.setdefault(comm, itertools.count()))
        key = f"session/{count}"
        if comm.rank == LEADER:
            self.nonce = secrets.token_hex(8)
            comm.put(key, self.nonce.encode())
        else:
            nonce = comm.get(key, comm.timeout_s)
            if nonce is None:
                raise CommTimeoutError(
                    f"rank {LEADER} has not begun session {count} of this comm within {comm.timeout_s:g} s; "
                    "do all ranks save and load with it in the same order?",
                    (LEADER,),
                )
            self.nonce = nonce.decode()
        self._lock = threading.Lock()
        self._next = 0
        self._open: set[int] = set()
        self._published = 0
        self._ended: dict[int, dict[str, int]] = {}
        """The leader's: rounds whose keys are still there, with the keys of its words and the number of their parts."""

    def round(self, tag: str) -> Round:
        """Begin the next round. All ranks do, in the same order.

        Args:
            tag: what it is for; a rank that comes with another one is an error, not a wait.

        Returns:
            The round, which must be closed.
        """
        with self._lock:
            number = self._next
            self._next += 1
            self._open.add(number)
        return Round(self, number, tag)

    def exchange(self, tag: str, value: bytes) -> list[bytes]:
        """A round that is nothing but a :meth:`Round.exchange`. For set-up: each of N ranks gets N values."""
        with self.round(tag) as round_:
            return round_.share(value)

    def end(self, number: int, words: dict[str, int]) -> None:
        """A round is closed here: say so, and as the leader remove what nobody needs any more."""
        with self._lock:
            self._open.discard(number)
            first_open = min(self._open, default=self._next)
            if self.comm.rank == LEADER:
                self._ended[number] = words
            elif first_open > self._published:
                # Under the lock: a smaller number must not overtake a larger one.
                self.comm.put(f"{self.nonce}/closed/{self.comm.rank}", str(first_open).encode())
                self._published = first_open
        if len(self._ended) >= SWEEP_ROUNDS and number % SWEEP_ROUNDS == 0:
            self._sweep(first_open)

    def _sweep(self, first_open: int) -> None:
        for rank in range(1, self.comm.size):
            closed = self.comm.get(f"{self.nonce}/closed/{rank}", 0)
            first_open = min(first_open, int(closed or 0))
        with self._lock:
            unneeded = {number: words for number, words in self._ended.items() if number < first_open}
            for number in unneeded:
                del self._ended[number]
        for words in unneeded.values():
            for key, parts in words.items():
                self.comm.delete(f"{key}/failed")
                delete_value(self.comm, f"{key}/done", parts)
