"""A training loop on the CPU, and the ways to keep its every step that stall_time.py compares."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _contenders import State, save_safetensors, save_torch
from _harness import fsync
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from fp_multi.adapters.torch import Checkpointer, capture

KEEP = 2


class Trainer:
    """Linear layers with batch norm, and AdamW. The batch alone says how long forward and backward take."""

    def __init__(self, width: int, layers: int, batch: int) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(layers)]
        self.model = nn.Sequential(*blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.data = torch.randn(batch, width)
        self.step()  # makes AdamW's state

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.data).square().mean().backward()

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return capture(model=self.model, optimizer=self.optimizer, rng=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The same as one flat dict, for who needs that."""
        states = self.optimizer.state_dict()["state"]
        moments = {f"state.{i}.{name}": value for i, one in states.items() for name, value in one.items()}
        return {**self.model.state_dict(), **moments}

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


def trainer_with(width: int, layers: int, forward_backward_s: float) -> Trainer:
    """A trainer whose forward and backward take about so long on this machine."""
    few, many = 64, 512
    took = []
    for batch in (few, many):
        trainer = Trainer(width, layers, batch)
        trainer.forward_backward()
        begin = time.perf_counter()
        for _ in range(3):
            trainer.forward_backward()
        took.append((time.perf_counter() - begin) / 3)
        del trainer
    each_s = max((took[1] - took[0]) / (many - few), 1e-6)
    batch = few + int((forward_backward_s - took[0]) / each_s)
    return Trainer(width, layers, max(batch, 16))


@dataclass
class Saver:
    """One way to save, during one run."""

    save: Callable[[int], None]
    stalls_s: list[float] = field(default_factory=list)
    """How long the loop waited for each save; complete when the run is over."""
    rates: list[float] = field(default_factory=list)
    """GB/s of each save until it was durable, where that is known."""
    write_rates: list[float] = field(default_factory=list)
    """GB/s of the write alone, without what is planned before and committed behind it."""


class Contender(NamedTuple):
    """How every step is kept. The context's end waits until the last one is durable."""

    name: str
    opened: Callable[[Trainer, Path], Any]


@contextmanager
def _nothing(trainer: Trainer, directory: Path) -> Iterator[Saver]:
    yield Saver(lambda step: None)


class _Kept:
    """Retention for those who have none: removes old steps in a thread."""

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self._thread = ThreadPoolExecutor(1)

    def add(self, path: Path) -> None:
        self._paths.append(path)
        if len(self._paths) > KEEP:
            self._thread.submit(_remove, self._paths.pop(0))

    def close(self) -> None:
        self._thread.shutdown()


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _in_the_loop(trainer: Trainer, directory: Path) -> Any:
    return _one_after_another(directory, lambda path: save_torch(State({}, trainer.tensors()), path))


def _in_a_thread(trainer: Trainer, directory: Path) -> Any:
    pool = ThreadPoolExecutor(1)

    def start(path: Path) -> Future[None]:
        # The copy is the price of going on: the file is written while the next step changes the tensors.
        copies = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
        return pool.submit(save_safetensors, State({}, copies), path)

    return _one_after_another(directory, start)


def _dcp(kind: AsyncCheckpointerType) -> Callable[[Trainer, Path], Any]:
    def opened(trainer: Trainer, directory: Path) -> Any:
        def start(path: Path) -> Any:
            writer = dcp.FileSystemWriter(path, sync_files=True)
            return dcp.async_save(trainer.state(), storage_writer=writer, async_checkpointer_type=kind)

        return _one_after_another(directory, start)

    return opened


@contextmanager
def _one_after_another(directory: Path, start: Callable[[Path], Any]) -> Iterator[Saver]:
    kept = _Kept()
    pending: list[tuple[Future[Any], Path]] = []

    def settle() -> None:
        for future, path in pending:
            future.result()
            kept.add(path)
        pending.clear()

    def save(step: int) -> None:
        begin = time.perf_counter()
        settle()
        path = directory / f"step_{step}"
        future = start(path)
        if future is None:
            kept.add(path)
        else:
            pending.append((future, path))
        saver.stalls_s.append(time.perf_counter() - begin)

    saver = Saver(save)
    yield saver
    settle()
    kept.close()
    fsync(directory)


def _ours(overlap: Literal["hybrid", "borrow", "snapshot"]) -> Callable[[Trainer, Path], Any]:
    @contextmanager
    def opened(trainer: Trainer, directory: Path) -> Iterator[Saver]:
        handles = []
        with Checkpointer(directory, overlap=overlap, keep=KEEP) as checkpointer:
            checkpointer.attach(trainer.optimizer)
            saver = Saver(lambda step: handles.append(checkpointer.save(step, trainer.state())))
            yield saver
            checkpointer.wait_for_staging()
        reports = [handle.report for handle in handles]
        saver.stalls_s += [report.stall_s for report in reports]
        saves = [report.save for report in reports if report.save is not None]
        saver.rates += [save.gbytes_per_s for save in saves]
        saver.write_rates += [save.tensor_nbytes / 1e9 / (save.write_s + save.fsync_s) for save in saves]

    return opened


NOTHING = "no checkpoints"
OURS = {mode: f"fp_multi, {mode}" for mode in ("hybrid", "borrow", "snapshot")}
CONTENDERS = (
    Contender(NOTHING, _nothing),
    Contender("torch.save + fsync", _in_the_loop),
    Contender("safetensors in a thread + fsync", _in_a_thread),
    Contender("dcp.async_save, thread", _dcp(AsyncCheckpointerType.THREAD)),
    Contender("dcp.async_save, process", _dcp(AsyncCheckpointerType.PROCESS)),
    *(Contender(name, _ours(mode)) for mode, name in OURS.items()),  # type: ignore[arg-type]
)


@contextmanager
def process_group(directory: Path) -> Iterator[None]:
    """DCP's asynchronous saves want one, also of a single process."""
    store = dist.FileStore(str(directory / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def busy_python() -> Iterator[None]:
    """A thread that computes in pure Python all the time, as a data loader or a logger may."""
    stop = threading.Event()

    def compute() -> None:
        total = 0
        while not stop.is_set():
            for i in range(10_000):
                total += i * i

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
