"""What a conversion tells: how far it is, and what became something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from fp_multi._cli_text import out, say, shown
from fp_multi._nodes import Cell, readable
from fp_multi.errors import UnsupportedLeafError

_MAX_NAMED = 5


class Meter:
    """How far a conversion is: gives the bar what it needs.

    Args:
        update: takes the bytes done and the bytes in all.
    """

    def __init__(self, update: Callable[[int, int], None]) -> None:
        self._update = update
        self._done = self._total = 0

    def begin(self, total: int) -> None:
        """Start, or start again, with so many bytes to come."""
        self._done, self._total = 0, total
        self._update(0, total)

    def moved(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._done += nbytes
        self._update(self._done, max(self._total, self._done))


class Losses:
    """What the other format has no room for: converted in a documented way and told, or refused."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}

    def add(self, what: str, path: tuple[Any, ...] | str) -> None:
        """Something is not as it was.

        Args:
            what: what becomes of it, for example ``"tuples became lists"``.
            path: keys and positions from the root, or the readable path itself.
        """
        self._places.setdefault(what, []).append(path if isinstance(path, str) else place(path))

    def refuse(self, path: tuple[Any, ...] | str, what: str) -> NoReturn:
        """Something cannot go across.

        Raises:
            UnsupportedLeafError: always.
        """
        text = path if isinstance(path, str) else place(path)
        raise UnsupportedLeafError(f"{text}: {what}", text)

    def forget(self) -> None:
        """Start again."""
        self._places.clear()

    def tell(self) -> None:
        """One line for each kind of loss, on standard output."""
        for what, places in self._places.items():
            say(out(), f"{what} ({len(places)}): {some(places)}")


def place(path: tuple[Any, ...]) -> str:
    """A path for people."""
    cell: Cell = None
    for key in path:
        plain = type(key) in (str, int)
        cell = (cell, key if plain else ["key", repr(key)])
    return readable(cell)


def some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return shown(", ".join(names[:_MAX_NAMED]) + more)
