"""States and trees: the whole of docs/format.md sections 3.3 and 3.4 in four functions.

``describe`` takes a state apart, ``decode`` puts it together again, ``select`` cuts a tree down,
``tree_paths`` lists it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp_multi._nodes import check_tree as check_tree
from fp_multi._tree_decode import build
from fp_multi._tree_encode import describe as describe
from fp_multi._tree_select import TreeLeaf as TreeLeaf
from fp_multi._tree_select import select as select
from fp_multi._tree_select import tree_paths as tree_paths
from fp_multi._types import Selection


def decode(tree: Any, tensors: Sequence[Any], *, only: Selection | None = None) -> Any:
    """Rebuild a state, or the part of it that ``only`` names.

    Args:
        tree: a tree that ``check_tree`` accepted, or that ``describe`` or ``select`` made.
        tensors: the value for each tensor index; those that are not used may be anything.
        only: see :func:`select`.

    Returns:
        The state.

    Raises:
        KeyNotFoundError: ``only`` names what the tree does not have.
        ManifestError: a key or an extension value turns out to be impossible.
    """
    if only is not None:
        tree, _ = select(tree, only)
    return build(tree, tensors)
