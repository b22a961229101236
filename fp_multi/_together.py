"""A save or a load of several ranks on its way through the stages; what single processes need of it costs nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fp_multi._arguments import require
from fp_multi._comm import Comm
from fp_multi._types import Described
from fp_multi.config import SaveConfig

if TYPE_CHECKING:
    from fp_multi._round import Round as Round
    from fp_multi._team import Prepared, Team

_LOOK_FIRST_S = 0.1
_LOOK_LAST_S = 5.0


class Together:
    """One save or load of a team, on its way from the thread that asked for it to the one that does it.

    Attributes:
        team: the ranks.
        round: in which they agree on it.
        taken: whether the background has begun with it; from then on the round is not the asking thread's.
        prepared: of a save: what the ranks know of each other's states, once they have asked.
    """

    def __init__(self, team: Team, round_: Round) -> None:
        self.team = team
        self.round = round_
        self.taken = False
        self.prepared: Prepared | None = None

    def prepare(self, described: Described, config: SaveConfig, parent: str) -> Prepared:
        """See :meth:`Team.prepare`; asked once, where all ranks come in the same order."""
        if self.prepared is None:
            self.prepared = self.team.prepare(described, config, parent, self.round)
        return self.prepared

    def give_up(self, error: BaseException) -> None:
        """Tell the others that it has failed here, unless the background does; what was agreed on is not relied on."""
        if not self.taken:
            self.round.fail(error)
            self.round.close()
            self.team.forget()


class Watch:
    """Looks now and then whether another rank has failed, so that a rank that is still writing can stop."""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._pause_s = _LOOK_FIRST_S
        self._next_s = time.monotonic() + self._pause_s

    def __call__(self, job: Any = None) -> None:
        """Raise if another rank has failed."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        # Early failures (no room, the checkpoint exists) are the usual ones; later looks are for the store's sake few.
        self._pause_s = min(2 * self._pause_s, _LOOK_LAST_S)
        self._next_s = now_s + self._pause_s
        error = self._round.failed()
        if error is not None:
            raise error


def team_of(comm: Comm) -> Team:
    """The team of a comm; the first call is the set-up, which all ranks take part in.

    Raises:
        CommError: the store cannot be reached.
    """
    # Imported when there are several ranks: it would double what the first save of a single process imports.
    from fp_multi import _team

    return _team.team_of(comm)


def begin(comm: Comm, tag: str) -> Together:
    """Begin a round of a comm's team; the caller closes it."""
    team = team_of(comm)
    return Together(team, team.round(tag))


@contextmanager
def together(comm: Comm | None, tag: str) -> Iterator[Together | None]:
    """Begin a round of a comm's team; an exception that leaves the block reaches the other ranks.

    Args:
        comm: the job; None, or one of a single process, needs no agreement.
        tag: what it is for.
    """
    if comm is not None:
        require("comm", comm, Comm)
    if comm is None or comm.size == 1:
        yield None
        return
    one = begin(comm, tag)
    try:
        yield one
    except BaseException as error:
        one.give_up(error)
        raise
    one.round.close()
