"""Memory of this process that other processes of its host can map, with two counters that tell how far work in it is.

Anonymous: nothing has to be removed, whoever dies.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fp_multi import _engine
from fp_multi._memfd import NAME, memfd

_HEAD_NBYTES = 192
"""The data is on no page's edge, so that the engine reads into its own huge pages and copies: a drive is slower with
the small pages that this memory is made of than both together."""
_TOKEN, _FILLED, _EMPTIED = 0, 64, 128
"""Where they stand; the counters in cache lines of their own."""
_TOKEN_NBYTES = 16
_NAP_FIRST_S = 0.0001
_NAP_LAST_S = 0.002


class Address(NamedTuple):
    """Where a process finds another one's memory."""

    pid: int
    fd: int
    token: bytes
    nbytes: int


class HostMemory:
    """A mapping of one process's memory; made by :func:`share` there and by :func:`attach` elsewhere.

    Attributes:
        data: the bytes.
        address: for :func:`attach`.
    """

    def __init__(self, fd: int, address: Address) -> None:
        whole = np.frombuffer(mmap.mmap(fd, _HEAD_NBYTES + address.nbytes), np.uint8)
        self.data: npt.NDArray[np.uint8] = whole[_HEAD_NBYTES:]
        self.address = address
        self._head = whole[:_HEAD_NBYTES]
        self._base = _engine.address_of(self._head)

    @property
    def filled(self) -> int:
        """How many parts the owner has put in; what was written before is to be seen."""
        return _engine.load_acquire(self._base + _FILLED)

    @filled.setter
    def filled(self, count: int) -> None:
        _engine.store_release(self._base + _FILLED, count)

    @property
    def emptied(self) -> int:
        """How many parts, of all processes, the owner has taken out."""
        return _engine.load_acquire(self._base + _EMPTIED)

    @emptied.setter
    def emptied(self, count: int) -> None:
        _engine.store_release(self._base + _EMPTIED, count)


class Owned(HostMemory):
    """Memory of this process."""

    def __init__(self, fd: int, address: Address) -> None:
        self._fd = fd
        super().__init__(fd, address)
        self._head[_TOKEN : _TOKEN + _TOKEN_NBYTES] = np.frombuffer(address.token, np.uint8)

    def close(self) -> None:
        """Nobody attaches any more; mappings stay."""
        os.close(self._fd)


def share(nbytes: int) -> Owned:
    """Memory that others of this host can attach.

    Raises:
        OSError: there is not so much, or no such memory on this system.
    """
    fd = memfd()
    try:
        os.posix_fallocate(fd, 0, _HEAD_NBYTES + nbytes)  # or a page that cannot be had would end the process later
        return Owned(fd, Address(os.getpid(), fd, os.urandom(_TOKEN_NBYTES), nbytes))
    except BaseException:
        os.close(fd)
        raise


def attach(address: Address) -> HostMemory:
    """Map another process's memory.

    Raises:
        OSError: it cannot be reached from here: another namespace of processes, another user, or it is gone.
    """
    path = f"/proc/{address.pid}/fd/{address.fd}"
    # In another namespace the number is somebody else's, whose file is not to be opened just to see what it is.
    if not os.readlink(path).startswith(f"/memfd:{NAME}"):
        raise FileNotFoundError(f"{path} is not memory of fp_multi")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != _HEAD_NBYTES + address.nbytes:
            raise FileNotFoundError(f"{path} is other memory than the one that was announced")
        found = HostMemory(fd, address)
    finally:
        os.close(fd)
    if found._head[_TOKEN : _TOKEN + _TOKEN_NBYTES].tobytes() != address.token:
        raise FileNotFoundError(f"{path} is other memory than the one that was announced")
    return found


def wait_for(reached: Callable[[], bool], look: Callable[[], None]) -> None:
    """Wait until other processes have come so far.

    Args:
        reached: whether they have.
        look: called between two looks; raises if there is no point in waiting.
    """
    nap_s = _NAP_FIRST_S
    while not reached():
        look()
        time.sleep(nap_s)
        nap_s = min(1.5 * nap_s, _NAP_LAST_S)
