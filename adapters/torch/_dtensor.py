"""DTensor, by the placements on its mesh: described as the boxes that are here, filled and made of loaded boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fp_multi import Box, LeafSource, Sharded
from fp_multi.errors import UnsupportedLeafError

from ._builder import plain_tensor
from ._describe import describe
from ._dtypes import ELEMENTS
from ._memory_format import memory_format_of
from ._refusals import why_not
from ._spread import Split, boxes_at, local_shape, spread
from ._together import Together, together

_MOST_KNOWN = 1 << 14


class _Here(NamedTuple):
    """How tensors of one shape, mesh and placements are spread, seen from this rank."""

    boxes: tuple[Box, ...]
    """Empty for tensors without elements."""
    holders: tuple[tuple[int, ...], ...]
    """Ranks as the save numbers them; empty for boxes of ranks that do not save."""
    local: tuple[tuple[int, Box | None], ...]
    """Boxes that are here, and where they are in the local tensor; None if they are all of it."""
    local_shape: tuple[int, ...]
    everywhere: bool
    """Every rank that saves has all of it."""


_known: dict[Any, _Here] = {}


def describe_distributed(tensor: DTensor, path: str) -> LeafSource:
    """Say where the bytes of a DTensor are: its local tensor's, nothing is gathered and nothing is copied.

    Args:
        tensor: a DTensor; every rank of its mesh has one like it.
        path: where it stands in the state, for messages.

    Returns:
        The source; its shape is the whole tensor's.

    Raises:
        UnsupportedLeafError: it has a partial placement, or its parts are on ranks that do not save.
    """
    element = ELEMENTS.get(tensor.dtype)
    if element is None:
        _refuse(path, why_not(tensor))
    here = _here(tensor, path)
    local = _local(tensor)
    if here.local and tuple(local.shape) != here.local_shape:
        _refuse(
            path,
            f"the local tensor of a DTensor with {tensor.placements} has shape {tuple(local.shape)}, expected "
            f"{here.local_shape}; make it with distribute_tensor(), or save the local tensors as fp_multi.ShardOf",
        )
    kind = "torch.parameter" if isinstance(tensor, torch.nn.Parameter) else "torch"
    attrs = _attrs(tensor, local, element.attrs)
    shape = tuple(tensor.shape)
    if here.everywhere or not here.boxes:
        source = describe(local, path)
        keepalive = tensor if source.keepalive is local else (tensor, source.keepalive)
        source = source._replace(kind=kind, attrs=attrs, shape=shape, keepalive=keepalive)
        return source if here.boxes else source._replace(strides=None)
    if not all(here.holders):
        _refuse(path, _elsewhere(here))
    parts = [(number, local if box is None else _within(local, box)) for number, box in here.local]
    identity = None
    if local.numel():
        begin = local.storage_offset() * local.itemsize
        address = local.untyped_storage().data_ptr() + begin
        identity = (str(local.device), address, local.stride(), tensor.device_mesh, tensor.placements)
    return LeafSource(
        element.name,
        shape,
        tensor.numel() * element.itemsize,
        0,
        tensor,
        kind,
        attrs=attrs,
        itemsize=element.itemsize,
        identity=identity,
        sharded=Sharded(here.boxes, here.holders, tuple([(number, describe(part, path)) for number, part in parts])),
    )


def parts_of(tensor: DTensor, path: str) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a DTensor that are here, each with the tensor that holds it: a view of the local tensor.

    Args:
        tensor: a DTensor; its local tensor may be on the meta device.
        path: where it stands, for messages.

    Raises:
        UnsupportedLeafError: it has a partial placement.
    """
    here = _here(tensor, path)
    local = _local(tensor)
    if not here.local:
        # Nothing is here; an empty box still tells what kind of tensor it is. Outside of its mesh there is no rank.
        inside = local.dim() == len(here.local_shape) == tensor.dim()
        return [(Box((0,) * local.dim(), tuple(local.shape)), local)] if inside else []
    return [(here.boxes[number], local if box is None else _within(local, box)) for number, box in here.local]


