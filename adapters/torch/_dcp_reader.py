"""StorageReader: what ``torch.distributed.checkpoint`` calls, in its order, to load."""

from __future__ import annotations

import dataclasses
import errno
import os
import secrets
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from fp_multi import CheckpointReader, read_checkpoint
from fp_multi.config import LoadConfig
from fp_multi.errors import CheckpointNotFoundError, ConfigError
from fp_multi.storage import work_name

from ._dcp_alone import check_covered, is_rank_directory, rank_directory, ranks_in
from ._dcp_metadata import Catalog
from ._dcp_peers import Listener, host_key
from ._dcp_read import read_items
from ._dcp_share import Orders, Wishes, give_orders, keys_of
from ._dcp_shared_read import read_together
from ._dcp_targets import Wanted

AnyPath: TypeAlias = str | os.PathLike[str]


class StorageReader(storage.StorageReader):
    """Reads checkpoints for ``dcp.load``: those of :class:`StorageWriter`, and every other fp_multi checkpoint.

    Each rank reads only the bytes that it needs, whatever number of ranks and sharding they were saved with, straight
    into the tensors where dtype and strides allow it. What several ranks of a host need is read by one of them and
    copied by the others. Every chunk that is read is compared with its checksum. Nothing is unpickled.

    What :func:`fp_multi.save` or Orbax saved has the names that DCP would have given it: keys joined by dots.

    Args:
        path: the checkpoint directory; ``checkpoint_id`` of a load comes before it.
        config: how to read.
        _extension_registry: ignored, as the writer applies no extensions.
        allow_pickle: unpickle values that were saved with ``allow_pickle=True``. Only for checkpoints you trust.
        share: let ranks of one host read for each other; False lets each read all that it needs.

    Example:
        >>> dcp.load(state, checkpoint_id="run/step_100", storage_reader=StorageReader())  # doctest: +SKIP
    """

    def __init__(
        self,
        path: AnyPath | None = None,
        config: LoadConfig = LoadConfig(),
        *,
        _extension_registry: object = None,
        allow_pickle: bool = False,
        share: bool = True,
    ) -> None:
        super().__init__()
        self.path = path
        self.config = config
        self.allow_pickle = allow_pickle
        self.share = share
        self._listener: Listener | None = None
        self._opened: tuple[CheckpointReader, Catalog] | None = None
        self._is_own = False
        """What is open is the checkpoint that this rank saved for itself."""
        self.load_id = str(uuid.uuid4())
        """DCP's name for the load."""

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
        self.load_id = str(uuid.uuid4())
        self._stop_listening()

    # "kwargs", by that name: then DCP asks again, with the rank, where there is no checkpoint of all ranks.
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds, as DCP describes it.

        Args:
            *args: none.
            **kwargs: ``rank`` for the checkpoint that this rank saved for itself (``use_collectives=False``).

        Raises:
            CheckpointNotFoundError: there is no complete checkpoint; the message says what there is.
            ManifestError: the manifest is damaged, or of a newer version.
        """
        rank = kwargs.get("rank")
        self._is_own = rank is not None
        self._opened = self._open(None if rank is None else int(rank))
        metadata = self._opened[1].metadata()
        known = metadata.storage_meta or StorageMeta()
        metadata.storage_meta = dataclasses.replace(known, checkpoint_id=self.path, load_id=self.load_id)
        return metadata

    def _open(self, rank: int | None = None) -> tuple[CheckpointReader, Catalog]:
        if self.path is None:
            raise ConfigError("no path: pass checkpoint_id to dcp.load, or path to StorageReader")
        place = self.path if rank is None else rank_directory(self.path, rank)
        try:
            reader = read_checkpoint(place, lambda reader: reader, config=self.config)
        except CheckpointNotFoundError as error:
            path = os.path.abspath(place)
            raise CheckpointNotFoundError(errno.ENOENT, _why_not(path), path) from error
        return reader, Catalog(reader.manifest, reader.directory)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See ``torch.distributed.checkpoint.StorageReader``."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Let the coordinator know what this rank needs, and where the other ranks of the host reach it."""
        if not self.share or plan.storage_data is not None or not dist.is_available() or not dist.is_initialized():
            return plan
        if self._is_own or self._checkpoint()[1].parts:
            return plan  # every rank reads what it saved for itself
        host = host_key() if dist.get_world_size() > 1 else None
        if host is None:
            return plan
        try:
            listener = self._listener = Listener()
        except OSError:
            return plan
        keys = keys_of(plan.items, self._checkpoint()[1])
        return dataclasses.replace(plan, storage_data=Wishes(host, listener.address, keys))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Let one rank read what several of one host need."""
        if not any(isinstance(plan.storage_data, Wishes) for plan in plans):
            return plans
        return give_orders(plans, self._checkpoint()[1], secrets.token_bytes(16))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for.

        Raises:
            CorruptCheckpointError: a shard is missing, cut, or its bytes changed; the message names the tensor. Some
                tensors of the state may have been filled then.
            PickleRefusedError: a value is a pickle, and ``allow_pickle`` was not given.
            StorageError: the operating system refused an operation.
        """
        reader, catalog = self._checkpoint()
        check_covered(plan.items, planner, catalog)
        orders, listener = plan.storage_data, self._listener
        together: Callable[[list[Wanted]], list[Wanted]] = list
        if isinstance(orders, Orders) and listener is not None:
            together = partial(read_together, planner=planner, reader=reader, orders=orders, listener=listener)
        else:
            self._stop_listening()
        try:
            read_items(plan.items, planner, reader, catalog, allow_pickle=self.allow_pickle, read_together=together)
        finally:
            self._stop_listening()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _checkpoint(self) -> tuple[CheckpointReader, Catalog]:
        return self._opened or self._open()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None


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
    own = ranks_in(path)
    if own:
        return (
            f"every rank saved for itself here (use_collectives=False), {own[0]} to {own[-1]} ({len(own)}): dcp.load "
            "gives each its own back; to read another one's, give its directory as the path"
        )
    own = ranks_in(os.path.dirname(path)) if is_rank_directory(path) else []
    if own:
        return f"this rank has saved nothing here for itself; there is {own[0]} to {own[-1]} ({len(own)})"
    if os.path.lexists(path):
        return "no checkpoint here: expected a directory with manifest.json, which is written last"
    hidden = os.path.basename(work_name(path, "tmp", "-")).removesuffix("-")
    parent = os.path.dirname(path)
    if os.path.isdir(parent) and any(name.startswith(hidden) for name in os.listdir(parent)):
        return "a save to this path is under way or was interrupted: nothing of it is complete"
    return "no checkpoint here: found nothing"
