"""The coordinator's part of a DCP save: the reports of all ranks and DCP's metadata -> the manifest.

The state in the manifest is the nested one that DCP's planner flattened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fp_multi.errors import UnsupportedLeafError
from fp_multi.storage import Manifest, Tensor, combine, describe

from ._convert_tensors import torch_dtype
from ._dcp_note import NOTE, Note, Parts
from ._dcp_report import Report
from ._dcp_union import Union
from ._dcp_values import Path


def build_manifest(
    directory: str, metadata: Metadata, reports: Sequence[Report], user: Mapping[str, str], *, save_id: str
) -> Manifest:
    """Put together what the ranks have written.

    Args:
        directory: where the shards are.
        metadata: DCP's; what it says of dtypes is corrected.
        reports: by rank.
        user: strings to keep with the checkpoint.
        save_id: DCP's name for the save.

    Raises:
        CommError: the reports do not make a checkpoint.
        UnsupportedLeafError: the planner's data cannot be stored.
    """
    names = list(metadata.state_dict_metadata)
    paths = _paths(metadata.planner_data, names)
    nested = None if paths is None else _nest(paths)
    flat = nested is None
    if paths is None or nested is None:
        paths = {fqn: (fqn,) for fqn in names}
        nested = dict(zip(names, names, strict=True))
    union = Union(directory, reports)
    tree = union.node(nested)
    written = [
        msgspec.structs.replace(report.part, tensors=[numbers[i] for i in report.part.tensors])
        for report, numbers in zip(reports, union.numbers, strict=True)
    ]
    manifest = combine(directory, tree, union.heads, written, user)
    parted = {fqn: found for report in reports for fqn, found in report.parts.items()}
    note = Note(
        flat=flat,
        values=[list(paths[fqn]) for fqn in names if fqn in union.values and fqn not in parted],
        raw=[fqn for report in reports for fqn in report.raw],
        planner_data=_node_of(metadata.planner_data) if flat and metadata.planner_data is not None else None,
        parts=[Parts(list(paths[fqn]), shape, offsets) for fqn, (shape, offsets) in parted.items()],
        streams={fqn: at for report in reports for fqn, at in report.streams.items()},
        save_id=save_id,
    )
    for fqn in parted:
        rank, first, _ = union.values[fqn]
        _correct_dtype(metadata, fqn, manifest.tensors[union.numbers[rank][first]])
    for fqn, number in union.tensors.items():
        _note_tensor(note, metadata, fqn, manifest.tensors[number])
    manifest.metadata[NOTE] = msgspec.json.encode(note).decode()
    return manifest


def _paths(planner_data: Any, names: Sequence[str]) -> dict[str, Path] | None:
    """Where DCP's default planner says that everything stands; None if it does not say."""
    if not isinstance(planner_data, Mapping):
        return None
    paths = {}
    for fqn in names:
        path = planner_data.get(fqn)
        if not isinstance(path, (tuple, list)) or ".".join(map(str, path)) != fqn:
            return None
        if not path or not all([type(key) in (str, int) for key in path]):
            return None
        paths[fqn] = tuple(path)
    return paths


def _nest(paths: Mapping[str, Path]) -> dict[Any, Any] | None:
    """Dicts in dicts, with names for leaves; None if two paths, of different ranks for instance, do not go together."""
    root: dict[Any, Any] = {}
    for fqn, path in paths.items():
        at = root
        for key in path[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                return None
        if path[-1] in at:
            return None
        at[path[-1]] = fqn
    stack: list[Any] = [root]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            if len({type(key) for key in one}) > 1:
                return None
            stack.extend(one.values())
    return None if any([type(key) is int for key in root]) else root


def _node_of(planner_data: Any) -> Any:
    described = describe(planner_data)
    if described.sources:
        raise UnsupportedLeafError(
            "the planner's own data holds tensors, arrays or byte strings; it may hold plain values"
        )
    return described.tree


def _correct_dtype(metadata: Metadata, fqn: str, tensor: Tensor) -> None:
    """Cached plans do not look at dtypes."""
    entry = metadata.state_dict_metadata[fqn]
    dtype = torch_dtype(tensor)
    if isinstance(entry, TensorStorageMetadata) and dtype is not None and entry.properties.dtype != dtype:
        metadata.state_dict_metadata[fqn] = dataclasses.replace(
            entry, properties=dataclasses.replace(entry.properties, dtype=dtype)
        )


def _note_tensor(note: Note, metadata: Metadata, fqn: str, tensor: Tensor) -> None:
    _correct_dtype(metadata, fqn, tensor)
    entry = metadata.state_dict_metadata[fqn]
    if not isinstance(entry, TensorStorageMetadata):
        return
    chunks = [(list(chunk.offsets), list(chunk.sizes)) for chunk in entry.chunks]
    if chunks == [([0] * len(tensor.shape), tensor.shape)]:
        return
    if sorted(chunks) == sorted([piece.box for piece in tensor.pieces if piece.box is not None]):
        note.pieces.append(fqn)
    else:
        note.chunks[fqn] = chunks
