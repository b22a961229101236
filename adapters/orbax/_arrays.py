"""jax.Array -> LeafSource: where the bytes of an array are.

An array of JAX never changes, so that nothing has to be copied and no fence is needed, as long as its memory stays. A
NumPy view of it sees to that: JAX does not give away memory that has such a view, neither to a jitted function that the
array is donated to (XLA copies instead) nor after ``delete()``.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fp_multi import LeafSource, numpy_dtype
from fp_multi.errors import UnsupportedLeafError

KEY_ATTR = "key_impl"
"""Attribute of a typed PRNG key: its implementation. Its stored elements are its key data."""


def describe(array: jax.Array, path: str) -> LeafSource:
    """Say where the bytes of an array are; waits until it is computed.

    An array on the CPU that is on one device, or whole on each, is not copied. One that is spread over devices, or on
    an accelerator, is copied to the host here.

    Args:
        array: an array or a typed PRNG key.
        path: where it stands in the state, for messages.

    Returns:
        The source; it keeps the array's memory alive and unchanged.

    Raises:
        UnsupportedLeafError: the array was deleted or donated, is not wholly in this process, or has a dtype that the
            format has not.
    """
    if array.is_deleted():
        _refuse(path, "the array was deleted, or donated to a jitted function; save it before, or save what came out")
    if not array.is_fully_addressable:
        _refuse(path, "the array is spread over several processes; save its addressable shards, or gather it first")
    attrs = None
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        attrs = {KEY_ATTR: _key_impl(array, path)}
        array = jax.random.key_data(array)
    host = _on_host(array)
    name = host.dtype.name
    if numpy_dtype(name) != host.dtype:
        _refuse(path, f"cannot store elements of {array.dtype}; convert it")
    return LeafSource(
        name,
        host.shape,
        host.nbytes,
        host.__array_interface__["data"][0],
        host,
        "jax",
        None if host.flags.c_contiguous else host.strides,
        attrs,
        None,
        host.itemsize,
        # A copy is somewhere else each time.
        ("jax", id(array)) if host.flags.owndata else None,
    )


def spec(array: jax.Array) -> tuple[str, tuple[int, ...]]:
    """The format's dtype name and the shape of an array."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, array)
        return str(data.dtype), tuple(data.shape)
    return array.dtype.name, tuple(array.shape)


def _on_host(array: jax.Array) -> npt.NDArray[Any]:
    if array.is_fully_replicated:
        # Not np.asarray(array): JAX would remember the copy that this is on an accelerator.
        return np.asarray(array.addressable_data(0))
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            whole[shard.index] = np.asarray(shard.data)
    return whole


def _key_impl(array: jax.Array, path: str) -> str:
    impl = jax.random.key_impl(array)
    if not isinstance(impl, str):
        _refuse(path, f"the key's implementation {impl} has no name to find it by; save its jax.random.key_data()")
    return impl


def _refuse(path: str, what: str) -> NoReturn:
    raise UnsupportedLeafError(f"{path}: {what}", path)
