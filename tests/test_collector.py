"""The pause of the garbage collector, which is the whole process's."""

from __future__ import annotations

import gc
import sys
import threading

from fp_multi._collector import collector_paused


def test_two_threads_that_pause_the_collector_leave_it_on() -> None:
    """In every order of their beginning and end; and one that the program has switched off stays off."""
    first, second = collector_paused(), collector_paused()
    with first:
        second.__enter__()
        assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_threads_that_pause_the_collector_at_the_same_time_leave_it_on() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def pause() -> None:
        for _ in range(3000):
            with collector_paused():
                pass

    try:
        threads = [threading.Thread(target=pause) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        found = gc.isenabled()
        gc.enable()
    assert found
