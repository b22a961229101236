"""load(): a checkpoint as JAX arrays."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

import fp_multi
from fp_multi import HostTensor, numpy_dtype
from fp_multi.config import LoadConfig
from fp_multi.errors import ManifestError, UnsupportedLeafError

from ._arrays import KEY_ATTR, require_jax_dtype

_KINDS = ("jax", "torch", "torch.parameter", "safetensors")


def load(
    path: str | os.PathLike[str],
    *,
    device: Any = None,
    target: Any = None,
    only: Any = None,
    config: LoadConfig = LoadConfig(),
    allow_pickle: bool = False,
) -> Any:
    """Read a checkpoint directory.

    What JAX or torch saved comes back as JAX arrays; NumPy arrays stay NumPy arrays.

    Args:
        path: the checkpoint directory, whoever wrote it.
        device: a device or a sharding for all arrays; None for JAX's default device.
        target: a state of the same structure to load like, see :func:`fp_multi.load`.
        only: the paths of the subtrees wanted.
        config: how to read.
        allow_pickle: unpickle the values that were saved with ``allow_pickle=True``. Only for files you trust.

    Returns:
        The state.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at ``path``.
        CorruptCheckpointError: stored bytes are not what was written.
        PickleRefusedError: the checkpoint holds a pickled value.
        UnsupportedLeafError: this JAX does not have the dtype or the key implementation of an array; 64-bit types need
            ``jax_enable_x64``.

    Example:
        >>> state = load("step_100", only=["params"])  # doctest: +SKIP
    """

    def build(host: HostTensor) -> Any:
        array = host.data.view(numpy_dtype(host.dtype)).reshape(host.shape)
        return _to_jax(array, host, device) if host.kind in _KINDS else array

    return fp_multi.load(path, target=target, only=only, config=config, allow_pickle=allow_pickle, tensor_builder=build)


def _to_jax(array: np.ndarray[Any, Any], host: HostTensor, device: Any) -> jax.Array:
    require_jax_dtype(array.dtype, host.path)
    try:
        # Nobody else has these bytes, so JAX may use the memory as it is.
        placed: jax.Array = jax.device_put(array, device)
    except TypeError as error:
        raise UnsupportedLeafError(f"{host.path}: {error}; load it with fp_multi.load", host.path) from error
    impl = host.attrs.get(KEY_ATTR)
    return placed if impl is None else to_key(placed, impl, host.path)


def to_key(data: jax.Array, impl: str, path: str) -> jax.Array:
    """A typed key of its data.

    Args:
        data: as ``jax.random.key_data`` gives it.
        impl: the name of the key's implementation.
        path: where it stands, for messages.

    Raises:
        UnsupportedLeafError: this JAX has no such implementation.
        ManifestError: this is not the data of a key.
    """
    try:
        key: jax.Array = jax.random.wrap_key_data(data, impl=impl)
    except ValueError as error:
        raise UnsupportedLeafError(
            f"{path}: this JAX has no key implementation {impl!r}; load its data with fp_multi.load", path
        ) from error
    except TypeError as error:
        raise ManifestError(f"tensor {path!r}: not the data of a key: {error}; the manifest is damaged") from error
    return key
