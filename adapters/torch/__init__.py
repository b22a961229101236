"""PyTorch: save and load what trainers give to ``torch.save``, and plain .safetensors files.

Importing this package teaches :func:`fp_multi.save` torch's tensors and its plain values (``torch.Size``,
``torch.dtype``, ``torch.device``, ``torch.layout``, ``torch.memory_format``), so the core's own functions take them
too.

Example:
    >>> import torch
    >>> from fp_multi.adapters.torch import load, save
    >>> model = torch.nn.Linear(4, 2)
    >>> report = save({"model": model.state_dict(), "step": 3}, path)  # doctest: +SKIP
    >>> state = load(path, map_location="cpu")  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fp_multi import TensorType, register_tensor_type
from fp_multi.adapters._lazy import lazily

from ._builder import assign
from ._capture import capture as capture
from ._capture import resume as resume
from ._describe import describe, join, parts, spec
from ._device import pin
from ._extensions import register_extensions
from ._safetensors import load_file as load_file
from ._safetensors import save_file as save_file
from .checkpointer import Checkpointer as Checkpointer
from .state_dict import load as load
from .state_dict import save as save

if TYPE_CHECKING:
    from .comm import TorchComm as TorchComm
    from .dcp import AsyncStager as AsyncStager
    from .dcp import StorageReader as StorageReader
    from .dcp import StorageWriter as StorageWriter

__all__ = [
    "save",
    "load",
    "save_file",
    "load_file",
    "Checkpointer",
    "capture",
    "resume",
    "TorchComm",
    "StorageWriter",
    "StorageReader",
    "AsyncStager",
]

# torch.distributed costs time to import: only who names one of these pays for it.
_HOMES = {"TorchComm": "comm", "StorageWriter": "dcp", "StorageReader": "dcp", "AsyncStager": "dcp"}

# One registration covers every subclass; describe() refuses those that it cannot store exactly.
register_tensor_type(
    torch.Tensor, TensorType(describe=describe, pin=pin, spec=spec, assign=assign, parts=parts, join=join)
)
register_extensions()

__getattr__ = lazily(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
