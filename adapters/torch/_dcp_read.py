"""Carry out a DCP load plan: one pass over the shards, straight into the waiting tensors where that is possible."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from fp_multi import Box, CheckpointReader, ReadRequest
from fp_multi.errors import KeyNotFoundError, PickleRefusedError, TargetMismatchError
from fp_multi.storage import decode, itemsize, refuse_pickle, stored_value

from ._builder import make_builder
from ._convert_tensors import torch_dtype
from ._dcp_metadata import Catalog
from ._dcp_places import Places
from ._dcp_values import tensors_in, to_bytes
from ._dtypes import CARRIERS

_BUFFER_NBYTES = 1 << 30
"""Tensors that cannot be read in place wait in memory; more than that at once are read in several passes."""

_Bytes = npt.NDArray[np.uint8]


class _Wanted(NamedTuple):
    item: ReadItem
    tensor: int
    box: Box
    nbytes: int
    target: torch.Tensor
    out: _Bytes | None
    """The target's memory, if it can be filled as it is."""


def read_items(
    items: Sequence[ReadItem], planner: LoadPlanner, reader: CheckpointReader, catalog: Catalog, *, allow_pickle: bool
) -> None:
    """Read what a plan asks for, and give it to the planner.

    Args:
        items: of the plan.
        planner: says where everything goes.
        reader: the checkpoint.
        catalog: the same, by DCP's names.
        allow_pickle: unpickle values.

    Raises:
        PickleRefusedError: a value is a pickle, and the caller did not allow them.
        CorruptCheckpointError: a shard is missing, cut, or its bytes changed; the message names the tensor.
        TargetMismatchError: a tensor does not fit.
    """
    values = [item for item in items if item.type == LoadItemType.BYTE_IO]
    inside = sorted({index for item in values for index in tensors_in(_entry(catalog, item).node)})
    refuse_pickle(reader.manifest, inside, allow_pickle=allow_pickle)
    for item in values:
        if item.storage_index.fqn in catalog.raw and not allow_pickle:
            raise PickleRefusedError(
                f"{item.storage_index.fqn}: these are bytes of the planner's own, which may be a pickle; pass "
                "allow_pickle=True if you trust the checkpoint"
            )
    wanted = [_want(item, planner, reader, catalog) for item in items if item.type != LoadItemType.BYTE_IO]
    data: dict[int, _Bytes] = {}
    for number, batch in enumerate(_batches(wanted)):
        requests = [ReadRequest(one.tensor, one.box, one.out) for one in batch]
        more = inside if number == 0 else []
        found = reader.read([*requests, *[ReadRequest(index) for index in more]])
        for one, buffer in zip(batch, found, strict=False):
            if one.out is None:
                _copy(buffer, one, reader)
            planner.commit_tensor(one.item, one.target)
        data.update(zip(more, found[len(batch) :], strict=True))
    if values:
        _load_values(values, data, planner, reader, catalog)


def _entry(catalog: Catalog, item: ReadItem) -> Any:
    entry = catalog.entries.get(item.storage_index.fqn)
    if entry is None or entry.is_tensor != (item.type != LoadItemType.BYTE_IO):
        raise KeyNotFoundError(f"{item.storage_index.fqn}: the checkpoint has no such tensor or value")
    return entry


def _want(item: ReadItem, planner: LoadPlanner, reader: CheckpointReader, catalog: Catalog) -> _Wanted:
    index = _entry(catalog, item).node
    tensor = reader.manifest.tensors[index]
    length = tuple(item.lengths)
    corner = item.storage_index.offset or (0,) * len(length)
    start = tuple([a + b for a, b in zip(corner, item.storage_offsets, strict=True)])
    target = planner.resolve_tensor(item).detach()
    if tuple(target.shape) != length:
        raise TargetMismatchError(
            f"{item.storage_index.fqn}: the planner gives a tensor of shape {tuple(target.shape)} for a part "
            f"of {length}"
        )
    nbytes = itemsize(tensor.dtype) * int(np.prod(length, dtype=np.int64))
    in_place = nbytes > 0 and target.dtype == torch_dtype(tensor)
    return _Wanted(item, index, Box(start, length), nbytes, target, _memory(target) if in_place else None)


def _memory(target: torch.Tensor) -> _Bytes | None:
    """The bytes of a tensor, if they are its values in C order in host memory."""
    if (
        type(target) not in (torch.Tensor, torch.nn.Parameter)
        or not target.is_cpu
        or not target.is_contiguous()
        or target.is_conj()
        or target.is_neg()
    ):
        return None
    # Not view(-1): a single element may have any stride.
    flat = target.as_strided((target.numel(),), (1,))
    memory: _Bytes = flat.view(torch.uint8).numpy()
    return memory


def _batches(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    """All that goes straight into place first; what needs a buffer in the order of the files."""
    batch = [one for one in wanted if one.out is not None]
    held = 0
    for one in sorted([one for one in wanted if one.out is None], key=lambda one: (one.tensor, one.box.start)):
        if held and held + one.nbytes > _BUFFER_NBYTES:
            yield batch
            batch, held = [], 0
        batch.append(one)
        held += one.nbytes
    yield batch


def _copy(buffer: _Bytes, one: _Wanted, reader: CheckpointReader) -> None:
    tensor = reader.manifest.tensors[one.tensor]
    dtype = torch_dtype(tensor)
    if dtype is None or not one.nbytes:
        return
    carrier = CARRIERS[dtype.itemsize]
    source = torch.from_numpy(buffer).view(carrier).view(one.box.length)
    into = one.target
    if into.dtype == dtype and not into.is_conj() and not into.is_neg():
        # Bit by bit: some small float types have no kernel that copies them.
        into.view(carrier).copy_(source)
    else:
        into.copy_(source.view(dtype))


def _load_values(
    items: Sequence[ReadItem],
    data: Mapping[int, _Bytes],
    planner: LoadPlanner,
    reader: CheckpointReader,
    catalog: Catalog,
) -> None:
    tensors = reader.manifest.tensors
    build = make_builder("cpu")
    places = Places(planner, items)
    for item in items:
        node = _entry(catalog, item).node
        # Values of their own for each item: who gets one may change it.
        made = {index: stored_value(tensors[index], data[index].copy(), build) for index in tensors_in(node)}
        value = decode(node, _ByIndex(made))
        fqn = item.storage_index.fqn
        planner.load_bytes(item, io.BytesIO(value) if fqn in catalog.raw else to_bytes(value, fqn))
    places.correct()


class _ByIndex(Sequence[Any]):
    """The tensors of one value, under their indices in the checkpoint."""

    def __init__(self, made: Mapping[int, Any]) -> None:
        self._made = made

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]

    def __len__(self) -> int:
        return len(self._made)
