"""``fp-multi convert``: PyTorch and safetensors files to checkpoint directories, and back."""

from __future__ import annotations

import importlib
import os
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fp_multi as fp
from fp_multi._cli_text import count, err, out, say, shown, size, working
from fp_multi._commit import FileCommit
from fp_multi._format import Manifest
from fp_multi._tree import decode, tree_paths
from fp_multi._types import Array
from fp_multi.config import SaveConfig
from fp_multi.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    UnsupportedLeafError,
)

_TORCH = (".pt", ".pth")
_SAFETENSORS = (".safetensors",)
_MAX_NAMED = 5


def convert(source: Path, target: Path, *, overwrite: bool) -> None:
    """Convert; what SRC is and the suffix of DST decide the direction.

    Args:
        source: a checkpoint directory or a file.
        target: a file or a checkpoint directory.
        overwrite: replace the target.

    Raises:
        ConfigError: the two do not make a direction, or a file cannot be read as what its suffix says.
        CheckpointNotFoundError: there is nothing at ``source``.
        CheckpointExistsError: the target exists and ``overwrite`` was not given.
        FpMultiError: what loading and saving raise.
    """
    if not os.path.lexists(source):
        raise CheckpointNotFoundError(f"{source}: there is nothing here")
    if os.path.lexists(target) and not overwrite:
        raise CheckpointExistsError(f"{target} exists; --overwrite replaces it")
    done = _from_checkpoint(source, target) if source.is_dir() else _to_checkpoint(source, target, overwrite)
    say(out(), f"{shown(str(source))} -> {shown(str(target))}: {done}")


def _from_checkpoint(source: Path, target: Path) -> str:
    _check_suffix(target, "DST, if SRC is a directory,")
    if target.is_dir():
        raise CheckpointExistsError(f"{target} is a directory and would become a file; remove it")
    if target.suffix in _TORCH:
        return _to_torch_file(source, target)
    return _to_safetensors(source, target)


def _to_checkpoint(source: Path, target: Path, overwrite: bool) -> str:
    _check_suffix(source, "SRC, if it is a file,")
    if target.suffix in _TORCH + _SAFETENSORS:
        raise ConfigError(f"{source} and {target} are both files; one of the two must be a checkpoint directory")
    metadata: dict[str, str] = {}
    with working(f"reading {source.name}"):
        if source.suffix in _TORCH:
            state = _read_torch_file(source)
        else:
            state = fp.load_safetensors(source)
            _, metadata = fp.read_safetensors_header(source)
    with working(f"writing {target.name}"):
        report = fp.save(state, target, overwrite=overwrite, metadata=metadata)
    return _summary(report)


def _check_suffix(path: Path, role: str) -> None:
    if path.suffix not in _TORCH + _SAFETENSORS:
        raise ConfigError(f"{role} must end with .pt, .pth or .safetensors, found {path.name!r}")


def _summary(report: fp.SaveReport) -> str:
    return f"{count(report.tensors, 'tensor')}, {size(report.tensor_nbytes)}, {report.gbytes_per_s:.2f} GB/s"


def _values(manifest: Manifest, state: Any) -> list[Any]:
    """The value of every tensor of a loaded state, by its index in the manifest."""
    # The indices mark the places of the tensors in a state of the same structure.
    indices = [_Index(i) for i in range(len(manifest.tensors))]
    values: list[Any] = [None] * len(indices)
    stack = [(decode(manifest.tree, indices), state)]
    while stack:
        mark, value = stack.pop()
        if isinstance(mark, _Index):
            values[mark.index] = value
        elif isinstance(mark, dict):
            stack.extend((mark[key], value[key]) for key in mark)
            if isinstance(mark, OrderedDict):
                stack.extend((child, vars(value)[name]) for name, child in vars(mark).items())
        elif isinstance(mark, (list, tuple)):
            stack.extend(zip(mark, value, strict=True))
    return values


@dataclass(frozen=True, slots=True)
class _Index:
    index: int


def _to_safetensors(source: Path, target: Path) -> str:
    manifest = fp.read_manifest(source)
    with working(f"reading {source.name}"):
        values = _values(manifest, fp.load(source))
    tensors = {tensor.name: _array(value) for tensor, value in zip(manifest.tensors, values, strict=True)}
    _name_left_out(manifest.tree)
    with working(f"writing {target.name}"):
        report = fp.save_safetensors(tensors, target, metadata=manifest.metadata)
    return _summary(report)


def _array(value: Any) -> Array:
    if isinstance(value, (bytes, bytearray)):
        return np.frombuffer(value, np.uint8)
    return np.asarray(value)


def _name_left_out(tree: Any) -> None:
    left_out = [leaf.path for leaf in tree_paths(tree) if leaf.tensor is None]
    if left_out:
        names = ", ".join(left_out[:_MAX_NAMED])
        more = f" and {len(left_out) - _MAX_NAMED} more" if len(left_out) > _MAX_NAMED else ""
        say(
            err(),
            f"fp-multi: {count(len(left_out), 'value')} left out, "
            f"a safetensors file holds tensors only: {shown(names)}{more}",
        )


def _torch() -> tuple[Any, Any]:
    """PyTorch and our adapter: only these conversions need them."""
    try:
        return importlib.import_module("torch"), importlib.import_module("fp_multi.adapters.torch")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; .pt and .pth need: pip install 'fp_multi[torch]'") from error


def _read_torch_file(source: Path) -> Any:
    torch, _ = _torch()
    try:
        # weights_only: the file may come from anybody, and plain unpickling would run what it says.
        return torch.load(source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{source}: PyTorch cannot read it with weights_only=True: {reason}") from error


def _to_torch_file(source: Path, target: Path) -> str:
    torch, adapter = _torch()
    manifest = fp.read_manifest(source)
    with working(f"reading {source.name}"):
        values = _values(manifest, adapter.load(source, map_location="cpu"))
    for index, tensor in enumerate(manifest.tensors):
        # weights_only=True reads tensors back, not NumPy arrays.
        if isinstance(values[index], (np.ndarray, np.generic)):
            values[index] = _torch_tensor(torch, np.asarray(values[index]), tensor.name)
    totals = manifest.totals
    with (
        working(f"writing {target.name}"),
        FileCommit(target, SaveConfig(), nbytes=totals.tensor_nbytes) as work,
    ):
        with open(work.path, "xb") as file:
            torch.save(decode(manifest.tree, values), file)
            file.flush()
            os.fsync(file.fileno())
        work.publish()
    return f"{count(totals.tensors, 'tensor')}, {size(totals.tensor_nbytes)}"


def _torch_tensor(torch: Any, array: Array, name: str) -> Any:
    dtype = getattr(torch, array.dtype.name, None)
    try:
        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        raw = torch.from_numpy(native.reshape(-1).view(np.uint8))
        return raw.view(dtype).reshape(array.shape)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedLeafError(f"{name}: PyTorch has no tensors of NumPy's {array.dtype}", name) from error
