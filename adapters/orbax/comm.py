"""JaxComm: how the processes of a ``jax.distributed`` job agree on a checkpoint."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

# JAX has no public name for the client of its coordination service; Orbax takes it from here too.
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp_multi import Comm, SingleProcess
from fp_multi.errors import CommError, ConfigError

__all__ = ["JaxComm"]

_LOOK_S = 1.0
"""Waits up to this long look again and again: each blocking call that runs out of time leaves a little memory behind in
the service."""
_FIRST_NAP_S, _LONGEST_NAP_S = 0.002, 0.05
_BLOCKING_S = 30.0
_GATHER_NBYTES = 64 << 20
"""Bytes on each device in one step of an all_gather."""

_made: Counter[str] = Counter()
_made_lock = threading.Lock()


class JaxComm:
    """The processes of a ``jax.distributed`` job, or some of them, for ``comm=`` of :func:`fp_multi.save` and its kin.

    All of these processes make it, and if they make several of the same processes, in the same order. What they tell
    each other about a save goes through the coordination service's key-value store, never through a JAX computation: it
    is safe in a background thread while the devices compute. Only a load with ``broadcast=True`` moves data between
    processes; it is a JAX computation over one device of each process, so all of them must call it in the same order as
    their other computations, in the same thread.

    Without ``jax.distributed`` it is a job of one process. A process that dies gives the others an error when
    ``timeout_s`` is up, unless JAX ends them first: it does so when the process with the service (process 0) is gone,
    or another has been silent for ``heartbeat_timeout_seconds``.

    Args:
        processes: their process ids; None is all. Ranks follow the ids in ascending order.
        timeout_s: how long a process waits for another, in seconds: at least as long as the slowest may write after the
            fastest is done.

    Attributes:
        rank, size: this process's place among them, and how many there are.
        timeout_s: as given.

    Raises:
        CommError: this process is not one of ``processes``, or one is not in the job.
        ConfigError: timeout_s is not positive and finite, or ``processes`` names one twice.

    Example:
        >>> import jax
        >>> import fp_multi as fp
        >>> from fp_multi.adapters.orbax import JaxComm
        >>> jax.distributed.initialize()  # doctest: +SKIP
        >>> report = fp.save(state, path, comm=JaxComm())  # doctest: +SKIP
    """

    def __init__(self, *, processes: Sequence[int] | None = None, timeout_s: float = 600.0) -> None:
        if not 0 < timeout_s < math.inf:
            raise ConfigError(f"timeout_s must be positive and finite, found {timeout_s}")
        state = distributed.global_state
        chosen = sorted(range(state.num_processes) if processes is None else processes)
        if len(set(chosen)) != len(chosen):
            raise ConfigError(f"processes names a process twice: {chosen}")
        if not set(chosen) <= set(range(state.num_processes)):
            raise CommError(f"processes names {chosen}, the job has {state.num_processes}, numbered from 0")
        if state.process_id not in chosen:
            raise CommError(f"this is process {state.process_id}, it cannot be in a comm of the processes {chosen}")
        self._processes = tuple(chosen)
        self.rank = chosen.index(state.process_id)
        self.size = len(chosen)
        self.timeout_s = float(timeout_s)
        self._store: Comm | _Service
        self._store = SingleProcess() if self.size == 1 else _Service(state.client, _new_prefix(chosen))
        self._gather: Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]] | None = None

    def put(self, key: str, value: bytes) -> None:
        """See :meth:`fp_multi.Comm.put`."""
        self._store.put(key, value)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """See :meth:`fp_multi.Comm.get`."""
        return self._store.get(key, timeout_s)

    def delete(self, key: str) -> None:
        """See :meth:`fp_multi.Comm.delete`."""
        self._store.delete(key)

    def all_gather(self, part: npt.NDArray[np.uint8], whole: npt.NDArray[np.uint8]) -> None:
        """See :meth:`fp_multi.Comm.all_gather`. A JAX computation; it goes through device memory in steps."""
        try:
            self._all_gather(part, whole)
        except jax.errors.JaxRuntimeError as error:
            raise CommError(f"all_gather over {self.size} processes failed, perhaps one is gone: {error}") from error

    def _all_gather(self, part: npt.NDArray[np.uint8], whole: npt.NDArray[np.uint8]) -> None:
        if self._gather is None:
            self._gather = _gatherer(self._processes)
        said = self._gather(np.array([part.size, whole.size], np.int64).view(np.uint8)).view(np.int64)
        sizes = said.reshape(self.size, 2).tolist()
        cuts = [0, *accumulate(own for own, _ in sizes)]
        if any(total != cuts[-1] for _, total in sizes):
            raise CommError(f"all_gather: the parts have {cuts[-1]} bytes together, whole has {whole.size}")
        longest = max(own for own, _ in sizes)
        # A power of two: each new length is compiled anew.
        step = min(_GATHER_NBYTES // self.size, 1 << max(longest - 1, 0).bit_length())
        for start in range(0, longest, step):
            piece = np.zeros(step, np.uint8)
            mine = part[start : start + step]
            piece[: mine.size] = mine
            for rank, row in enumerate(self._gather(piece).reshape(self.size, step)):
                into = whole[cuts[rank] + start : min(cuts[rank] + start + step, cuts[rank + 1])]
                into[:] = row[: into.size]


class _Service:
    """The key-value store of JAX's coordination service, under a prefix."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    def put(self, key: str, value: bytes) -> None:
        with _as_comm_error():
            self._client.key_value_set_bytes(self._prefix + key, value, allow_overwrite=True)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        key = self._prefix + key
        deadline_s = time.monotonic() + timeout_s
        nap_s = _FIRST_NAP_S
        with _as_comm_error():
            while True:
                value = self._look(key)
                left_s = deadline_s - time.monotonic()
                if value is None and timeout_s > _LOOK_S and left_s > 0:
                    value = self._block(key, min(left_s, _BLOCKING_S))
                if value is not None or left_s <= 0:
                    return value
                time.sleep(min(nap_s, left_s))
                nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def _look(self, key: str) -> bytes | None:
        try:
            value: bytes = self._client.key_value_try_get_bytes(key)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("NOT_FOUND"):
                raise
            return None
        return value

    def _block(self, key: str, timeout_s: float) -> bytes | None:
        try:
            value: bytes = self._client.blocking_key_value_get_bytes(key, max(int(timeout_s * 1000), 1))
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise
            return None
        return value

    def delete(self, key: str) -> None:
        with _as_comm_error():
            self._client.key_value_delete(self._prefix + key)


@contextmanager
def _as_comm_error() -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise CommError(
            f"the coordination service of jax.distributed cannot be reached; process 0 may have died: {error}"
        ) from error


def _new_prefix(processes: Sequence[int]) -> str:
    """The same on all of these processes, as each makes its comms in the same order."""
    name = hashlib.sha256(repr(list(processes)).encode()).hexdigest()[:16]
    with _made_lock:
        number = _made[name]
        _made[name] += 1
    return f"fp_multi/{name}/{number}/"


def _gatherer(processes: Sequence[int]) -> Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]:
    """A function that gives all processes the bytes of all, equally many from each; over one device of each."""
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([first[process] for process in processes]), ("process",))
    split = NamedSharding(mesh, PartitionSpec("process"))  # type: ignore[no-untyped-call]
    everywhere = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    own = first[distributed.global_state.process_id]
    spread = jax.jit(lambda whole: whole, out_shardings=everywhere)

    def gather(part: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        shape = (part.size * len(processes),)
        whole = jax.make_array_from_single_device_arrays(shape, split, [jax.device_put(part, own)])
        return np.asarray(spread(whole).addressable_data(0))

    return gather
