"""How fast a drive takes writes: declared, remembered, or measured in half a second.

What is measured is the engine with nothing to copy, so the drive itself (:mod:`fp_multi._ceiling`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from fp_multi._ceiling import measure_ceiling
from fp_multi._drive import Device, existing
from fp_multi._hidden import unlock
from fp_multi._rate_cache import Key, remember, remembered
from fp_multi.config import MIB, SaveConfig
from fp_multi.errors import FpMultiError

_BUDGET_S = 0.5
_FIRST_NBYTES = MIB
_LAST_NBYTES = 256 * MIB
_GROWTH = 8
"""A drive that is fast only at first (a burst allowance, a cache) must not be given too much at once."""
_ROOM_SHARE = 8
"""Of what is free no more than this part is taken for a moment."""
_WAIT_S = 2.0
_TICK_S = 0.01
_USUAL = SaveConfig()


class DriveRate(NamedTuple):
    """What is known of a drive's rate."""

    bytes_per_s: float | None
    """None: not known."""
    how: str
    """``declared``, ``measured``, ``measured on`` a date, or why it is not known."""


_known: dict[Key, DriveRate] = {}


def drive_rate(
    directory: str | os.PathLike[str], device: Device, host: str, config: SaveConfig | None = None
) -> DriveRate:
    """Rate at which the drive behind a directory takes writes from this host; never raises for the drive's sake.

    Processes of one host take turns, and who comes second finds what the first measured.

    Args:
        directory: where the checkpoint goes; it need not exist yet. What is measured writes a hidden file of at most
            256 MiB there, for about half a second, and removes it.
        device: its drive.
        host: this host, as the topology calls it.
        config: the declared rate, and which capabilities to use.

    Returns:
        The rate, and where it comes from.
    """
    config = config or SaveConfig()
    if config.drive_bytes_per_s is not None:
        return DriveRate(float(config.drive_bytes_per_s), "declared")
    key = Key(host, device.key, f"io_uring={config.io_uring} direct={config.direct} dontcache={config.dontcache}")
    found = _known.get(key)
    if found is None:
        with _turn(key):
            found = _remembered(key)
            if found is None:
                found = _measured(existing(directory), config)
                if found.bytes_per_s is not None:
                    remember(key, found.bytes_per_s)
        # A failure is kept as well, for this process: a drive that is full now is not asked before every save.
        _known[key] = found
    return found


def _remembered(key: Key) -> DriveRate | None:
    kept = remembered(key)
    return kept and DriveRate(kept[0], f"measured on {kept[1]:%Y-%m-%d}")


def _measured(directory: str, config: SaveConfig) -> DriveRate:
    begin = time.perf_counter()
    nbytes = _FIRST_NBYTES
    try:
        stat = os.statvfs(directory)
        room = stat.f_bavail * stat.f_frsize // _ROOM_SHARE
        if room < nbytes:
            return DriveRate(None, f"not known: {stat.f_bavail * stat.f_frsize} bytes free are too few to measure")
        while True:
            (result,) = measure_ceiling(
                directory,
                nbytes,
                block_bytes=(_USUAL.block_bytes,),
                queue_depth=(_USUAL.queue_depth,),
                config=config,
            )
            rate = result.gbytes_per_s * 1e9
            left_s = _BUDGET_S - (time.perf_counter() - begin)
            # Larger ones tell more of what a drive sustains; one that is barely larger tells nothing new.
            larger = min(nbytes * _GROWTH, _LAST_NBYTES, room, int(rate * left_s))
            if larger < 2 * nbytes:
                return DriveRate(rate, "measured")
            nbytes = larger
    except (FpMultiError, OSError, MemoryError) as error:
        return DriveRate(None, f"not known: {error}")


@contextlib.contextmanager
def _turn(key: Key) -> Iterator[None]:
    """Wait until no other process of this user on this host measures that drive; not for long, and never fail."""
    # Not beside the cache file: a home directory is often one for a thousand hosts, which must not wait for each other.
    name = f"fp_multi-{os.geteuid()}-{zlib.crc32(repr(key).encode()):08x}.lock"
    fd = None
    locked = False
    try:
        with contextlib.suppress(OSError):
            path = os.path.join(tempfile.gettempdir(), name)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            locked = _locked(fd, time.monotonic() + _WAIT_S)
        yield
    finally:
        if locked:
            # Who waits on the file that is removed here finds the rate in the cache when its turn comes.
            with contextlib.suppress(OSError):
                os.unlink(path)
        if fd is not None:
            unlock(fd)


def _locked(fd: int, deadline_s: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_TICK_S)
