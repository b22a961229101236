"""A gate: holds a save where a test wants it, between save() and the last byte's leaving."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import fp_multi as fp


class Gate:
    """A page at the front of a file that is not there before the gate opens: nothing behind it is read until then."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def open(self) -> None:
        self.event.set()

    def open_soon(self) -> None:
        threading.Timer(0.15, self.event.set).start()

    def fetch(self, address: int, start: int, nbytes: int) -> Callable[[], None]:
        def finish() -> None:
            if not self.event.wait(30):
                raise TimeoutError("the gate was never opened")
            ctypes.memset(address, 1, nbytes)

        return finish


fp.register_tensor_type(
    Gate, fp.TensorType(lambda gate, path: fp.LeafSource("uint8", (4096,), 4096, 0, gate, fetch=gate.fetch))
)
