"""Every error that fp_multi raises.

All derive from :class:`FpMultiError` and from the built-in type that fits, so that ``except OSError`` and
``except fp_multi.errors.FpMultiError`` both work. Messages say what happened, where (leaf path, file, offset), what was
expected and what was found, and the way out.
"""

from __future__ import annotations

import errno as _errno
import os
from collections.abc import Sequence


class FpMultiError(Exception):
    """Base of the family."""


class ConfigError(FpMultiError, ValueError):
    """A setting is out of range or two settings contradict each other; the message names them."""


class CapabilityError(FpMultiError, RuntimeError):
    """A capability that the configuration switched ``"on"`` is not available here."""


class UnsupportedLeafError(FpMultiError, TypeError):
    """The state holds a value that the format cannot represent; nothing has been written.

    Attributes:
        path: where the value stands in the state, for example ``model.layers[3].hook``.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class PickleRefusedError(FpMultiError, ValueError):
    """The checkpoint holds a pickled object and the caller did not pass ``allow_pickle=True``."""


class CheckpointExistsError(FpMultiError, FileExistsError):
    """The target exists and ``overwrite=True`` was not given (or the target is not a checkpoint)."""


class CheckpointNotFoundError(FpMultiError, FileNotFoundError):
    """There is no checkpoint at the path."""


class StorageError(FpMultiError, OSError):
    """The operating system refused an operation.

    Attributes:
        errno, strerror, filename: as in OSError.
        op: the operation, for example ``write`` or ``fdatasync``.
        offset, nbytes: position and length of the request in the file, or None.
    """

    def __init__(
        self,
        errno: int,
        op: str,
        filename: str,
        offset: int | None = None,
        nbytes: int | None = None,
        hint: str = "",
    ) -> None:
        where = "" if offset is None else f" (offset {offset}, {nbytes} bytes)"
        tail = f"; {hint}" if hint else ""
        super().__init__(errno, f"{op}: {os.strerror(errno)}{where}{tail}", filename)
        self.op = op
        self.offset = offset
        self.nbytes = nbytes

    def __reduce__(self) -> tuple[object, ...]:
        # OSError pickles its own three arguments, which are not ours.
        return _rebuild_storage_error, (type(self), self.args, self.filename, dict(self.__dict__))


def _rebuild_storage_error(
    cls: type[StorageError], args: tuple[int, str], filename: str, attrs: dict[str, object]
) -> StorageError:
    error = cls.__new__(cls, args[0], args[1], filename)
    OSError.__init__(error, args[0], args[1], filename)
    error.__dict__.update(attrs)
    return error


class NoSpaceError(StorageError):
    """The file system has not enough room.

    Attributes:
        needed_nbytes, free_nbytes: what the save needs and what was free when it was asked.
    """

    def __init__(self, filename: str, needed_nbytes: int, free_nbytes: int) -> None:
        super().__init__(
            _errno.ENOSPC,
            "save",
            filename,
            hint=f"{needed_nbytes} bytes needed, {free_nbytes} bytes free; "
            "remove old checkpoints or choose another directory",
        )
        self.needed_nbytes = needed_nbytes
        self.free_nbytes = free_nbytes


class ManifestError(FpMultiError, ValueError):
    """The manifest is damaged, or says things that cannot be true of its shards."""


class FormatVersionError(ManifestError):
    """The checkpoint was written in a newer format than this software knows."""


class CorruptCheckpointError(FpMultiError, ValueError):
    """Stored bytes are not what was written.

    Attributes:
        faults: every fault found, each an error of this family (the error itself if there is only one).
        tensor, shard, chunk: the tensor's path, the shard's file name and the number of the checksum chunk in
            the piece, where they apply.
    """

    def __init__(
        self,
        message: str,
        *,
        tensor: str | None = None,
        shard: str | None = None,
        chunk: int | None = None,
        faults: Sequence[CorruptCheckpointError] = (),
    ) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.shard = shard
        self.chunk = chunk
        self.faults: tuple[CorruptCheckpointError, ...] = tuple(faults) or (self,)


class ChecksumError(CorruptCheckpointError):
    """A chunk's CRC differs: the bytes changed since they were written."""


class TruncatedShardError(CorruptCheckpointError):
    """A shard file has another length than the manifest says."""


class MissingShardError(CorruptCheckpointError, FileNotFoundError):
    """A shard file that the manifest lists is not there."""


class KeyNotFoundError(FpMultiError, KeyError):
    """``only=`` names a path that the checkpoint does not have."""

    def __str__(self) -> str:  # KeyError shows the repr of its argument
        return str(self.args[0])


class TargetMismatchError(FpMultiError, ValueError):
    """``target=`` and the checkpoint differ in structure, shape or dtype; the message names the leaf."""


class EngineClosedError(FpMultiError, RuntimeError):
    """The engine was closed, or belongs to another process (a fork)."""


class CommError(FpMultiError, RuntimeError):
    """The processes of the job cannot reach each other, or are not doing the same thing."""


class RankFailedError(CommError):
    """Another process of the job failed, and so did what all were doing together; nothing was committed.

    Attributes:
        rank: which one.
        kind: the class of the error there, by name, for example ``NoSpaceError``.
        text: what the error said.
    """

    def __init__(self, rank: int, kind: str, text: str) -> None:
        super().__init__(rank, kind, text)
        self.rank = rank
        self.kind = kind
        self.text = text

    def __str__(self) -> str:
        return f"rank {self.rank} failed, so nothing was committed; there: {self.kind}: {self.text}"


class CommTimeoutError(CommError, TimeoutError):
    """A process of the job did not answer in time; it may be dead, or just slow.

    Attributes:
        ranks: the ranks that were waited for in vain, as far as they are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
