"""Rates of drives that were measured, kept in a file of the user's."""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
from typing import Annotated

import msgspec

_KEEP = datetime.timedelta(days=30)
_CACHE_MAX_NBYTES = 1 << 20
_FORMAT = "fp_multi-drives-1"


class Key(msgspec.Struct, frozen=True):
    """What a rate is true of."""

    host: str
    device: str
    settings: str
    """What of the configuration makes a drive faster or slower."""


class _Entry(msgspec.Struct, frozen=True):
    key: Key
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]
    date: Annotated[datetime.datetime, msgspec.Meta(tz=True)]


class _Cache(msgspec.Struct):
    format: str
    drives: list[_Entry]


def cache_file() -> str | None:
    """The file that keeps measured rates; None if the user has no place for it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "fp_multi", "drives.json") if os.path.isabs(base) else None


def remembered(key: Key) -> tuple[float, datetime.datetime] | None:
    """The rate in bytes per second that was measured, and when; None if nothing fit to use was."""
    return next(((entry.bytes_per_s, entry.date) for entry in _entries() if entry.key == key), None)


def _entries() -> list[_Entry]:
    """What the cache file holds and is not too old; nothing if anything about the file is odd."""
    path = cache_file()
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        if path is None:
            return []
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_size > _CACHE_MAX_NBYTES:
                return []
            cache = msgspec.json.decode(file.read(), type=_Cache)
        now = datetime.datetime.now(datetime.UTC)
        if cache.format == _FORMAT:
            return [entry for entry in cache.drives if now - _KEEP < entry.date < now + _KEEP]
    return []


def remember(key: Key, bytes_per_s: float) -> None:
    """Keep a rate, in bytes per second, measured now. Where that cannot be, nothing happens."""
    path = cache_file()
    if path is None:
        return
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    entries = [entry for entry in _entries() if entry.key != key]
    data = msgspec.json.encode(_Cache(_FORMAT, [*entries, _Entry(key, bytes_per_s, now)]))
    # Who cannot keep it measures again, next time.
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix="drives-")
        try:
            with open(fd, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
