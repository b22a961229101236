"""One agreement between the processes of a job; how it goes is told in ``_agree``."""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from types import TracebackType
from typing import Protocol

import msgspec

from fp_multi._comm import Comm
from fp_multi._messages import decode_error, delete_value, encode_error, get_value, missing, put_value
from fp_multi.errors import CommError, CommTimeoutError

LEADER = 0
POLL_S = 0.2
"""How long the leader waits for one receipt before it looks whether somebody failed."""
LEADER_SHARE = 0.8
"""The leader gives up after this share of the comm's time, so that the others hear from it whom it missed before their
own time is up."""


class Owner(Protocol):
    """What a round needs of the session that made it."""

    comm: Comm
    nonce: str

    def end(self, number: int, words: dict[str, int]) -> None:
        """A round is closed here; ``words`` are the keys of what the leader has said in it, and their parts."""


class Round:
    """One agreement. Its methods are called by one thread at a time, except :meth:`failed`, which any thread may call.

    As a context manager it tells the others of an exception that leaves the block, and closes. Made by
    :meth:`Session.round`.

    Attributes:
        tag: as given.
        number: counts the rounds of the session.
    """

    def __init__(self, session: Owner, number: int, tag: str, outer: Round | None = None) -> None:
        self.tag = tag
        self._outer = outer
        self._words: dict[str, int] = {}
        self._session = session
        self._comm = session.comm
        self.number = number
        self._key: str = f"{session.nonce}/{number}" if outer is None else f"{outer._key}/{len(outer._words)}"
        if outer is not None:
            outer._words[self._key] = 0
        self._receipt: bytes | None = None
        self._receipt_parts: int | None = None
        self._error: BaseException | None = None
        """What failed on this rank, or the leader's reason to reject."""
        self._value: bytes | None = None
        self._value_parts = 0
        self.rejected = False
        """The leader has said no; False as long as it has said nothing."""
        self._settled = False
        """The leader's word is known here."""
        self._closed = False

    def __enter__(self) -> Round:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def exchange(self, tag: str, value: bytes) -> list[bytes]:
        """Give every rank the values of all, as part of this round: whoever fails the round fails this.

        Args:
            tag: what it is for.
            value: this rank's.

        Returns:
            The values in the order of the ranks.

        Raises:
            RankFailedError: a rank failed meanwhile.
            CommTimeoutError: a rank did not come.
            CommError: the store cannot be reached, or the ranks do different things.
        """
        with Round(self._session, self.number, f"{self.tag}: {tag}", self) as inner:
            return inner.share(value)

    def share(self, value: bytes) -> list[bytes]:
        """All of a round whose outcome are the values of all ranks."""
        self.post(value)
        if self._comm.rank == LEADER:
            # Ranks tend to say nearly the same thing.
            self.decide(zlib.compress(msgspec.msgpack.encode(self.collect()), 1))
        return msgspec.msgpack.decode(zlib.decompress(self.outcome()), type=list[bytes])

    def post(self, value: bytes) -> None:
        """This rank has done its part.

        Args:
            value: its receipt, for the leader.

        Raises:
            CommError: the store cannot be reached.
        """
        self._receipt = value
        if self._comm.rank != LEADER:
            message = json.dumps(self.tag).encode() + b"\n" + value
            self._receipt_parts = put_value(self._comm, f"{self._key}/r{self._comm.rank}", message)

    def fail(self, error: BaseException) -> None:
        """This rank failed: the others get the error, and nothing is committed unless the leader has decided already.

        Never raises: the caller has an error to report that matters more.

        Args:
            error: what happened; :meth:`outcome` and :meth:`collect` raise it here.
        """
        if self._settled or self._closed or self._error is not None:
            return
        self._error = error
        try:
            # The first one's error tells most; what follows are often its consequences.
            if self._comm.get(f"{self._key}/failed", 0) is None:
                self._comm.put(f"{self._key}/failed", encode_error(error, self._comm.rank))
            if self._comm.rank == LEADER:
                self.reject(error)
        except CommError as unreachable:
            error.add_note(f"The other ranks could not be told and will wait until their time is up: {unreachable}")

    def failed(self) -> BaseException | None:
        """Whether a rank has failed: a quick look, for a rank that is still writing and may stop.

        Returns:
            The error (this rank's own, or a RankFailedError), or None.

        Raises:
            CommError: the store cannot be reached.
        """
        if self._error is not None or self._closed:
            return self._error
        message = self._comm.get(f"{self._key}/failed", 0)
        if message is None:
            # What the leader rejects for reasons of its own (somebody is missing) stands only there.
            word = get_value(self._comm, f"{self._key}/done", 0)
            message = word[1:] if word is not None and word[:1] == b"-" else None
        return None if message is None else decode_error(message)

    def collect(self, *, timeout_s: float | None = None) -> list[bytes]:
        """Wait for the receipts of all ranks. Rank 0 only, after its own :meth:`post`. If it raises, the others know.

        Args:
            timeout_s: how long to wait, in seconds; by default four fifths of the comm's.

        Returns:
            The receipts in the order of the ranks.

        Raises:
            RankFailedError: a rank failed; noticed within a fraction of a second.
            CommTimeoutError: receipts are missing; names the ranks.
            CommError: the store cannot be reached, or a rank takes part in something else.
        """
        if self._comm.rank != LEADER or self._receipt is None:
            raise CommError(f"round {self.tag!r}: only rank {LEADER} collects, when it has posted its own receipt")
        if self._error is not None:
            raise self._error
        if timeout_s is None:
            timeout_s = LEADER_SHARE * self._comm.timeout_s
        deadline_s = time.monotonic() + timeout_s
        try:
            receipts = [self._receipt]
            receipts += [self._wait_for(rank, deadline_s, timeout_s) for rank in range(1, self._comm.size)]
            self._raise_if_failed()  # a rank may fail after it has posted
        except CommError as error:
            with contextlib.suppress(CommError):  # if the store is gone, the others notice it themselves
                self.reject(error)
            raise
        return receipts

    def _wait_for(self, rank: int, deadline_s: float, timeout_s: float) -> bytes:
        wait_s = 0.0
        while (message := get_value(self._comm, f"{self._key}/r{rank}", wait_s)) is None:
            self._raise_if_failed()
            self._raise_if_apart(rank)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                rest = [r for r in range(rank, self._comm.size) if self._comm.get(f"{self._key}/r{r}", 0) is None]
                raise missing(self.tag, rest, self._comm.size, timeout_s)
            wait_s = min(POLL_S, left_s)
        tag, _, receipt = message.partition(b"\n")
        if json.loads(tag) != self.tag:
            raise self._out_of_step(rank, json.loads(tag))
        return receipt

    def _out_of_step(self, rank: int, tag: str) -> CommError:
        return CommError(
            f"rank {rank} takes part in {tag!r} while rank {LEADER} does in {self.tag!r}: "
            "all ranks must save and load the same things in the same order"
        )

    def _raise_if_apart(self, rank: int) -> None:
        """Find a rank that exchanges something while the leader does not, or the reverse: neither would ever come."""
        apart = f"{self._key}/{len(self._words)}" if self._outer is None else self._outer._key
        message = get_value(self._comm, f"{apart}/r{rank}", 0)
        if message is not None:
            tag = json.loads(message.partition(b"\n")[0])
            if not tag.startswith(self.tag) and not self.tag.startswith(tag):
                raise self._out_of_step(rank, tag)
            who, other = (rank, LEADER) if self._outer is None else (LEADER, rank)
            raise CommError(
                f"{self.tag}: the structure of the state (paths, shapes, shardings, or the directory) has changed on "
                f"rank {who}, but not on rank {other}; it must change on all ranks in the same save"
            )

    def _raise_if_failed(self) -> None:
        message = self._comm.get(f"{self._key}/failed", 0)
        if message is not None:
            raise decode_error(message)
        if self._outer is not None:
            self._outer._raise_if_failed()

    def decide(self, value: bytes) -> None:
        """It is done: every rank's :meth:`outcome` returns the value. Rank 0 only.

        Args:
            value: what all are to know.

        Raises:
            CommError: the store cannot be reached, or the round is rejected already.
        """
        if self._comm.rank != LEADER or self._settled:
            raise CommError(f"round {self.tag!r}: rank {LEADER} decides, and only once")
        self._speak(b"+" + value)
        self._value = value

    def reject(self, error: BaseException) -> None:
        """It is off: every rank's :meth:`outcome` raises. Rank 0 only; if it has decided or rejected, that stands.

        Args:
            error: why; of another rank, or rank 0's own.

        Raises:
            CommError: the store cannot be reached.
        """
        if self._comm.rank == LEADER and not self._settled:
            self._error = error
            message = b"-" + encode_error(error, LEADER, passed_on=True)
            self._speak(message)
            if self._outer is None and self._comm.size > 1:
                # A rank that does not know yet may be waiting in the exchange that would have come next.
                ahead = f"{self._key}/{len(self._words)}"
                self._words[ahead] = put_value(self._comm, f"{ahead}/done", message)

    def _speak(self, message: bytes) -> None:
        # Settled even if the store fails: who knows what of it arrived.
        self._settled = True
        if self._comm.size > 1:
            self._value_parts = put_value(self._comm, f"{self._key}/done", message)

    def outcome(self) -> bytes:
        """Wait for the leader's word, at most the comm's ``timeout_s``.

        Returns:
            What the leader has decided.

        Raises:
            RankFailedError: a rank failed (on that rank: its own error).
            CommTimeoutError: the leader missed ranks, or has not decided (whether it still will is unknown then; a
                leader that hears of this in time does not).
            CommError: the store cannot be reached.
        """
        if self._error is not None:
            raise self._error
        if self._value is not None:
            return self._value
        if self._comm.rank == LEADER:
            raise CommError(f"round {self.tag!r}: rank {LEADER} has to decide before there is an outcome")
        message = get_value(self._comm, f"{self._key}/done", self._comm.timeout_s)
        if message is None:
            raise CommTimeoutError(
                f"{self.tag}: rank {LEADER} has not decided within {self._comm.timeout_s:g} s; "
                "it is dead, or it or a rank that it waits for is slow",
                (LEADER,),
            )
        self._settled = True
        if message[:1] == b"-":
            self.rejected = True
            self._error = decode_error(message[1:])
            raise self._error
        self._value = message[1:]
        return self._value

    def close(self) -> None:
        """Remove this rank's keys and let the leader remove the rest, once all have closed. Never raises.

        A rank that closes before it knows the outcome takes its receipt back.
        """
        if self._closed:
            return
        self._closed = True
        # A store that cannot be reached is reported by the next round; this one's result is known.
        with contextlib.suppress(CommError):
            if self._receipt_parts is not None:
                delete_value(self._comm, f"{self._key}/r{self._comm.rank}", self._receipt_parts)
            if self._outer is not None:
                self._outer._words[self._key] = self._value_parts
            else:
                self._session.end(self.number, {**self._words, self._key: self._value_parts})
