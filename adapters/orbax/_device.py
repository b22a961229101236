"""Arrays on accelerators: copied to page-locked host memory beside everything else, and read from there."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

_HOST = "pinned_host"


def is_in_host_memory(array: jax.Array) -> bool:
    """Whether NumPy can look at the array's memory where it is."""
    return all([device.platform == "cpu" for device in array.devices()])


class Arriving:
    """A copy of an accelerator's array on its way to host memory.

    The copy is queued at once, behind what computes the array and before whatever is asked of the device later, so that
    the array may be donated or deleted right away.

    Args:
        array: on one device.
    """

    def __init__(self, array: jax.Array) -> None:
        kinds = {memory.kind for device in array.devices() for memory in device.addressable_memories()}
        if _HOST in kinds:
            self._copy = jax.device_put(array, array.sharding.with_memory_kind(_HOST))
        else:
            self._copy = array
            array.copy_to_host_async()
        self._bytes: npt.NDArray[np.uint8] | None = None
        self._lock = threading.Lock()

    def fetch(self, address: int, start: int, nbytes: int) -> Callable[[], None]:
        """See :class:`fp_multi.LeafSource`; called by the engine's threads as blocks come free."""

        def finish() -> None:
            ctypes.memmove(address, self._arrived()[start:].ctypes.data, nbytes)

        return finish

    def _arrived(self) -> npt.NDArray[np.uint8]:
        with self._lock:
            if self._bytes is None:
                host: npt.NDArray[Any] = np.asarray(self._copy)
                self._bytes = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
            return self._bytes
