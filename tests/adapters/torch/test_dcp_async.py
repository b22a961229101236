"""AsyncStager: what is borrowed until the fence, what is copied at once, and saves that fail before they begin."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import fp_multi as fp  # noqa: E402
from fp_multi.adapters.torch.dcp import AsyncStager, StorageReader, StorageWriter  # noqa: E402
from fp_multi.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

QUICK = fp.SaveConfig(durable=False)
HANG_LIMIT_S = 60
MODES = ["hybrid", "borrow", "snapshot"]


class Held(dcp.DefaultSavePlanner):
    """Stops before anything is read, until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def finish_plan(self, new_plan: Any) -> Any:
        self.reached.set()
        assert self.go_on.wait(HANG_LIMIT_S)
        return super().finish_plan(new_plan)


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.count = [0]
        self.backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict(), "count": self.count}

    def backward(self) -> None:
        """Changes statistics, and the list."""
        self.optimizer.zero_grad()
        self.model(torch.rand(8, 64)).square().sum().backward()
        self.count[0] += 1

    def start(self, path: Path, stager: AsyncStager, **how: Any) -> Any:
        how.setdefault("storage_writer", StorageWriter(config=QUICK))
        return dcp.async_save(self.state(), checkpoint_id=path, async_stager=stager, **how)


