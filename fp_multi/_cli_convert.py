"""``fp-multi convert``: checkpoints and files of other software to checkpoint directories of ours, and back."""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import fp_multi as fp
from fp_multi._cli_formats import DCP, ORBAX, OURS, PT, SAFETENSORS, Found, direction, look, recognize
from fp_multi._cli_losses import Losses, Meter, some
from fp_multi._cli_text import count, err, out, progress_bar, say, shown, size
from fp_multi._commit import FileCommit
from fp_multi._commit_tree import TreeCommit
from fp_multi._dtypes import from_safetensors
from fp_multi._layout import lay_out
from fp_multi._partial import CheckpointReader, ReadRequest
from fp_multi._streamed import StreamedTensor, groups
from fp_multi.checkpoint import read_checkpoint
from fp_multi.config import SaveConfig
from fp_multi.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    StorageError,
    UnsupportedLeafError,
)

_BAND_NBYTES = 8 << 20
_AHEAD_NBYTES = 16 << 20

Moved = Callable[[int], None]


def convert(source: Path, target: Path, *, overwrite: bool, to: str | None = None, allow_pickle: bool = False) -> None:
    """Convert; what SRC is, and the suffix of DST or ``to``, decide the direction.

    Args:
        source: a checkpoint directory or a file.
        target: a file or a checkpoint directory.
        overwrite: replace the target.
        to: the target's format; None goes by the suffix of ``target``, and without one to a checkpoint of ours.
        allow_pickle: let pickles in the source run.

    Raises:
        ConfigError: the two do not make a direction, or a file cannot be read as what its suffix says.
        CheckpointNotFoundError: there is nothing at ``source``.
        CheckpointExistsError: the target exists and ``overwrite`` was not given, or it is of another format.
        PickleRefusedError: the source holds a pickle and ``allow_pickle`` was not given.
        UnsupportedLeafError: a value has no place in the other format; nothing has been written.
        FpMultiError: what loading and saving raise.
    """
    if not os.path.lexists(source):
        raise CheckpointNotFoundError(f"{source}: there is nothing here")
    if os.path.lexists(target) and not overwrite:
        raise CheckpointExistsError(f"{target} exists; --overwrite replaces it")
    found = recognize(source)
    wanted = direction(source, found.form, target, to)
    losses = Losses()
    with progress_bar(f"convert {shown(source.name)}") as update:
        meter = Meter(update)
        try:
            if found.form == OURS:
                done = _from_ours(wanted, found.path, target, overwrite, allow_pickle, losses, meter)
            else:
                done = _to_ours(found, target, overwrite, allow_pickle, losses, meter)
        except RecursionError as error:
            raise ConfigError(f"{source}: nested too deeply, or within itself") from error
    say(out(), f"{shown(str(source))} -> {shown(str(target))}: {done}")
    losses.tell()


def _summary(report: fp.SaveReport) -> str:
    return f"{count(report.tensors, 'tensor')}, {size(report.tensor_nbytes)}, {report.gbytes_per_s:.2f} GB/s"


# Frameworks: only the conversions that need one import it


def _torch() -> Any:
    try:
        importlib.import_module("torch")
        return importlib.import_module("fp_multi.adapters.torch.convert")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; .pt, .pth and DCP need: pip install 'fp_multi[torch]'"
        ) from error


def _orbax() -> Any:
    # Nothing here computes; JAX would take an accelerator's memory just for having been imported.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        importlib.import_module("orbax.checkpoint")
        return importlib.import_module("fp_multi.adapters.orbax.convert")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed; Orbax needs: pip install 'fp_multi[orbax]'") from error


# To a checkpoint of ours


def _to_ours(found: Found, target: Path, overwrite: bool, allow_pickle: bool, losses: Losses, meter: Meter) -> str:
    metadata: Mapping[str, str] = {}
    with ExitStack() as stack:
        if found.form == SAFETENSORS:
            state, total, metadata = _open_safetensors(found.path, stack, meter.moved)
        elif found.form == PT:
            state, total = _torch().open_pt(found.path, meter.moved, allow_pickle=allow_pickle)
        elif found.form == DCP:
            state, total = _torch().open_dcp(found.path, meter.moved, losses, allow_pickle=allow_pickle)
        else:
            state, total, metadata = _orbax().open_orbax(found.path, meter.moved)
        meter.begin(total)
        report = fp.save(state, target, overwrite=overwrite, metadata=metadata, allow_pickle=allow_pickle)
    if allow_pickle:
        for tensor in fp.read_manifest(target).tensors:
            if tensor.kind == "pickle":
                losses.add("pickles; loading them needs allow_pickle=True", tensor.name)
    return _summary(report)


