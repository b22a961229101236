"""Orbax's ``transforms`` on restore: renamed leaves, and leaves that keep the target's value."""

from __future__ import annotations

import re
from typing import Any

import jax
import orbax.checkpoint as ocp

from fp_multi.errors import ConfigError

from ._stored import key_name

_Path = tuple[Any, ...]


class Transforms:
    """Where a restored leaf comes from.

    Args:
        tree: a tree or a flat dict of ``ocp.Transform``; the keys of a path, joined by ``/``, are a regular expression
            for paths of the target. None for no transforms.
        default: leaves that no transform names come from the same path of the checkpoint; else they keep their value.

    Raises:
        ConfigError: a transform computes values. Restore first, then compute.
    """

    def __init__(self, tree: Any, *, default: bool = True) -> None:
        self._given = tree is not None
        self._default = default or not self._given
        self._rules: list[tuple[re.Pattern[str], Any]] = []
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, ocp.Transform))
        for keys, transform in leaves:
            name = "/".join([str(key_name(key)) for key in keys])
            if not isinstance(transform, ocp.Transform):
                raise ConfigError(f"transforms: {name} is a {type(transform).__name__}, expected ocp.Transform")
            if any(getattr(transform, field, None) is not None for field in ("value_fn", "multi_value_fn")):
                raise ConfigError(
                    f"transforms: {name} has a value_fn or multi_value_fn; this handler renames (original_key) and "
                    "keeps (use_fallback) only. Restore, and apply the function to what you get"
                )
            self._rules.append((re.compile(name), transform))

    def __bool__(self) -> bool:
        return self._given

    def source(self, path: _Path) -> _Path | None:
        """The path in the checkpoint for a path of the target; None if the target's own value stays."""
        text = "/".join(map(str, path)) if self._rules else ""
        for pattern, transform in self._rules:
            match = pattern.fullmatch(text)
            if match is None:
                continue
            if transform.use_fallback:
                return None
            original = transform.original_key
            if original is None:
                return path
            if isinstance(original, tuple):
                return original
            return tuple(match.expand(original).split("/"))
        return path if self._default else None
