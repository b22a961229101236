"""JAX: save and load ``jax.Array``.

Importing this package teaches :func:`fp_multi.save` and :class:`fp_multi.Checkpointer` JAX's arrays and its typed PRNG
keys. It needs jax only.

Example:
    >>> import jax.numpy as jnp
    >>> import fp_multi as fp
    >>> from fp_multi.adapters.orbax import load
    >>> report = fp.save({"w": jnp.ones((4, 2)), "step": 3}, path)  # doctest: +SKIP
    >>> state = load(path)  # doctest: +SKIP
"""

from __future__ import annotations

import jax

from fp_multi import TensorType, register_tensor_type

from ._arrays import describe, spec
from ._load import load as load

__all__ = ["load"]

# One registration covers jaxlib's class and typed keys; tracers are not covered, they have no values.
register_tensor_type(jax.Array, TensorType(describe=describe, spec=spec))
