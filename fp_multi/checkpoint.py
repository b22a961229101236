"""save() and load(): the whole story, top to bottom."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from fp_multi import _assemble, _broadcast, _commit, _engine, _target
from fp_multi._arguments import require
from fp_multi._comm import Comm
from fp_multi._format import MAX_MANIFEST_NBYTES, Manifest, check_metadata, decode_manifest
from fp_multi._hidden import translated
from fp_multi._partial import CheckpointReader, ReadRequest
from fp_multi._save import Saving
from fp_multi._together import together
from fp_multi._tree import decode, describe, select
from fp_multi._types import SaveReport, Selection, TensorBuilder
from fp_multi.config import LoadConfig, SaveConfig
from fp_multi.errors import CheckpointNotFoundError, ConfigError, FpMultiError, ManifestError, StorageError

_Result = TypeVar("_Result")
_ReadParts: TypeAlias = Callable[[Sequence[ReadRequest]], list[_assemble.Buffer]]

_REPLACED_TRIES = 20


def save(
    state: Any,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
    config: SaveConfig = SaveConfig(),
    allow_pickle: bool = False,
    comm: Comm | None = None,
) -> SaveReport:
    """Save a state as a checkpoint directory; it is complete and on the drive when this returns.

    Until then the path shows what it showed before, whatever happens (docs/commit.md).

    Args:
        state: any nesting of dicts, lists, tuples and named tuples with arrays, tensors of registered frameworks, and
        plain
            values. It must not change meanwhile.
        path: the directory to make.
        overwrite: replace a checkpoint that is there, atomically. Anything else that is there is never replaced.
        metadata: strings to keep with it.
        config: how to write.
        allow_pickle: pickle leaves that the format does not know; loading them needs the same permission.
        comm: the processes that save this together, each with its own part; all of them call this, with the same path.
            What several have is divided among them (``config.writers``); a dict may have other keys elsewhere, and a
            tensor may be a part of a larger one (:class:`fp_multi.ShardOf`). Other plain values than tensors are those
            of the lowest rank that has them.

    Returns:
        What was written, how, and how long it took.

    Raises:
        UnsupportedLeafError: a leaf cannot be stored; nothing has been written.
        ConfigError: the metadata is not strings, or an argument of another type; nothing has been written.
        CheckpointExistsError: the path exists.
        NoSpaceError: the file system has not the room; nothing has been written.
        StorageError: the operating system refused an operation; the path is untouched.
        CommError: another rank failed (RankFailedError) or is gone (CommTimeoutError); the path is untouched.

    Example:
        >>> import numpy as np, fp_multi as fp
        >>> report = fp.save({"w": np.arange(6.0).reshape(2, 3), "step": 7}, "ckpt/step_7", overwrite=True)
        >>> fp.load("ckpt/step_7")["step"]
        7
    """
    begin = time.perf_counter()
    with together(comm, f"save {os.fspath(path)!r}") as team:
        require("config", config, SaveConfig)
        attached = check_metadata(metadata) or {}
        described = describe(state, allow_pickle=allow_pickle)
        saving = Saving(described, path, config, overwrite=overwrite, metadata=attached, begin_s=begin, team=team)
        return saving.finish()


def open_checkpoint(path: str | os.PathLike[str]) -> tuple[str, Manifest]:
    """Find a checkpoint and read its manifest.

    Returns:
        The directory that holds it, and the checked manifest.

    Raises:
        CheckpointNotFoundError: there is none.
        ManifestError: the manifest is damaged or impossible.
        FormatVersionError: it is of a newer version.
    """
    directory = _commit.find(path)
    if directory is None:
        raise CheckpointNotFoundError(
            2,
            f"no checkpoint here: expected a directory with {_commit.MANIFEST}"
            + ("" if os.path.lexists(path) else ", found nothing"),
            os.fspath(path),
        )
    source = os.path.join(directory, _commit.MANIFEST)
    with translated("read", source), open(source, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_MANIFEST_NBYTES:
            raise ManifestError(f"{source}: expected at most {MAX_MANIFEST_NBYTES} bytes, found {size}")
        data = file.read()
    return directory, decode_manifest(data, _engine.crc32c, source=source)


def on_one_checkpoint(
    path: str | os.PathLike[str], act: Callable[[str, Manifest], _Result], *, verified: bool = True
) -> _Result:
    """Act on a directory and its manifest; from the start again if a save replaces the checkpoint meanwhile.

    Args:
        path: the checkpoint directory.
        act: called with the directory that holds the checkpoint, and the manifest.
        verified: that ``act`` fails if it meets the shards of another checkpoint than the manifest's.

    Raises:
        StorageError: it was replaced again and again.
    """
    for _ in range(_REPLACED_TRIES):
        before = _commit.identity(path)
        try:
            result = act(*open_checkpoint(path))
        except FpMultiError:
            if _commit.identity(path) == before:
                raise
        else:
            if verified or _commit.identity(path) == before:
                return result
    raise StorageError(errno.EBUSY, "read", os.fspath(path), hint="the checkpoint is replaced again and again")


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """What a checkpoint contains, without reading any tensor.

    Args:
        path: the checkpoint directory.

    Returns:
        Shards, tensors with their pieces, tree, metadata and totals (docs/format.md section 3).

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        ManifestError: the manifest is damaged, impossible, or of a newer version (FormatVersionError).

    Example:
        >>> import fp_multi as fp
        >>> [tensor.name for tensor in fp.read_manifest("ckpt/step_7").tensors]
        ['w']
    """
    return open_checkpoint(path)[1]


def read_checkpoint(
    path: str | os.PathLike[str], act: Callable[[CheckpointReader], _Result], *, config: LoadConfig = LoadConfig()
) -> _Result:
    """Open a checkpoint, and read parts of it.

    Args:
        path: the checkpoint directory.
        act: called with the open checkpoint; called again, with the new one, if a save replaces it meanwhile.
        config: how to read.

    Returns:
        What ``act`` returned.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        ManifestError: the manifest is damaged, impossible, or of a newer version (FormatVersionError).

    Example:
        >>> import fp_multi as fp
        >>> def first_row(reader):
        ...     return reader.read([fp.ReadRequest(0, fp.Box((0, 0), (1, 3)))])[0].view("f8")
        >>> fp.read_checkpoint("ckpt/step_7", first_row)
        array([0., 1., 2.])
    """
    require("config", config, LoadConfig)
    return on_one_checkpoint(path, lambda directory, manifest: act(CheckpointReader(directory, manifest, config)))


def load(
    path: str | os.PathLike[str],
    *,
    target: Any = None,
    only: Selection | None = None,
    inplace: bool = False,
    config: LoadConfig = LoadConfig(),
    allow_pickle: bool = False,
    tensor_builder: TensorBuilder | None = None,
    comm: Comm | None = None,
    broadcast: bool = False,
) -> Any:
    """Load a checkpoint; every chunk that is read is compared with its checksum.

    Args:
        path: the checkpoint directory, whoever wrote it.
        target: a state of the same structure, whose shapes and dtypes are checked; the result has its containers. With
            ``only``, of the structure that ``only`` selects. A leaf may be a part of a tensor (:class:`ShardOf`, or a
            framework's tensor that is spread over processes): only that part is read then, and by each process for
            itself.
        only: load only these subtrees: dotted paths, or tuples of keys. The nesting stays.
        inplace: fill the target's own arrays and return them in place of new ones. If an error is raised then, the
            target may hold a mixture of old and new values.
        config: how to read.
        allow_pickle: unpickle leaves that were pickled. A pickle can run any code: only for checkpoints you trust.
        tensor_builder: makes a framework's tensors; without it everything is a NumPy array.
        comm: the processes that load this together. Without ``broadcast`` each reads by itself what it needs.
        broadcast: all ranks of ``comm`` load the same: each reads a share of the bytes, and they give each other the
            rest through the framework's collectives. Parts of tensors may be others on every rank; where they lie
            between each other's (columns of what was written by rows), the ranks of a host read each byte once.

    Returns:
        The state. Each array owns its memory.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        ManifestError: the manifest is damaged, impossible, or of a newer version (FormatVersionError).
        CorruptCheckpointError: a shard is missing (MissingShardError), cut (TruncatedShardError), or its bytes changed
            (ChecksumError); the message names tensor, file and chunk.
        TargetMismatchError: the target does not fit.
        KeyNotFoundError: ``only`` names what is not there.
        PickleRefusedError: a leaf is pickled and ``allow_pickle`` was not given.
        ConfigError: arguments contradict each other, or are of another type.
        CommError: with ``broadcast``: another rank failed, or the ranks want different things.

    Example:
        >>> import fp_multi as fp
        >>> fp.load("ckpt/step_7", only=["w"])["w"].shape
        (2, 3)
    """
    if broadcast and comm is None:
        raise ConfigError("broadcast=True needs comm=: with whom to share the reading")
    if inplace and target is None:
        raise ConfigError("inplace=True needs target=: whose memory to fill")
    with together(comm if broadcast else None, f"load {os.fspath(path)!r}") as team:
        require("config", config, LoadConfig)
        read = None if team is None else partial(_broadcast.fetch_shared, team=team)

        def one(directory: str, manifest: Manifest) -> Any:
            reader = CheckpointReader(directory, manifest, config)
            parts: _ReadParts = reader.read
            if team is not None:
                # Imported when there are several ranks: single processes need none of it.
                from fp_multi import _exchange

                parts = partial(_exchange.read_parts, reader, team=team)
            return _load(directory, manifest, target, only, inplace, config, allow_pickle, tensor_builder, read, parts)

        if team is not None:
            return one(*open_checkpoint(path))  # another try would be out of step with the other ranks'
        return on_one_checkpoint(path, one, verified=config.verify)


def _load(
    directory: str,
    manifest: Manifest,
    target: Any,
    only: Selection | None,
    inplace: bool,
    config: LoadConfig,
    allow_pickle: bool,
    tensor_builder: TensorBuilder | None,
    read: _assemble.Reading | None,
    read_parts: _ReadParts,
) -> Any:
    tree = manifest.tree
    wanted = list(range(len(manifest.tensors)))
    if only is not None:
        tree, indices = select(tree, only)
        wanted = sorted(indices)
    _assemble.refuse_pickle(manifest, wanted, allow_pickle=allow_pickle)
    if target is None:
        read_parts([])
        values = _assemble.load_values(directory, manifest, wanted, config, tensor_builder, read=read)
        return decode(tree, [values.get(i) for i in range(len(manifest.tensors))])

    places, parts = _target.match(tree, target, manifest.tensors, memory=inplace)
    into: dict[int, int] = {}
    if inplace:
        addresses = ((i, _target.memory(found)) for i, found in places.items())
        into = {i: address for i, address in addresses if address is not None}
    plain = {i for i, found in places.items() if isinstance(found[0].leaf, np.ndarray)}
    # The parts come first: what fails in them is the round's, which ends with the whole tensors.
    boxes = _load_boxes(manifest, parts, tensor_builder, inplace, read_parts)
    values = _assemble.load_values(
        directory, manifest, sorted(places), config, tensor_builder, into, plain, target, read
    )
    if inplace:
        for i, found in places.items():
            if i not in into:
                _target.fill(found, values[i])
    return _target.rebuild(tree, target, values, boxes, inplace=inplace)


def _load_boxes(
    manifest: Manifest,
    parts: Sequence[tuple[int, _target.Place]],
    builder: TensorBuilder | None,
    inplace: bool,
    read: _ReadParts,
) -> list[Any]:
    """The values of boxes of tensors; in place, the leaves that take them."""
    requests = [ReadRequest(i, place.box, _target.room(place) if inplace else None) for i, place in parts]
    found: list[Any] = []
    for (i, place), request, data in zip(parts, requests, read(requests), strict=True):
        if request.out is None and place.box is not None:
            box = msgspec.structs.replace(manifest.tensors[i], shape=list(place.box.length), pieces=[])
            value = _assemble.value(box, data, None if isinstance(place.leaf, np.ndarray) else builder)
            if inplace:
                _target.fill([place], value)
            found.append(value)
        else:
            found.append(place.leaf)
    return found
