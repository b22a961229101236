"""What a checkpoint holds, in Orbax's own classes."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

# Orbax has no public name for what makes a TreeMetadata; handlers are meant to return one.
from orbax.checkpoint._src.metadata.tree import TreeMetadata, build_default_tree_metadata

from fp_multi import CheckpointReader, numpy_dtype
from fp_multi.errors import ManifestError

from ._save import CUSTOM_KEY
from ._shardings import Shardings
from ._stored import StoredLeaf, StoredTree, leaves_below, with_leaves

_value = ocp.metadata.value


def is_tree_metadata(value: Any) -> bool:
    """Whether a value is what ``item_metadata`` returns."""
    return hasattr(value, "custom_metadata") and isinstance(value, TreeMetadata)


def tree_metadata(reader: CheckpointReader) -> Any:
    """Orbax's metadata of an item.

    Args:
        reader: the checkpoint.

    Returns:
        A ``TreeMetadata``: ``ArrayMetadata`` for arrays, ``ScalarMetadata`` for Python scalars, ``StringMetadata`` for
        strings, in the saved containers; types that the format does not have are in their plain form.
    """
    stored = StoredTree(reader)
    shardings = Shardings()
    directory = epath.Path(reader.directory)
    values = {leaf: _leaf(leaf, reader, shardings, directory) for leaf in leaves_below(stored.root)}
    return build_default_tree_metadata(with_leaves(stored.root, values), custom_metadata=_custom(reader))


def abstract_tree(reader: CheckpointReader) -> Any:
    """A target for a restore: ``jax.ShapeDtypeStruct`` for arrays, a Python scalar for a Python scalar."""
    stored = StoredTree(reader)
    shardings = Shardings()

    def abstract(leaf: StoredLeaf) -> Any:
        if leaf.tensor is None:
            return "string" if isinstance(leaf.value, str) else type(leaf.value)(0)
        tensor = reader.manifest.tensors[leaf.tensor]
        try:
            sharding = shardings.here(leaf.sharding)
        except ValueError:
            sharding = None
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            tuple(tensor.shape), numpy_dtype(tensor.dtype), sharding=sharding
        )

    return with_leaves(stored.root, {leaf: abstract(leaf) for leaf in leaves_below(stored.root)})


def _leaf(leaf: StoredLeaf, reader: CheckpointReader, shardings: Shardings, directory: epath.Path) -> Any:
    if leaf.tensor is None:
        if isinstance(leaf.value, str):
            return _value.StringMetadata(name=str(leaf), directory=directory)
        return _value.ScalarMetadata(name=str(leaf), directory=directory, dtype=_scalar_dtype(leaf.value))
    tensor = reader.manifest.tensors[leaf.tensor]
    shape = tuple(tensor.shape)
    return _value.ArrayMetadata(
        name=str(leaf),
        directory=directory,
        shape=shape,
        sharding=shardings.metadata(leaf.sharding),
        dtype=numpy_dtype(tensor.dtype),
        storage=_value.StorageMetadata(chunk_shape=_largest(tensor, shape), write_shape=None),
    )


def _largest(tensor: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    piece = max(tensor.pieces, key=lambda piece: piece.nbytes)
    return shape if piece.box is None else tuple(piece.box[1])


def _scalar_dtype(value: Any) -> np.dtype[Any]:
    # An integer of more than 64 bits has no dtype; what stands for it says at least that it is whole.
    found = np.asarray(value).dtype
    return np.dtype(np.int64) if found.kind == "O" else found


def _custom(reader: CheckpointReader) -> Any:
    text = reader.manifest.metadata.get(CUSTOM_KEY)
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{reader.directory}: {CUSTOM_KEY} is not JSON: {error}") from error
