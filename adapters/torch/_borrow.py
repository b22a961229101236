"""Which memory only an optimizer's step changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fp_multi import LeafSource


def steady_storages(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Where the storages begin of the optimizers' parameters and of the tensors in their states."""
    found = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found.add(_storage_of(parameter))
        for tensor in _tensors_in(list(optimizer.state.values())):
            found.add(_storage_of(tensor))
    # Storages without memory have no place to tell them apart by.
    found.discard(0)
    return found


def changing_sources(sources: Sequence[LeafSource], steady: set[int]) -> list[int]:
    """The tensors that are in other storages, by index."""
    return [i for i, source in enumerate(sources) if source.nbytes and not _is_steady(source.keepalive, steady)]


def _is_steady(tensor: object, steady: set[int]) -> bool:
    return isinstance(tensor, torch.Tensor) and _storage_of(tensor) in steady


def _storage_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        # Sparse tensors and wrappers have none; describing them is what refuses them.
        return 0


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from _tensors_in(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _tensors_in(child)
