"""The ranks of one host that read together: each reads into shared memory, the others copy out of it.

The memory has no name, so nothing of it is left wherever a process ends, and it does not count towards the size of
/dev/shm. Ranks hand it to each other over Unix sockets, which have no files either, and which tell at once when a peer
is gone. Each pair has two connections, one for what either of them reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from fp_multi.errors import CommError
from fp_multi.storage import host_of, memfd

PATIENCE_S = 60.0
"""How long a rank waits for the next block before it reads alone."""
MEETING_S = 5.0
"""How long it waits at least for the others to come."""
_ALONE_NBYTES_PER_S = 1e9
_HELLO = struct.Struct("<16sq")
_NUMBER = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")

Memory = npt.NDArray[np.uint8]


class PeerLostError(CommError):
    """A rank of this host is gone, reads alone, or cannot be reached; whoever gets this reads alone, too."""


def host_key() -> str | None:
    """The same text on processes that can reach each other; None where that is not possible."""
    try:
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
    return f"{host_of()[0]}/{network}/{os.geteuid()}"


class Listener:
    """Where the other ranks of the host reach this one.

    Raises:
        OSError: the system has no such sockets.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.close = weakref.finalize(self, _refuse, self._socket)
        """From now on nobody reaches this rank; who waits to be let in is told at once."""
        self._socket.bind("")  # the kernel chooses a name that no file has
        self._socket.listen(1024)
        self.address: bytes = self._socket.getsockname()

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def accept(self) -> socket.socket:
        """The next connection of this user."""
        connection, _ = self._socket.accept()
        try:
            _check_user(connection)
        except OSError:
            connection.close()
            raise
        return connection


class Peers:
    """Connections to the ranks that this one reads for, or that read for it.

    The thread that reads uses ``announce`` and ``wait_taken``, the one that takes ``receive`` and ``taken``.

    Attributes:
        memory: what this rank reads into.
    """

    def __init__(self, rank: int, nbytes: int) -> None:
        self._rank = rank
        self._fd, self.memory = _new_memory(nbytes)
        self._memories: dict[int, Memory] = {rank: self.memory}
        self._outs: dict[int, socket.socket] = {}
        self._ins: dict[int, socket.socket] = {}

    def meet(self, listener: Listener, token: bytes, addresses: Mapping[int, bytes], nbytes: int) -> None:
        """Connect with the others; all of them do the same.

        Args:
            listener: where they reach this rank.
            token: of this load.
            addresses: of their listeners, by rank.
            nbytes: what they read for this rank: who would have read that alone by now waits no longer. One whose
                planner raised before anything is read never comes.

        Raises:
            PeerLostError: one cannot be reached, or does not come.
        """
        with _lost("meet the ranks of this host"):
            # What this rank reads reaches its own taking thread in the same way.
            self._outs[self._rank], self._ins[self._rank] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for rank, address in addresses.items():
                out = self._outs[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                out.settimeout(PATIENCE_S)
                out.connect(address)
                _check_user(out)  # the name of a rank that is gone is anybody's
                socket.send_fds(out, [_HELLO.pack(token, self._rank)], [self._fd], socket.MSG_NOSIGNAL)
            missing = set(addresses)
            poll = select.poll()
            poll.register(listener, select.POLLIN)
            for rank in missing:
                poll.register(self._outs[rank], 0)  # tells only that it is gone
            patience_s = min(MEETING_S + nbytes / _ALONE_NBYTES_PER_S, PATIENCE_S)
            end_s = time.monotonic() + patience_s
            while missing:
                for fd, _ in poll.poll(max(end_s - time.monotonic(), 0) * 1e3):
                    if fd != listener.fileno():
                        raise PeerLostError("a rank of this host is gone, or reads alone")
                    with contextlib.suppress(PermissionError):
                        missing.remove(self._welcome(listener.accept(), token, missing))
                if time.monotonic() >= end_s:
                    raise PeerLostError(f"ranks {sorted(missing)} did not come within {patience_s:g} s")

    def _welcome(self, connection: socket.socket, token: bytes, missing: Collection[int]) -> int:
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            connection.settimeout(PATIENCE_S)
            hello, fds, _, _ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
            for fd in fds:
                stack.callback(os.close, fd)
            found, rank = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
            if found != token or rank not in missing or len(fds) != 1:
                raise PermissionError("not of this load")
            self._memories[rank] = _mapped(fds[0])
            stack.pop_all()
            os.close(fds[0])
        self._ins[rank] = connection
        return int(rank)

    def announce(self, number: int, takers: Collection[int]) -> None:
        """Tell that a block is in this rank's memory."""
        with _lost(f"hand on block {number}"):
            for rank in takers:
                self._outs[rank].send(_NUMBER.pack(number), socket.MSG_NOSIGNAL)

    def wait_taken(self, number: int, takers: Collection[int]) -> None:
        """Wait until all have copied a block."""
        for rank in takers:
            _expect(self._outs[rank], number, rank)

    def receive(self, number: int, reader: int) -> Memory:
        """Wait for a block; gives its reader's memory."""
        _expect(self._ins[reader], number, reader)
        return self._memories[reader]

    def taken(self, number: int, reader: int) -> None:
        """Tell that this rank has copied a block."""
        with _lost(f"acknowledge block {number}"):
            self._ins[reader].send(_NUMBER.pack(number), socket.MSG_NOSIGNAL)

    def hang_up(self) -> None:
        """Let all know that this rank goes its own way; whoever waits in another thread wakes up."""
        for one in (*self._outs.values(), *self._ins.values()):
            with contextlib.suppress(OSError):
                # Not close: a forked child may have it, too.
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and give everything back; no thread may use it any more."""
        self.hang_up()
        for one in (*self._outs.values(), *self._ins.values()):
            one.close()
        os.close(self._fd)


def _refuse(listening: socket.socket) -> None:
    """Close for all who come, and who have come; a forked child may have the socket, too, so that closing is not it."""
    with contextlib.suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)
        listening.setblocking(False)
        while True:
            listening.accept()[0].close()
    listening.close()


def _check_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
        raise PermissionError("a process of another user")


@contextlib.contextmanager
def _lost(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PeerLostError(f"cannot {what}: {error}") from error


def _expect(connection: socket.socket, number: int, rank: int) -> None:
    with _lost(f"wait for block {number} of rank {rank}"):
        message = connection.recv(_NUMBER.size)
    if message != _NUMBER.pack(number):
        raise PeerLostError(f"rank {rank} is gone, or reads alone")


def _new_memory(nbytes: int) -> tuple[int, Memory]:
    """Memory without a name, which can be handed to other processes, and its descriptor."""
    with _lost(f"get {nbytes} bytes of shared memory"):
        fd = memfd()
        try:
            # All of it now: that there is none must not turn out as SIGBUS.
            os.posix_fallocate(fd, 0, max(nbytes, mmap.PAGESIZE))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return fd, _mapped(fd)
        except OSError:
            os.close(fd)
            raise


def _mapped(fd: int) -> Memory:
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, flags), np.uint8)
