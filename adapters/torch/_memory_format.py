"""Channels-last memory formats: recognising them in strides, and restoring them (docs/format.md section 3.6)."""

from __future__ import annotations

import torch

_FORMATS = {
    4: ("channels_last", torch.channels_last),
    5: ("channels_last_3d", torch.channels_last_3d),
}


def memory_format_of(tensor: torch.Tensor) -> str | None:
    """Name the channels-last format that a tensor's strides have.

    Args:
        tensor: any strided tensor.

    Returns:
        The name in the format; None for tensors in C order and all others.
    """
    known = _FORMATS.get(tensor.dim())
    if known is None:
        return None
    name, memory_format = known
    if not tensor.is_contiguous():
        return name if tensor.is_contiguous(memory_format=memory_format) else None
    # With one channel or one pixel both orders are one in memory, and only the strides tell them apart.
    shape, strides = tuple(tensor.shape), tensor.stride()
    if strides == _c_strides(shape):
        return None
    batch, channels, *pixels = shape
    outer, *inner, last = _c_strides((batch, *pixels, channels))
    return name if strides == (outer, last, *inner) else None


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def in_memory_format(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Copy a tensor into a channels-last format.

    Args:
        tensor: in C order.
        name: what :func:`memory_format_of` gave.

    Returns:
        The copy.

    Raises:
        ValueError: there is no such format for this number of axes.
    """
    known = _FORMATS.get(tensor.dim())
    if known is None or known[0] != name:
        raise ValueError(f"memory_format {name!r} does not fit {tensor.dim()} axes")
    # Not contiguous(memory_format=): it leaves tensors of one channel or one pixel as they are.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=known[1])
    return copy.copy_(tensor)
