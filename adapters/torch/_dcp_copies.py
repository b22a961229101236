"""Which tensors of a state only optimizers change, and copies of all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor

from ._borrow import steady_storages


def steady(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Where the storages begin of the optimizers' parameters and states, those of DTensors' local tensors included."""
    optimizers = list(optimizers)
    found = steady_storages(optimizers)
    for one in optimizers:
        for tensor in _tensors(one):
            found.update(_storages_of(tensor))
    found.discard(0)
    return found


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from [value for value in state.values() if isinstance(value, torch.Tensor)]


def _storages_of(tensor: torch.Tensor) -> list[int]:
    if isinstance(tensor, DTensor):
        return _storages_of(tensor._local_tensor)
    shards: Callable[[], Any] | None = getattr(tensor, "local_shards", None)
    if shards is not None:
        return [begin for shard in shards() for begin in _storages_of(shard.tensor)]
    try:
        return [tensor.untyped_storage().data_ptr()]
    except RuntimeError:
        return []


def copied(state: Any, steady: set[int], *, only: set[int] | None = None, shared: bool = False) -> Any:
    """Copy a state to host memory, except for what stays where it is.

    Args:
        state: any nesting of dicts, lists and tuples.
        steady: tensors in storages that begin there are not copied.
        only: only tensors in these are copied, if given.
        shared: the copies are in memory that can be sent to another process.
    """
    copier = _Copier(steady, only, shared)
    try:
        return copier.stage(state)
    finally:
        copier.close()  # type: ignore[no-untyped-call]  # it would keep the copies for another time


class _Copier(StateDictStager):
    """torch's own copier, with exceptions."""

    def __init__(self, steady: set[int], only: set[int] | None, shared: bool) -> None:
        super().__init__(pin_memory=False, share_memory=shared)
        self._steady = steady
        self._only = only

    def _offload_tensor(self, x: torch.Tensor, memo: Any, non_blocking: bool = False) -> torch.Tensor:
        storages = [begin for begin in _storages_of(x) if begin]
        if storages and all([begin in self._steady for begin in storages]):
            return x
        if self._only is not None and not any([begin in self._only for begin in storages]):
            return x
        made: torch.Tensor = super()._offload_tensor(x, memo, non_blocking)  # type: ignore[no-untyped-call]
        return made
