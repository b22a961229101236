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
    Of two threads that overlap here the first to finish may switch it on again; that costs time
    only.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
