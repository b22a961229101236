"""torch.Tensor -> LeafSource: where the bytes of a tensor are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from fp_multi import Box, LeafSource
from fp_multi.errors import UnsupportedLeafError

from ._device import DeviceFetch, pin
from ._dtypes import ELEMENTS, Element
from ._memory_format import memory_format_of
from ._refusals import meta_tensor, no_memory, past_storage, why_not
from ._spread import is_distributed

_KINDS: dict[type, str] = {torch.Tensor: "torch", torch.nn.Parameter: "torch.parameter"}
_GRAD: Mapping[str, str] = {"requires_grad": "1"}
_STRIDED = torch.strided


def describe(tensor: torch.Tensor, path: str) -> LeafSource:
    """Say where the bytes of a tensor are.

    Nothing is copied, except conjugate and negative views (their memory holds other values) and tensors of
    accelerators other than CUDA. Of a DTensor the parts that are here are described.

    Args:
        tensor: a tensor or parameter on any device, with any strides, or a DTensor.
        path: where it stands in the state, for messages.

    Returns:
        The source; it keeps the tensor's memory alive.

    Raises:
        UnsupportedLeafError: the bytes of the tensor do not say what it is (sparse, nested, quantized, a subclass), or
            are not there (meta, freed storage).
    """
    # This runs once for each of maybe 100,000 tensors, with the training loop waiting: no helpers on the usual way.
    kind = _KINDS.get(type(tensor))
    element = ELEMENTS.get(tensor.dtype)
    if kind is None or element is None or tensor.layout is not _STRIDED or tensor.is_nested:
        if is_distributed(tensor):
            return _distributed().describe_distributed(tensor, path)  # type: ignore[no-any-return]
        _refuse(path, why_not(tensor))
    if not tensor.is_cpu or tensor.is_neg() or tensor.is_conj():
        return _describe_unusual(tensor, path, kind, element)
    address, room = _memory(tensor, element.itemsize, path)
    name, itemsize, attrs = element
    shape = tuple(tensor.shape)
    nbytes = extent = tensor.nbytes
    strides = None
    if tensor.requires_grad:
        attrs = _GRAD if attrs is None else {**attrs, **_GRAD}
    if len(shape) > 3:
        attrs = _with_memory_format(tensor, attrs)
    if not tensor.is_contiguous():
        strides = tuple([step * itemsize for step in tensor.stride()])
        extent = _extent(shape, strides, itemsize)
    if nbytes and extent > room:
        _refuse(path, past_storage(extent, room))
    return LeafSource(name, shape, nbytes, address, tensor, kind, strides, attrs, None, itemsize)


def spec(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """The format's dtype name and the shape of a tensor, which need not have memory."""
    element = ELEMENTS.get(tensor.dtype)
    return str(tensor.dtype) if element is None else element.name, tuple(tensor.shape)


def parts(tensor: torch.Tensor, path: str) -> Sequence[tuple[Box, torch.Tensor]] | None:
    """The boxes of a DTensor that are here, each with the tensor that holds it; None for other tensors.

    Args:
        tensor: any.
        path: where it stands in a target, for messages.

    Raises:
        UnsupportedLeafError: it is a DTensor with a partial placement.
    """
    if type(tensor) in _KINDS or not is_distributed(tensor):
        return None
    return _distributed().parts_of(tensor, path)  # type: ignore[no-any-return]


def join(tensor: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    """A DTensor like another one, made of values for its :func:`parts`."""
    return _distributed().join(tensor, values)  # type: ignore[no-any-return]


def _distributed() -> Any:
    # Importing DTensor takes longer than importing torch: only states that have some wait for it.
    from . import _dtensor

    return _dtensor


def _memory(tensor: torch.Tensor, itemsize: int, path: str) -> tuple[int, int]:
    """Address of the first element, and how many bytes its storage has from there on."""
    try:
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        room = storage.nbytes() if base else 0
    except RuntimeError as error:
        _refuse(path, no_memory(error), error)
    # Not tensor.data_ptr(): with an offset it looks like an address even where there is no memory.
    begin = int(tensor.storage_offset()) * itemsize
    return base + begin, room - begin


def _extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """From the first byte of the first element to the last byte of the last, in the unit of the strides."""
    return itemsize + sum([(length - 1) * step for length, step in zip(shape, strides, strict=True)])


def _with_memory_format(tensor: torch.Tensor, attrs: Mapping[str, str] | None) -> Mapping[str, str] | None:
    name = memory_format_of(tensor)
    return attrs if name is None else {**(attrs or {}), "memory_format": name}


def _describe_unusual(tensor: torch.Tensor, path: str, kind: str, element: Element) -> LeafSource:
    """A tensor whose values are not on the host, or not in its memory as they are."""
    device = tensor.device
    if device.type == "meta":
        _refuse(path, meta_tensor())
    address, room = _memory(tensor, element.itemsize, path)
    # The source's address, that of a copy or none at all, does not say which tensors are one.
    identity = (str(device), address, tensor.stride(), tensor.is_conj(), tensor.is_neg()) if tensor.nbytes else None
    attrs = _with_memory_format(tensor, element.attrs)
    if tensor.requires_grad:
        attrs = {**(attrs or {}), **_GRAD}
    if device.type != "cpu":
        attrs = {**(attrs or {}), "device": str(device)}
    if device.type == "cuda":
        extent = _extent(tensor.shape, tensor.stride(), 1) * element.itemsize
        if tensor.nbytes and extent > room:
            _refuse(path, past_storage(extent, room))
        return LeafSource(
            element.name,
            tuple(tensor.shape),
            tensor.nbytes,
            0,
            tensor,
            kind,
            attrs=attrs,
            fetch=DeviceFetch(tensor) if tensor.nbytes else None,
            itemsize=element.itemsize,
            identity=identity,
            pin=pin,
        )
    copy = describe(tensor.detach().cpu().resolve_conj().resolve_neg(), path)
    return copy._replace(kind=kind, attrs=attrs, identity=identity)


def _refuse(path: str, what: str, cause: BaseException | None = None) -> NoReturn:
    raise UnsupportedLeafError(f"{path}: {what}", path) from cause
