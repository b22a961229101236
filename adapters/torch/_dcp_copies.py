"""Which tensors of a state only optimizers change, and copies of all others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.remote_device import _remote_device
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


class CopyPool:
    """Copies of whole states, in memory that is used again: a copy into new memory takes twice as long."""

    def __init__(self) -> None:
        self._idle: list[_Copier] = []  # append and pop are atomic
        self._closed = False

    def copied(self, state: Any) -> tuple[Any, PoolMemory]:
        """Copy a state.

        Returns:
            The copy, and its memory.
        """
        self._closed = False
        try:
            copier = self._idle.pop()
        except IndexError:
            copier = _Copier(set(), None, shared=False)
        memory = PoolMemory(self, copier)
        try:
            return copier.stage(state), memory
        except BaseException:
            memory.discard()
            raise

    def take_back(self, copier: _Copier) -> None:
        """Use its memory for another copy."""
        if self._closed:
            copier.close()  # type: ignore[no-untyped-call]
        else:
            self._idle.append(copier)

    def close(self) -> None:
        """Let the memory go; that of copies in use when they are given back."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()  # type: ignore[no-untyped-call]


class PoolMemory:
    """The memory of one copy; either of the two is called, once."""

    def __init__(self, pool: CopyPool, copier: _Copier) -> None:
        self._pool = pool
        self._copier = copier

    def give_back(self) -> None:
        """The copy is not needed any more, and nobody else can have it."""
        self._pool.take_back(self._copier)

    def discard(self) -> None:
        """The memory goes with the copy. A copier that is not closed refers to itself, and would keep both."""
        self._copier.close()  # type: ignore[no-untyped-call]


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
        if isinstance(x, ShardedTensor):
            return self._copied_shards(x, memo, non_blocking)
        made: torch.Tensor = super()._offload_tensor(x, memo, non_blocking)  # type: ignore[no-untyped-call]
        return made

    def _stage_untyped_storage(self, storage: torch.UntypedStorage, non_blocking: bool = False) -> Any:
        kept = self._cached_storage_mapping.get(storage)  # type: ignore[no-untyped-call]
        if kept is not None and kept.size() != storage.size():
            del self._cached_storage_mapping[storage]  # resized since the last copy
        return super()._stage_untyped_storage(storage, non_blocking)

    def _copied_shards(self, x: ShardedTensor, memo: Any, non_blocking: bool) -> ShardedTensor:
        """Its metadata say where each shard is, and have to say so of the copies."""
        metadata = copy.deepcopy(x.metadata())
        metadata.tensor_properties.requires_grad = False
        metadata.tensor_properties.pin_memory = False
        shards = []
        for shard in x.local_shards():
            tensor = self.deepcopy_with_tensor_offload(  # type: ignore[no-untyped-call]
                shard.tensor.detach(), memo, non_blocking=non_blocking
            )
            shards.append(Shard(tensor, copy.deepcopy(shard.metadata)))
        for one in [*metadata.shards_metadata, *[shard.metadata for shard in shards]]:
            if one.placement is not None:
                one.placement = _remote_device(f"rank:{one.placement.rank()}/cpu")
        made = ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, metadata, process_group=x._process_group
        )
        memo[id(x)] = made
        return made
