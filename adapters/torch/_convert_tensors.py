"""Between torch tensors and bytes, for conversions: the bits of a tensor, and a tensor for any leaf of a checkpoint."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fp_multi import HostTensor
from fp_multi.errors import CorruptCheckpointError, FpMultiError, PickleRefusedError

from ._builder import make_builder
from ._dtypes import CARRIERS, TORCH_DTYPES, VIEW_ATTR, VIEWED_DTYPES

_OPAQUE = frozenset(("bytes", "bytearray", "pickle"))


def bits(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The values of a tensor on the CPU, in C order; its own memory where that is so."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    plain = tensor.detach().resolve_conj().resolve_neg()
    # Small float types have no kernels that copy them; integers of their size do.
    flat = plain.view(CARRIERS[plain.itemsize]).contiguous().reshape(-1).view(torch.uint8)
    array: npt.NDArray[np.uint8] = flat.numpy()
    return array


def load(
    file: Any,
    where: str,
    *,
    allow_pickle: bool,
    mmap: bool = False,
    damaged: type[FpMultiError] = CorruptCheckpointError,
) -> Any:
    """What ``torch.load`` makes of a file, on the CPU.

    Args:
        file: a path or an open file.
        where: what it is, for messages.
        allow_pickle: run what pickles in it say.
        mmap: leave the tensors in the file.
        damaged: the error for a file that is no such file, or damaged.

    Raises:
        PickleRefusedError: it holds more than tensors and plain values.
        FpMultiError: ``damaged``.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "ComplexHalf")  # nothing is computed here
            # weights_only: the file may come from anybody, and plain unpickling would run what it says.
            return torch.load(file, map_location="cpu", weights_only=not allow_pickle, mmap=mmap)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            raise damaged(f"{where}: PyTorch cannot read it: {_reason(error)}") from error
        raise PickleRefusedError(
            f"{where}: PyTorch cannot read it with weights_only=True: {_reason(error)}; if you trust where it comes "
            "from, --allow-pickle lets it run its code"
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, ImportError) as error:
        raise damaged(f"{where}: PyTorch cannot read it: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    text = str(error)
    # torch puts advice of several lines in front of what happened.
    text = text.rpartition("WeightsUnpickler error:")[2].strip() or text.strip()
    return text.partition("\n")[0] or type(error).__name__


def is_opaque(tensor: Any) -> bool:
    """Whether a manifest's tensor is a byte string or a pickle, not a tensor."""
    return tensor.kind in _OPAQUE


def torch_dtype(tensor: Any) -> torch.dtype | None:
    """The element type that a manifest's tensor has in torch; None if torch has no such type."""
    viewed = tensor.attrs.get(VIEW_ATTR)
    return TORCH_DTYPES.get(tensor.dtype) if viewed is None else VIEWED_DTYPES.get(viewed)


def check(reader: Any, losses: Any, *, exact: bool, fits: Callable[[torch.dtype], bool] = lambda dtype: True) -> None:
    """Refuse what torch cannot hold, and note what it holds in another form.

    Args:
        reader: a ``CheckpointReader``.
        losses: takes notes and refusals.
        exact: the other format keeps Parameters, ``requires_grad``, and that two names are one tensor.
        fits: whether the other format takes tensors of a type.

    Raises:
        UnsupportedLeafError: torch does not have the dtype of a tensor.
    """
    entries = reader.manifest.tensors
    seen: set[int] = set()
    for leaf in reader.leaves():
        if leaf.tensor is None or is_opaque(entries[leaf.tensor]):
            continue
        entry = entries[leaf.tensor]
        dtype = torch_dtype(entry)
        if dtype is None or not fits(dtype):
            whose = "PyTorch has" if dtype is None else "this format of PyTorch's takes"
            losses.refuse(leaf.path, f"{whose} no tensors of {entry.attrs.get(VIEW_ATTR, entry.dtype)}")
        if entry.kind.startswith("numpy"):
            losses.add("NumPy arrays became tensors", leaf.path)
        elif entry.attrs.get("key_impl"):
            losses.add("random keys became their data", leaf.path)
        if exact:
            continue
        if entry.kind == "torch.parameter" or entry.attrs.get("requires_grad"):
            losses.add("parameters became plain tensors", leaf.path)
        if leaf.tensor in seen:
            losses.add("tied tensors were stored once more", leaf.path)
        seen.add(leaf.tensor)


def without_classes(value: Any, path: tuple[Any, ...], losses: Any) -> Any:
    """A value whose named tuples are plain ones: their classes are not here to be pickled. Dicts are changed in place.

    Args:
        value: what a checkpoint was decoded to.
        path: where it is.
        losses: takes notes.
    """
    if isinstance(value, dict):
        for key, child in value.items():
            value[key] = without_classes(child, (*path, key), losses)
        for name, child in getattr(value, "__dict__", {}).items():
            vars(value)[name] = without_classes(child, (*path, name), losses)
    elif type(value) is list:
        return [without_classes(child, (*path, i), losses) for i, child in enumerate(value)]
    elif isinstance(value, tuple) and not isinstance(value, torch.Size):
        labels = getattr(value, "_fields", None)
        if labels is not None:
            losses.add("named tuples became plain tuples", path)
        keys = labels or range(len(value))
        return tuple(without_classes(child, (*path, key), losses) for key, child in zip(keys, value, strict=True))
    return value


def value_maker() -> Callable[[Any, npt.NDArray[np.uint8]], Any]:
    """The function that makes a leaf's value of its entry in the manifest and its bytes: always a tensor on the CPU.

    Byte strings and pickles become themselves; the reader has refused the latter already, if they are not allowed.
    """
    build = make_builder("cpu")

    def make(tensor: Any, data: npt.NDArray[np.uint8]) -> Any:
        if tensor.kind == "pickle":
            return pickle.loads(data.data)
        if is_opaque(tensor):
            return bytearray(data) if tensor.kind == "bytearray" else data.tobytes()
        numpys = tensor.kind.startswith("numpy")
        kind, attrs = ("torch", {}) if numpys else (tensor.kind, tensor.attrs)
        known = kind if kind in ("torch", "torch.parameter", "jax") else "torch"
        return build(HostTensor(tensor.dtype, tuple(tensor.shape), data, known, attrs, tensor.name))

    return make
