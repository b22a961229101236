"""StorageWriter: what ``torch.distributed.checkpoint`` calls, in its order, to save."""

from __future__ import annotations

import dataclasses
import errno
import os
import secrets
import threading
import uuid
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fp_multi import SaveConfig
from fp_multi.errors import ConfigError, FpMultiError, StorageError
from fp_multi.storage import crc32c, encode_manifest, require_space, resolve

from ._dcp_alone import check_shared_place, rank_directory
from ._dcp_commit import CoordinatorCommit, RankCommit, check_target, coordinate, take_part
from ._dcp_copies import copied
from ._dcp_loan import loan_here
from ._dcp_manifest import build_manifest
from ._dcp_note import DCP_VERSION, NOTE
from ._dcp_plan import Orders, cached_orders, give_orders, note_holdings, order_all, orders_of
from ._dcp_reader import AnyPath, is_local
from ._dcp_report import decode_report
from ._dcp_write import RankWrite

_REPORT = "fp_multi"


@dataclasses.dataclass(slots=True)
class _Save:
    """One save in one thread."""

    path: AnyPath | None
    """Where it goes."""
    checkpoint_id: AnyPath | None
    """What DCP calls that; not the same for a rank that saves alone."""
    save_id: str
    """DCP's name for it."""
    thread: threading.Thread
    rank: int = 0
    is_set_up: bool = False
    is_coordinator: bool = False
    is_alone: bool = False
    """The rank saves for itself; it is its own coordinator."""
    commits: dict[str, CoordinatorCommit] = dataclasses.field(default_factory=dict)
    """The coordinator's, by token; several until it knows which cached plan is carried out."""

    def drop(self, but: str = "") -> None:
        """Remove what is left of it, if it was not completed."""
        for token in [token for token in self.commits if token != but]:
            self.commits.pop(token).__exit__()