def _open_safetensors(source: Path, stack: ExitStack, moved: Moved) -> tuple[dict[str, Any], int, dict[str, str]]:
    # One open file from here on: a file that takes its name meanwhile is another one.
    file = stack.enter_context(source.open("rb", buffering=0))
    entries, metadata = fp.read_safetensors_header(source)
    if not os.path.samestat(os.fstat(file.fileno()), os.stat(source)):
        raise StorageError(errno.EBUSY, "read", str(source), hint="it was replaced meanwhile; try again")
    data_begin = 8 + int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    state: dict[str, Any] = {}
    total = 0
    for name, entry in entries.items():
        try:
            dtype, shape = from_safetensors(entry.code, entry.shape)
        except ValueError as error:
            raise UnsupportedLeafError(f"{name}: {error}", name) from error
        nbytes = entry.end - entry.begin
        edges = [*range(0, nbytes, _BAND_NBYTES), nbytes]
        read = _file_bands(file, data_begin + entry.begin, nbytes)
        state[name] = StreamedTensor(dtype, shape, edges, read, moved=moved)
        total += nbytes
    return state, total, metadata


def _file_bands(file: BinaryIO, begin: int, nbytes: int) -> Callable[[int], Any]:
    def read(number: int) -> Any:
        at = number * _BAND_NBYTES
        band = np.empty(min(_BAND_NBYTES, nbytes - at), np.uint8)
        done = 0
        while done < band.nbytes:
            got = os.preadv(file.fileno(), [band[done:].data], begin + at + done)
            if not got:
                raise CorruptCheckpointError(f"{file.name}: it was cut while it was read")
            done += got
        return band

    return read


# From a checkpoint of ours


def _from_ours(
    wanted: str, source: Path, target: Path, overwrite: bool, allow_pickle: bool, losses: Losses, meter: Meter
) -> str:
    def act(reader: CheckpointReader) -> str:
        losses.forget()
        reader.refuse_pickle(allow_pickle=allow_pickle)
        meter.begin(reader.manifest.totals.tensor_nbytes)
        if wanted == SAFETENSORS:
            return _to_safetensors(reader, target, meter.moved)
        if wanted == PT:
            _write_file(reader, target, _torch().plan_pt(reader, meter.moved, losses))
        elif wanted == DCP:
            _write_tree(reader, target, DCP, _torch().plan_dcp(reader, meter.moved, losses), overwrite)
        else:
            _write_tree(reader, target, ORBAX, _orbax().plan_orbax(reader, meter.moved, losses), overwrite)
        if wanted != ORBAX:
            for key in reader.manifest.metadata:
                losses.add("metadata left out", key)
        totals = reader.manifest.totals
        return f"{count(totals.tensors, 'tensor')}, {size(totals.tensor_nbytes)}"

    return read_checkpoint(source, act)


def _write_file(reader: CheckpointReader, target: Path, write: Callable[[Any], None]) -> None:
    with FileCommit(target, SaveConfig(), nbytes=reader.manifest.totals.tensor_nbytes) as work:
        with open(work.path, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        work.publish()


def _write_tree(
    reader: CheckpointReader, target: Path, form: str, write: Callable[[str], None], overwrite: bool
) -> None:
    def replaceable(path: str) -> bool:
        found = look(Path(path))
        return found is not None and found.form == form

    nbytes = reader.manifest.totals.tensor_nbytes
    with TreeCommit(target, SaveConfig(), replaceable=replaceable if overwrite else None, nbytes=nbytes) as work:
        write(work.path)
        work.publish()


def _to_safetensors(reader: CheckpointReader, target: Path, moved: Moved) -> str:
    manifest = reader.manifest
    left_out = [leaf.path for leaf in reader.leaves() if leaf.tensor is None]
    sizes = [sum(piece.nbytes for piece in tensor.pieces) for tensor in manifest.tensors]
    ahead = _Ahead(reader, sizes)
    tensors = {
        tensor.name: StreamedTensor(tensor.dtype, tensor.shape, [0, nbytes], ahead.reading(index), moved=moved)
        for index, (tensor, nbytes) in enumerate(zip(manifest.tensors, sizes, strict=True))
    }
    report = fp.save_safetensors(tensors, target, metadata=manifest.metadata)
    if left_out:
        say(
            err(),
            f"fp-multi: {count(len(left_out), 'value')} left out, a safetensors file holds tensors only: "
            f"{some(left_out)}",
        )
    return _summary(report)


class _Ahead:
    """Reads tensors in the order in which a file is written, small ones together."""

    def __init__(self, reader: CheckpointReader, sizes: list[int]) -> None:
        self._reader = reader
        order = lay_out(sizes).order
        self._runs = {
            order[i]: [order[k] for k in run]
            for run in groups([sizes[index] for index in order], _AHEAD_NBYTES)
            for i in run
        }
        self._data: dict[int, Any] = {}

    def reading(self, index: int) -> Callable[[int], Any]:
        """What a streamed tensor needs: a function that gives its one band."""

        def read(_: int) -> Any:
            if index not in self._data:
                run = self._runs[index]
                self._data = dict(zip(run, self._reader.read([ReadRequest(i) for i in run]), strict=True))
            return self._data.pop(index)

        return read
