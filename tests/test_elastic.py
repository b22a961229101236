"""What some ranks wrote under one sharding is read by others under another one, and by other frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multiprocess import run_jax, run_torch
from support import assert_same, hidden_names

import fp_multi as fp
from fp_multi import Box, _reader
from fp_multi._tree import describe
from fp_multi._union import sketch, unite

QUICK = fp.SaveConfig(durable=False)
SMALL_CHUNKS = fp.SaveConfig(durable=False, chunk_bytes=4096, block_bytes=64 << 10)
MIB = 1 << 20


# Ranks that are not there: each part is described, planned and written by this process


class Spread:
    """A tensor as one rank has it, of a framework that spreads tensors over ranks."""

    def __init__(self, whole: Any, boxes: Sequence[Box], holders: Sequence[tuple[int, ...]], rank: int) -> None:
        self.whole = whole
        self.boxes = tuple(boxes)
        self.holders = tuple(holders)
        self.rank = rank

    def describe(self, path: str) -> fp.LeafSource:
        local = []
        for number, (box, holders) in enumerate(zip(self.boxes, self.holders, strict=True)):
            if self.rank in holders:
                # Every other box lies in memory as a framework may keep it: not in C order.
                part = self.whole[slices(box)]
                part = np.asfortranarray(part) if number % 2 else np.ascontiguousarray(part)
                strides = None if part.flags.c_contiguous else part.strides
                address = part.__array_interface__["data"][0]
                local.append((number, self._source(part.shape, part.nbytes, address, part, strides)))
        whole = self._source(self.whole.shape, self.whole.nbytes, 0, self, None)
        return whole._replace(sharded=fp.Sharded(self.boxes, self.holders, tuple(local)))

    def _source(self, shape: Any, nbytes: int, address: int, keepalive: Any, strides: Any) -> fp.LeafSource:
        dtype = self.whole.dtype
        return fp.LeafSource(dtype.name, shape, nbytes, address, keepalive, strides=strides, itemsize=dtype.itemsize)


fp.register_tensor_type(Spread, fp.TensorType(describe=Spread.describe))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(*box, strict=True))


def save_as(
    directory: Path, state_of: Any, ranks: int, config: fp.SaveConfig, writers: Sequence[int] | None = None
) -> None:
    """What these ranks would do, one after the other."""
    directory.mkdir()
    parts = [fp.StatePart(state_of(rank), rank=rank, size=ranks, writers=writers) for rank in range(ranks)]
    fp.combine_parts(directory, [part.write(directory, config) for part in parts], config=config)


def row_blocks(shape: Sequence[int], count: int, axis: int = 0) -> list[Box]:
    """Blocks of an axis, as even as may be; no more than it has indices."""
    cuts = sorted({shape[axis] * i // count for i in range(count + 1)})
    boxes = []
    for begin, end in pairwise(cuts):
        start, length = [0] * len(shape), list(shape)
        start[axis], length[axis] = begin, end - begin
        boxes.append(Box(tuple(start), tuple(length)))
    return boxes


@st.composite
def tilings(draw: Any, shape: tuple[int, ...], most: int) -> list[Box]:
    """Any way to take a tensor apart by straight cuts, also such as no grid has."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, most)) if shape and 0 not in shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        if box.length[axis] > 1:
            at = draw(st.integers(1, box.length[axis] - 1))
            for start, length in ((0, at), (at, box.length[axis] - at)):
                first, size = list(box.start), list(box.length)
                first[axis] += start
                size[axis] = length
                boxes.append(Box(tuple(first), tuple(size)))
        else:
            boxes.append(box)
    return draw(st.permutations(boxes))


SHAPES = st.one_of(
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 11, 13]), max_size=4).map(tuple),
    st.sampled_from([(), (1,), (997,), (127, 131), (2, 3, 61, 5), (1, 4099), (0, 7)]),
)


@st.composite
def cases(draw: Any) -> Any:
    ranks = draw(st.integers(1, 5))
    holders = st.sets(st.integers(0, ranks - 1), min_size=1).map(lambda who: tuple(sorted(who)))
    tensors = []
    for number in range(draw(st.integers(1, 6))):
        shape = draw(SHAPES)
        dtype = draw(st.sampled_from(["float32", "int8", "float64", "complex64"]))
        whole = np.random.default_rng(number).integers(-99, 99, shape).astype(dtype)
        if draw(st.booleans()):
            boxes = draw(tilings(shape, 6))
            tensors.append((whole, boxes, [draw(holders) for _ in boxes]))
        else:
            tensors.append((whole, None, None))
    writers = draw(st.none() | holders)
    readers = [draw(tilings(whole.shape, 6)) for whole, _, _ in tensors]
    return ranks, tensors, writers, readers


