"""Carry out a DCP load plan: one pass over the shards, straight into the waiting tensors where that is possible."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from fp_multi import CheckpointReader, ReadRequest
from fp_multi.errors import KeyNotFoundError, PickleRefusedError
from fp_multi.storage import decode, refuse_pickle, stored_value

from ._builder import make_builder
from ._dcp_metadata import Catalog
from ._dcp_places import Places
from ._dcp_targets import Bytes, Wanted, fill, want
from ._dcp_values import tensors_in, to_bytes

_BUFFER_NBYTES = 1 << 30
"""Tensors that cannot be read in place wait in memory; more than that at once are read in several passes."""


def read_items(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    reader: CheckpointReader,
    catalog: Catalog,
    *,
    allow_pickle: bool,
    read_together: Callable[[list[Wanted]], list[Wanted]] = lambda wanted: wanted,
) -> None:
    """Read what a plan asks for, and give it to the planner.

    Args:
        items: of the plan.
        planner: says where everything goes.
        reader: the checkpoint.
        catalog: the same, by DCP's names.
        allow_pickle: unpickle values.
        read_together: gets what other ranks read, too, and gives back what is left.

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
    tensors = reader.manifest.tensors
    wanted = []
    for item in items:
        if item.type != LoadItemType.BYTE_IO:
            _entry(catalog, item)
            located, index = catalog.locate(item)
            wanted.append(want(located, index, tensors[index], planner))
    data: dict[int, Bytes] = {}
    for number, batch in enumerate(_batches(read_together(wanted))):
        requests = [ReadRequest(one.tensor, one.box, one.out) for one in batch]
        more = inside if number == 0 else []
        found = reader.read([*requests, *[ReadRequest(index) for index in more]])
        for one, buffer in zip(batch, found, strict=False):
            if one.out is None:
                fill(one, buffer, tensors[one.tensor])
            planner.commit_tensor(one.item, one.target)
        data.update(zip(more, found[len(batch) :], strict=True))
    if values:
        _load_values(values, data, planner, reader, catalog)


def _entry(catalog: Catalog, item: ReadItem) -> Any:
    entry = catalog.entries.get(item.storage_index.fqn)
    if entry is None or entry.is_tensor != (item.type != LoadItemType.BYTE_IO):
        raise KeyNotFoundError(f"{item.storage_index.fqn}: the checkpoint has no such tensor or value")
    return entry


def _batches(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
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


def _load_values(
    items: Sequence[ReadItem],
    data: Mapping[int, Bytes],
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
        planner.load_bytes(item, io.BytesIO(value) if fqn in catalog.raw else to_bytes(catalog.value(fqn, value), fqn))
    places.correct()


class _ByIndex(Sequence[Any]):
    """The tensors of one value, under their indices in the checkpoint."""

    def __init__(self, made: Mapping[int, Any]) -> None:
        self._made = made

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]

    def __len__(self) -> int:
        return len(self._made)