class StorageWriter(storage.StorageWriter):
    """Writes what ``dcp.save`` and ``dcp.async_save`` save.

    Tensors that several ranks have are divided among them, byte by byte. The checkpoint appears at its path when it is
    complete on the drive, all at once; until then the path shows what it showed before. An error on any rank fails the
    save on all of them, and the rank that failed removes what was written. (If it was killed, the coordinator's writer
    does at its next save or when it is dropped, or else the next save in that directory.)

    Values that are no tensors are stored as plain values (numbers, strings, lists, dicts, tuples, arrays ...), never
    as pickles, unless ``allow_pickle`` is given. A plain tensor counts as equal on all ranks that have it.

    Args:
        path: the checkpoint directory; ``checkpoint_id`` of a save comes before it.
        single_file_per_rank: taken for the sake of calls written for ``FileSystemWriter``, and ignored.
        sync_files: False is ``SaveConfig(durable=False)``.
        thread_count: ignored: the engine needs no threads to be counted.
        per_thread_copy_ahead: ignored.
        cache_staged_state_dict: ignored; see :class:`AsyncStager`.
        overwrite: replace a checkpoint that is there. Other files in the directory stay in it; other directories in it
            are refused.
        _extensions: not applied: what is stored is the tensors' bytes as they are, and a warning says so.
        serialization_format: ignored.
        config: how to write. ``writers`` may be ``"auto"`` or ``"all"`` (whoever has a replicated tensor writes a part
            of it), or a tuple of ranks.
        allow_pickle: pickle values (not tensors) that the format has no form for, instead of refusing them.
        metadata: strings to keep with the checkpoint.

    Raises:
        ConfigError: a writer policy that needs to know the ranks' hosts.

    Example:
        >>> writer = StorageWriter(overwrite=False)  # doctest: +SKIP
        >>> metadata = dcp.save(state, checkpoint_id="run/step_100", storage_writer=writer)  # doctest: +SKIP
    """

    def __init__(
        self,
        path: AnyPath | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: object = None,
        *,
        config: SaveConfig = SaveConfig(),
        allow_pickle: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        if config.writers not in ("auto", "all") and not isinstance(config.writers, tuple):
            raise ConfigError(
                f"writers={config.writers!r}: torch.distributed.checkpoint does not tell which ranks share a host; "
                'pass "all" or a tuple of ranks'
            )
        self.path = path
        self.overwrite = overwrite
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        if _extensions:
            names = ", ".join([type(one).__name__ for one in _extensions])
            warnings.warn(
                f"_extensions are not applied: {names} will not see the bytes, which are stored as they are",
                UserWarning,
                stacklevel=2,
            )
        self.config = config if sync_files else dataclasses.replace(config, durable=False)
        self.allow_pickle = allow_pickle
        self.metadata = dict(metadata or {})
        if NOTE in self.metadata:
            raise ConfigError(f"metadata {NOTE!r} is written by the storage itself")
        self._new()

    def _new(self) -> None:
        self.save_id = str(uuid.uuid4())
        """DCP's name for the save that comes next, or began last."""
        self._saves: dict[int, _Save] = {}
        """By thread: saves of one writer may overlap."""
        weakref.finalize(self, _drop_all, self._saves)

    def __getstate__(self) -> dict[str, Any]:
        # It goes to another process for AsyncCheckpointerType.PROCESS.
        state = {name: value for name, value in vars(self).items() if name not in ("_saves", "save_id")}
        return {**state, "path": None if self.path is None else os.fspath(self.path)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._new()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Whether it is a path of the local file system that can be made."""
        return is_local(checkpoint_id)

    @property
    def checkpoint_id(self) -> AnyPath | None:
        """The path, for DCP's log."""
        return self.path

    # Asked by dcp.async_save without a stager, as DCP's own storage writer is.

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether ``dcp.async_save`` has to wait: everything has been copied by then."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state in host memory."""
        content: dict[str, Any] = copied(state_dict, set())
        return content

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Nothing is held."""

    def storage_meta(self) -> StorageMeta:
        """What DCP keeps about the storage."""
        save = self._saves.get(threading.get_ident())
        if save is None:
            return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)
        return StorageMeta(checkpoint_id=save.checkpoint_id, save_id=save.save_id)

    def reset(self, checkpoint_id: AnyPath | None = None) -> None:
        """A new save begins."""
        path = self.path if checkpoint_id is None else checkpoint_id
        save_id = str(uuid.uuid4())
        self.path, self.save_id = path, save_id
        self._begin(path, save_id)

    def _begin(self, path: AnyPath | None, save_id: str) -> _Save:
        # A save that was given up elsewhere is over when its thread does something else, or has ended.
        here = threading.current_thread()
        for number, before in list(self._saves.items()):
            if before.thread is here or not before.thread.is_alive():
                del self._saves[number]
                before.drop()
        save = self._saves[threading.get_ident()] = _Save(path, path, save_id, here)
        return save

    def _save(self) -> _Save:
        save = self._saves.get(threading.get_ident())
        return self._begin(self.path, self.save_id) if save is None else save

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See ``torch.distributed.checkpoint.StorageWriter``.

        Raises:
            ConfigError: there is no path.
        """
        save = self._save()
        if save.is_set_up:
            save = self._begin(save.checkpoint_id, save.save_id)
        save.is_set_up = True
        save.rank = int(kwargs.get("rank") or 0)
        save.is_alone = not kwargs.get("use_collectives", True)
        save.is_coordinator = is_coordinator or save.is_alone
        if save.path is None:
            raise ConfigError("no path: pass checkpoint_id to dcp.save, or path to StorageWriter")
        if save.is_alone:
            check_shared_place(save.path)
            save.path, save.rank = rank_directory(save.path, save.rank), 0

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Note what this rank has, and refuse a path that is taken.

        Raises:
            CheckpointExistsError: there is something at the path that may not be replaced.
        """
        save = self._save()
        if save.is_coordinator:
            # Here and not in the global plan: DCP's plan cache does not get over a failure there.
            check_target(resolve(_path(save)), overwrite=self.overwrite)
        return note_holdings(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Divide the work, and make the directory in which all ranks write.

        Raises:
            NoSpaceError: the file system has not the room.
            StorageError: the operating system refused an operation.
        """
        save = self._save()
        writers = self.config.writers
        if save.is_alone:
            ordered = [order_all(one, token=secrets.token_hex(8), chunk_bytes=self.config.chunk_bytes) for one in plans]
        else:
            ordered = give_orders(
                plans,
                token=secrets.token_hex(8),
                chunk_bytes=self.config.chunk_bytes,
                writers=writers if isinstance(writers, tuple) else None,
            )
        orders = ordered[0].storage_data if ordered else None
        known = [orders] if isinstance(orders, Orders) else None
        # With cached plans only write_data is told which orders are carried out.
        for each in known or cached_orders(self.config.chunk_bytes, alone=save.is_alone):
            self._coordinate(save, each)
        return ordered

    def _coordinate(self, save: _Save, orders: Orders) -> CoordinatorCommit:
        commit = save.commits.get(orders.token)
        if commit is None:
            commit = save.commits[orders.token] = coordinate(
                _path(save), self.config, overwrite=self.overwrite, nbytes=orders.nbytes, token=orders.token
            )
        return commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; it is on the drive on return.

        Raises:
            UnsupportedLeafError: something cannot be stored; its name in the state is in the message.
            NoSpaceError: the file system has not the room.
            StorageError: the operating system refused an operation.
        """
        save = self._save()
        loan = loan_here()
        try:
            report = self._write(save, plan, planner)
        except BaseException:
            save.drop()
            raise
        finally:
            if loan is not None:
                loan.end()
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(_REPORT), len(report), report)])
        return done

    def _write(self, save: _Save, plan: SavePlan, planner: SavePlanner) -> bytes:
        loan = loan_here()
        orders = orders_of(plan, self.config.chunk_bytes, alone=save.is_alone)
        paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else None
        commit: CoordinatorCommit | RankCommit
        if save.is_coordinator:
            commit = self._coordinate(save, orders)
            save.drop(but=orders.token)
        else:
            commit = take_part(_path(save), self.config, token=orders.token)
        try:
            work = RankWrite(orders, planner, paths, save.rank, allow_pickle=self.allow_pickle)
            require_space(commit.path, work.nbytes)
            report = work.write(
                commit.path,
                self.config,
                spill_nbytes=0 if loan is None else min(loan.spill_nbytes, work.nbytes),
                started=_nothing if loan is None else loan.started,
            )
            if not save.is_coordinator:
                commit.published = True
        finally:
            if not save.is_coordinator:
                commit.__exit__()
        return report

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, and make the checkpoint appear: the moment at which it exists.

        Raises:
            CommError: what the ranks have written does not make a checkpoint.
            StorageError: the operating system refused an operation; the path is untouched.
        """
        save = self._save()
        if not save.commits:
            raise StorageError(errno.EINVAL, "finish", str(save.path), hint="nothing has been written in this thread")
        (commit,) = save.commits.values()
        try:
            reports = [decode_report(one.storage_data) for result in results for one in result]
            manifest = build_manifest(commit.path, metadata, reports, self.metadata, save_id=save.save_id)
            commit.write_manifest(encode_manifest(manifest, crc32c))
            commit.publish()
        finally:
            save.drop()
            self._saves.pop(threading.get_ident(), None)
        metadata.storage_meta = StorageMeta(checkpoint_id=save.checkpoint_id, save_id=save.save_id)
        metadata.version = DCP_VERSION


def _path(save: _Save) -> AnyPath:
    if save.path is None:
        raise FpMultiError("the storage writer was not set up in this thread")
    return save.path


def _drop_all(saves: dict[int, _Save]) -> None:
    while saves:
        saves.popitem()[1].drop()


def _nothing(_: object) -> None:
    """Nobody wants to know."""
