"""Where loaded tensors go: every form of ``map_location`` that ``torch.load`` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from fp_multi.errors import CapabilityError, ConfigError

Device: TypeAlias = "str | torch.device | int"
MapLocation: TypeAlias = "Device | Mapping[str, Device] | Callable[[torch.UntypedStorage, str], Any] | None"
Place: TypeAlias = Callable[[torch.Tensor, str], torch.Tensor]
"""``place(tensor, location)`` moves a new CPU tensor that was saved on ``location``."""


def placer(map_location: MapLocation) -> Place:
    """Turn a ``map_location`` into a function that moves tensors.

    Args:
        map_location: as :func:`fp_multi.adapters.torch.load` takes it.

    Returns:
        The function.

    Raises:
        CapabilityError: a device is named that is not here.
        ConfigError: it has none of the forms, or names no device at all.
    """
    if map_location is None:
        return _back
    if isinstance(map_location, (str, torch.device, int)):
        device = usable(map_location, "map_location")
        return lambda tensor, location: _move(tensor, device)
    if isinstance(map_location, Mapping):
        table = {str(old): new for old, new in map_location.items()}
        return lambda tensor, location: _back(tensor, table.get(location, location))
    if callable(map_location):
        function = map_location
        return lambda tensor, location: _called(function, tensor, location)
    raise ConfigError(
        "map_location must be a device, a dict from device to device, or a function of storage and location, found "
        f"{type(map_location).__name__}"
    )


def usable(device: Device, source: str) -> torch.device:
    """Check that a device exists here.

    Args:
        device: its name, or the number of an accelerator.
        source: where the name comes from, for messages.

    Returns:
        The device.

    Raises:
        CapabilityError: it does not.
        ConfigError: it is not the name of a device.
    """
    found = _parse(device, source)
    if found.type == "cpu":
        return found
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        # torch says "not compiled with CUDA" with an AssertionError, "no such device" with a RuntimeError.
        raise CapabilityError(
            f"{source}: device {str(found)!r} is not available here ({str(error).splitlines()[0]}); "
            'pass map_location="cpu", or a dict such as {"cuda:1": "cuda:0"}'
        ) from error
    return found


def _parse(device: Device, source: str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        if isinstance(device, int):
            # Without an accelerator a number names none; let the message say which one was meant.
            return torch.device("cuda", device)
        raise ConfigError(f"{source}: {device!r} is not a device: {error}") from error


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if device.type == "cpu" else tensor.to(device)


def _back(tensor: torch.Tensor, location: Device) -> torch.Tensor:
    if location == "cpu":
        return tensor
    return _move(tensor, usable(location, "tensor saved on another device"))


def _called(function: Callable[..., Any], tensor: torch.Tensor, location: str) -> torch.Tensor:
    storage = tensor.untyped_storage()
    result = function(storage, location)
    if result is None:
        return _back(tensor, location)
    moved = getattr(result, "untyped", lambda: result)()
    if not isinstance(moved, torch.UntypedStorage):
        raise ConfigError(f"map_location returned {type(result).__name__}; expected the storage, moved, or None")
    if moved.data_ptr() == storage.data_ptr() and moved.device == storage.device:
        return tensor
    empty = torch.empty(0, dtype=tensor.dtype, device=moved.device)
    return empty.set_(moved, 0, tensor.shape, tensor.stride())