def flat(state: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, (dict, list, tuple)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from flat(value, f"{where}.{key}")
    else:
        yield where, state.clone() if isinstance(state, torch.Tensor) else state


@pytest.fixture
def training() -> Training:
    return Training()


def check(path: Path, before: dict[str, Any], training: Training, reader: Any = None) -> None:
    found = training.state()
    found["count"] = None
    dcp.load(found, checkpoint_id=path, storage_reader=reader or StorageReader())
    found = dict(flat(found))
    assert found.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


@pytest.mark.parametrize("overlap", MODES)
@pytest.mark.parametrize("attached", [True, False])
def test_modes(tmp_path: Path, training: Training, overlap: Any, attached: bool) -> None:
    stager = AsyncStager(overlap)
    if attached:
        stager.attach(training.optimizer)
    for step in range(3):
        before = dict(flat(training.state()))
        future = training.start(tmp_path / str(step), stager)
        training.backward()
        training.optimizer.step()
        future.result(HANG_LIMIT_S)
        check(tmp_path / str(step), before, Training())
    stager.close()
    training.optimizer.step()


@pytest.mark.parametrize("overlap", ["hybrid", "borrow"])
def test_the_step_waits(tmp_path: Path, training: Training, overlap: Any) -> None:
    stager = AsyncStager(overlap)
    stager.attach(training.optimizer)
    planner = Held()
    before = dict(flat(training.state()))
    borrowed = training.state()["model"]["0.weight"].data_ptr()
    future = training.start(tmp_path / "c", stager, planner=planner)
    assert planner.reached.wait(HANG_LIMIT_S)
    # The tensors themselves are under way; what forward changes is a copy.
    staged = planner.state_dict
    assert staged["model.0.weight"].data_ptr() == borrowed
    assert staged["model.1.running_mean"].data_ptr() != training.model[1].running_mean.data_ptr()
    training.backward()
    stepped = threading.Event()
    step = threading.Thread(target=lambda: (training.optimizer.step(), stepped.set()))
    step.start()
    assert not stepped.wait(0.3)
    planner.go_on.set()
    assert stepped.wait(HANG_LIMIT_S)
    step.join()
    future.result(HANG_LIMIT_S)
    check(tmp_path / "c", before, Training())
    stager.close()


def test_a_fence_that_comes_first(tmp_path: Path, training: Training) -> None:
    stager = AsyncStager("hybrid")
    stager.attach(training.optimizer, hook=False)
    before = dict(flat(training.state()))
    lent = stager.stage(training.state())
    stager.fence()
    training.backward()
    training.optimizer.step()
    dcp.save(lent, checkpoint_id=tmp_path / "c", storage_writer=StorageWriter(config=QUICK))
    check(tmp_path / "c", before, Training())


def test_what_is_staged_is_saved_once(tmp_path: Path, training: Training) -> None:
    stager = AsyncStager("hybrid")
    stager.attach(training.optimizer)
    lent = stager.stage(training.state())
    dcp.save(lent, checkpoint_id=tmp_path / "a", storage_writer=StorageWriter(config=QUICK))
    with pytest.raises(ConfigError, match="saved once"):
        dcp.save(lent, checkpoint_id=tmp_path / "b", storage_writer=StorageWriter(config=QUICK))
    stager.close()


def test_a_save_that_fails_before_it_begins(tmp_path: Path, training: Training) -> None:
    stager = AsyncStager("borrow")
    stager.attach(training.optimizer)
    fp.save({}, tmp_path / "c", config=QUICK)
    future = training.start(tmp_path / "c", stager, storage_writer=StorageWriter(overwrite=False))
    training.optimizer.step()
    with pytest.raises(CheckpointException, match="Checkpoint already exists"):
        future.result(HANG_LIMIT_S)
    stager.close()


def test_another_writer(tmp_path: Path, training: Training) -> None:
    stager = AsyncStager("hybrid")
    stager.attach(training.optimizer)
    planner = Held()
    before = dict(flat(training.state()))
    writer = dcp.FileSystemWriter(tmp_path / "c")
    future = training.start(tmp_path / "c", stager, storage_writer=writer, planner=planner)
    assert planner.reached.wait(HANG_LIMIT_S)
    threading.Timer(0.2, planner.go_on.set).start()
    training.backward()
    training.optimizer.step()
    assert future.done()
    check(tmp_path / "c", before, Training(), dcp.FileSystemReader(tmp_path / "c"))
    stager.close()


def test_without_a_stager(tmp_path: Path, training: Training) -> None:
    before = dict(flat(training.state()))
    future = dcp.async_save(
        training.state(), checkpoint_id=tmp_path / "c", storage_writer=StorageWriter(cache_staged_state_dict=True)
    )
    training.optimizer.step()
    future.result(HANG_LIMIT_S)
    check(tmp_path / "c", before, Training())


def test_arguments(training: Training) -> None:
    for wrong in ({"overlap": "none"}, {"staging_bytes": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            AsyncStager(**wrong)
    with pytest.raises(ConfigError, match="Optimizer"):
        AsyncStager().attach(training.model)
    stager = AsyncStager()
    stager.attach(training.optimizer)
    stager.attach(training.optimizer)
    assert len(training.optimizer._optimizer_step_pre_hooks) == 1
    stager.close()
    assert not training.optimizer._optimizer_step_pre_hooks


def staged_at(planner: Held, name: str = "model.0.weight") -> int:
    pointer: int = planner.state_dict[name].data_ptr()
    return pointer


def test_snapshot_uses_its_memory_again(tmp_path: Path, training: Training) -> None:
    """Once a save has read it, and never before."""
    stager = AsyncStager("snapshot")
    places, befores, futures, planners = [], [], [], []
    for step in range(2):  # two at the same time
        befores.append(dict(flat(training.state())))
        planners.append(Held())
        futures.append(training.start(tmp_path / str(step), stager, planner=planners[-1]))
        assert planners[-1].reached.wait(HANG_LIMIT_S)
        places.append(staged_at(planners[-1]))
        training.backward()
        training.optimizer.step()
    assert places[0] != places[1]
    for step in range(2):
        planners[step].go_on.set()
        futures[step].result(HANG_LIMIT_S)
        check(tmp_path / str(step), befores[step], Training())

    before = dict(flat(training.state()))
    planner = Held()
    planner.go_on.set()
    training.start(tmp_path / "2", stager, planner=planner).result(HANG_LIMIT_S)
    assert staged_at(planner) in places
    check(tmp_path / "2", before, Training())
    stager.close()


def test_a_save_that_fails_keeps_its_memory(tmp_path: Path, training: Training) -> None:
    class Fails(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            raise RuntimeError("out of ideas")

    stager = AsyncStager("snapshot")
    for _ in range(2):
        with pytest.raises(CheckpointException, match="out of ideas"):
            training.start(tmp_path / "c", stager, planner=Fails()).result(HANG_LIMIT_S)
    before = dict(flat(training.state()))
    training.start(tmp_path / "c", stager).result(HANG_LIMIT_S)
    check(tmp_path / "c", before, Training())
    stager.close()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def memory_of(staged: dict[str, Any]) -> StorageWeakRef:
    return StorageWeakRef(staged["model"]["0.weight"].untyped_storage())


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("what", ["nothing", "sent", "saved by another writer"])
def test_memory_that_is_not_given_back_goes_with_the_copy(tmp_path: Path, training: Training, what: str) -> None:
    """Without a garbage collection; of whole models there may be no time to wait for one."""
    stager = AsyncStager("snapshot")
    lent = stager.stage(training.state())
    memory = memory_of(lent)
    if what == "sent":
        pickle.dumps(lent)
    elif what == "saved by another writer":
        dcp.save(lent, checkpoint_id=tmp_path / "c", storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    assert not memory.expired()
    del lent
    assert memory.expired()
    again = stager.stage(training.state())
    assert dict(flat(again)).keys() == dict(flat(training.state())).keys()
    stager.close()


def test_saves_of_one_writer_that_overlap(tmp_path: Path, training: Training) -> None:
    """Each one's metadata name its own path, and its own save."""
    writer, stager = StorageWriter(config=QUICK), AsyncStager("snapshot")
    planners = [Held(), Held()]
    futures = []
    for step, planner in enumerate(planners):
        futures.append(training.start(tmp_path / str(step), stager, storage_writer=writer, planner=planner))
        assert planner.reached.wait(HANG_LIMIT_S)
    for planner in planners:
        planner.go_on.set()
    metas = [future.result(HANG_LIMIT_S).storage_meta for future in futures]
    assert [meta.checkpoint_id for meta in metas] == [tmp_path / "0", tmp_path / "1"]
    assert metas[0].save_id != metas[1].save_id
    for step, meta in enumerate(metas):
        found = StorageReader(tmp_path / str(step)).read_metadata().storage_meta
        assert found.save_id == meta.save_id
    stager.close()


def test_snapshot_of_storages_that_grow(tmp_path: Path) -> None:
    stager = AsyncStager("snapshot")
    tensor = torch.arange(4.0)
    for step, count in enumerate((4, 9, 2)):
        tensor.untyped_storage().resize_(4 * count)
        tensor.set_(tensor.untyped_storage(), 0, (count,), (1,)).copy_(torch.arange(float(count)) + step)
        future = dcp.async_save(
            {"t": tensor},
            checkpoint_id=tmp_path / str(step),
            storage_writer=StorageWriter(config=QUICK),
            async_stager=stager,
        )
        future.result(HANG_LIMIT_S)
        found = {"t": torch.zeros(count)}
        dcp.load(found, checkpoint_id=tmp_path / str(step), storage_reader=StorageReader())
        assert torch.equal(found["t"], tensor)
    stager.close()
