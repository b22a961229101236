"""Threads and waiting that survive what a signal handler raises.

``KeyboardInterrupt``, and what a handler of SIGTERM raises, may come between any two instructions of the main thread.
The classes of ``threading`` and ``concurrent.futures`` are written in Python: interrupted at the wrong instruction they
leave a lock taken for good, and whoever needs it hangs. Here the main thread only uses what is one instruction: locks
in ``with`` blocks, and ``SimpleQueue``.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Task = Callable[[], object]

_RECHECK_S = 0.1

_log = logging.getLogger("fp_multi")


class Latch:
    """Something happens once; any thread may wait for it."""

    def __init__(self) -> None:
        self._set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """It has happened. Called by one thread only."""
        if not self._set:
            self._set = True
            self._lock.release()

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for it; False if the time is over first."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._set:
            pause_s = _RECHECK_S if end_s is None else min(_RECHECK_S, end_s - time.monotonic())
            if pause_s <= 0:
                return False
            # A waiter that is interrupted here takes the lock along: the others look again.
            if self._lock.acquire(timeout=pause_s):
                self._lock.release()
        return True


class Crew:
    """A few threads, started when first needed, that do what they are given, in order.

    The end of the interpreter waits until they have done it.

    Args:
        most: how many threads.
        name: what their names begin with.
        last: called when everything is done.
    """

    def __init__(self, most: int, name: str, last: Task = lambda: None) -> None:
        self._most = most
        self._name = name
        self._last = last
        self._pid = os.getpid()
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._ended = False
        _remember(self)
        # For who forgets to end it. At the interpreter's end it is too early for that.
        weakref.finalize(self, _dismiss, self._tasks, last, self._pid).atexit = False

    def run(self, task: Task) -> None:
        """Give it something to do.

        Raises:
            RuntimeError: no thread can be started, or it was ended. The task will not be done.
        """
        with self._lock:
            if self._ended:
                raise RuntimeError("cannot start new work after shutdown")
            while len(self._threads) < self._most:
                # Daemons, because the interpreter would otherwise wait for them before it tells us to end.
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    if not self._threads:
                        raise
                    break  # fewer are enough, only slower
                self._threads.append(thread)
            self._tasks.put(task)

    def end(self) -> None:
        """Return when everything is done and no thread is left."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._ended = True
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._last()


def _work(tasks: SimpleQueue[Task | None]) -> None:
    while True:
        task = tasks.get()
        if task is None:
            tasks.put(None)  # for the others
            return
        try:
            task()
        except BaseException:
            _log.exception("a background task failed")
        # Not to be held while there is nothing to do.
        del task


def _dismiss(tasks: SimpleQueue[Task | None], last: Task, pid: int) -> None:
    if os.getpid() == pid:
        tasks.put(None)
        last()


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()
_registering = threading.Lock()


def _remember(crew: Crew) -> None:
    with _registering:
        if not _crews:
            # Handlers run last in, first out: registered late, this one comes before that of the engines.
            atexit.unregister(_end_all)
            atexit.register(_end_all)
        _crews.add(crew)


def _end_all() -> None:
    for crew in list(_crews):
        crew.end()


def _after_fork() -> None:
    global _registering
    _registering = threading.Lock()  # another thread of the parent may have held it
    _crews.clear()


os.register_at_fork(after_in_child=_after_fork)
