"""Bytes of CUDA tensors: copied to page-locked host memory on a stream of their own, beside what the GPU computes."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

import torch

_logger = logging.getLogger("fp_multi")
_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    stream = _streams.get(device)
    if stream is None:
        stream = _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return stream


def host_bytes(address: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over host memory that somebody else owns."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


class DeviceFetch:
    """``LeafSource.fetch`` of one CUDA tensor.

    The copies see the tensor as the work leaves it that was queued, on the current stream, when this object was made.
    Later work is not waited for and must not change the tensor before its last byte has arrived.
    """

    __slots__ = ("_bytes", "_ready", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._bytes: torch.Tensor | None = None
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record(torch.cuda.current_stream(tensor.device))

    def __call__(self, address: int, start: int, nbytes: int) -> Callable[[], None]:
        """Start copying bytes ``[start, start + nbytes)`` to ``address``; the result waits for them."""
        stream = _side_stream(self._tensor.device)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            data = self._bytes
            if data is None:
                # Only strided tensors need memory here, and only from their first fetch on.
                plain = self._tensor.resolve_conj().resolve_neg().contiguous()
                # Not view(-1): a single element keeps whatever stride it has, and view(uint8) wants 1.
                data = self._bytes = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
            host_bytes(address, nbytes).copy_(data[start : start + nbytes], non_blocking=True)
            done.record(stream)
        if start + nbytes == data.numel():
            # Memory of the side stream's own pool: whoever gets it next on that stream comes after this copy.
            self._bytes = None
        return done.synchronize


def pin(address: int, nbytes: int) -> Callable[[], None]:
    """Page-lock host memory, so that device copies into it run at full speed and beside the CPU.

    Where the memory cannot be locked (a limit of the container, for instance) copies still work, slower; that is
    logged.

    Args:
        address: where the memory begins.
        nbytes: its length.

    Returns:
        The undo, to be called before the memory is freed.
    """
    if not torch.cuda.is_available():
        return _nothing
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(address, nbytes, 0))
    if code != 0:
        _clear_error()
        _logger.warning(
            "cudaHostRegister of %d bytes: CUDA error %d; device copies go through pageable memory",
            nbytes,
            code,
        )
        return _nothing

    def unpin() -> None:
        runtime.cudaHostUnregister(address)

    return unpin


def _nothing() -> None:
    """The undo of nothing."""


def _clear_error() -> None:
    # The runtime remembers the failure and torch would report it at the user's next kernel: take it here.
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError as error:
        _logger.debug("cleared: %s", error)