@given(cases(), st.sampled_from([QUICK, SMALL_CHUNKS]))
@settings(max_examples=100, deadline=None)
def test_any_boxes_come_out_of_any_others(case: Any, config: fp.SaveConfig) -> None:
    ranks, tensors, writers, readers = case

    def state_of(rank: int) -> dict[str, Any]:
        leaves = [whole if boxes is None else Spread(whole, boxes, who, rank) for whole, boxes, who in tensors]
        return {"leaves": leaves, "step": 3}

    with TemporaryDirectory(prefix="fp_multi-test-") as scratch:
        path = Path(scratch) / "checkpoint"
        save_as(path, state_of, ranks, config, writers)
        assert_same(fp.load(path), {"leaves": [whole for whole, _, _ in tensors], "step": 3})

        def read(reader: fp.CheckpointReader) -> None:
            requests = [fp.ReadRequest(i, box) for i, boxes in enumerate(readers) for box in boxes]
            for request, data in zip(requests, reader.read(requests), strict=True):
                whole = tensors[request.tensor][0]
                assert data.tobytes() == whole[slices(request.box)].tobytes()
            assert reader.wanted_nbytes == sum(whole.nbytes for whole, _, _ in tensors)

        fp.read_checkpoint(path, read)
        # The same through a target: each reader's box in a state of the same structure.
        for number in range(max(len(boxes) for boxes in readers)):
            boxes = [boxes[number % len(boxes)] for boxes in readers]
            leaves = [
                fp.ShardOf(np.zeros(box.length, whole.dtype), whole.shape, box.start)
                for box, (whole, _, _) in zip(boxes, tensors, strict=True)
            ]
            for inplace in (False, True):
                found = fp.load(path, target={"leaves": leaves, "step": 0}, inplace=inplace)
                for leaf, old, box, (whole, _, _) in zip(found["leaves"], leaves, boxes, tensors, strict=True):
                    assert (leaf is old) is inplace
                    assert_same(leaf.array, np.array(whole[slices(box)]))


def test_a_target_of_parts_must_fit(tmp_path: Path) -> None:
    whole = np.arange(70.0).reshape(7, 10)
    fp.save({"a": whole, "raw": b"bytes", "n": 1}, tmp_path / "c", config=QUICK)

    def load(**leaves: Any) -> Any:
        return fp.load(tmp_path / "c", target={"a": whole, "raw": b"", "n": 0, **leaves})

    def part(length: Any = (3, 4), shape: Any = (7, 10), start: Any = (2, 5), dtype: str = "f8") -> fp.ShardOf:
        return fp.ShardOf(np.zeros(length, dtype), shape, start)

    assert_same(load(a=part())["a"].array, whole[2:5, 5:9].copy())
    for wrong, message in (
        (part(shape=(7, 11)), r"a: shape: \(7, 11\) in target"),
        (part(dtype="f4"), "a: dtype: float32 in target"),
        (part(start=(5, 5)), "a: the box at"),
        (part(length=(3,)), "a: the box at"),
    ):
        with pytest.raises(fp.errors.TargetMismatchError, match=message):
            load(a=wrong)
    for name in ("raw", "n"):
        with pytest.raises(fp.errors.TargetMismatchError, match=f"{name}: structure"):
            load(**{name: part()})
    frozen = part()
    frozen.array.flags.writeable = False
    with pytest.raises(fp.errors.TargetMismatchError, match=r"a: .*read-only"):
        fp.load(tmp_path / "c", target={"a": frozen, "raw": b"", "n": 0}, inplace=True)
    only = fp.load(tmp_path / "c", target={"a": part()}, only=["a"])
    assert only["a"].start == (2, 5)


