"""State that is spread over ranks: DTensors, DDP, FSDP2, ZeRO; real processes over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multiprocess import run_torch
from support import assert_same, hidden_names

torch = pytest.importorskip("torch")

import fp_multi as fp  # noqa: E402
from fp_multi import errors  # noqa: E402
from fp_multi.adapters.torch import Checkpointer, TorchComm, load, save  # noqa: E402

ALL = fp.SaveConfig(writers="all", durable=False)


# Which boxes a mesh cuts a tensor into


def torch_parts(shape: tuple[int, ...], mesh: tuple[int, ...], placements: list[Any], place: tuple[int, ...]) -> Any:
    """The local tensor at a place of a mesh, cut by torch's own placements, of a tensor that counts its elements."""
    from torch.distributed.tensor import Replicate

    local = torch.arange(int(np.prod(shape))).reshape(shape)
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Replicate):
            local = placement._split_tensor(local, mesh[axis], with_padding=False)[0][place[axis]]
    return local.numpy()


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_boxes_are_what_the_placements_of_torch_cut(data: st.DataObject) -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    from fp_multi.adapters.torch import _dtensor, _spread

    shape = tuple(data.draw(st.lists(st.integers(1, 13), min_size=1, max_size=3), "shape"))
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3), "mesh"))
    axis = st.integers(0, len(shape) - 1)
    placement = st.one_of(
        st.just(Replicate()),
        axis.map(Shard),
        st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), axis, st.integers(1, 3)),
    )
    placements = [data.draw(placement) for _ in mesh]
    splits = _dtensor._splits(placements, "x")
    ranks = np.random.default_rng(0).permutation(int(np.prod(mesh))).reshape(mesh)
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    holders: dict[fp.Box, list[int]] = {}
    for place in np.ndindex(mesh):
        local = torch_parts(shape, mesh, placements, place)
        assert _spread.local_shape(shape, mesh, splits, place) == local.shape
        seen = 0
        for box, within in _spread.boxes_at(shape, mesh, splits, place):
            assert_same(local[slices(within)], whole[slices(box)])
            seen += int(np.prod(box.length))
            holders.setdefault(box, []).append(int(ranks[place]))
        assert seen == local.size
    found = _spread.spread(shape, ranks, splits)
    assert dict(zip(found.boxes, found.holders, strict=True)) == {
        box: tuple(sorted(who)) for box, who in holders.items()
    }
    assert list(found.boxes) == sorted(found.boxes)
    assert sum(int(np.prod(box.length)) for box in found.boxes) == whole.size


def slices(box: fp.Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(*box, strict=True))


# DTensors: N writers, M readers


def make_comm(group: Any = None) -> TorchComm:
    return TorchComm(group, timeout_s=60.0)


def wholes() -> dict[str, Any]:
    """Odd shapes: prime axes, fewer rows than ranks, 0-d, no elements, one large, several axes, small floats."""
    generator = torch.Generator().manual_seed(0)
    return {
        "prime": torch.randn(13, 7, generator=generator),
        "few": torch.randn(2, 5, generator=generator),
        "one": torch.randn(1, generator=generator),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "large": torch.randn(1031, 257, generator=generator),
        "deep": torch.randn(5, 3, 4, 11, generator=generator).to(torch.bfloat16),
        "ints": torch.arange(101 * 6).reshape(101, 6),
        "flags": torch.randn(9, generator=generator) > 0,
    }


def local_of(whole: Any, mesh: Any, placements: Any) -> Any:
    """This rank's part, without a word to other ranks."""
    from torch.distributed.tensor import Replicate

    local = whole
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Replicate):
            parts = placement._split_tensor(local, mesh.size(axis), with_padding=False)[0]
            local = parts[mesh.get_coordinate()[axis]]
    return local.clone()


