"""What is wanted for one place of a state: from a target's leaf, from Orbax's restore args, or as it was saved."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from fp_multi.errors import TargetMismatchError

from ._arrays import KEY_ATTR
from ._shardings import Shardings
from ._stored import StoredLeaf, Tensor

_Shape: TypeAlias = tuple[int, ...]

SCALARS: tuple[type, ...] = (bool, int, float, complex, str)


@dataclass(frozen=True, slots=True)
class Want:
    """One value to make. Equal wants of one tensor are one value."""

    form: Literal["jax", "numpy", "scalar", "stored"]
    dtype: np.dtype[Any] | None = None
    """Elements; None as stored."""
    shape: _Shape | None = None
    """None as stored; of a key its data's."""
    sharding: Sharding | None = None
    layout: Any = None
    """A ``jax.experimental.layout.Format``, if the array is to have one."""
    kind: type | None = None
    """Of a Python scalar."""
    lossy: bool = False
    """The dtype was named for this value: convert whatever is lost."""
    strict: bool = True
    """Refuse another shape than the stored one; else cut off, or fill with zeros."""
    key: str | None = None
    """The implementation of a typed PRNG key."""


class Wants:
    """Makes wants for one restore.

    Args:
        strict: refuse other shapes than the stored ones.
        fallback: for arrays whose saved sharding is not to be had here.
        support_layout: give arrays the layouts of their targets.
    """

    def __init__(self, *, strict: bool = True, fallback: Sharding | None = None, support_layout: bool = False) -> None:
        self._strict = strict
        self._fallback = fallback
        self._support_layout = support_layout
        self._shardings = Shardings()

    def as_saved(self, leaf: StoredLeaf, tensor: Tensor | None) -> Want:
        """What was saved there, where it was."""
        if tensor is None or tensor.kind != "jax":
            return Want("stored")
        return Want("jax", sharding=self._saved(leaf), key=tensor.attrs.get(KEY_ATTR))

    def like(self, target: Any, leaf: StoredLeaf, tensor: Tensor | None) -> Want:
        """What a target's leaf describes.

        Args:
            target: an array, a ``jax.ShapeDtypeStruct``, an Orbax metadata object, a Python scalar or its type.
            leaf: the place in the checkpoint.
            tensor: its entry in the manifest, None for a plain value.

        Raises:
            TargetMismatchError: the target describes nothing that can be restored.
        """
        if isinstance(target, ocp.metadata.value.Metadata):
            return self._like_metadata(target, leaf, tensor)
        if isinstance(target, (jax.Array, jax.ShapeDtypeStruct)):
            return self._like_jax(target, leaf, tensor)
        if isinstance(target, (np.ndarray, np.generic)):
            return Want("numpy", target.dtype, target.shape, strict=self._strict, kind=_scalar_kind(target))
        if isinstance(target, type):
            # Orbax's newer interface: what was saved, as this type.
            kinds = (*SCALARS, np.ndarray, np.generic, jax.Array)
            known = any([issubclass(target, kind) for kind in kinds])
            return dataclasses.replace(self.typed(target if known else None, leaf, tensor), lossy=False)
        for kind in SCALARS:
            if isinstance(target, kind):
                return Want("scalar", kind=kind)
        if isinstance(target, (bytes, bytearray)):
            return Want("stored")
        if hasattr(target, "shape") and hasattr(target, "dtype"):
            return self._like_jax(target, leaf, tensor)
        raise TargetMismatchError(
            f"{leaf}: cannot restore into a value of type {type(target).__module__}.{type(target).__qualname__}; use "
            "an array, a jax.ShapeDtypeStruct, a Python scalar, None or ocp.PLACEHOLDER"
        )

    def as_told(self, args: Any, leaf: StoredLeaf, tensor: Tensor | None) -> Want:
        """What an ``ocp.RestoreArgs`` or ``ocp.ArrayRestoreArgs`` says.

        Args:
            args: it; a dtype that it names is converted to whatever is lost.
            leaf: the place in the checkpoint.
            tensor: its entry in the manifest, None for a plain value.
        """
        dtype = None if args.dtype is None or _is_key(args.dtype) else np.dtype(args.dtype)
        if not isinstance(args, ocp.ArrayRestoreArgs):
            want = self.typed(args.restore_type, leaf, tensor)
            key = want.key if dtype is None else None
            return dataclasses.replace(want, dtype=dtype, lossy=True, strict=self._strict, key=key)
        sharding: Any = args.sharding
        if sharding is None and args.mesh is not None:
            sharding = NamedSharding(args.mesh, args.mesh_axes)
        shape = args.global_shape if args.global_shape is not None else args.shape
        sharding, layout = self._placed(sharding, leaf)
        key = None if tensor is None else tensor.attrs.get(KEY_ATTR)
        if key is not None and shape is not None and len(shape) < len(tensor.shape if tensor else ()):
            shape = (*shape, *_key_data_shape(key))
        return Want(
            "jax",
            None if key is not None else dtype,
            None if shape is None else tuple(shape),
            sharding,
            layout,
            lossy=True,
            strict=self._strict and args.strict,
            key=key,
        )

    def typed(self, kind: Any, leaf: StoredLeaf, tensor: Tensor | None) -> Want:
        """What was saved there, as a type: ``jax.Array``, ``np.ndarray``, a Python scalar's, or None for its own."""
        if kind is None:
            return self.as_saved(leaf, tensor)
        if kind in SCALARS:
            return Want("scalar", kind=kind, lossy=True)
        if isinstance(kind, type) and issubclass(kind, (np.ndarray, np.generic)):
            return Want("numpy", strict=self._strict, kind=np.generic if issubclass(kind, np.generic) else None)
        if isinstance(kind, type) and issubclass(kind, jax.Array):
            key = None if tensor is None else tensor.attrs.get(KEY_ATTR)
            return Want("jax", sharding=self._saved(leaf), strict=self._strict, key=key)
        raise TargetMismatchError(
            f"{leaf}: restore_type={kind!r} is none of jax.Array, np.ndarray, int, float, bool, str"
        )

    def _like_jax(self, target: Any, leaf: StoredLeaf, tensor: Tensor | None) -> Want:
        where: Any = getattr(target, "sharding", None)
        layout = getattr(target, "format", None) if self._support_layout else None
        if where is None and (tensor is None or tensor.kind != "jax"):
            return Want("numpy", np.dtype(target.dtype), tuple(target.shape), strict=self._strict)
        sharding, other_layout = self._placed(where, leaf)
        key = None
        shape = tuple(target.shape)
        dtype: Any = target.dtype
        if _is_key(dtype):
            key = _impl_of(dtype)
            found = None if tensor is None else tensor.attrs.get(KEY_ATTR)
            if key != found:
                raise TargetMismatchError(f"{leaf}: a {key} key in target, {found or 'no typed key'} on disk")
            dtype, shape = None, (*shape, *_key_data_shape(key))
        return Want(
            "jax",
            None if dtype is None else np.dtype(dtype),
            shape,
            sharding,
            _layout_of(layout) or other_layout,
            strict=self._strict,
            key=key,
        )

    def _like_metadata(self, target: Any, leaf: StoredLeaf, tensor: Tensor | None) -> Want:
        if isinstance(target, ocp.metadata.value.StringMetadata):
            return Want("scalar", kind=str)
        if isinstance(target, ocp.metadata.value.ScalarMetadata):
            return Want("stored") if tensor is None else Want("scalar", kind=_kind_of(target.dtype))
        key = None if tensor is None else tensor.attrs.get(KEY_ATTR)
        if tensor is None or tensor.kind != "jax":
            if target.sharding is None:
                return Want("numpy", np.dtype(target.dtype), tuple(target.shape), strict=self._strict)
        elif key is not None:
            return self.as_saved(leaf, tensor)
        sharding, _ = self._placed(target.sharding, leaf)
        return Want("jax", np.dtype(target.dtype), tuple(target.shape), sharding, strict=self._strict)

    def _placed(self, sharding: Any, leaf: StoredLeaf) -> tuple[Sharding, Any]:
        """A sharding in JAX's terms, and a layout that came with it."""
        if sharding is None:
            return self._saved(leaf), None
        if isinstance(sharding, Sharding):
            return sharding, None
        if hasattr(sharding, "to_jax_sharding"):
            try:
                return sharding.to_jax_sharding(), None
            except ValueError:
                if self._fallback is None:
                    raise
                return self._fallback, None
        return sharding.sharding, sharding if self._support_layout else None

    def _saved(self, leaf: StoredLeaf) -> Sharding:
        try:
            found = self._shardings.here(leaf.sharding)
        except ValueError as error:
            if self._fallback is None:
                raise TargetMismatchError(
                    f"{leaf}: Topology mismatch detected: the array was saved on devices that are not here ({error}). "
                    "Pass a target with shardings, or fallback_sharding="
                ) from error
            found = None
        return found or self._fallback or _default_sharding()


@cache
def _key_data_shape(impl: str) -> _Shape:
    return tuple(jax.random.key_data(jax.random.key(0, impl=impl)).shape)


def _is_key(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def _impl_of(dtype: Any) -> str:
    return str(dtype._impl.name)


def _layout_of(layout: Any) -> Any:
    return layout if layout is not None and layout.layout is not None else None


def _scalar_kind(target: Any) -> type | None:
    return np.generic if isinstance(target, np.generic) else None


def _kind_of(dtype: Any) -> type:
    found = np.dtype(dtype)
    if found.kind == "b":
        return bool
    if found.kind == "c":
        return complex
    return int if found.kind in "iu" else float


def _default_sharding() -> Sharding:
    return SingleDeviceSharding(jax.local_devices()[0])