def test_a_part_without_the_others_is_refused_by_path(tmp_path: Path) -> None:
    whole = np.arange(6.0)
    part = {"layers": [fp.ShardOf(whole[3:], (6,), (3,))]}
    spread = {"layers": [Spread(whole, row_blocks((6,), 2), [(0,), (1,)], 0)]}
    for state in (part, spread):
        with pytest.raises(fp.errors.UnsupportedLeafError, match=r"layers\.0: only a part .* 24 of 48 bytes; .*comm="):
            fp.save(state, tmp_path / "c")
    with pytest.raises(fp.errors.UnsupportedLeafError, match=r"layers\.0: only a part"):
        fp.StatePart(part, rank=0, size=2)
    assert not list(tmp_path.iterdir())
    # All of it is here, as one part or as several.
    everything = {"a": fp.ShardOf(whole, (6,), (0,)), "b": Spread(whole, row_blocks((6,), 2), [(7,), (7,)], 7)}
    fp.save(everything, tmp_path / "c", config=QUICK)
    assert_same(fp.load(tmp_path / "c"), {"a": whole, "b": whole})


@pytest.mark.parametrize("other", ["ranks", "whole", "part"])
def test_different_tensors_under_one_path_are_noticed(other: str) -> None:
    """Two pipeline stages that each call a tensor of theirs "w": neither must be lost."""
    whole = np.arange(6.0)
    first = describe({"w": Spread(whole, row_blocks((6,), 2), [(0,), (1,)], 0), "first": 1})
    boxes = {"ranks": Spread(whole, row_blocks((6,), 2), [(2,), (3,)], 2), "whole": whole}
    second = describe({"w": boxes.get(other, fp.ShardOf(whole[3:], (6,), (3,))), "second": 1})
    with pytest.raises(fp.errors.UnsupportedLeafError, match=r"w: .*spread in different ways"):
        unite([sketch(first), sketch(second)])


def test_a_target_of_parts_reads_these_parts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.random.default_rng(0).random((2048, 1024))
    fp.save({"a": whole, "b": whole.copy()}, tmp_path / "c", config=QUICK)
    moved = []
    original = _reader.RangesRead.finish

    def counting(*arguments: Any, **settings: Any) -> Any:
        crcs, nbytes = original(*arguments, **settings)
        moved.append(nbytes)
        return crcs, nbytes

    monkeypatch.setattr(_reader.RangesRead, "finish", counting)
    for inplace in (False, True):
        moved.clear()
        part = fp.ShardOf(np.zeros((300, 1024)), whole.shape, (1011, 0))
        found = fp.load(tmp_path / "c", target={"a": part}, only=["a"], inplace=inplace)
        assert_same(found["a"].array, whole[1011:1311])
        assert part.array.nbytes <= sum(moved) <= 1.06 * part.array.nbytes


@pytest.mark.parametrize("writers", [1, 2, 3, 4])
def test_rows_are_read_without_their_neighbours(tmp_path: Path, writers: int) -> None:
    """Tensors of several MB, one huge one, and many tiny ones: the drive gives hardly more than is wanted."""
    rng = np.random.default_rng(0)
    wholes = {f"w{i}": rng.random((1021, 1031 + i), np.float32) for i in range(4)} | {"huge": rng.random((1999, 1511))}
    tiny = {f"t{i}": np.full((3, 2), i) for i in range(10_000)}

    def state_of(rank: int) -> dict[str, Any]:
        spread = {}
        for name, whole in wholes.items():
            boxes = row_blocks(whole.shape, writers)
            spread[name] = Spread(whole, boxes, [(number,) for number in range(len(boxes))], rank)
        return {**spread, **tiny}

    save_as(tmp_path / "c", state_of, writers, QUICK)
    for readers in (1, 2, 3, 5):
        wanted = moved = 0
        for number in range(readers):

            def read(reader: fp.CheckpointReader, number: int = number, readers: int = readers) -> tuple[int, int]:
                indices = {tensor.name: i for i, tensor in enumerate(reader.manifest.tensors)}
                boxes = {name: row_blocks(whole.shape, readers)[number] for name, whole in wholes.items()}
                found = reader.read([fp.ReadRequest(indices[name], box) for name, box in boxes.items()])
                for (name, box), data in zip(boxes.items(), found, strict=True):
                    assert data.tobytes() == wholes[name][slices(box)].tobytes()
                return reader.wanted_nbytes, reader.drive_nbytes

            nbytes = fp.read_checkpoint(tmp_path / "c", read)
            wanted += nbytes[0]
            moved += nbytes[1]
        assert wanted == sum(whole.nbytes for whole in wholes.values())
        assert moved <= 1.05 * wanted, f"{writers} writers, {readers} readers: {moved / wanted:.3f}"