def spread_out(whole: Any, mesh: Any, placements: Any, *, empty: bool = False) -> Any:
    from torch.distributed.tensor import DTensor

    local = local_of(whole, mesh, placements)
    if empty:
        local = torch.zeros_like(local)
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def placements_for(mesh: Any, dims: int) -> list[Any]:
    """Ways to place a tensor of so many axes on a mesh."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if dims == 0:
        return [[Replicate()] * mesh.ndim]
    last = dims - 1
    if mesh.ndim == 1:
        return [[Shard(0)], [Shard(last)], [Replicate()]]
    size = mesh.size(1)
    return [
        [Shard(0), Shard(0)],
        [Shard(0), Shard(last)],
        [Replicate(), Shard(0)],
        [Shard(last), Replicate()],
        [_StridedShard(0, split_factor=size), Shard(0)],  # FSDP2 and tensor parallelism on one axis
        [_StridedShard(0, split_factor=2), Replicate()],  # no box: rows from several places
    ]


def states(mesh: Any, *, empty: bool = False) -> Any:
    """A state of every tensor in every placement."""
    return {
        name: [spread_out(whole, mesh, way, empty=empty) for way in placements_for(mesh, whole.dim())]
        for name, whole in wholes().items()
    }


def assert_local(found: Any, whole: Any) -> None:
    """A DTensor has the values that its place in the whole says."""
    from torch.distributed.tensor import DTensor

    assert type(found) is DTensor
    assert (found.dtype, found.shape) == (whole.dtype, whole.shape)
    expected = local_of(whole, found.device_mesh, found.placements)
    assert found._local_tensor.shape == expected.shape
    assert torch.equal(found._local_tensor, expected)


def check_matrix(root: Path) -> None:
    """Each of 1 to 4 ranks, in several meshes, writes; each of them reads what each has written."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    rank = dist.get_rank()
    meshes = {
        "1": DeviceMesh("cpu", [0]),
        "2": DeviceMesh("cpu", [0, 1]),
        "3": DeviceMesh("cpu", [0, 1, 2]),
        "4": DeviceMesh("cpu", [0, 1, 2, 3]),
        "2x2": DeviceMesh("cpu", [[0, 1], [2, 3]]),
        "3x1": DeviceMesh("cpu", [[3], [1], [0]]),  # in another order, and not from 0 on
    }
    groups = {name: dist.new_group(sorted(mesh.mesh.flatten().tolist())) for name, mesh in meshes.items()}
    comms = {name: make_comm(groups[name]) for name, mesh in meshes.items() if rank in mesh.mesh}
    for name, comm in comms.items():
        report = save(states(meshes[name]), root / name, comm=comm, config=ALL)
        assert report.tensor_nbytes == fp.read_manifest(root / name).totals.tensor_nbytes
    dist.barrier()
    for written in meshes:
        if rank == 0:
            check_whole(root / written, meshes[written].ndim)
        for name in comms:
            if meshes[name].ndim != meshes[written].ndim:
                continue
            target = states(meshes[name], empty=True)
            check_loaded(load(root / written, target=target), target)
            filled = load(root / written, target=target, inplace=True)
            assert filled["deep"][0] is target["deep"][0]
            check_loaded(filled, target)
    check_refusals(root, meshes, comms)
    check_kinds(root, meshes["4"], comms["4"])


def check_whole(path: Path, axes: int) -> None:
    """Without a target a DTensor is a whole tensor."""
    found = load(path)
    for name, whole in wholes().items():
        ways = 1 if whole.dim() == 0 else 3 if axes == 1 else 6
        assert len(found[name]) == ways
        for tensor in found[name]:
            assert type(tensor) is torch.Tensor
            assert tensor.dtype == whole.dtype
            assert torch.equal(tensor, whole)


def check_loaded(found: Any, target: Any) -> None:
    for name, whole in wholes().items():
        for tensor, like in zip(found[name], target[name], strict=True):
            assert (tensor.device_mesh, tensor.placements) == (like.device_mesh, like.placements)
            assert_local(tensor, whole)


