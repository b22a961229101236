"""What fp_multi asks of the processes of one job: a small store that all of them see, and one gather of bytes.

No transport of our own: an adapter builds a :class:`Comm` from what the framework already runs. Who waits for whom
is written once, in ``_agree``.
"""

from __future__ import annotations

import threading
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fp_multi.errors import CommError

VALUE_NBYTES = 1 << 20
"""The longest value that :meth:`Comm.put` has to take. Torch's TCPStore drops a client that sends more than 8 MiB, and
gRPC under ``jax.distributed`` refuses messages of more than 4 MiB."""


@runtime_checkable
class Comm(Protocol):
    """How the processes that save or load one checkpoint together reach each other.

    ``put``, ``get`` and ``delete`` reach a key-value store that all of these processes share. They may be called from
    several threads at once: a ``get`` that waits neither holds the GIL nor keeps another thread's call from
    going through. Keys are ASCII, at most 512 characters. A comm is hashable by identity.

    ``rank`` numbers the processes from 0, ``size`` counts them, and ``timeout_s`` is how long one waits for another.

    Example:
        >>> import fp_multi as fp
        >>> comm = fp.SingleProcess()
        >>> comm.put("greeting", b"hello")
        >>> comm.get("greeting", timeout_s=1.0)
        b'hello'
    """

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    @property
    def timeout_s(self) -> float:
        """How long a process waits for another one, in seconds."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Set a key; a later value replaces an earlier one. When this returns, every other process can see it.

        Args:
            key: the name.
            value: at most 1 MiB.

        Raises:
            CommError: the store cannot be reached.
        """
        ...

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value of a key, as soon as it has one.

        Args:
            key: the name.
            timeout_s: how long to wait for it, in seconds; 0 only looks.

        Returns:
            The value, or None if the key had none when the time was up.

        Raises:
            CommError: the store cannot be reached.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove a key, if it is there.

        Args:
            key: the name.

        Raises:
            CommError: the store cannot be reached.
        """
        ...

    def all_gather(self, part: npt.NDArray[np.uint8], whole: npt.NDArray[np.uint8]) -> None:
        """Give every process the parts of all, one behind the other in the order of the ranks.

        All processes call it, in the same order, each in the thread that calls the framework's own collectives.

        Args:
            part: this process's bytes, 1-d and contiguous; the lengths may differ between the ranks. It may be the
                piece of ``whole`` that it belongs in: then it is not copied.
            whole: where all bytes go, 1-d and contiguous, as long as all parts together.

        Raises:
            CommError: a process is gone, or the lengths do not add up to that of ``whole`` somewhere.
        """
        ...


class SingleProcess:
    """A job of one process, which is what saves and loads without ``comm=`` are.

    Example:
        >>> import fp_multi as fp
        >>> fp.SingleProcess().size
        1
    """

    rank = 0
    size = 1
    timeout_s = 600.0

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        """See :meth:`Comm.put`."""
        with self._changed:
            self._values[key] = bytes(value)
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """See :meth:`Comm.get`."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, max(timeout_s, 0.0))
            return self._values.get(key)

    def delete(self, key: str) -> None:
        """See :meth:`Comm.delete`."""
        with self._changed:
            self._values.pop(key, None)

    def all_gather(self, part: npt.NDArray[np.uint8], whole: npt.NDArray[np.uint8]) -> None:
        """See :meth:`Comm.all_gather`."""
        if part.size != whole.size:
            raise CommError(f"all_gather: the parts have {part.size} bytes together, whole has {whole.size}")
        whole[:] = part
