"""Which memory only an optimizer's step changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fp_multi import LeafSource

from ._spread import is_distributed


def steady_storages(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Where the storages begin of the optimizers' parameters and of the tensors in their states.

    Of a DTensor it is the storage of the part that is here.
    """
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
    """The tensors that are in other storages, by index; of one that is spread over ranks the parts here count."""
    return [i for i, source in enumerate(sources) if source.nbytes and not _source_is_steady(source, steady)]


def _source_is_steady(source: LeafSource, steady: set[int]) -> bool:
    if source.sharded is None:
        return _is_steady(source.keepalive, steady)
    return all([_is_steady(part.keepalive, steady) for _, part in source.sharded.local])


def _is_steady(tensor: object, steady: set[int]) -> bool:
    return isinstance(tensor, torch.Tensor) and _storage_of(tensor) in steady


def _storage_of(tensor: torch.Tensor) -> int:
    local: Any = tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    try:
        begin: int = local.untyped_storage().data_ptr()
    except RuntimeError:
        # Sparse tensors and wrappers have none; describing them is what refuses them.
        return 0
    return begin


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for child in value.values():
            yield from _tensors_in(child)
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _tensors_in(child)
