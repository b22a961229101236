"""Restore: match a target with what a checkpoint holds, and read just that."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from fp_multi import CheckpointReader
from fp_multi.errors import TargetMismatchError

from ._build import Builder
from ._stored import MISSING, StoredLeaf, StoredTree, child_of, key_name, leaves_below, shown, with_leaves
from ._transforms import Transforms
from ._types import with_types
from ._want import Want, Wants

_SHOWN = 5
_DIFFER = "User-provided restore item and on-disk values have different leaves"
"""Begins as Orbax's message does: there is code that looks for it."""
PLACEHOLDER = ...
"""``ocp.PLACEHOLDER``: this leaf is not wanted."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How to restore; the fields of :class:`FastPersistRestore`."""

    restore_args: Any = None
    strict: bool = True
    partial_restore: bool = False
    support_layout: bool = False
    fallback_sharding: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True


class Restore:
    """One restore from an open checkpoint.

    Args:
        reader: the checkpoint.
        options: how.

    Raises:
        PickleRefusedError: the checkpoint holds a pickled value.
    """

    def __init__(self, reader: CheckpointReader, options: Options) -> None:
        reader.refuse_pickle(allow_pickle=False)
        self._reader = reader
        self._options = options
        self._stored = StoredTree(reader)
        self._wants = Wants(
            strict=options.strict, fallback=options.fallback_sharding, support_layout=options.support_layout
        )
        self._wanted: list[tuple[StoredLeaf, Want]] = []

    def as_saved(self) -> Any:
        """The whole state, in its own structure."""
        told = _Told(self._options.restore_args)
        leaves = []
        for leaf in leaves_below(self._stored.root):
            args = told.at(leaf.path)
            if args is PLACEHOLDER:
                continue
            leaves.append(leaf)
            tensor = self._tensor(leaf)
            want = self._wants.as_saved(leaf, tensor) if args is None else self._wants.as_told(args, leaf, tensor)
            self._wanted.append((leaf, want))
        values: dict[StoredLeaf, Any] = dict.fromkeys(leaves_below(self._stored.root), PLACEHOLDER)
        values.update(zip(leaves, Builder(self._reader).build(self._wanted), strict=True))
        return with_types(with_leaves(self._stored.root, values), self._reader.manifest.metadata)

    def like(self, target: Any) -> Any:
        """The state in the structure of a target.

        Raises:
            TargetMismatchError: they do not fit.
        """
        flat, treedef = jax.tree_util.tree_flatten_with_path(target, is_leaf=lambda node: node is None)
        told = _Told(self._options.restore_args)
        transforms = Transforms(self._options.transforms, default=self._options.transforms_default_to_original)
        found: list[Any] = [None] * len(flat)
        places: list[int] = []
        seen: set[StoredLeaf] = set()
        missing: list[str] = []
        for number, (keys, leaf) in enumerate(flat):
            path = tuple([key_name(key) for key in keys])
            source = transforms.source(path)
            stored = MISSING if source is None else self._at(source)
            if leaf is None or (leaf is PLACEHOLDER and _is_one(stored)):
                found[number] = leaf
                seen.update(() if stored is MISSING else leaves_below(stored))
            elif stored is MISSING:
                found[number] = leaf
                if source is not None and not self._options.partial_restore:
                    missing.append(shown(path))
            elif isinstance(stored, StoredLeaf):
                seen.add(stored)
                args = told.at(path)
                if args is PLACEHOLDER:
                    found[number] = args
                    continue
                self._wanted.append((stored, self._want(stored, args, leaf)))
                places.append(number)
            elif next(leaves_below(stored), None) is not None:
                raise TargetMismatchError(
                    f"{shown(path)}: {_DIFFER}: a leaf in target, a {type(stored).__name__} with leaves on disk"
                )
            # else: it was masked, or empty, when it was saved: None, as Orbax has it
        self._check(missing, seen, drop_others=self._options.partial_restore or bool(transforms))
        for number, value in zip(places, Builder(self._reader).build(self._wanted), strict=True):
            found[number] = value
        return jax.tree_util.tree_unflatten(treedef, found)

    def _want(self, stored: StoredLeaf, args: Any, leaf: Any) -> Want:
        tensor = self._tensor(stored)
        return self._wants.like(leaf, stored, tensor) if args is None else self._wants.as_told(args, stored, tensor)

    def _at(self, path: tuple[Any, ...]) -> Any:
        node = self._stored.root
        for name in path:
            node = child_of(node, name)
            if node is MISSING:
                break
        return node

    def _tensor(self, leaf: StoredLeaf) -> Any:
        return None if leaf.tensor is None else self._reader.manifest.tensors[leaf.tensor]

    def _check(self, missing: list[str], seen: set[StoredLeaf], *, drop_others: bool) -> None:
        others = [] if drop_others else [str(leaf) for leaf in leaves_below(self._stored.root) if leaf not in seen]
        if not missing and not others:
            return
        parts = []
        if missing:
            parts.append(f"in target only: {_listed(missing)}")
        if others:
            parts.append(f"on disk only: {_listed(others)}")
        raise TargetMismatchError(
            f"{self._reader.directory}: {_DIFFER}: {'; '.join(parts)}. "
            "partial_restore=True restores what both have; None or ocp.PLACEHOLDER in the target leaves a leaf out"
        )


class _Told:
    """A tree of restore args, by path; keys are compared by their text, as the tree may be of plain dicts."""

    def __init__(self, tree: Any) -> None:
        self._args: Mapping[tuple[str, ...], Any] = {}
        if tree is not None:
            flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, ocp.RestoreArgs))
            self._args = {tuple([str(key_name(key)) for key in keys]): args for keys, args in flat}

    def at(self, path: tuple[Any, ...]) -> Any:
        if not self._args:
            return None
        found = self._args.get(tuple([str(key) for key in path]))
        if found is None or found is PLACEHOLDER or isinstance(found, ocp.RestoreArgs):
            return found
        raise TargetMismatchError(f"{shown(path)}: restore_args has {type(found).__name__}, expected ocp.RestoreArgs")


def _is_one(stored: Any) -> bool:
    """Whether there is at most one leaf at a place."""
    return stored is MISSING or isinstance(stored, StoredLeaf) or next(leaves_below(stored), None) is None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
