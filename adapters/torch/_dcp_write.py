"""One rank's part of a DCP save: its orders -> shard files, and a report for the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from fp_multi import Box, LeafSource
from fp_multi.config import SaveConfig
from fp_multi.storage import Contents, Described, PartWrite, head, lay_out_shard, narrowed, shard_name, shards_of

from ._dcp_plan import Job, Orders
from ._dcp_report import Report
from ._dcp_source import OwnPart, name_of, own_part_of, source_of
from ._dcp_values import Path, value_of

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
        self._streams: dict[str, int] = {}
        self._parts: dict[str, tuple[list[int], list[list[int]]]] = {}
        self._pieces: dict[int, list[tuple[Box, LeafSource]]] = {}
        numbers: dict[str, int] = {}
        parts: dict[str, list[OwnPart]] = {}
        for job in orders.jobs:
            fqn = job.item.index.fqn
            path = tuple(paths[fqn]) if paths is not None and fqn in paths else (fqn,)
            if job.item.tensor_data is None:
                self._add_value(planner, job.item, path, allow_pickle=allow_pickle)
            elif orders.alone and (part := own_part_of(planner, job.item, path)) is not None:
                parts.setdefault(fqn, []).append(part)
            else:
                self._add_tensor(planner, job, path, numbers)
        for fqn, some in parts.items():
            self._add_parts(fqn, some)
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
        report = Report(part, self._fqns, heads, self._values, self._raw, self._streams, self._parts)
        return msgspec.msgpack.encode(report)

    def _add_tensor(self, planner: SavePlanner, job: Job, path: Path, numbers: dict[str, int]) -> None:
        item = job.item
        fqn = item.index.fqn
        source, chunk, shape = source_of(planner, item)
        number = numbers.get(fqn)
        if number is None:
            number = numbers[fqn] = len(self._fqns)
            nbytes = source.itemsize
            for length in shape:
                nbytes *= length
            self._fqns.append(fqn)
            self._names.append(name_of(fqn, path))
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
        self._add_node(fqn, value.node, value.names, value.sources)
        if value.raw:
            self._raw.append(fqn)
        if value.stream is not None:
            self._streams[fqn] = value.stream

    def _add_parts(self, fqn: str, parts: list[OwnPart]) -> None:
        """One rank's parts of a tensor: one is a tensor of its own shape, several are a list of such."""
        if len(parts) == 1:
            names = [name_of(fqn, parts[0].path)]
        else:
            names = [name_of(f"{fqn}.{number}", (*part.path, number)) for number, part in enumerate(parts)]
        node = 0 if len(parts) == 1 else ["list", list(range(len(parts)))]
        self._add_node(fqn, node, names, [part.source for part in parts])
        self._parts[fqn] = list(parts[0].shape), [list(part.start) for part in parts]

    def _add_node(self, fqn: str, node: Any, names: list[str], sources: list[LeafSource]) -> None:
        self._values[fqn] = [len(self._fqns), node]
        for name, source in zip(names, sources, strict=True):
            self._pieces[len(self._fqns)] = [(Box((0,) * len(source.shape), source.shape), source)]
            self._fqns.append(None)
            self._names.append(name)
            self._wholes.append(source)

    def _contents(self) -> list[Contents]:
        described = Described(None, self._names, self._wholes)
        shards = shards_of(described, self._pieces, self._file)
        if not shards and self._rank == 0:
            shards = [Contents(self._file(0), [], [], [])]  # a checkpoint has at least one shard
        return shards

    def _file(self, plane: int) -> str:
        return shard_name(self._rank, self._orders.size, plane)
