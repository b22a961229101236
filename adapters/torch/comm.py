"""TorchComm: how the ranks of a ``torch.distributed`` group agree on a checkpoint."""

from __future__ import annotations

import hashlib
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from fp_multi.errors import CommError, CommTimeoutError, ConfigError

if TYPE_CHECKING:  # a torch that was built without torch.distributed can be imported too
    from torch.distributed.distributed_c10d import Store

__all__ = ["TorchComm"]

_POLL_S = 5.0
"""The longest wait inside one call of the store: so long does Python not notice a signal in the main thread."""
_CONNECT_S = 60.0
"""The longest wait for a connection to a store that this process has reached before."""

_made: Counter[str] = Counter()
_made_lock = threading.Lock()


class TorchComm:
    """The ranks of a process group, as :func:`fp_multi.save` and :func:`fp_multi.load` take them.

    All ranks of the group make it, and if they make several, in the same order. It works with any backend. What ranks
    tell each other about a save goes through the key-value store that the job was set up with, over connections of its
    own, never through a collective: it is safe in a background thread beside the training's NCCL or gloo work. Only a
    load with ``broadcast=True`` moves data between ranks. It runs in the caller's thread and uses a gloo group of its
    own, which is connected at the first such load.

    A rank that dies gives the others an error when ``timeout_s`` is up. If the process with the store dies (rank 0, or
    torchrun's agent on the first node), they get it at once.

    Args:
        process_group: the group; None is the default group.
        timeout_s: how long a rank waits for another, in seconds: at least as long as the slowest rank may write after
            the fastest is done.

    Attributes:
        rank, size: this process's place in the group (not in the job), and how many there are.
        ranks: the group's ranks in the job, in the order of their places.
        timeout_s: as given.

    Raises:
        CommError: torch.distributed is not set up, this process is not in the group, or a rank does not come.
        ConfigError: timeout_s is not positive and finite.

    Example:
        >>> import torch.distributed as dist
        >>> from fp_multi.adapters.torch import TorchComm, save
        >>> dist.init_process_group("nccl")  # doctest: +SKIP
        >>> comm = TorchComm()  # doctest: +SKIP
        >>> report = save(state, path, comm=comm)  # doctest: +SKIP
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        if not 0 < timeout_s < math.inf:
            raise ConfigError(f"timeout_s must be positive and finite, found {timeout_s}")
        if not dist.is_available() or not dist.is_initialized():
            raise CommError(
                "TorchComm needs torch.distributed: call torch.distributed.init_process_group first (under torchrun), "
                "or save without comm= in a single process"
            )
        self.rank: int = dist.get_rank(process_group)
        if self.rank < 0:
            raise CommError("this process is not in the process group; only its members make a TorchComm of it")
        self.size: int = dist.get_world_size(process_group)
        self.timeout_s = float(timeout_s)
        group = process_group or dist.distributed_c10d._get_default_group()
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        store = dist.distributed_c10d._get_default_store()
        self._prefix = self._agree_on_prefix(group, store)
        self._connections = _Connections(store, timeout_s)
        self._gloo: Any = None
        """A ProcessGroupGloo that no other code knows, so that none of its collectives can come between."""

    def _agree_on_prefix(self, group: dist.ProcessGroup, store: Store) -> str:
        """A name for this comm that no other in the store has, the same on all its ranks."""
        name = hashlib.sha256(f"{group.group_name}:{dist.get_process_group_ranks(group)}".encode()).hexdigest()[:16]
        with _made_lock:
            number = _made[name]
            _made[name] += 1
        key = f"fp_multi/{name}/{number}"
        with _comm_errors():
            if self.rank == 0:
                store.set(key, secrets.token_hex(8))
            token = _get(store, key, self.timeout_s)
        if token is None:
            raise CommTimeoutError(
                f"rank 0 of the group has not made its TorchComm number {number} within {self.timeout_s:g} s; "
                "all ranks of a group make its comms, in the same order",
                (0,),
            )
        return f"fp_multi/{token.decode()}/"

    def put(self, key: str, value: bytes) -> None:
        """See :meth:`fp_multi.Comm.put`."""
        key = self._prefix + key
        with self._connections.borrow() as store:
            store.set(key, value)  # type: ignore[arg-type]  # takes bytes, whatever its stub says
            # A TCPStore does not answer a set. This is answered after it: what failed is known here, and the order is
            # kept towards calls that use another connection.
            store.check([key])

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """See :meth:`fp_multi.Comm.get`."""
        with self._connections.borrow() as store:
            return _get(store, self._prefix + key, timeout_s)

    def delete(self, key: str) -> None:
        """See :meth:`fp_multi.Comm.delete`."""
        with self._connections.borrow() as store:
            store.delete_key(self._prefix + key)

    def all_gather(self, part: npt.NDArray[np.uint8], whole: npt.NDArray[np.uint8]) -> None:
        """See :meth:`fp_multi.Comm.all_gather`."""
        try:
            self._all_gather(part, whole)
        except RuntimeError as error:
            if isinstance(error, CommError):
                raise
            raise CommError(f"all_gather over gloo failed, perhaps a rank is gone: {error}") from error

    def _all_gather(self, part: npt.NDArray[np.uint8], whole: npt.NDArray[np.uint8]) -> None:
        if self._gloo is None:
            store = dist.PrefixStore(f"{self._prefix}gloo", self._connections.open())  # type: ignore[attr-defined]
            self._gloo = dist.distributed_c10d.ProcessGroupGloo(
                store, self.rank, self.size, timedelta(seconds=self.timeout_s)
            )
        sizes = [torch.empty(2, dtype=torch.int64) for _ in range(self.size)]
        self._gloo.allgather([sizes], [torch.tensor([part.size, whole.size])]).wait()
        cuts = [0, *accumulate(int(size[0]) for size in sizes)]
        if any(int(size[1]) != cuts[-1] for size in sizes):
            raise CommError(f"all_gather: the parts have {cuts[-1]} bytes together, whole has {whole.size}")
        mine = whole[cuts[self.rank] : cuts[self.rank + 1]]
        if mine.ctypes.data != part.ctypes.data:
            mine[:] = part
        buffer = torch.from_numpy(whole)
        # One broadcast for each part goes straight into place; an allgather would need all of it a second time.
        work = [
            self._gloo.broadcast(buffer[start:end], root=rank)
            for rank, (start, end) in enumerate(pairwise(cuts))
            if start < end
        ]
        for each in work:
            each.wait()

    def close(self) -> None:
        """Give back the connections; the comm connects anew if it is used again. Not needed at the end of a process."""
        self._gloo = None
        self._connections.close()


class _Connections:
    """Connections to the job's store, one for each call under way: a client that waits lets no other call through."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store = store
        self._timeout = timedelta(seconds=min(timeout_s, _CONNECT_S))
        self._idle: list[Store] = []
        self._lock = threading.Lock()
        self._lost: Exception | None = None

    def open(self) -> Store:
        """A connection that nobody else uses; a store that is no server (a file, a table in memory) is shared."""
        bottom = self._store
        while isinstance(bottom, dist.PrefixStore):  # type: ignore[attr-defined]
            bottom = bottom.underlying_store
        if not isinstance(bottom, dist.TCPStore):  # type: ignore[attr-defined]
            return self._store
        # Without the prefixes of the store that it stands for: the comm's own is unique in any case.
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            bottom.host, bottom.port, is_master=False, timeout=self._timeout, wait_for_workers=False
        )
        return store

    @contextmanager
    def borrow(self) -> Iterator[Store]:
        """A connection for one call; after an error it is dropped, as half an answer may be in it."""
        with _comm_errors():
            if self._lost is not None:  # connecting to a dead host would take its time
                raise self._lost
            with self._lock:
                store = self._idle.pop() if self._idle else None
            if store is None:
                store = self.open()
            try:
                yield store
            except dist.DistNetworkError as error:
                self._lost = error
                raise
        with self._lock:
            self._idle.append(store)

    def close(self) -> None:
        with self._lock:
            self._idle.clear()


@contextmanager
def _comm_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise CommError(
            "the job's key-value store cannot be reached; the process that hosts it (rank 0, or torchrun's agent) may "
            f"have died: {error}"
        ) from error


def _get(store: Store, key: str, timeout_s: float) -> bytes | None:
    deadline_s = time.monotonic() + timeout_s
    while not store.check([key]):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        _wait(store, key, min(left_s, _POLL_S))
    value: bytes = store.get(key)
    return value


def _wait(store: Store, key: str, timeout_s: float) -> None:
    """Wait until a key is there or the time is up; the caller looks which."""
    began_s = time.monotonic()
    try:
        # No less than 1 ms: 0 is no limit.
        store.wait([key], timedelta(seconds=max(timeout_s, 0.002)))
    except dist.DistNetworkError:
        raise
    except RuntimeError:
        # Stores say in different ways that the time is up, and torch has no class of its own for it.
        if time.monotonic() - began_s < 0.9 * timeout_s:
            raise
