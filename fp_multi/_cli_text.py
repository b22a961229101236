"""How the command line shows things: consoles, sizes, and text that comes from a file somebody else may have made."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

_SIGPIPE_EXIT = 128 + 13
_UNLIMITED = 1 << 20


def leave_broken_pipe() -> NoReturn:
    """Exit silently, with the code a shell shows for SIGPIPE: 1 would say that the checkpoint is corrupt.

    Raises:
        SystemExit: always.
    """
    # What is still buffered goes nowhere; flushing it at exit would raise again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(_SIGPIPE_EXIT)


class _PipeConsole(Console):
    def on_broken_pipe(self) -> None:
        leave_broken_pipe()


def out() -> Console:
    """Standard output, looked up anew each time (tests replace it). Where no terminal has a width, nothing is cut."""
    width = None if sys.stdout.isatty() else _UNLIMITED
    return _PipeConsole(highlight=False, markup=False, width=width)


def err() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False, markup=False)


def say(console: Console, text: Any) -> None:
    """Print a line as it is, without breaking it, or a renderable in the width of the terminal."""
    console.print(text, soft_wrap=isinstance(text, str))


def shown(text: str) -> str:
    """Text of unknown origin in one harmless line: control characters and the like become escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: int) -> str:
    """A size for people, in powers of 1000 like all rates here."""
    return decimal(nbytes)


def rate(nbytes: int, elapsed_s: float) -> str:
    """A rate in GB/s."""
    return f"{nbytes / 1e9 / elapsed_s:.2f} GB/s" if elapsed_s > 0 else "instantly"


def count(number: int, noun: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error where that is a terminal, nothing elsewhere.

    Yields:
        ``update(done_nbytes, total_nbytes)``.
    """
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=err(),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on standard error where that is a terminal, nothing elsewhere."""
    console = err()
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        yield