def join(tensor: DTensor, values: Sequence[Any]) -> DTensor:
    """A DTensor like another one, made of loaded values.

    Args:
        tensor: whose mesh and placements it gets. Being a Parameter and ``requires_grad`` are the values'.
        values: tensors or NumPy arrays for the boxes that :func:`parts_of` gave.
    """
    if not values:
        return tensor
    old = _local(tensor)
    device = torch.device(tensor.device_mesh.device_type) if old.is_meta else old.device
    plain = [plain_tensor(value, tensor.dtype).to(device) for value in values]
    local = plain[0]
    if len(plain) > 1:
        here = _here(tensor, "")
        local = torch.empty(here.local_shape, dtype=tensor.dtype, device=device)
        for (_, box), value in zip(here.local, plain, strict=True):
            if box is not None:
                _within(local, box).copy_(value)
    with torch.no_grad():
        made: DTensor = DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=_strides(tuple(tensor.shape), local),
        )
    first = values[0]
    if isinstance(first, torch.nn.Parameter):
        parameter: Any = torch.nn.Parameter(made, first.requires_grad)  # a DTensor all the same
        made = parameter
    elif isinstance(first, torch.Tensor):
        made.requires_grad_(first.requires_grad)
    return made


def _here(tensor: DTensor, path: str) -> _Here:
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    saving = together()
    key = (mesh, placements, shape, saving)
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _known[key] = _looked_up(mesh, _splits(placements, path), shape, saving)
    return found


def _splits(placements: Sequence[Any], path: str) -> list[Split]:
    found = []
    for mesh_axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            found.append(Split(mesh_axis, placement.dim, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            found.append(Split(mesh_axis, placement.dim))
        elif not isinstance(placement, Replicate):
            _refuse(
                path,
                f"a DTensor with the placement {placement!r} is not made yet, each rank has only a part of every "
                "value; redistribute() it to Shard or Replicate",
            )
    return found


def _looked_up(mesh: Any, splits: list[Split], shape: tuple[int, ...], saving: Together) -> _Here:
    ranks = mesh.mesh.numpy(force=True)
    coordinate = mesh.get_coordinate()
    if 0 in shape:
        return _Here(
            (), (), (), shape if coordinate is None else local_shape(shape, ranks.shape, splits, coordinate), True
        )
    boxes, holders = spread(shape, ranks, splits)
    numbers = saving.numbers
    holders = tuple([tuple(sorted([numbers[rank] for rank in who if rank in numbers])) for who in holders])
    local: list[tuple[int, Box | None]] = []
    lengths: tuple[int, ...] = (0,)
    if coordinate is not None:
        lengths = local_shape(shape, ranks.shape, splits, coordinate)
        mine = boxes_at(shape, ranks.shape, splits, coordinate)
        places = {box: number for number, box in enumerate(boxes)}
        local = [(places[box], None if len(mine) == 1 else within) for box, within in mine]
    everywhere = len(boxes) == 1 and bool(local) and len(holders[0]) == len(numbers)
    return _Here(boxes, holders, tuple(local), lengths, everywhere)


def _elsewhere(here: _Here) -> str:
    ranks = len(together().numbers)
    if ranks == 1:
        return (
            "a DTensor has parts on other ranks, and this process saves alone; pass comm=TorchComm() on all ranks, or "
            "save its full_tensor()"
        )
    if not ranks:
        return (
            "a DTensor is spread over ranks of the job, and the comm does not say which of them it has; use TorchComm"
        )
    missing = sum([not who for who in here.holders])
    return (
        f"{missing} of {len(here.boxes)} parts of a DTensor are on ranks that do not take part in the save; pass a "
        "comm of all ranks of its mesh, or save its full_tensor()"
    )


def _local(tensor: DTensor) -> torch.Tensor:
    # Not to_local(): it makes another tensor each time, and a place in autograd's graph.
    local: Any = tensor._local_tensor
    wait = getattr(local, "wait", None)  # the result of a collective may still be on its way
    found: torch.Tensor = local if wait is None else wait()
    return found


def _within(local: torch.Tensor, box: Box) -> torch.Tensor:
    return local[tuple([slice(start, start + length) for start, length in zip(*box, strict=True)])]


def _attrs(tensor: DTensor, local: torch.Tensor, attrs: Mapping[str, str] | None) -> Mapping[str, str] | None:
    found = dict(attrs or {})
    memory_format = memory_format_of(tensor)
    if memory_format is not None:
        found["memory_format"] = memory_format
    if tensor.requires_grad:
        found["requires_grad"] = "1"
    if not local.is_cpu:
        # Without a number: each rank has its own device, and which one it is says nothing of where it is loaded.
        found["device"] = local.device.type
    return found or None


def _strides(shape: tuple[int, ...], local: torch.Tensor) -> tuple[int, ...]:
    """Strides of a whole tensor whose memory is in the order of its local part's."""
    name = memory_format_of(local)
    order = torch.contiguous_format if name is None else getattr(torch, name)
    return torch.empty(shape, device="meta", memory_format=order).stride()


def _refuse(path: str, what: str) -> NoReturn:
    raise UnsupportedLeafError(f"{path}: {what}", path)
