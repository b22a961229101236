"""One rank's part of a DCP save: its orders -> shard files, and a report for the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from fp_multi import Box, LeafSource
from fp_multi.config import SaveConfig
from fp_multi.errors import UnsupportedLeafError
from fp_multi.storage import Contents, Described, PartWrite, head, lay_out_shard, narrowed, shard_name, shards_of
from fp_multi.storage import describe as describe_state

from ._dcp_plan import Job, Orders
from ._dcp_report import Report
from ._dcp_values import Path, value_of
from ._describe import describe

Started = Callable[[PartWrite], object]


class RankWrite:
    """What a rank is to write, described: all that can be refused is refused before the first byte is written.

    Args:
        orders: the rank's.
        planner: gives the data.
        paths: by DCP's name, where a value stands in the state; without them the state is flat.
        rank: of this process.
        allow_pickle: see :class:`fp_multi.adapters.torch.StorageWriter`.

    Raises:
        UnsupportedLeafError: something cannot be stored.
    """

    def __init__(
        self, orders: Orders, planner: SavePlanner, paths: Mapping[str, Path] | None, rank: int, *, allow_pickle: bool
    ) -> None:
        self._orders = orders
        self._rank = rank
        self._fqns: list[str | None] = []
        self._wholes: list[LeafSource] = []
        self._names: list[str] = []
        self._values: dict[str, Any] = {}
        self._raw: list[str] = []
        self._pieces: dict[int, list[tuple[Box, LeafSource]]] = {}
        numbers: dict[str, int] = {}
        for job in orders.jobs:
            fqn = job.item.index.fqn
            path = tuple(paths[fqn]) if paths is not None and fqn in paths else (fqn,)
            if job.item.tensor_data is None:
                self._add_value(planner, job.item, path, allow_pickle=allow_pickle)
            else:
                self._add_tensor(planner, job, path, numbers)
        self._layouts = [lay_out_shard(contents) for contents in self._contents()]

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum([layout.nbytes for layout in self._layouts])

    def write(self, directory: str, config: SaveConfig, *, spill_nbytes: int, started: Started) -> bytes:
        """Write the shards; they are on the drive on return.

        Args:
            directory: of the save.
            config: how to write.
            spill_nbytes: a fence may come and copy at most so much.
            started: called when the engine has the work.

        Returns:
            The report.

        Raises:
            StorageError: the operating system refused an operation.
        """
        write = PartWrite(
            directory,
            self._layouts,
            config,
            chunk_nbytes=self._orders.chunk_nbytes,
            rank=self._rank,
            spill_nbytes=spill_nbytes,
        )
        try:
            started(write)
        except BaseException:
            write.abandon()
            raise
        part = write.finish()
        heads = [head(name, source) for name, source in zip(self._names, self._wholes, strict=True)]
        return msgspec.msgpack.encode(Report(part, self._fqns, heads, self._values, self._raw))

    def _add_tensor(self, planner: SavePlanner, job: Job, path: Path, numbers: dict[str, int]) -> None:
        item = job.item
        fqn = item.index.fqn
        source, chunk, shape = _source_of(planner, item)
        number = numbers.get(fqn)
        if number is None:
            number = numbers[fqn] = len(self._fqns)
            nbytes = source.itemsize
            for length in shape:
                nbytes *= length
            self._fqns.append(fqn)
            self._names.append(_name(fqn, path))
            self._wholes.append(source._replace(shape=shape, nbytes=nbytes))
        pieces = self._pieces.setdefault(number, [])
        if job.boxes is None:
            pieces.append((chunk, source))
            return
        for box in job.boxes:
            inside = tuple([a - b for a, b in zip(box.start, chunk.start, strict=True)])
            pieces.append((box, narrowed(source, Box(inside, box.length))))

    def _add_value(self, planner: SavePlanner, item: WriteItem, path: Path, *, allow_pickle: bool) -> None:
        fqn = item.index.fqn
        value = value_of(planner, item, path, allow_pickle=allow_pickle)
        first = len(self._fqns)
        for name, source in zip(value.names, value.sources, strict=True):
            self._pieces[len(self._fqns)] = [(Box((0,) * len(source.shape), source.shape), source)]
            self._fqns.append(None)
            self._names.append(name)
            self._wholes.append(source)
        self._values[fqn] = [first, value.node]
        if value.raw:
            self._raw.append(fqn)

    def _contents(self) -> list[Contents]:
        described = Described(None, self._names, self._wholes)
        shards = shards_of(described, self._pieces, self._file)
        if not shards and self._rank == 0:
            shards = [Contents(self._file(0), [], [], [])]  # a checkpoint has at least one shard
        return shards

    def _file(self, plane: int) -> str:
        return shard_name(self._rank, self._orders.size, plane)


def _source_of(planner: SavePlanner, item: WriteItem) -> tuple[LeafSource, Box, tuple[int, ...]]:
    """The bytes of an item, the box that they are, and the shape of the tensor that it is a box of."""
    data = item.tensor_data
    fqn = item.index.fqn
    tensor = planner.resolve_data(item)
    if data is None or not isinstance(tensor, torch.Tensor):
        raise UnsupportedLeafError(f"{fqn}: the planner gives no tensor, but a {type(tensor).__qualname__}", fqn)
    # The dtype is that of the tensor: plans may come from a cache that does not look at dtypes.
    source = describe(tensor.detach(), fqn)
    chunk = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    shape = tuple(data.size)
    if source.shape != chunk.length:
        raise UnsupportedLeafError(
            f"{fqn}: the plan says shape {chunk.length}, the tensor has {source.shape}; a planner must not change it",
            fqn,
        )
    if 0 in shape:
        source = source._replace(shape=shape)
        chunk = Box((0,) * len(shape), shape)
    return source, chunk, shape


def _name(fqn: str, path: Path) -> str:
    """docs/format.md section 3.4. DCP's own names are those, but for a few that are reserved."""
    if fqn and fqn[0] not in "~_" and fqn.isascii():
        return fqn
    state: Any = b""
    for key in reversed(path):
        state = {key: state}
    return describe_state(state).names[0]
