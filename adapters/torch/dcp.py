"""Storage for ``torch.distributed.checkpoint``: the checkpoints that it saves are ordinary fp_multi checkpoints.

docs/dcp.md says what is where.

Example:
    >>> import torch.distributed.checkpoint as dcp
    >>> from fp_multi.adapters.torch import StorageReader, StorageWriter
    >>> metadata = dcp.save(state, storage_writer=StorageWriter(path))  # doctest: +SKIP
    >>> dcp.load(state, storage_reader=StorageReader(path))  # doctest: +SKIP
"""

from __future__ import annotations

from ._dcp_reader import StorageReader as StorageReader
from ._dcp_stager import AsyncStager as AsyncStager
from ._dcp_writer import StorageWriter as StorageWriter

__all__ = ["StorageWriter", "StorageReader", "AsyncStager"]
