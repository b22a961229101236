"""Keep Python's cyclic garbage collector out of stages that make very many small objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Switch the collector off for a while, in the whole process.

    For code whose new objects all survive: hundreds of thousands of new tuples have the collector
    walk every object of the process again and again for nothing, which takes longer than the rest.
    Of two threads that overlap here the one that switched it off may switch it on again before the
    other has finished; that costs time only.
    """
    if not gc.isenabled():  # the program's wish, or another thread is here: who switches it off switches it on
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()
