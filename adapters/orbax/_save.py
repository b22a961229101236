"""One save: described and pinned while the caller waits, written and agreed on afterwards."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from fp_multi import StatePart, combine_parts
from fp_multi.config import SaveConfig
from fp_multi.errors import CommError, ConfigError
from fp_multi.storage import collector_paused

from ._plain import Plain
from ._processes import Agreement, Processes
from ._shardings import shardings_metadata
from ._spread import saving_together

CUSTOM_KEY = "orbax.custom_metadata"
"""In a checkpoint's metadata: the JSON that the caller attached."""
ORBAX_METADATA = "_METADATA"
"""The file by which Orbax's newer interface knows an item of arrays."""

_PART = ".part-"


class _PartFile(msgspec.Struct, frozen=True):
    """What one process leaves for the primary host."""

    size: int
    """How many processes there are."""
    part: bytes
    metadata: dict[str, str]
    """Only of rank 0."""


class Save:
    """One item on its way. Making it is the short part.

    Args:
        item: the pytree.
        processes: who saves together.
        tag: what is saved, the same on all processes.
        save_args: a tree like the item of ``ocp.SaveArgs`` or None.
        custom_metadata: whatever JSON holds.
        copy: copy what the caller can change afterwards.

    Raises:
        UnsupportedLeafError: a leaf cannot be stored.
        ConfigError: the metadata is not JSON, or there is nothing to save.
    """

    def __init__(
        self,
        item: Any,
        processes: Processes,
        *,
        tag: str,
        save_args: Any = None,
        custom_metadata: Any = None,
        copy: bool,
    ) -> None:
        self._rank, self._size = processes.rank, len(processes.ids)
        self.agreement: Agreement = processes.agreement(tag)
        self._canceled = False
        self._part: StatePart | None = None
        try:
            if item is None or (isinstance(item, (dict, list, tuple)) and not item):
                raise ConfigError(f"there is nothing to save: the item is {item!r}")
            with collector_paused():
                plain = Plain(item if save_args is None else _cast(item, save_args), copy=copy)
            self._metadata = {
                **plain.types.to_metadata(),
                **shardings_metadata(plain.arrays),
                **_custom(custom_metadata),
            }
            with saving_together(processes.ids):
                self._part = StatePart(plain.state, rank=self._rank, size=self._size)
        except BaseException as error:
            self.give_up(error)
            raise

    @property
    def written_nbytes(self) -> int:
        """Bytes that this process writes; 0 when that is done."""
        return 0 if self._part is None else self._part.written_nbytes

    def write(self, directory: str | os.PathLike[str], config: SaveConfig) -> None:
        """Write this process's part and leave its receipt in the directory; all processes are done on return.

        Raises:
            StorageError: the operating system refused an operation.
            CommError: another process failed, or does not answer.
        """
        try:
            self._leave(directory, self._written(directory, config))
            self.agreement.arrive()
            self.agreement.conclude()
        except BaseException as error:
            self.give_up(error)
            raise
        self.agreement.close()

    def write_all(self, directory: str | os.PathLike[str], config: SaveConfig) -> None:
        """Write this process's part; on return the directory is a checkpoint.

        Raises:
            StorageError: the operating system refused an operation.
            CommError: another process failed, or does not answer.
        """
        try:
            receipts = self.agreement.arrive(self._written(directory, config))
            if self.agreement.is_leader:
                _combine(directory, receipts, self._metadata, config)
            self.agreement.conclude()
        except BaseException as error:
            self.give_up(error)
            raise
        self.agreement.close()

    def cancel(self) -> None:
        """Nobody waits for this any more: tell the others, as soon as the part is written."""
        self._canceled = True

    def _written(self, directory: str | os.PathLike[str], config: SaveConfig) -> bytes:
        part, self._part = self._part, None
        if part is None:
            raise ConfigError("this save has been written already")
        receipt = part.write(directory, config)
        if self._canceled:
            raise CommError("the save was canceled")
        return receipt

    def _leave(self, directory: str | os.PathLike[str], receipt: bytes) -> None:
        mine = _PartFile(self._size, receipt, {} if self._rank else self._metadata)
        with open(os.path.join(directory, f"{_PART}{self._rank:05d}"), "wb") as file:
            file.write(msgspec.msgpack.encode(mine))

    def give_up(self, error: BaseException) -> None:
        """Let go of the state, and tell the other processes why."""
        self._part = None
        traceback.clear_frames(error.__traceback__)  # whoever keeps the error would keep the state
        self.agreement.fail(error)
        self.agreement.close()


def finalize(directory: str | os.PathLike[str], config: SaveConfig) -> None:
    """Make a directory in which all processes have left their parts a checkpoint, flushed to the drive.

    Raises:
        CommError: parts are missing, or do not belong together.
        StorageError: the operating system refused an operation.
    """
    names = sorted([name for name in os.listdir(directory) if name.startswith(_PART)])
    files = []
    for name in names:
        with open(os.path.join(directory, name), "rb") as file:
            files.append(_decoded(file.read(), name))
    if not files or len(files) != files[0].size:
        raise CommError(
            f"{os.fspath(directory)}: expected parts of {files[0].size if files else 'all'} processes, found "
            f"{len(files)}; the directory must be on a file system that all processes share"
        )
    for name in names:
        os.remove(os.path.join(directory, name))
    _combine(directory, [file.part for file in files], files[0].metadata, config)


def _decoded(data: bytes, name: str) -> _PartFile:
    try:
        return msgspec.msgpack.decode(data, type=_PartFile)
    except msgspec.MsgspecError as error:
        raise CommError(f"{name} is not the receipt of a part: {error}; do all processes run one version?") from error


def _combine(
    directory: str | os.PathLike[str], receipts: Sequence[bytes], metadata: Mapping[str, str], config: SaveConfig
) -> None:
    path = os.path.join(directory, ORBAX_METADATA)
    with open(path, "wb") as file:
        file.write(b"{}")
        if config.durable:
            file.flush()
            os.fsync(file.fileno())
    # Last: with the manifest the directory is a checkpoint. This flushes the directory, too.
    combine_parts(directory, receipts, metadata=metadata, config=config)


def _custom(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    try:
        return {CUSTOM_KEY: json.dumps(value)}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"custom_metadata must be what JSON holds: {error}") from error


def _cast(item: Any, save_args: Any) -> Any:
    """The item with the dtypes that its save args name."""

    def one(leaf: Any, args: Any) -> Any:
        dtype = getattr(args, "dtype", None)
        if dtype is None:
            return leaf
        if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
            return np.asarray(leaf).astype(dtype).item()
        return leaf.astype(dtype) if hasattr(leaf, "astype") else leaf

    return jax.tree.map(one, item, save_args)
