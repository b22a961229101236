"""Where the parts of tensors that a DCP load reads go: into the waiting tensor's memory, or through a buffer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from fp_multi import Box
from fp_multi.errors import TargetMismatchError
from fp_multi.storage import Tensor, itemsize

from ._convert_tensors import torch_dtype
from ._dcp_share import place_of
from ._dtypes import CARRIERS

Bytes = npt.NDArray[np.uint8]


class Wanted(NamedTuple):
    """A part of a tensor, and the tensor that waits for it."""

    item: ReadItem
    tensor: int
    """Its index in the manifest."""
    box: Box
    nbytes: int
    target: torch.Tensor
    out: Bytes | None
    """The target's memory, if it can be filled as it is."""


def want(item: ReadItem, index: int, tensor: Tensor, planner: LoadPlanner) -> Wanted:
    """What an item of a plan wants.

    Args:
        item: of the plan.
        index: of the tensor in the manifest.
        tensor: its entry there.
        planner: says where the part goes.

    Raises:
        TargetMismatchError: the planner gives a tensor of another shape.
    """
    _, box = place_of(item, index)
    target = planner.resolve_tensor(item).detach()
    if tuple(target.shape) != box.length:
        raise TargetMismatchError(
            f"{item.storage_index.fqn}: the planner gives a tensor of shape {tuple(target.shape)} for a part "
            f"of {box.length}"
        )
    nbytes = itemsize(tensor.dtype) * int(np.prod(box.length, dtype=np.int64))
    in_place = nbytes > 0 and target.dtype == torch_dtype(tensor)
    return Wanted(item, index, box, nbytes, target, _memory(target) if in_place else None)


def _memory(target: torch.Tensor) -> Bytes | None:
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
    memory: Bytes = flat.view(torch.uint8).numpy()
    return memory


def fill(one: Wanted, buffer: Bytes, tensor: Tensor) -> None:
    """Copy a part into a target that is no plain memory of its dtype.

    Args:
        one: what is wanted.
        buffer: the bytes of the part.
        tensor: its entry in the manifest.
    """
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
