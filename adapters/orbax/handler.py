"""FastPersistHandler: Orbax's CheckpointManager, at the drive's own speed."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from fp_multi import CheckpointReader, read_checkpoint
from fp_multi.config import LoadConfig, SaveConfig
from fp_multi.errors import ConfigError
from fp_multi.storage import collector_paused

from . import _metadata
from ._processes import Processes
from ._restore import Options, Restore
from ._save import Save, finalize

_BLOCKING_EVENT = "/jax/orbax/write/blocking_d2h_duration_secs"
_RATE_EVENT = "/jax/orbax/write/gbytes_per_sec"


class FastPersistHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """A checkpoint handler for pytrees, in the place of ``ocp.StandardCheckpointHandler``.

    Each process writes the boxes of the arrays that its devices hold, replicas divided evenly, straight from their
    memory with aligned, direct, asynchronous requests. A save only describes the state and keeps its memory; on CPU
    backends nothing is copied but NumPy arrays. What it leaves in the item directory is an ordinary fp_multi
    checkpoint, flushed to the drive before Orbax renames it.

    Args:
        config: how to write.
        load_config: how to read.
        multiprocessing_options: as for Orbax's own handlers.
        timeout_s: how long one process waits for another, in seconds.

    Raises:
        ConfigError: the options contradict each other.

    Example:
        >>> import orbax.checkpoint as ocp
        >>> from fp_multi.adapters.orbax import FastPersistRestore, FastPersistSave
        >>> with ocp.CheckpointManager(directory) as manager:  # doctest: +SKIP
        ...     manager.save(step, args=FastPersistSave(state))
        ...     manager.wait_until_finished()
        ...     state = manager.restore(step, args=FastPersistRestore(abstract_state))
    """

    def __init__(
        self,
        *,
        config: SaveConfig = SaveConfig(),
        load_config: LoadConfig = LoadConfig(),
        multiprocessing_options: ocp.options.MultiprocessingOptions = ocp.options.MultiprocessingOptions(),  # noqa: B008
        timeout_s: float = 600.0,
    ) -> None:
        self._config = config
        self._load_config = load_config
        self._processes = Processes(multiprocessing_options, timeout_s)

    async def async_save(
        self, directory: epath.Path, item: Any = None, save_args: Any = None, args: Any = None
    ) -> list[ocp.future.Future]:
        """Describe an item and keep its memory; then write it in a thread.

        Args:
            directory: where; it may appear later.
            item: the pytree, if there are no ``args``.
            save_args: see :class:`FastPersistSave`.
            args: a :class:`FastPersistSave`.

        Returns:
            One future: this process's part is on the drive, and so are those of all others.

        Raises:
            UnsupportedLeafError: a leaf cannot be stored.
            ConfigError: there is nothing to save, or the metadata is not JSON.
        """
        begin_s = time.perf_counter()
        save = self._begin(directory, item, save_args, args, copy=True)
        jax.monitoring.record_event_duration_secs(_BLOCKING_EVENT, time.perf_counter() - begin_s)

        async def write() -> None:
            try:
                await asyncio.to_thread(self._write, save, directory)
            except asyncio.CancelledError:
                save.cancel()
                raise

        return [ocp.future.CommitFutureAwaitingContractedSignals(write(), name="fp_multi_save")]

    def save(self, directory: epath.Path, item: Any = None, save_args: Any = None, args: Any = None) -> None:
        """Write this process's part of an item; see :meth:`async_save`.

        Raises:
            UnsupportedLeafError: a leaf cannot be stored.
            StorageError: the operating system refused an operation.
            CommError: another process failed, or does not answer.
        """
        # Nobody can change an array before this returns.
        self._write(self._begin(directory, item, save_args, args, copy=False), directory)

    def _begin(self, directory: epath.Path, item: Any, save_args: Any, args: Any, *, copy: bool) -> Save:
        if isinstance(item, ocp.args.CheckpointArgs):
            raise ConfigError(f"pass {type(item).__name__} as args=")
        if args is not None:
            item, save_args = args.item, args.save_args
        return Save(
            item,
            self._processes,
            tag=f"save {os.path.basename(os.fspath(directory))}",
            save_args=save_args,
            custom_metadata=getattr(args, "custom_metadata", None),
            copy=copy,
        )

    def _write(self, save: Save, directory: epath.Path) -> None:
        begin_s, nbytes = time.perf_counter(), save.written_nbytes
        save.write(directory, self._config)
        elapsed_s = time.perf_counter() - begin_s
        jax.monitoring.record_scalar(_RATE_EVENT, nbytes / 1e9 / elapsed_s if elapsed_s > 0 else 0.0)

    def finalize(self, directory: epath.Path) -> None:
        """Make the directory a checkpoint, flushed to the drive. On the primary host, when all have written.

        Args:
            directory: Orbax's temporary directory.

        Raises:
            CommError: the parts do not belong together, or some are missing.
            StorageError: the operating system refused an operation.
        """
        finalize(directory, self._config)

    def restore(self, directory: epath.Path, item: Any = None, restore_args: Any = None, args: Any = None) -> Any:
        """Restore an item; each process reads the boxes that its devices need, once.

        Args:
            directory: the item's.
            item: what is wanted, if there are no ``args``.
            restore_args: see :class:`FastPersistRestore`.
            args: a :class:`FastPersistRestore`.

        Returns:
            The pytree, in the structure of the item, or as it was saved.

        Raises:
            CheckpointNotFoundError: there is none.
            CorruptCheckpointError: stored bytes are not what was written.
            TargetMismatchError: item and checkpoint do not fit.
            CommError: another process failed, or does not answer.
        """
        if isinstance(item, ocp.args.CheckpointArgs):
            raise ConfigError(f"pass {type(item).__name__} as args=")
        options = Options(restore_args=restore_args)
        if args is not None:
            item = args.item
            options = Options(
                args.restore_args,
                args.strict,
                args.partial_restore,
                args.support_layout,
                args.fallback_sharding,
                args.transforms,
                args.transforms_default_to_original,
            )
        return self.load(directory, item, options)

    def load(self, directory: str | os.PathLike[str], item: Any, options: Options) -> Any:
        """Restore, and agree that all processes have."""

        def act(reader: CheckpointReader) -> Any:
            # Thousands of small objects, all of which stay.
            with collector_paused():
                restore = Restore(reader, options)
                return restore.as_saved() if item is None else restore.like(item)

        agreement = self._processes.agreement(f"restore {os.path.basename(os.fspath(directory))}")
        try:
            found = read_checkpoint(directory, act, config=self._load_config)
            agreement.arrive()
            agreement.conclude()
        except BaseException as error:
            agreement.fail(error)
            raise
        finally:
            agreement.close()
        return found

    def metadata(self, directory: epath.Path) -> Any:
        """What an item holds, without reading any array.

        Args:
            directory: the item's.

        Returns:
            Orbax's own ``TreeMetadata``; its leaves have shape, dtype and sharding.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
        """
        return read_checkpoint(directory, _metadata.tree_metadata, config=self._load_config)

    def close(self) -> None:
        """Nothing to close: the engine belongs to the process."""

    @classmethod
    def typestr(cls) -> str:
        """The name under which Orbax remembers who wrote an item; it stays the same wherever the class moves."""
        return "fp_multi.adapters.orbax.FastPersistHandler"
