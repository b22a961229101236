"""What a CheckpointManager is told: FastPersistSave and FastPersistRestore."""

from __future__ import annotations

import dataclasses
from typing import Any

import orbax.checkpoint as ocp
from jax.sharding import Sharding

from fp_multi.errors import ConfigError

from ._metadata import is_tree_metadata
from .handler import FastPersistHandler


@ocp.args.register_with_handler(FastPersistHandler, for_save=True)
@dataclasses.dataclass
class FastPersistSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Save a pytree with :class:`FastPersistHandler`.

    Attributes:
        item: the pytree: of JAX and NumPy arrays, typed keys, Python scalars of any size, strings, None.
        save_args: a tree like the item of ``ocp.SaveArgs``, or None; arrays are cast to a ``dtype`` that they name.
            What they say about chunks has no meaning here.
        custom_metadata: whatever JSON holds; comes back with the item's metadata.

    Example:
        >>> manager.save(step, args=FastPersistSave(state))  # doctest: +SKIP
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None

    def __post_init__(self) -> None:
        """Refuse what describes a checkpoint in the place of a state."""
        if is_tree_metadata(self.item):
            raise ConfigError("cannot save the metadata of a checkpoint; save a state")


@ocp.args.register_with_handler(FastPersistHandler, for_restore=True)
@dataclasses.dataclass
class FastPersistRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Restore a pytree with :class:`FastPersistHandler`; docs/orbax.md has the rules as one table.

    Attributes:
        item: a pytree that says what is wanted: arrays or ``jax.ShapeDtypeStruct`` with the shapes, dtypes and
            shardings; None or ``ocp.PLACEHOLDER`` for a leaf that is not; or what ``item_metadata`` returned. Without
            it the state comes back as it was saved.
        restore_args: a tree of ``ocp.RestoreArgs`` or ``ocp.ArrayRestoreArgs``, which say more than the item.
        strict: False cuts off or fills up with zeros arrays whose shape is another one than the target's.
        partial_restore: restore what item and checkpoint both have; other leaves of the item stay as they are.
        support_layout: give arrays the layouts of the item's arrays.
        fallback_sharding: for arrays whose saved sharding is not to be had on these devices.
        transforms: a tree or flat dict of ``ocp.Transform`` with ``original_key`` or ``use_fallback``.
        transforms_default_to_original: as for ``ocp.args.PyTreeRestore``.
        legacy_transform_fn: not supported.

    Example:
        >>> state = manager.restore(step, args=FastPersistRestore(abstract_state))  # doctest: +SKIP
    """

    item: Any = None
    restore_args: Any = None
    strict: bool = True
    partial_restore: bool = False
    support_layout: bool = False
    fallback_sharding: Sharding | None = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None

    def __post_init__(self) -> None:
        """Take the tree out of metadata."""
        if is_tree_metadata(self.item):
            self.item = self.item.tree
        if is_tree_metadata(self.restore_args):
            self.restore_args = self.restore_args.tree
        if self.legacy_transform_fn is not None:
            raise ConfigError("legacy_transform_fn is not supported; restore, and apply the function to what you get")
