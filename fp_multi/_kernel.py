"""What the kernel tells in /proc and /sys: files, directories, and the mount that an open directory lies on."""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple

_OCTAL = re.compile(r"\\([0-7]{3})")


class Roots(NamedTuple):
    """Where the kernel's files are; tests have their own."""

    sys: str = "/sys"
    proc: str = "/proc"


REAL = Roots()


class Mount(NamedTuple):
    """One line of mountinfo, as far as it matters here."""

    fstype: str
    source: str
    options: str
    """Of the file system (not of the mount): an overlay's upper directory stands there."""


def mount_of(number: str | None, roots: Roots = REAL) -> Mount | None:
    """The line of mountinfo with this number.

    Args:
        number: as :func:`mount_id` gives; None if that was not to be had.
        roots: where the kernel's files are.
    """
    for line in (read_text(f"{roots.proc}/self/mountinfo") or "").splitlines():
        fields = line.split(" ")
        if fields[0] == number and "-" in fields[6:]:
            rest = fields[fields.index("-", 6) + 1 :]
            if len(rest) >= 3:
                return Mount(rest[0], _unescaped(rest[1]), _unescaped(rest[2]))
    return None


def mount_id(fd: int, roots: Roots) -> str | None:
    """Of the mount that an open directory lies on: exact, where comparing paths is not (mounts can hide mounts)."""
    for line in (read_text(f"{roots.proc}/self/fdinfo/{fd}") or "").splitlines():
        if line.startswith("mnt_id:"):
            return line.split()[1]
    return None


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def read_text(path: str) -> str | None:
    """A file of the kernel's; None if it is not there or hidden."""
    # What is not UTF-8 must still go into messages.
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="backslashreplace") as file:
        return file.read().strip()
    return None


def names_in(path: str) -> list[str]:
    """The sorted names in a directory; none if it is not there or hidden."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir(path))
    return []
