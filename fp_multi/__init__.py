"""Checkpoints at the drive's own speed, durable and checked, for every framework.

``save`` and ``load`` take any nesting of arrays and plain values; adapters for frameworks are in
``fp_multi.adapters``. The format is docs/format.md: every shard is a valid safetensors file.
"""

from __future__ import annotations

from fp_multi import errors as errors
from fp_multi._ceiling import CeilingResult as CeilingResult
from fp_multi._ceiling import capabilities as capabilities
from fp_multi._ceiling import measure_ceiling as measure_ceiling
from fp_multi._dtypes import numpy_dtype as numpy_dtype
from fp_multi._registry import register_extension_type as register_extension_type
from fp_multi._registry import register_tensor_type as register_tensor_type
from fp_multi._safetensors import load_safetensors as load_safetensors
from fp_multi._safetensors import read_safetensors_header as read_safetensors_header
from fp_multi._safetensors import save_safetensors as save_safetensors
from fp_multi._types import ExtensionType as ExtensionType
from fp_multi._types import HostTensor as HostTensor
from fp_multi._types import LeafSource as LeafSource
from fp_multi._types import SaveReport as SaveReport
from fp_multi._types import TensorBuilder as TensorBuilder
from fp_multi._types import TensorType as TensorType
from fp_multi._types import VerifyReport as VerifyReport
from fp_multi._verify import verify as verify
from fp_multi._version import VERSION
from fp_multi.checkpoint import load as load
from fp_multi.checkpoint import read_manifest as read_manifest
from fp_multi.checkpoint import save as save
from fp_multi.config import LoadConfig as LoadConfig
from fp_multi.config import SaveConfig as SaveConfig
from fp_multi.errors import FpMultiError as FpMultiError

__version__ = VERSION

__all__ = [
    "save",
    "load",
    "verify",
    "read_manifest",
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
