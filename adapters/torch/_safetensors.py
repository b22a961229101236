"""save_file() and load_file(): one plain .safetensors file, called as in ``safetensors.torch``.

Differences: a file appears complete and durable or not at all; tensors need not be contiguous; errors belong to
:mod:`fp_multi.errors` as well as to the built-in type that safetensors raises.
"""

from __future__ import annotations

import os
from typing import Any

import torch

import fp_multi
from fp_multi import SaveReport
from fp_multi.config import LoadConfig, SaveConfig
from fp_multi.errors import UnsupportedLeafError

from ._builder import make_builder
from ._dtypes import ELEMENTS
from ._location import Device
from ._refusals import why_not


class InvalidTensorsError(UnsupportedLeafError, ValueError):
    """What was given to :func:`save_file` is not a dict of names and strided tensors."""


class SharedMemoryError(UnsupportedLeafError, RuntimeError):
    """Tensors given to :func:`save_file` overlap in memory, and a safetensors file cannot say so."""


def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    *,
    config: SaveConfig = SaveConfig(),
) -> SaveReport:
    """Write tensors as one safetensors file, replacing what is there; it is durable on return.

    Args:
        tensors: names and tensors, on any device. Tensors with other strides are written in C order.
        filename: the file.
        metadata: strings for the file's header.
        config: how to write.

    Returns:
        What was done, and how fast.

    Raises:
        InvalidTensorsError: (a ValueError) not a dict, a name that is no string, a value that is no tensor, a sparse
            tensor, or metadata that is not text.
        SharedMemoryError: (a RuntimeError) two tensors overlap in memory: they would be written twice and come back
            apart.
        UnsupportedLeafError: a tensor cannot be stored exactly.
        StorageError: the operating system refused an operation.

    Example:
        >>> save_file({"weight": torch.zeros(4, 2)}, "model.safetensors")  # doctest: +SKIP
    """
    _check(tensors)
    _check_metadata(metadata)
    return fp_multi.save_safetensors(tensors, filename, metadata=metadata, config=config)


def load_file(
    filename: str | os.PathLike[str],
    device: Device = "cpu",
    *,
    config: LoadConfig = LoadConfig(),
) -> dict[str, torch.Tensor]:
    """Read a safetensors file, whoever wrote it.

    Args:
        filename: the file.
        device: where the tensors go.
        config: how to read.

    Returns:
        Names and tensors, each with memory of its own.

    Raises:
        CapabilityError: the device is not here.
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: the file is cut short.
        ManifestError: its header is not one of a safetensors file.
        UnsupportedLeafError: this torch does not have the dtype of a tensor.

    Example:
        >>> tensors = load_file("model.safetensors", device="cuda:0")  # doctest: +SKIP
    """
    loaded: dict[str, torch.Tensor] = fp_multi.load_safetensors(
        filename, config=config, tensor_builder=make_builder(device)
    )
    return loaded


def _check(tensors: Any) -> None:
    if not isinstance(tensors, dict):
        raise InvalidTensorsError(f"tensors must be a dict of str to torch.Tensor, found {type(tensors).__name__}")
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise InvalidTensorsError(f"name {name!r} must be a str, found {type(name).__name__}", repr(name))
        if not isinstance(tensor, torch.Tensor):
            raise InvalidTensorsError(f"{name}: expected a torch.Tensor, found {type(tensor).__name__}", name)
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise InvalidTensorsError(f"{name}: {why_not(tensor)}", name)
        element = ELEMENTS.get(tensor.dtype)
        if element is not None and element.attrs is not None:
            # A checkpoint says beside the bytes what they are; this file could not.
            raise InvalidTensorsError(
                f"{name}: safetensors has no dtype for {tensor.dtype}; save its view(torch.{element.name}), or use "
                "fp_multi.adapters.torch.save, which keeps it",
                name,
            )
    shared = _overlapping(tensors)
    if shared:
        raise SharedMemoryError(
            f"tensors share memory: {'; '.join(', '.join(group) for group in shared)}. They would be written once each "
            "and come back apart; leave out all but one, clone() them, or use fp_multi.adapters.torch.save, which "
            "keeps tied tensors tied",
            shared[0][0],
        )


def _check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise InvalidTensorsError(f"metadata must be a dict of str to str, found {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidTensorsError(f"metadata must be a dict of str to str, found {key!r}: {value!r}")


def _overlapping(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Groups of names whose address ranges overlap."""
    spans = []
    for name, tensor in tensors.items():
        # Meta tensors, subclasses and the like have no memory to overlap; saving refuses them with better words.
        if not tensor.numel() or tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            continue
        reach = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
        try:
            begin = tensor.data_ptr()
        except RuntimeError:
            continue
        spans.append((str(tensor.device), begin, begin + (reach + 1) * tensor.itemsize, name))
    groups: list[list[str]] = []
    reached = ("", 0)
    for device, begin, end, name in sorted(spans):
        if device == reached[0] and begin < reached[1]:
            groups[-1].append(name)
            reached = (device, max(end, reached[1]))
        else:
            groups.append([name])
            reached = (device, end)
    return [sorted(group) for group in groups if len(group) > 1]
