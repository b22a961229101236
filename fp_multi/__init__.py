"""Checkpoints at the drive's own speed, durable and checked, for every framework.

``save`` and ``load`` take any nesting of arrays and plain values; adapters for frameworks are in
``fp_multi.adapters``. The format is docs/format.md: every shard is a valid safetensors file.

Importing the package is cheap: what does the work is imported when its name is first used.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import TYPE_CHECKING, Any

from fp_multi import errors as errors
from fp_multi._version import VERSION
from fp_multi.errors import FpMultiError as FpMultiError

if TYPE_CHECKING:
    from fp_multi._advice import Advice as Advice
    from fp_multi._ceiling import CeilingResult as CeilingResult
    from fp_multi._ceiling import capabilities as capabilities
    from fp_multi._ceiling import measure_ceiling as measure_ceiling
    from fp_multi._comm import Comm as Comm
    from fp_multi._comm import SingleProcess as SingleProcess
    from fp_multi._dtypes import numpy_dtype as numpy_dtype
    from fp_multi._partial import CheckpointReader as CheckpointReader
    from fp_multi._partial import ReadRequest as ReadRequest
    from fp_multi._pending import OverlapReport as OverlapReport
    from fp_multi._pending import PendingSave as PendingSave
    from fp_multi._registry import register_extension_type as register_extension_type
    from fp_multi._registry import register_tensor_type as register_tensor_type
    from fp_multi._safetensors import load_safetensors as load_safetensors
    from fp_multi._safetensors import read_safetensors_header as read_safetensors_header
    from fp_multi._safetensors import save_safetensors as save_safetensors
    from fp_multi._state_part import StatePart as StatePart
    from fp_multi._state_part import combine_parts as combine_parts
    from fp_multi._types import Box as Box
    from fp_multi._types import ExtensionType as ExtensionType
    from fp_multi._types import HostTensor as HostTensor
    from fp_multi._types import LeafSource as LeafSource
    from fp_multi._types import SaveReport as SaveReport
    from fp_multi._types import Sharded as Sharded
    from fp_multi._types import ShardOf as ShardOf
    from fp_multi._types import TensorBuilder as TensorBuilder
    from fp_multi._types import TensorType as TensorType
    from fp_multi._types import VerifyReport as VerifyReport
    from fp_multi._verify import verify as verify
    from fp_multi.checkpoint import load as load
    from fp_multi.checkpoint import read_checkpoint as read_checkpoint
    from fp_multi.checkpoint import read_manifest as read_manifest
    from fp_multi.checkpoint import save as save
    from fp_multi.checkpointer import Checkpointer as Checkpointer
    from fp_multi.config import LoadConfig as LoadConfig
    from fp_multi.config import SaveConfig as SaveConfig
    from fp_multi.config import per_node as per_node

__version__ = VERSION

# Where each public name lives; the imports above say the same to type checkers.
_HOMES = {
    "_advice": ("Advice",),
    "_ceiling": (
        "CeilingResult",
        "capabilities",
        "measure_ceiling",
    ),
    "_comm": (
        "Comm",
        "SingleProcess",
    ),
    "_dtypes": ("numpy_dtype",),
    "_partial": (
        "CheckpointReader",
        "ReadRequest",
    ),
    "_pending": (
        "OverlapReport",
        "PendingSave",
    ),
    "_registry": (
        "register_extension_type",
        "register_tensor_type",
    ),
    "_safetensors": (
        "load_safetensors",
        "read_safetensors_header",
        "save_safetensors",
    ),
    "_state_part": (
        "StatePart",
        "combine_parts",
    ),
    "_types": (
        "Box",
        "ExtensionType",
        "HostTensor",
        "LeafSource",
        "SaveReport",
        "ShardOf",
        "Sharded",
        "TensorBuilder",
        "TensorType",
        "VerifyReport",
    ),
    "_verify": ("verify",),
    "checkpoint": (
        "load",
        "read_checkpoint",
        "read_manifest",
        "save",
    ),
    "checkpointer": ("Checkpointer",),
    "config": (
        "LoadConfig",
        "SaveConfig",
        "per_node",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "save",
    "load",
    "Checkpointer",
    "PendingSave",
    "OverlapReport",
    "Advice",
    "verify",
    "read_manifest",
    "read_checkpoint",
    "CheckpointReader",
    "ReadRequest",
    "Box",
    "Comm",
    "SingleProcess",
    "ShardOf",
    "Sharded",
    "per_node",
    "StatePart",
    "combine_parts",
    "save_safetensors",
    "load_safetensors",
    "read_safetensors_header",
    "SaveConfig",
    "LoadConfig",
    "SaveReport",
    "VerifyReport",
    "errors",
    "FpMultiError",
    "register_tensor_type",
    "register_extension_type",
    "TensorType",
    "ExtensionType",
    "LeafSource",
    "HostTensor",
    "TensorBuilder",
    "numpy_dtype",
    "capabilities",
    "measure_ceiling",
    "CeilingResult",
    "__version__",
]


# No fork while a module is on its way: the child would wait for ever for the thread that imports it.
_importing = threading.RLock()
os.register_at_fork(before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _importing:
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
