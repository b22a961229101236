"""JAX: save and load ``jax.Array``; Orbax: a checkpoint handler.

Importing this package teaches :func:`fp_multi.save` and :class:`fp_multi.Checkpointer` JAX's arrays and its typed PRNG
keys. It needs jax only; Orbax is imported, and the handler registered there, when one of the handler's names is used.

Example:
    >>> import jax.numpy as jnp
    >>> import fp_multi as fp
    >>> from fp_multi.adapters.orbax import load
    >>> report = fp.save({"w": jnp.ones((4, 2)), "step": 3}, path)  # doctest: +SKIP
    >>> state = load(path)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from fp_multi import TensorType, register_tensor_type
from fp_multi.adapters._lazy import lazily

from ._arrays import describe, spec
from ._load import load as load
from .comm import JaxComm as JaxComm

if TYPE_CHECKING:
    from .args import FastPersistRestore as FastPersistRestore
    from .args import FastPersistSave as FastPersistSave
    from .handler import FastPersistHandler as FastPersistHandler
    from .v1 import FastPersistCheckpointable as FastPersistCheckpointable
    from .v1 import fastpersist_registry as fastpersist_registry

__all__ = [
    "load",
    "JaxComm",
    "FastPersistHandler",
    "FastPersistSave",
    "FastPersistRestore",
    "FastPersistCheckpointable",
    "fastpersist_registry",
]

# FastPersistHandler too lives in args for this purpose: whoever has the handler has registered its arguments.
_HOMES = {
    "FastPersistHandler": "args",
    "FastPersistSave": "args",
    "FastPersistRestore": "args",
    "FastPersistCheckpointable": "v1",
    "fastpersist_registry": "v1",
}

# One registration covers jaxlib's class and typed keys; tracers are not covered, they have no values.
register_tensor_type(jax.Array, TensorType(describe=describe, spec=spec))

__getattr__ = lazily(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