# Across frameworks


SHAPES_ACROSS = {"even": (16, 8), "deep": (8, 3, 5), "wide": (2, 24), "large": (1024, 520)}


def values(name: str) -> Any:
    shape = SHAPES_ACROSS[name]
    return np.random.default_rng(prod(shape)).standard_normal(shape).astype(np.float32)


def mesh_of_jax(shape: tuple[int, ...]) -> Any:
    import jax
    from jax.sharding import Mesh

    names = ("a", "b")[: len(shape)]
    return Mesh(np.array(jax.devices()).reshape(shape), names)


def jax_states() -> dict[str, Any]:
    """Arrays on eight devices: in rows, in blocks, in replicas of columns, and on all."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    line, grid = mesh_of_jax((8,)), mesh_of_jax((4, 2))
    ways = {
        "even": NamedSharding(line, PartitionSpec("a")),
        "deep": NamedSharding(grid, PartitionSpec("a")),
        "wide": NamedSharding(grid, PartitionSpec("b", "a")),
        "large": NamedSharding(grid, PartitionSpec("a", "b")),
    }

    def made(name: str, way: Any) -> Any:
        return jax.make_array_from_callback(SHAPES_ACROSS[name], way, lambda index: values(name)[index])

    spread = {name: made(name, way) for name, way in ways.items()}
    whole = {name: made(name, NamedSharding(line, PartitionSpec())) for name in ways}
    return {"spread": spread, "whole": whole, "step": 7}


def check_jax_writes(directory: str) -> None:
    from fp_multi.adapters.orbax.comm import JaxComm

    report = fp.save(
        jax_states(), Path(directory) / "jax", comm=JaxComm(timeout_s=60.0), config=fp.SaveConfig(writers="all")
    )
    assert report.written_nbytes > 0


def check_torch_reads_and_writes(directory: str) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from fp_multi.adapters.torch import TorchComm, load, save

    comm, mesh = TorchComm(timeout_s=60.0), init_device_mesh("cpu", (3,))
    placements = {"even": [Shard(1)], "deep": [Shard(0)], "wide": [Shard(0)], "large": [Shard(0)]}
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES_ACROSS.items()}
    target = {
        "spread": {name: distribute_tensor(zero, mesh, placements[name]) for name, zero in zeros.items()},
        "whole": zeros,
        "step": 0,
    }
    state = load(Path(directory) / "jax", target=target)
    for name in SHAPES_ACROSS:
        assert_same(state["spread"][name].full_tensor().numpy(), values(name))
        assert_same(state["whole"][name].numpy(), values(name))
    assert state["step"] == 7
    save(state, Path(directory) / "torch", comm=comm, config=fp.SaveConfig(writers="all"))


def check_jax_reads(directory: str) -> None:
    import jax

    from fp_multi.adapters.orbax import load

    sharding = jax_states()["spread"]["large"].sharding
    found = load(Path(directory) / "torch")
    placed = load(Path(directory) / "torch", only=["spread.large"], device=sharding)["spread"]["large"]
    assert len(placed.addressable_shards) == 8
    for name in SHAPES_ACROSS:
        for kind in ("spread", "whole"):
            assert isinstance(found[kind][name], jax.Array)
            assert_same(np.asarray(found[kind][name]), values(name))
    assert_same(np.asarray(placed), values("large"))
    assert found["step"] == 7


def test_jax_writes_torch_reads_and_back(tmp_path: Path) -> None:
    """Two processes of four devices, then three ranks, then one process of eight devices."""
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    run_jax(check_jax_writes, 2, str(tmp_path), devices=4)
    run_torch(check_torch_reads_and_writes, 3, str(tmp_path))
    run_jax(check_jax_reads, 1, str(tmp_path), devices=8)
    for name in ("jax", "torch"):
        fp.verify(tmp_path / name)
        found = fp.load(tmp_path / name)
        for kind in ("spread", "whole"):
            assert_same(found[kind], {leaf: values(leaf) for leaf in SHAPES_ACROSS})
    assert hidden_names(tmp_path) == []
