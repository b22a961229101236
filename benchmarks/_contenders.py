"""Who is measured: for each, how it saves a state until it is durable, and how it loads it again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from _harness import Arrays, files_of, fsync

import fp_multi as fp
from fp_multi.adapters import torch as fp_torch

PAGE = 4096

# DCP says at every call that it runs in one process, which is what is measured.
warnings.filterwarnings("ignore", module="torch.distributed")


class State(NamedTuple):
    """What is saved, as NumPy arrays and as torch tensors over the same memory."""

    arrays: Arrays
    tensors: dict[str, torch.Tensor]


class Contender(NamedTuple):
    """One way to keep a state. ``save`` returns when the state would survive a power failure."""

    name: str
    save: Callable[[State, Path], object]
    load: Callable[[Path], object] | None = None
    prepared: Callable[[State, Path], AbstractContextManager[Callable[[], object]]] | None = None
    """For a save that needs earlier ones: makes those, and gives the one to be timed."""

    takes_memory: bool = True
    """Whether a save takes memory for the state's bytes: page cache, buffers. Direct writes take none."""

    @property
    def is_ours(self) -> bool:
        """Whether it is fp_multi."""
        return self.name.startswith("fp_multi")

    def save_memory(self, nbytes: int) -> int:
        """How much memory a save of so many bytes should find: the page cache and a quarter more; no peer needs it."""
        return nbytes * 5 // 4 if self.takes_memory else 0

    @contextmanager
    def ready(self, state: State, path: Path) -> Iterator[Callable[[], object]]:
        """Give the call that is to be timed."""
        if self.prepared is None:
            yield partial(self.save, state, path)
        else:
            with self.prepared(state, path) as action:
                yield action


def both(arrays: Arrays) -> State:
    """Add the tensors."""
    return State(arrays, {name: torch.from_numpy(array) for name, array in arrays.items()})


def _flush(path: Path) -> None:
    """What the others leave out: bytes and names on the drive."""
    for file in files_of(path):
        fsync(file)
    if path.is_dir():
        fsync(path)
    fsync(path.parent)


def save_ours(state: State, path: Path) -> None:
    """The adapter's save, which is durable as it is."""
    fp_torch.save(state.tensors, path)


def save_ours_numpy(state: State, path: Path) -> None:
    """The core's save."""
    fp.save(state.arrays, path)


def save_torch(state: State, path: Path) -> None:
    """torch.save, flushed."""
    torch.save(state.tensors, path)
    _flush(path)


def save_safetensors(state: State, path: Path) -> None:
    """safetensors, flushed."""
    safetensors.torch.save_file(state.tensors, path)
    _flush(path)


def dcp_saver(threads: int) -> Callable[[State, Path], None]:
    """DCP, which flushes its files itself."""

    def save(state: State, path: Path) -> None:
        writer = dcp.FileSystemWriter(path, single_file_per_rank=threads == 1, sync_files=True, thread_count=threads)
        dcp.save(state.tensors, storage_writer=writer, no_dist=True)
        fsync(path)
        fsync(path.parent)

    return save


def load_dcp(path: Path) -> dict[str, torch.Tensor]:
    """DCP reads into tensors that exist, so making them is part of it, as for everybody else."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    into = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
    dcp.load(into, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return into


def load_safetensors_touching(path: Path) -> Any:
    """safetensors maps the file; a tensor is read when it is touched. One byte of each page is the least that does."""
    tensors = safetensors.torch.load_file(path)
    for tensor in tensors.values():
        tensor.view(torch.uint8).flatten()[::PAGE].sum()
    return tensors


def load_safetensors_copied(path: Path) -> Any:
    """safetensors, into memory of its own, which is what the other loaders give."""
    return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}


@contextmanager
def recycled(state: State, path: Path) -> Iterator[Callable[[], object]]:
    """The third save of a Checkpointer that keeps one step goes into the file of the first."""

    def save(step: int) -> None:
        checkpointer.save(step, state.tensors)
        checkpointer.wait()

    with fp.Checkpointer(path, keep=1) as checkpointer:
        save(0)
        save(1)
        yield partial(save, 2)


OURS = "fp_multi, torch"
TORCH = "torch.save + fsync"
SAFETENSORS = "safetensors + fsync"
TOUCHED, COPIED = "safetensors, every page touched", "safetensors, copied to own memory"
DCP1, DCP2 = "torch DCP, 1 thread", "torch DCP, 2 threads"
RECYCLED = "fp_multi Checkpointer, recycled file"

SAVERS = (
    Contender(OURS, save_ours, takes_memory=False),
    Contender("fp_multi, NumPy", save_ours_numpy, takes_memory=False),
    Contender(TORCH, save_torch),
    Contender(SAFETENSORS, save_safetensors),
    Contender(DCP1, dcp_saver(1)),
    Contender(DCP2, dcp_saver(2)),
    Contender(RECYCLED, save_ours, prepared=recycled, takes_memory=False),
)
LOADERS = (
    Contender(OURS, save_ours, lambda path: fp_torch.load(path)),
    Contender("fp_multi, NumPy", save_ours_numpy, lambda path: fp.load(path)),
    Contender(TOUCHED, save_safetensors, load_safetensors_touching),
    Contender(COPIED, save_safetensors, load_safetensors_copied),
    Contender("torch.load", save_torch, lambda path: torch.load(path, weights_only=True)),
    Contender("torch DCP", dcp_saver(1), load_dcp),
)


def named(contenders: tuple[Contender, ...], name: str) -> Contender:
    """Find one by its name."""
    return next(contender for contender in contenders if contender.name == name)
