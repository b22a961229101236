"""FastPersistCheckpointable: the handler for Orbax's newer interface (``from orbax.checkpoint import v1``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, ClassVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import v1

# There is no public name for the options of the moment; handlers are meant to look at them.
from orbax.checkpoint.experimental.v1._src.context.context import get_context

from fp_multi import read_checkpoint
from fp_multi.config import LoadConfig, SaveConfig

from . import _metadata
from ._processes import Processes
from ._restore import Options
from ._save import Save
from .handler import FastPersistHandler

_LEAVES = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, str, bytes)
_ABSTRACT = (*_LEAVES, jax.ShapeDtypeStruct, type, type(...))


class FastPersistCheckpointable:
    """A ``CheckpointableHandler`` for pytrees; :func:`fastpersist_registry` puts it in its place.

    Orbax makes a new one for each operation. Process options, time limit, ``partial_load``, padding and truncation and
    the dtype that arrays are saved with come from the ``Context`` of the moment; other settings are attributes of the
    class: derive one of your own to change them.

    Attributes:
        config: how to write.
        load_config: how to read.
    """

    config: ClassVar[SaveConfig] = SaveConfig()
    load_config: ClassVar[LoadConfig] = LoadConfig()

    def __init__(self) -> None:
        context = get_context()
        self._processes_options = ocp.options.MultiprocessingOptions(
            primary_host=context.multiprocessing_options.primary_host,
            active_processes=context.multiprocessing_options.active_processes,
            barrier_sync_key_prefix=context.multiprocessing_options.barrier_sync_key_prefix,
        )
        self._timeout_s = float(context.async_options.timeout_secs or 600.0)
        self._dtype = context.array_options.saving.storage_options.dtype
        self._copy = context.memory_options.deepcopy_host_arrays
        self._options = Options(
            strict=not context.array_options.loading.enable_padding_and_truncation,
            partial_restore=context.pytree_options.loading.partial_load,
        )

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Describe a pytree and keep its memory.

        Args:
            directory: where; it may appear later.
            checkpointable: the pytree.

        Returns:
            What writes it; done, the directory is a checkpoint, flushed to the drive, on all processes.

        Raises:
            UnsupportedLeafError: a leaf cannot be stored.
        """
        save = Save(
            checkpointable,
            Processes(self._processes_options, self._timeout_s),
            tag=f"save {directory.path.name}",
            save_args=self._save_args(checkpointable),
            copy=self._copy is not False,
        )

        async def write() -> None:
            try:
                path = await directory.await_creation()
                await asyncio.to_thread(save.write_all, path, self.config)
            except asyncio.CancelledError:
                save.cancel()
                raise
            except BaseException as error:
                save.give_up(error)
                raise

        return write()

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Restore a pytree.

        Args:
            directory: the checkpointable's.
            abstract_checkpointable: what is wanted; see :class:`FastPersistRestore`.

        Returns:
            What reads it.
        """
        handler = FastPersistHandler(
            load_config=self.load_config,
            multiprocessing_options=self._processes_options,
            timeout_s=self._timeout_s,
        )
        return asyncio.to_thread(handler.load, directory, abstract_checkpointable, self._options)

    async def metadata(self, directory: Any) -> Any:
        """What a checkpoint holds, as a target for :meth:`load`.

        Args:
            directory: the checkpointable's.
        """
        return read_checkpoint(directory, _metadata.abstract_tree, config=self.load_config)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Whether this is a pytree of what can be stored."""
        return all([isinstance(leaf, _LEAVES) for leaf in jax.tree.leaves(checkpointable)])

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Whether this can say what is wanted; None leaves that to who saved."""
        leaves = jax.tree.leaves(abstract_checkpointable)
        if not leaves:
            return None
        return all([isinstance(leaf, _ABSTRACT) or hasattr(leaf, "shape") for leaf in leaves])

    def _save_args(self, checkpointable: Any) -> Any:
        if self._dtype is None:
            return None
        dtype = self._dtype
        return jax.tree.map(lambda leaf: ocp.SaveArgs(dtype=dtype) if hasattr(leaf, "astype") else None, checkpointable)


def fastpersist_registry(
    *names: str, handler: type[FastPersistCheckpointable] = FastPersistCheckpointable
) -> v1.handlers.CheckpointableHandlerRegistry:
    """All of Orbax's handlers, and FastPersistCheckpointable for some names.

    Args:
        names: of the checkpointables that it saves and loads; ``state`` if there are none, which is what ``v1.save``
            and ``training.Checkpointer.save`` call the pytree.
        handler: the class.

    Returns:
        A registry for ``Context.checkpointables.registry``. With it what :class:`FastPersistHandler` has saved is
        found, too.

    Example:
        >>> from orbax.checkpoint import v1
        >>> from fp_multi.adapters.orbax import fastpersist_registry
        >>> context = v1.Context()
        >>> context.checkpointables.registry = fastpersist_registry()
        >>> with context:  # doctest: +SKIP
        ...     v1.save(path, state)
        ...     state = v1.load(path, abstract_state)
    """
    chosen = names or ("state",)
    registry = v1.handlers.local_registry(include_global_registry=False)
    everyone = v1.handlers.global_registry()
    for known, name in everyone.get_all_entries():
        # A name has one handler, and who has the name comes first.
        if name not in chosen:
            others = everyone.get_secondary_typestrs(known) or None
            registry.add(known, checkpointable_name=name, secondary_typestrs=others)
    typestrs = [FastPersistHandler.typestr()]
    for name in chosen:
        registry.add(handler, checkpointable_name=name, secondary_typestrs=typestrs)
    return registry
