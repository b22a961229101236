"""``fp-multi inspect``: what a checkpoint holds, as a tree for people or as JSON for programs."""

from __future__ import annotations

import itertools
import json
import reprlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

import fp_multi as fp
from fp_multi._cli_text import count, shown, size
from fp_multi._format import Manifest, Tensor
from fp_multi._tree import decode

_MAX_REPR = 60
_MAX_PLAIN = 20
"""Of a container without tensors no more children are shown: histories and vocabularies can be long."""
_CONTAINERS = (dict, list, tuple)
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _MAX_REPR


def as_json(path: Path) -> str:
    """One JSON object. The checksums are left out, they are in the manifest.

    Raises:
        FpMultiError: what ``fp_multi.read_manifest`` raises.
    """
    if _is_single_file(path):
        entries, metadata = fp.read_safetensors_header(path)
        found: dict[str, Any] = {
            "path": str(path),
            "format": "safetensors",
            "metadata": metadata,
            "tensors": [
                {"name": name, "dtype": e.code, "shape": e.shape, "nbytes": e.end - e.begin}
                for name, e in entries.items()
            ],
        }
    else:
        manifest = fp.read_manifest(path)
        found = {
            "path": str(path),
            "format": manifest.format,
            "version": manifest.version,
            "writer": manifest.writer,
            "chunk_nbytes": manifest.chunk_nbytes,
            "metadata": manifest.metadata,
            "totals": {
                "tensors": manifest.totals.tensors,
                "tensor_nbytes": manifest.totals.tensor_nbytes,
                "shard_nbytes": manifest.totals.shard_nbytes,
            },
            "shards": [{"file": shard.file, "nbytes": shard.nbytes, "rank": shard.rank} for shard in manifest.shards],
            "tensors": [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "nbytes": _nbytes(tensor),
                    "kind": tensor.kind,
                    "attrs": tensor.attrs,
                    "shards": [piece.shard for piece in tensor.pieces],
                }
                for tensor in manifest.tensors
            ],
            "tree": manifest.tree,
        }
    return json.dumps(found, indent=2)


def as_tree(path: Path) -> RenderableType:
    """A heading and a tree of the state.

    Raises:
        FpMultiError: what ``fp_multi.read_manifest`` raises.
    """
    if _is_single_file(path):
        entries, metadata = fp.read_safetensors_header(path)
        total = sum(entry.end - entry.begin for entry in entries.values())
        head = [f"{path}: safetensors; {count(len(entries), 'tensor')}, {size(total)}"]
        tree = Tree("tensors")
        for name, entry in entries.items():
            tree.add(_line(name, entry.code, list(entry.shape), entry.end - entry.begin))
        return Group(*_heading(head, metadata), tree)
    manifest = fp.read_manifest(path)
    totals = manifest.totals
    head = [
        f"{path}: {manifest.format} version {manifest.version}, written by {manifest.writer}",
        f"{count(totals.tensors, 'tensor')}, {size(totals.tensor_nbytes)}, in "
        f"{count(len(manifest.shards), 'shard')} of together {size(totals.shard_nbytes)}",
    ]
    return Group(*_heading(head, manifest.metadata), _Branches(manifest).tree())


def _is_single_file(path: Path) -> bool:
    return path.is_file() and path.suffix == ".safetensors"


def _heading(lines: list[str], metadata: dict[str, str]) -> Iterator[Text]:
    for line in lines:
        yield Text(shown(line))
    for key, value in metadata.items():
        yield Text(shown(f"metadata {key} = {_repr.repr(value)}"))


def _nbytes(tensor: Tensor) -> int:
    return sum(piece.nbytes for piece in tensor.pieces)


def _line(label: str, dtype: str, shape: list[int], nbytes: int, *notes: str) -> Text:
    text = Text(shown(label), style="bold")
    text.append(shown(f"  {dtype} {shape}"), style="cyan")
    text.append(f"  {size(nbytes)}", style="green")
    for note in notes:
        text.append(shown(f"  {note}"), style="dim")
    return text


class _Branches:
    """The state of a manifest, with the manifest's records in the places of the tensors."""

    def __init__(self, manifest: Manifest) -> None:
        self.state = decode(manifest.tree, manifest.tensors)
        self.seen: set[int] = set()

    def tree(self) -> Tree:
        root = Tree("")
        self.add(root, "state", self.state)
        return root.children[0]

    def add(self, branch: Tree, label: str, value: Any) -> None:
        if isinstance(value, Tensor):
            branch.add(self.tensor(label, value))
        elif not isinstance(value, _CONTAINERS):
            branch.add(Text(shown(f"{label} = {_repr.repr(value)}")))
        else:
            self.container(branch, label, value)

    def container(self, branch: Tree, label: str, value: Any) -> None:
        plain = not _has_tensor(value)
        if plain and len(value) <= _MAX_PLAIN and len(text := repr(value)) <= _MAX_REPR:
            branch.add(Text(shown(f"{label} = {text}")))
            return
        below = branch.add(Text(shown(f"{label}  {type(value).__name__} of {len(value)}")))
        children = _children(value)
        for key, child in itertools.islice(children, _MAX_PLAIN if plain else None):
            self.add(below, key, child)
        if rest := sum(1 for _ in children):
            below.add(Text(f"and {count(rest, 'plain value')} more"))

    def tensor(self, label: str, tensor: Tensor) -> Text:
        if id(tensor) in self.seen:
            return Text(shown(f"{label}  the same tensor as {tensor.name}"))
        self.seen.add(id(tensor))
        notes = [tensor.kind] if tensor.kind != "numpy" else []
        if len(tensor.pieces) > 1:
            notes.append(f"in {len(tensor.pieces)} pieces")
        notes += [f"{key}={value}" for key, value in tensor.attrs.items()]
        return _line(label, tensor.dtype, tensor.shape, _nbytes(tensor), *notes)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """Labels and values below a container; the attributes of an OrderedDict come last."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield key if isinstance(key, str) else _repr.repr(key), child
        for name, child in vars(value).items() if isinstance(value, OrderedDict) else ():
            yield f"attribute {name}", child
        return
    names = getattr(value, "_fields", range(len(value)))
    for name, child in zip(names, value, strict=True):
        yield str(name), child


def _has_tensor(value: Any) -> bool:
    stack = [value]
    while stack:
        top = stack.pop()
        if isinstance(top, Tensor):
            return True
        if isinstance(top, _CONTAINERS):
            stack.extend(child for _, child in _children(top))
    return False
