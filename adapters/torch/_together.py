"""Which ranks of the job save together: a DTensor names its ranks as the job does, a save as its comm does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from weakref import WeakKeyDictionary

import torch

from fp_multi import Comm


class Together:
    """The ranks of a job that save a state together.

    Args:
        ranks: their numbers in the job, in the order of their numbers in the save.

    Attributes:
        numbers: by number in the job, that in the save.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.numbers = {rank: number for number, rank in enumerate(ranks)}


_together: ContextVar[Together | None] = ContextVar("together", default=None)
_known: WeakKeyDictionary[Comm, Together] = WeakKeyDictionary()


def together() -> Together:
    """The ranks of the save for which tensors are being described; all ranks of the job if it did not say."""
    return _together.get() or _everyone(*_job())


@cache
def _everyone(rank: int, size: int) -> Together:
    # The rank is in the key: what is known of tensors for these ranks is seen from one of them.
    return Together(range(size))


@cache
def _alone(rank: int) -> Together:
    return Together((rank,))


@contextmanager
def saving_together(comm: Comm | None) -> Iterator[None]:
    """Describe tensors for a save by the ranks of a comm.

    Args:
        comm: of the save; None for this process alone.
    """
    found = _alone(_job()[0]) if comm is None else _known.get(comm)
    if found is None and comm is not None:
        found = _known[comm] = Together(_ranks_of(comm))
    token = _together.set(found)
    try:
        yield
    finally:
        _together.reset(token)


def _ranks_of(comm: Comm) -> Sequence[int]:
    ranks: Sequence[int] | None = getattr(comm, "ranks", None)
    if ranks is not None:
        return ranks
    rank, size = _job()
    if comm.size == 1:
        return (rank,)
    # A comm that does not say which ranks it has, and cannot be all of them, knows none.
    return range(size) if (comm.rank, comm.size) == (rank, size) else ()


def _job() -> tuple[int, int]:
    """This process's rank in the job, and the number of processes."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()
