"""StorageReader: what ``torch.distributed.checkpoint`` calls, in its order, to load."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path
from typing import Any, TypeAlias

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from fp_multi import CheckpointReader, read_checkpoint
from fp_multi.config import LoadConfig
from fp_multi.errors import CheckpointNotFoundError, ConfigError
from fp_multi.storage import work_name

from ._dcp_metadata import Catalog
from ._dcp_read import read_items

AnyPath: TypeAlias = str | os.PathLike[str]


class StorageReader(storage.StorageReader):
    """Reads checkpoints for ``dcp.load``: those of :class:`StorageWriter`, and every other fp_multi checkpoint.

    Each rank reads only the bytes that it needs, whatever number of ranks and sharding they were saved with, straight
    into the tensors where dtype and strides allow it. Every chunk that is read is compared with its checksum. Nothing
    is unpickled.

    What :func:`fp_multi.save` or Orbax saved has the names that DCP would have given it: keys joined by dots.

    Args:
        path: the checkpoint directory; ``checkpoint_id`` of a load comes before it.
        config: how to read.
        allow_pickle: unpickle values that were saved with ``allow_pickle=True``. Only for checkpoints you trust.

    Example:
        >>> dcp.load(state, checkpoint_id="run/step_100", storage_reader=StorageReader())  # doctest: +SKIP
    """

    def __init__(
        self, path: AnyPath | None = None, config: LoadConfig = LoadConfig(), *, allow_pickle: bool = False
    ) -> None:
        super().__init__()
        self.path = path
        self.config = config
        self.allow_pickle = allow_pickle
        self._opened: tuple[CheckpointReader, Catalog] | None = None
        self._load_id = str(uuid.uuid4())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Whether it is a path of the local file system."""
        return is_local(checkpoint_id)

    @property
    def checkpoint_id(self) -> AnyPath | None:
        """The path, for DCP's log."""
        return self.path

    def reset(self, checkpoint_id: AnyPath | None = None) -> None:
        """A new load begins."""
        if checkpoint_id is not None:
            self.path = checkpoint_id
        self._opened = None
        self._load_id = str(uuid.uuid4())

    # Not "kwargs": a reader that takes those is asked again for a checkpoint of the rank's own.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """What the checkpoint holds, as DCP describes it.

        Raises:
            CheckpointNotFoundError: there is no complete checkpoint; the message says what there is.
            ManifestError: the manifest is damaged, or of a newer version.
        """
        self._opened = self._open()
        metadata = self._opened[1].metadata()
        metadata.storage_meta = StorageMeta(checkpoint_id=self.path, load_id=self._load_id)
        return metadata

    def _open(self) -> tuple[CheckpointReader, Catalog]:
        if self.path is None:
            raise ConfigError("no path: pass checkpoint_id to dcp.load, or path to StorageReader")
        try:
            reader = read_checkpoint(self.path, lambda reader: reader, config=self.config)
        except CheckpointNotFoundError as error:
            path = os.path.abspath(self.path)
            raise CheckpointNotFoundError(errno.ENOENT, _why_not(path), path) from error
        return reader, Catalog(reader.manifest, reader.directory)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See ``torch.distributed.checkpoint.StorageReader``."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Every rank reads what it needs."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nobody needs to know what others read."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for.

        Raises:
            CorruptCheckpointError: a shard is missing, cut, or its bytes changed; the message names the tensor. Some
                tensors of the state may have been filled then.
            PickleRefusedError: a value is a pickle, and ``allow_pickle`` was not given.
            StorageError: the operating system refused an operation.
        """
        reader, catalog = self._opened or self._open()
        read_items(plan.items, planner, reader, catalog, allow_pickle=self.allow_pickle)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def is_local(checkpoint_id: AnyPath) -> bool:
    """Whether a path is one of the local file system that is there or can be made."""
    text = os.fspath(checkpoint_id)
    if "://" in text:
        return False
    return any(os.access(parent, os.W_OK) for parent in [Path(text), *Path(text).absolute().parents] if parent.exists())


def _why_not(path: str) -> str:
    """Why there is no checkpoint."""
    if os.path.exists(os.path.join(path, ".metadata")):
        return "this is a checkpoint of DCP's FileSystemWriter: read it with FileSystemReader, or convert it"
    if os.path.lexists(path):
        return "no checkpoint here: expected a directory with manifest.json, which is written last"
    hidden = os.path.basename(work_name(path, "tmp", "-")).removesuffix("-")
    parent = os.path.dirname(path)
    if os.path.isdir(parent) and any(name.startswith(hidden) for name in os.listdir(parent)):
        return "a save to this path is under way or was interrupted: nothing of it is complete"
    return "no checkpoint here: found nothing"
