"""jax.Array -> LeafSource: where the bytes of an array are.

An array of JAX never changes, so that nothing has to be copied and no fence is needed, as long as its memory stays. A
NumPy view of it sees to that: JAX does not give away memory that has such a view, neither to a jitted function that the
array is donated to (XLA copies instead) nor after ``delete()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from fp_multi import LeafSource, Sharded, numpy_dtype
from fp_multi.errors import ManifestError, UnsupportedLeafError

from ._device import Arriving, is_in_host_memory
from ._spread import is_on_all, spread_of

_names: dict[Any, str] = {}
"""By dtype; NumPy builds a dtype's name anew each time, which is felt with many small arrays."""

KEY_ATTR = "key_impl"
"""Attribute of a typed PRNG key: its implementation. Its stored elements are its key data."""


def describe(array: jax.Array, path: str) -> LeafSource:
    """Say where the bytes of an array are; waits until it is computed if it is in host memory.

    Nothing is gathered and, in host memory, nothing is copied: an array that is spread over devices or processes is
    described as the boxes that are here. The copy of an array on an accelerator is started.

    Args:
        array: an array or a typed PRNG key.
        path: where it stands in the state, for messages.

    Returns:
        The source; it keeps the array's memory alive and unchanged.

    Raises:
        UnsupportedLeafError: the array was deleted or donated, parts of it are in no process that saves, or it has a
            dtype that the format has not.
    """
    if array.is_deleted():
        _refuse(path, "the array was deleted, or donated to a jitted function; save it before, or save what came out")
    attrs = None
    data = array
    if _names.get(array.dtype) is None and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        attrs = {KEY_ATTR: _key_impl(array, path)}
        data = jax.random.key_data(array)
    if not data.size:
        return _in_host_memory(np.empty(data.shape, data.dtype), ("jax", id(array)), attrs, path)
    if is_on_all(data):
        # Not np.asarray(array): JAX would remember the copy that this is on an accelerator.
        return _whole(data.addressable_data(0), array, attrs, path, here=is_in_host_memory(data))
    return _sharded(data, array, attrs, path)


def spec(array: jax.Array) -> tuple[str, tuple[int, ...]]:
    """The format's dtype name and the shape of an array."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, array)
        return str(data.dtype), tuple(data.shape)
    return array.dtype.name, tuple(array.shape)


def require_jax_dtype(dtype: np.dtype[Any], path: str) -> None:
    """Refuse what JAX would store with fewer bits.

    Raises:
        UnsupportedLeafError: JAX has 64-bit types only if it is told so.
    """
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise UnsupportedLeafError(
            f"{path}: JAX would make {dtype} narrower; set jax_enable_x64, or load it with fp_multi.load", path
        )


def _whole(data: jax.Array, array: jax.Array, attrs: Mapping[str, str] | None, path: str, *, here: bool) -> LeafSource:
    if here:
        host = np.asarray(data)
        # A copy is somewhere else each time.
        return _in_host_memory(host, ("jax", id(array)) if host.flags.owndata else None, attrs, path)
    return LeafSource(
        _dtype_name(data.dtype, path),
        data.shape,
        data.nbytes,
        0,
        array,
        "jax",
        attrs=attrs,
        fetch=Arriving(data).fetch,
        itemsize=data.dtype.itemsize,
        identity=("jax", id(array)),
    )


def _in_host_memory(host: npt.NDArray[Any], identity: object, attrs: Mapping[str, str] | None, path: str) -> LeafSource:
    return LeafSource(
        _dtype_name(host.dtype, path),
        host.shape,
        host.nbytes,
        host.__array_interface__["data"][0],
        host,
        "jax",
        None if host.flags.c_contiguous else host.strides,
        attrs,
        None,
        host.itemsize,
        identity,
    )


def _sharded(data: jax.Array, array: jax.Array, attrs: Mapping[str, str] | None, path: str) -> LeafSource:
    spread = spread_of(data)
    if not all(spread.holders):
        _refuse(path, "parts of the array are on devices of processes that do not take part in the save")
    here = is_in_host_memory(data)
    local = [(number, _whole(data.addressable_data(at), array, None, path, here=here)) for number, at in spread.local]
    return LeafSource(
        _dtype_name(data.dtype, path),
        data.shape,
        data.dtype.itemsize * data.size,
        0,
        [source.keepalive for _, source in local],
        "jax",
        attrs=attrs,
        itemsize=data.dtype.itemsize,
        identity=("jax", id(array)),
        sharded=Sharded(spread.boxes, spread.holders, tuple(local)),
    )


def _dtype_name(dtype: Any, path: str) -> str:
    found = _names.get(dtype)
    if found is None:
        name: str = dtype.name
        try:
            known = numpy_dtype(name) == dtype
        except ManifestError:
            known = False
        if not known:
            _refuse(path, f"cannot store elements of {dtype}; convert it")
        found = _names[dtype] = name
    return found


def _key_impl(array: jax.Array, path: str) -> str:
    impl = jax.random.key_impl(array)
    if not isinstance(impl, str):
        _refuse(path, f"the key's implementation {impl} has no name to find it by; save its jax.random.key_data()")
    return impl


def _refuse(path: str, what: str) -> NoReturn:
    raise UnsupportedLeafError(f"{path}: {what}", path)
