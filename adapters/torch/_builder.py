"""HostTensor -> torch.Tensor: loaded bytes become tensors, each with memory of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fp_multi import HostTensor, TensorBuilder, numpy_dtype
from fp_multi.errors import ManifestError, TargetMismatchError, UnsupportedLeafError

from ._dtypes import CARRIERS, TORCH_DTYPES, VIEW_ATTR, VIEWED_DTYPES
from ._location import MapLocation, placer
from ._memory_format import in_memory_format

_KINDS = ("torch", "torch.parameter", "jax", "safetensors")


def make_builder(map_location: MapLocation = None) -> TensorBuilder:
    """Make the function that turns loaded bytes into tensors.

    Args:
        map_location: see :func:`fp_multi.adapters.torch.load`.

    Returns:
        A tensor builder for :func:`fp_multi.load`: torch tensors for what torch or JAX saved, NumPy arrays for kinds
        that are not known.

    Raises:
        CapabilityError: a device is named that is not here.
        ConfigError: ``map_location`` has none of the known forms.
    """
    place = placer(map_location)

    def build(host: HostTensor) -> Any:
        if host.kind not in _KINDS:
            return host.data.view(numpy_dtype(host.dtype)).reshape(host.shape)
        tensor = place(_on_cpu(host), host.attrs.get("device", "cpu"))
        requires_grad = host.attrs.get("requires_grad") == "1"
        if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ManifestError(
                f"tensor {host.path!r}: requires_grad does not fit {tensor.dtype}; the manifest is damaged"
            )
        if host.kind == "torch.parameter":
            return torch.nn.Parameter(tensor, requires_grad)
        return tensor.requires_grad_() if requires_grad else tensor

    return build


def builder_for(map_location: MapLocation, *, inplace: bool) -> TensorBuilder:
    """The builder of a load.

    Args:
        map_location: where tensors go.
        inplace: they are copied into tensors that exist: then they need not visit the device they were saved on.
    """
    return make_builder("cpu" if inplace and map_location is None else map_location)


def assign(tensor: torch.Tensor, value: Any) -> None:
    """Copy a loaded tensor into an existing one, bit by bit.

    Args:
        tensor: on any device, with any strides.
        value: a tensor of the same shape and dtype; or a NumPy array or scalar, if NumPy wrote the checkpoint.

    Raises:
        TargetMismatchError: several elements of ``tensor`` are one place in memory (an expanded tensor), or it cannot
            be written for another reason.
    """
    into = tensor.detach()
    source = plain_tensor(value, into.dtype)
    if not into.is_conj() and not into.is_neg():
        into = into.view(CARRIERS[into.itemsize])
        source = source.view(CARRIERS[source.itemsize])
    try:
        into.copy_(source)
    except RuntimeError as error:
        raise TargetMismatchError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be filled in place: {error}"
        ) from error


def plain_tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """A loaded value as a tensor without history.

    Args:
        value: a tensor; or a NumPy array or scalar, if NumPy wrote the checkpoint.
        dtype: its elements.
    """
    if isinstance(value, torch.Tensor):
        return value.detach()
    # Through bytes: torch does not take arrays of all types that it has itself.
    return _view(np.frombuffer(bytearray(value.tobytes()), np.uint8), dtype, value.shape).view(dtype)


def _view(data: npt.NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Bytes as elements of the size of ``dtype``."""
    carrier = CARRIERS[dtype.itemsize]
    if not data.size:
        # Memory of no bytes cannot be viewed as elements. The device: a default one may be set.
        return torch.empty(shape, dtype=carrier, device="cpu")
    return torch.from_numpy(data).view(carrier).view(shape)


def _on_cpu(host: HostTensor) -> torch.Tensor:
    dtype = _torch_dtype(host)
    memory_format = host.attrs.get("memory_format")
    plain = _view(host.data, dtype, host.shape)
    if memory_format is not None:
        try:
            plain = in_memory_format(plain, memory_format)
        except ValueError as error:
            raise ManifestError(f"tensor {host.path!r}: {error}; the manifest is damaged") from error
    return plain.view(dtype)


def _torch_dtype(host: HostTensor) -> torch.dtype:
    viewed = host.attrs.get(VIEW_ATTR)
    dtype = TORCH_DTYPES.get(host.dtype) if viewed is None else VIEWED_DTYPES.get(viewed)
    if dtype is None:
        raise UnsupportedLeafError(
            f"{host.path}: torch {torch.__version__} has no dtype {viewed or host.dtype}; leave the tensor out with "
            "only=, load it as a NumPy array with fp_multi.load, or use a newer torch",
            host.path,
        )
    if host.data.size % dtype.itemsize:
        raise ManifestError(
            f"tensor {host.path!r}: {host.data.size} bytes are not elements of {dtype}; the manifest is damaged"
        )
    return dtype
