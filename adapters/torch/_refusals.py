"""Why a tensor cannot be stored, and what to do instead: the sentences."""

from __future__ import annotations

import torch

# Looked up by the class's name: importing the modules they are in is slow, and not every torch has them all.
_SUBCLASSES = {
    "DTensor": "save its to_local() or full_tensor()",
    "ShardedTensor": (
        "use FSDP2 (fully_shard), whose state dicts are of DTensors; or torch.distributed.checkpoint with fp_multi's "
        "storage; or save the tensors of its local_shards()"
    ),
    "NestedTensor": "save its values() and offsets()",
    "MaskedTensor": "save its get_data() and get_mask()",
    "FakeTensor": "it has no data; run outside FakeTensorMode",
    "UninitializedTensorMixin": "it has no data yet; run the module once, then save",
    "FlatParameter": "save the parameters it is made of, with a full or sharded state dict",
}


def why_not(tensor: torch.Tensor) -> str:
    """Explain a tensor that is not a strided torch.Tensor or Parameter of a known dtype."""
    cls = type(tensor)
    if cls not in (torch.Tensor, torch.nn.Parameter):
        names = {base.__name__ for base in cls.__mro__}
        way_out = next(
            (text for name, text in _SUBCLASSES.items() if name in names),
            "save the plain tensors it is made of, or its as_subclass(torch.Tensor) if it is only a label",
        )
        return f"cannot store a {cls.__module__}.{cls.__qualname__}, which is more than its bytes; {way_out}"
    if tensor.is_nested:
        return "cannot store a nested tensor; save the list that its unbind() gives"
    if tensor.layout is torch.sparse_coo:
        return (
            "cannot store a sparse tensor; save the indices() and values() of its coalesce() with its "
            "shape, or its to_dense()"
        )
    if tensor.layout is not torch.strided:
        return f"cannot store a tensor of layout {tensor.layout}; save the tensors it is made of, or its to_dense()"
    if tensor.is_quantized:
        return (
            f"cannot store a quantized tensor ({tensor.dtype}), whose scale is not in its bytes; save its int_repr(), "
            "q_scale() and q_zero_point(), or its dequantize()"
        )
    return f"cannot store elements of {tensor.dtype}; save its view(torch.uint8)"


def meta_tensor() -> str:
    """Explain a tensor on the meta device."""
    return "a meta tensor has no data; make it real with to_empty() and initialise it"


def no_memory(error: BaseException) -> str:
    """Explain a tensor whose memory torch does not show."""
    first = (str(error).splitlines() or [""])[0]
    return (
        f"the tensor has no memory to read ({first}); save outside torch.func transforms and tracing, or save its "
        "cpu() copy"
    )


def past_storage(needed_nbytes: int, found_nbytes: int) -> str:
    """Explain a tensor whose storage is too short for it."""
    return (
        f"the tensor needs {needed_nbytes} bytes and its storage has {max(found_nbytes, 0)} there: freed or cut (as "
        "FSDP does between uses), or never real; gather the parameters before saving, or save a clone()"
    )
