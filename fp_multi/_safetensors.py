"""One plain .safetensors file, written and read by the same engine as checkpoints."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fp_multi import _assemble, _commit, _reader, _writer
from fp_multi._arguments import require
from fp_multi._dtypes import from_safetensors, plain_safetensors
from fp_multi._format import (
    HeaderEntry,
    Tensor,
    check_metadata,
    decode_header,
    decode_whole_header,
    encode_header,
    header_nbytes,
)
from fp_multi._hidden import named, translated
from fp_multi._layout import lay_out
from fp_multi._tree import describe
from fp_multi._types import SaveReport, TensorBuilder
from fp_multi.config import LoadConfig, SaveConfig
from fp_multi.errors import (
    CheckpointNotFoundError,
    FpMultiError,
    KeyNotFoundError,
    StorageError,
    UnsupportedLeafError,
)

_REPLACED_TRIES = 20


def save_safetensors(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    config: SaveConfig = SaveConfig(),
) -> SaveReport:
    """Save named tensors as one safetensors file; atomic, and on the drive when this returns.

    Args:
        tensors: names to arrays or registered tensors. Tensors that are one and the same are stored under each name.
        path: the file; an existing file is replaced atomically.
        metadata: strings for the header.
        config: how to write.

    Returns:
        What was written, how, and how long it took.

    Raises:
        UnsupportedLeafError: a value is no tensor, or its dtype is not one of safetensors'.
        NoSpaceError: the file system has not the room; nothing has been written.
        StorageError: the operating system refused an operation; the path is untouched.

    Example:
        >>> import numpy as np, fp_multi as fp
        >>> _ = fp.save_safetensors({"w": np.ones((2, 2), np.float32)}, "weights.safetensors")
        >>> fp.load_safetensors("weights.safetensors")["w"].sum()
        np.float32(4.0)
    """
    begin = time.perf_counter()
    require("config", config, SaveConfig)
    require("tensors", tensors, Mapping)
    described = describe(dict(tensors))
    names, indices = described.tree[1], described.tree[2]
    for name, index in zip(names, indices, strict=True):
        if type(name) is not str or type(index) is not int:
            raise UnsupportedLeafError(
                f"{name!r}: a safetensors file holds tensors under string names only; "
                "use save() for other values and for nesting",
                str(name),
            )
    sources = [described.sources[index] for index in indices]
    forms = []
    for name, source in zip(names, sources, strict=True):
        try:
            forms.append(plain_safetensors(source.dtype, source.shape))
        except ValueError as error:
            raise UnsupportedLeafError(f"{name}: {error}; use save(), which keeps it", name) from error
    layout = lay_out([source.nbytes for source in sources])
    entries = [
        (names[i], *forms[i], at, at + sources[i].nbytes, ()) for i, at in zip(layout.order, layout.begins, strict=True)
    ]
    header = encode_header(entries, check_metadata(metadata), sharding_info=False)
    planned = time.perf_counter()
    with _commit.FileCommit(path, config, nbytes=len(header) + layout.nbytes) as commit:
        ordered = [sources[i] for i in layout.order]
        receipt = _writer.start_write(commit.path, header, ordered, config).finish()
        written = time.perf_counter()
        commit.publish()
    end = time.perf_counter()
    return SaveReport(
        path=commit.target,
        tensors=len(sources),
        tensor_nbytes=layout.nbytes,
        file_nbytes=receipt.nbytes,
        engine=receipt.engine,
        direct=receipt.direct,
        reasons=receipt.reasons,
        plan_s=planned - begin,
        write_s=receipt.open_s + receipt.write_s,
        fsync_s=receipt.fsync_s,
        commit_s=end - written,
        elapsed_s=end - begin,
        shards=(receipt,),
    )


class _Identity(NamedTuple):
    """Differs when another file is at the path."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int


def _identity(stat: os.stat_result) -> _Identity:
    return _Identity(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _read_head(path: str) -> tuple[bytes, _Identity]:
    with translated("read", path):
        try:
            with open(path, "rb") as file:
                found = _identity(os.fstat(file.fileno()))
                prefix = file.read(8)
                return prefix + file.read(header_nbytes(prefix, found.nbytes, path) - len(prefix)), found
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(2, "no such file", path) from error


def read_safetensors_header(
    path: str | os.PathLike[str],
) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """The tensors and the metadata of any safetensors file, without reading data.

    Args:
        path: the file.

    Returns:
        Name to (dtype code, shape, begin, end), and the metadata.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: the header is damaged or impossible.

    Example:
        >>> import fp_multi as fp
        >>> fp.read_safetensors_header("weights.safetensors")[0]["w"].shape
        (2, 2)
    """
    file = named(path)
    head, found = _read_head(file)
    return decode_whole_header(head, found.nbytes, file)


def load_safetensors(
    path: str | os.PathLike[str],
    *,
    names: Iterable[str] | None = None,
    config: LoadConfig = LoadConfig(),
    tensor_builder: TensorBuilder | None = None,
) -> dict[str, Any]:
    """Load a safetensors file, or some of its tensors, whoever wrote it.

    The format has no checksums: what comes back is what is in the file.

    Args:
        path: the file.
        names: the tensors wanted; None for all.
        config: how to read.
        tensor_builder: makes a framework's tensors; without it NumPy arrays.

    Returns:
        Name to tensor, in the order of the header or of ``names``.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: the header is damaged or impossible.
        KeyNotFoundError: a name is not in the file.

    Example:
        >>> import fp_multi as fp
        >>> list(fp.load_safetensors("weights.safetensors", names=["w"]))
        ['w']
    """
    require("config", config, LoadConfig)
    file = named(path)
    wanted = None if names is None else list(dict.fromkeys([names] if isinstance(names, str) else names))
    for _ in range(_REPLACED_TRIES):
        head, found = _read_head(file)
        try:
            values = _load(file, head, found.nbytes, wanted, config, tensor_builder)
        except FpMultiError:
            if _read_head(file)[1] == found:
                raise
        else:
            # No checksum would notice the header of one file and the data of the one that replaced it.
            if _read_head(file)[1] == found:
                return values
    raise StorageError(errno.EBUSY, "read", file, hint="the file is replaced again and again")


def _load(
    file: str,
    head: bytes,
    size: int,
    names: list[str] | None,
    config: LoadConfig,
    tensor_builder: TensorBuilder | None,
) -> dict[str, Any]:
    entries = decode_header(head, size, file)
    chosen = list(entries) if names is None else names
    missing = [name for name in chosen if name not in entries]
    if missing:
        raise KeyNotFoundError(f"{file}: no tensor named {missing[0]!r}")
    buffers = _reader.allocate([entries[n].end - entries[n].begin for n in chosen])
    begins = np.array([entries[n].begin for n in chosen], np.int64) + len(head)
    sizes = np.array([buffer.nbytes for buffer in buffers], np.int64)
    segments = np.column_stack([begins, sizes, _reader.addresses(buffers)])[sizes > 0]
    _reader.read_ranges(file, size, segments, np.empty((0, 2), np.int64), config, keepalive=buffers)
    kind = "numpy" if tensor_builder is None else "safetensors"
    values = {}
    for name, data in zip(chosen, buffers, strict=True):
        dtype, shape = from_safetensors(entries[name].code, entries[name].shape)
        tensor = Tensor(name, dtype, list(shape), [], kind)
        values[name] = _assemble.value(tensor, data, tensor_builder)
    return values