def check_refusals(root: Path, meshes: Any, comms: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    rank = dist.get_rank()
    whole = wholes()["prime"]
    state = {"layers": [{"w": spread_out(whole, meshes["4"], [Shard(0)])}]}
    with pytest.raises(errors.UnsupportedLeafError, match=r"layers\[0\]\.w: .*alone; pass comm=TorchComm"):
        save(state, root / "refused")
    partial = {"layers": [{"w": DTensor.from_local(whole, meshes["4"], [Partial()])}]}
    with pytest.raises(errors.UnsupportedLeafError, match=r"layers\[0\]\.w: .*Partial.*redistribute"):
        save(partial, root / "refused", comm=comms["4"])
    cut = {"w": DTensor.from_local(torch.ones(3), meshes["4"], [Shard(0)], shape=(13,), stride=(1,))}
    with pytest.raises(errors.FpMultiError, match=r"w: the local tensor .* expected \((4|1),\)"):
        save(cut, root / "refused", comm=comms["4"])
    if rank < 2:
        with pytest.raises(errors.UnsupportedLeafError, match=r"2 of 4 parts of a DTensor are on ranks that do not"):
            save(state, root / "refused", comm=comms["2"])
        # All ranks of a mesh need not be there if those that are have everything.
        half = {"w": spread_out(whole, meshes["2x2"], [Replicate(), Shard(0)])}
        save(half, root / "half", comm=comms["2"])
        assert torch.equal(load(root / "half")["w"], whole)
    replicated = {"w": spread_out(whole, meshes["4"], [Replicate()])}
    save(replicated, root / f"alone_{rank}")
    assert torch.equal(load(root / f"alone_{rank}")["w"], whole)
    assert not (root / "refused").exists()

    fp.save(state, root / "plain", comm=comms["4"])  # the core's own, which knows no comm's ranks
    assert torch.equal(load(root / "plain")["layers"][0]["w"], whole)
    other = {"layers": [{"w": spread_out(whole[:12], meshes["4"], [Shard(0)])}]}
    with pytest.raises(errors.TargetMismatchError, match=r"layers\[0\]\.w: shape: \(12, 7\) in target"):
        load(root / "plain", target=other)
    other = {"layers": [{"w": spread_out(whole.double(), meshes["4"], [Shard(0)])}]}
    with pytest.raises(errors.TargetMismatchError, match=r"layers\[0\]\.w: dtype: float64 in target"):
        load(root / "plain", target=other)
    with pytest.raises(errors.TargetMismatchError, match=r"layers\[0\]: keys"):
        load(root / "plain", target={"layers": [{"v": other["layers"][0]["w"]}]})


def check_kinds(root: Path, mesh: Any, comm: Any) -> None:
    """Parameters, tied ones, memory formats, and what NumPy wrote."""
    from torch.distributed.tensor import DTensor, Shard

    way = [Shard(0)]
    rows, images = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)), torch.arange(8.0 * 3 * 4 * 5)
    images = images.reshape(8, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    weight = torch.nn.Parameter(spread_out(rows, mesh, way))
    state = {
        "weight": weight,
        "tied": weight.detach(),
        "again": weight.detach(),
        "frozen": torch.nn.Parameter(spread_out(rows, mesh, way), requires_grad=False),
        "images": spread_out(images, mesh, way),
        "mirrored": torch.ones(3, 4),
        "step": 3,
    }
    save(state, root / "kinds", comm=comm)
    manifest = fp.read_manifest(root / "kinds")
    assert len(manifest.tensors) == 5  # two of the six are one; ranks without rows cannot know
    whole = load(root / "kinds")
    assert whole["tied"] is whole["again"]
    assert torch.equal(whole["weight"], rows)
    assert type(whole["weight"]) is torch.nn.Parameter
    assert whole["images"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(whole["images"], images)
    target = {
        **state,
        **{name: spread_out(rows, mesh, way, empty=True) for name in ("weight", "tied", "again", "frozen")},
    }
    target["images"] = spread_out(images, mesh, way, empty=True)
    found = load(root / "kinds", target=target, comm=comm, broadcast=True)  # what is whole is shared, parts are not
    assert torch.equal(found["mirrored"], torch.ones(3, 4))
    assert found["step"] == 3
    for name in ("weight", "frozen"):
        assert isinstance(found[name], torch.nn.Parameter)
        assert type(found[name]) is DTensor
        assert found[name].requires_grad is (name == "weight")
        assert_local(found[name].detach(), rows)
    assert_local(found["images"], images)
    assert found["images"].stride() == images.stride()
    # As it was, and on a mesh that only says what is wanted.
    with torch.device("meta"):
        meta = DTensor.from_local(
            local_of(rows, mesh, way).to("meta"), mesh, way, shape=rows.shape, stride=rows.stride()
        )
    assert_local(load(root / "kinds", target={"tied": meta}, only=["tied"])["tied"], rows)
    if comm.rank == 0:
        fp.save({"a": rows.numpy()}, root / "numpy")
    torch.distributed.barrier()
    target = {"a": spread_out(rows, mesh, way, empty=True)}
    assert_local(load(root / "numpy", target=target)["a"], rows)
    assert_local(load(root / "numpy", target=target, inplace=True)["a"], rows)
    shared = load(root / "kinds", comm=comm, broadcast=True)
    assert torch.equal(shared["images"], images)


@pytest.fixture
def job_of_one(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_mesh_of_one_rank_needs_no_comm(tmp_path: Path, job_of_one: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    state = {name: spread_out(whole, job_of_one, [Shard(0)]) for name, whole in wholes().items() if whole.dim()}
    state["scalar"] = spread_out(wholes()["scalar"], job_of_one, [Replicate()])
    state["gradient"] = torch.nn.Parameter(spread_out(torch.ones(3), job_of_one, [Shard(0)]))
    state["negative"] = spread_out(torch.arange(3.0), job_of_one, [Shard(0)])
    state["negative"]._local_tensor = torch.view_as_complex(torch.arange(6.0).reshape(3, 2)).conj().imag
    save(state, tmp_path / "c", config=ALL)
    whole = {**wholes(), "gradient": torch.nn.Parameter(torch.ones(3)), "negative": -torch.arange(1.0, 7.0, 2.0)}
    found = load(tmp_path / "c")
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert type(found[name]) is type(tensor)
        assert torch.equal(found[name], tensor), name
    found = load(tmp_path / "c", target=state)
    for name, tensor in whole.items():
        assert torch.equal(found[name].full_tensor(), tensor), name
    state["negative"] = DTensor.from_local(torch.ones(3), job_of_one, [Partial()])
    with pytest.raises(errors.UnsupportedLeafError, match=r"negative: .*Partial\(sum\).*redistribute"):
        save(state, tmp_path / "d")
    with pytest.raises(errors.UnsupportedLeafError, match=r"negative: .*Partial\(sum\).*redistribute"):
        load(tmp_path / "c", target=state)


# Training: FSDP2, tensor parallelism, DDP, ZeRO


WIDTHS = (13, 17, 11, 5)  # prime: no number of ranks divides them


def make_model() -> Any:
    torch.manual_seed(3)
    a, b, c, d = WIDTHS
    nn = torch.nn
    return nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.Linear(b, c, bias=False), nn.ReLU(), nn.Linear(c, d))


def fully_sharded(mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def optimizer_of(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, steps: int, first: int = 0) -> None:
    """The same data on every rank."""
    for step in range(first, first + steps):
        data = torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


def with_states(optimizer: Any) -> Any:
    """A new optimizer with states in the shapes that a step makes, and nothing moved."""
    for group in optimizer.param_groups:
        group["lr"], rate = 0.0, group["lr"]
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        group["lr"] = rate
    return optimizer


def gathered(state: Any) -> Any:
    """Whole tensors as NumPy arrays in place of DTensors and tensors."""
    from torch.distributed.tensor import DTensor

    if isinstance(state, DTensor):
        state = state.full_tensor()
    if isinstance(state, torch.Tensor):
        return state.detach().clone().numpy()
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    if isinstance(state, list):
        return [gathered(value) for value in state]
    return state


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


def restore_into(model: Any, optimizer: Any, path: Path) -> None:
    """Into new tensors, with the checks of torch's own loading."""
    state = load(path, target=state_of(model, with_states(optimizer)))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def one_process(steps: int) -> tuple[Any, Any]:
    model = make_model()
    optimizer = optimizer_of(model)
    train(model, optimizer, steps)
    return model, optimizer


def check_fsdp(root: Path, comm: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (comm.size,))
    model = fully_sharded(mesh)
    optimizer = optimizer_of(model)
    train(model, optimizer, 2)
    report = save(state_of(model, optimizer), root / "fsdp", comm=comm, config=ALL)
    expected = gathered(state_of(model, optimizer))
    assert 0 < report.written_nbytes < report.file_nbytes * 0.8

    again = fully_sharded(mesh)
    other = optimizer_of(again)
    restore_into(again, other, root / "fsdp")
    assert_same(gathered(state_of(again, other)), expected)
    train(model, optimizer, 2, first=2)
    train(again, other, 2, first=2)
    assert_same(gathered(state_of(again, other)), gathered(state_of(model, optimizer)))
    return expected


def check_ddp(root: Path, comm: Any) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(make_model())
    optimizer = optimizer_of(model)
    train(model, optimizer, 1)
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "big": torch.ones(1 << 20)}
    report = save(state, root / "ddp", comm=comm, config=ALL)
    # Each byte is written by one rank, and each rank writes its share.
    assert abs(report.written_nbytes - report.file_nbytes / comm.size) < report.file_nbytes * 0.2
    for shared in (load(root / "ddp", comm=comm, broadcast=True), load(root / "ddp", comm=comm)):
        assert_same(gathered(shared), gathered(state))
    target = {"model": make_model().state_dict(), "optimizer": optimizer.state_dict(), "big": torch.zeros(1 << 20)}
    found = load(root / "ddp", target=target, inplace=True, comm=comm, broadcast=True)
    assert found["big"] is target["big"]
    assert_same(gathered(target), gathered(state))


def zero_optimizer(model: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)


def zero_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """The states of this rank's parameters, each under its parameter's name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: dict(state) for parameter, state in optimizer.optim.state.items()}


def edges(count: int, ranks: int) -> list[int]:
    return [count * rank // ranks for rank in range(ranks + 1)]


def flat_part(comm: Any, whole: Any) -> fp.ShardOf:
    """One rank's part of a flat buffer."""
    cuts = edges(len(whole), comm.size)
    return fp.ShardOf(whole[cuts[comm.rank] : cuts[comm.rank + 1]], tuple(whole.shape), (cuts[comm.rank],))


def check_zero(root: Path, comm: Any) -> Any:
    model = make_model()
    optimizer = zero_optimizer(model)
    train(model, optimizer, 2)
    flat = torch.arange(1009.0)
    state = {
        "model": dict(model.state_dict()),
        "optimizer": zero_state(model, optimizer),
        "flat": flat_part(comm, flat),
    }
    for number in range(2):
        save(state, root / f"zero_{number}", comm=comm, config=ALL)
    # Together the ranks have what one process alone would have.
    plain, adam = one_process(2)
    by_name = {name: dict(adam.state[parameter]) for name, parameter in plain.named_parameters()}
    expected = gathered({"model": dict(plain.state_dict()), "optimizer": by_name})
    assert_same(gathered(state["model"]), expected["model"])
    return expected


def restore_zero(root: Path, comm: Any) -> None:
    """Other ranks have other parameters' states: each reads those that are its own now."""
    model = make_model()
    optimizer = zero_optimizer(model)
    names = [
        name
        for name, parameter in model.named_parameters()
        if parameter in set(optimizer.optim.param_groups[0]["params"])
    ]
    only = [("model",), *[("optimizer", name) for name in names], ("flat",)]
    flat = torch.zeros(1009)
    found = load(root / "zero_1", only=only[:-1])
    model.load_state_dict(found["model"])
    parameters = dict(model.named_parameters())
    for name in names:
        optimizer.optim.state[parameters[name]] = found["optimizer"][name]
    part = load(root / "zero_1", only=["flat"], target={"flat": flat_part(comm, flat)}, inplace=True)["flat"]
    assert torch.equal(part.array, torch.arange(1009.0)[part.start[0] : part.start[0] + len(part.array)])
    assert int(flat.count_nonzero()) == len(part.array) - (comm.rank == 0)
    train(model, optimizer, 2, first=2)
    expected, plain = one_process(4)
    assert_same(gathered(dict(model.state_dict())), gathered(dict(expected.state_dict())))
    for name, state in zero_state(model, optimizer).items():
        assert_same(gathered(state), gathered(dict(plain.state[dict(expected.named_parameters())[name]])))


def check_checkpointer(root: Path, comm: Any) -> None:
    """Training goes on while a step is saved, and every step comes back as it was."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (comm.size,))
    for overlap in ("hybrid", "borrow", "snapshot"):
        model = fully_sharded(mesh)
        optimizer = optimizer_of(model)
        expected, reports = {}, []
        with Checkpointer(root / overlap, overlap=overlap, comm=comm, config=ALL, keep=2) as ckpt:  # type: ignore[arg-type]
            ckpt.attach(optimizer)
            for step in range(4):
                train(model, optimizer, 1, first=step)  # its step is the fence
                # In place of what a forward pass changes.
                state = {**state_of(model, optimizer), "statistics": torch.full((3,), step)}
                expected[step] = gathered(state)
                reports.append(ckpt.save(step, state))
                state["statistics"].add_(100)
            ckpt.wait()
            for pending in reports:
                # One number for each parameter, and the statistics; nothing else can change before the fence.
                assert pending.report.eager_nbytes == 4 * 7 + 3 * 8
            assert ckpt.steps() == [2, 3]
            step, found = ckpt.restore(
                target={**state_of(model, optimizer), "statistics": torch.zeros(3, dtype=torch.int64)}
            )
            assert step == 3
            assert_same(gathered(found), expected[3])
        assert_same(gathered(load(root / overlap / "step_00000002")), expected[2])


def check_fence(root: Path, comm: Any) -> None:
    """A fence waits for this rank's bytes, not for a rank that is slow."""
    from fp_multi import _save

    original = _save.PartWrite.finish
    if comm.rank:
        # It is done when the first rank is through its fence, and would wait for ever if that waited for it.
        _save.PartWrite.finish = lambda self, on_tick=None: (  # type: ignore[method-assign]
            original(self, on_tick) if comm.get("passed", 60.0) else None
        )
    try:
        parameter = torch.nn.Parameter(torch.ones(1000))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        with Checkpointer(root / "fence", comm=comm, config=ALL) as ckpt:
            ckpt.attach(optimizer)
            pending = ckpt.save(0, {"w": parameter})
            parameter.grad = torch.ones(1000)
            optimizer.step()
            if comm.rank == 0:
                assert not pending.done
                comm.put("passed", b"1")
            pending.wait()
    finally:
        _save.PartWrite.finish = original  # type: ignore[method-assign]
    assert torch.equal(load(root / "fence" / "step_00000000")["w"], torch.ones(1000))


def check_pipeline(root: Path, comm: Any) -> None:
    """Each rank has a stage of its own, on a mesh of its own."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    meshes = [DeviceMesh("cpu", [rank]) for rank in range(comm.size)]
    mine = spread_out(wholes()["prime"] + comm.rank, meshes[comm.rank], [Shard(0)])
    state = {"stages": {comm.rank: {"w": mine}}, "step": 3}
    for number in range(2):
        save(state, root / f"stages_{number}", comm=comm, config=ALL)
    whole = load(root / "stages_1")
    for rank in range(comm.size):
        assert torch.equal(whole["stages"][rank]["w"], wholes()["prime"] + rank)
    target = {"stages": {comm.rank: {"w": torch.zeros_like(mine)}}}
    found = load(root / "stages_1", target=target, only=[("stages", comm.rank)])
    assert_local(found["stages"][comm.rank]["w"], wholes()["prime"] + comm.rank)
    with pytest.raises(errors.UnsupportedLeafError, match=r"w: the ranks have tensors .* spread in different ways"):
        save({"w": mine}, root / "lost", comm=comm)
    assert not (root / "lost").exists()


def check_two_ranks(directory: str) -> Any:
    root, comm = Path(directory), make_comm()
    expected = check_fsdp(root, comm)
    check_ddp(root, comm)
    zero = check_zero(root, comm)
    check_checkpointer(root, comm)
    check_fence(root, comm)
    check_pipeline(root, comm)
    return expected, zero


def check_three_ranks(directory: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    root, comm = Path(directory), make_comm()
    model = fully_sharded(init_device_mesh("cpu", (3,)))
    optimizer = optimizer_of(model)
    restore_into(model, optimizer, root / "fsdp")
    restore_zero(root, comm)
    return gathered(state_of(model, optimizer))


def check_tensor_parallel(root: Path, comm: Any) -> Any:
    """FSDP2 over tensor parallelism: one axis is cut by both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state = dict(model.state_dict())
    assert any(isinstance(way, _StridedShard) for tensor in state.values() for way in tensor.placements)
    save(state, root / "parallel", comm=comm, config=ALL)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for found in (load(root / "parallel", target=target), load(root / "parallel", target=target, inplace=True)):
        for name, tensor in found.items():
            assert torch.equal(tensor._local_tensor, state[name]._local_tensor), name
    return gathered(state)


def check_four_ranks(directory: str) -> Any:
    check_matrix(Path(directory))
    return check_tensor_parallel(Path(directory), make_comm())


def test_dtensors_of_any_ranks_and_placements(tmp_path: Path) -> None:
    parallel = run_torch(check_four_ranks, 4, str(tmp_path)).results[0]
    for name in ("1", "3", "2x2", "3x1", "kinds"):
        fp.verify(tmp_path / name)
    assert_same(gathered(load(tmp_path / "parallel")), parallel)
    assert hidden_names(tmp_path) == []


def test_training_on_two_ranks_goes_on_with_others(tmp_path: Path) -> None:
    expected, zero = run_torch(check_two_ranks, 2, str(tmp_path)).results[0]
    for restored in run_torch(check_three_ranks, 3, str(tmp_path)).results:
        assert_same(restored, expected)
    # And in this one process, which has no process group.
    model = make_model()
    optimizer = optimizer_of(model)
    state = load(tmp_path / "fsdp")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert_same(gathered(state_of(model, optimizer)), expected)
    whole = load(tmp_path / "zero_0")
    assert_same(gathered(whole["model"]), zero["model"])
    assert whole["optimizer"].keys() == zero["optimizer"].keys()
    assert_same({name: gathered(whole["optimizer"][name]) for name in zero["optimizer"]}, zero["optimizer"])
    assert torch.equal(whole["flat"], torch.arange(1009.0))
    for number in range(2):
        fp.verify(tmp_path / f"zero_{number}")
    assert hidden_names(tmp_path) == []
