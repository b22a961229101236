"""StorageWriter and StorageReader in one process: what is kept, what is refused, who else reads it."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import random
import threading
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner  # noqa: E402
from torch.distributed.checkpoint.planner_helpers import _create_write_items  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys  # noqa: E402

import fp_multi as fp  # noqa: E402
import fp_multi.adapters.torch as adapter  # noqa: E402
from fp_multi import _engine  # noqa: E402
from fp_multi.adapters.torch.dcp import StorageReader, StorageWriter  # noqa: E402
from fp_multi.errors import (  # noqa: E402
    CheckpointExistsError,
    ChecksumError,
    ConfigError,
    PickleRefusedError,
    UnsupportedLeafError,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

QUICK = fp.SaveConfig(durable=False)
Pair = namedtuple("Pair", ["left", "right"])


def save(state: Any, path: Path, planner: Any = None, **how: Any) -> Any:
    return dcp.save(state, checkpoint_id=path, storage_writer=StorageWriter(config=QUICK, **how), planner=planner)


def load(state: Any, path: Path, planner: Any = None, **how: Any) -> Any:
    dcp.load(state, checkpoint_id=path, storage_reader=StorageReader(**how), planner=planner)
    return state


def cause_of(caught: Any) -> BaseException:
    """What went wrong on rank 0."""
    error: BaseException = caught.value.failures[0][0]
    return error


def dtypes() -> list[Any]:
    names = ["bool", "int8", "int64", "uint16", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
    names += ["float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2"]
    return [getattr(torch, name) for name in names]


def filled(dtype: Any, *shape: int) -> Any:
    size = dtype.itemsize * int(np.prod(shape))
    data = np.frombuffer(random.Random(str(dtype)).randbytes(size), np.uint8).copy()
    return torch.from_numpy(data & 1 if dtype == torch.bool else data).view(dtype).view(shape)


def test_tensors_of_every_kind(tmp_path: Path, bits: Any) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {str(dtype): filled(dtype, 5, 4) for dtype in dtypes()}
    state |= {
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "transposed": base.T,
        "part": base[1:3, ::2],
        "negative": torch.imag(torch.view_as_complex(base.reshape(4, 3, 2)).conj()),
        "conjugate": torch.view_as_complex(base.reshape(4, 3, 2)).conj(),
        "last": torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.rand(3)),
    }
    metadata = save(state, tmp_path / "c")
    assert metadata.state_dict_metadata["part"].size == torch.Size([2, 3])
    into = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    # Not all memory can be filled as it is.
    into["part"] = torch.zeros(3, 2).T
    into["last"] = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    into["conjugate"] = torch.zeros(4, 3, dtype=torch.complex64).conj()
    memory = {name: tensor.data_ptr() for name, tensor in into.items()}
    load(into, tmp_path / "c")
    for name, tensor in state.items():
        assert into[name].data_ptr() == memory[name]
        assert bits(into[name]) == bits(tensor), name
    # To another dtype it is converted, as DCP does.
    assert torch.equal(load({"scalar": torch.tensor(0.0)}, tmp_path / "c")["scalar"], torch.tensor(3.0))
    assert bits(adapter.load(tmp_path / "c")["torch.bfloat16"]) == bits(state["torch.bfloat16"])
    fp.verify(tmp_path / "c")


def test_values(tmp_path: Path, same: Any) -> None:
    state = {
        "numbers": {"i": 5, "big": 1 << 80, "f": float("nan"), "c": 1j, "none": None, "yes": True},
        "text": "grün",
        "list": [1, [2.5, "x"], None],
        "tuple": (torch.arange(3), {"lr": (1, 2), 7: "seven"}),
        "named": Pair(1, np.arange(3)),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "number": np.float32(0.5),
        "bytes": b"\0\1",
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "ordered": OrderedDict(a=1, b=[{"c": torch.ones(2)}, 3]),
        "random": random.getstate(),
    }
    save(state, tmp_path / "c")
    into: dict[str, Any] = dict.fromkeys(state)
    into["numbers"] = dict.fromkeys(state["numbers"])
    into["ordered"] = OrderedDict(a=0, b=[{"c": torch.zeros(2)}, 0])
    same(load(into, tmp_path / "c"), state)
    # Nothing but the format's own forms is in it, and everybody reads it.
    assert "pickle" not in {tensor.kind for tensor in fp.read_manifest(tmp_path / "c").tensors}
    loaded = adapter.load(tmp_path / "c")
    same(loaded, {**state, "ordered": dict(state["ordered"])})
    # Without a template DCP builds the state from our metadata.
    built = _load_state_dict_from_keys(storage_reader=StorageReader(tmp_path / "c"))
    same(built, {**state, "ordered": dict(state["ordered"])})
    some = _load_state_dict_from_keys("numbers.i", storage_reader=StorageReader(tmp_path / "c"))
    assert some == {"numbers": {"i": 5}}


def test_a_named_tuple_whose_class_is_not_here(tmp_path: Path) -> None:
    local = namedtuple("local", ["lr", "w"])
    save({"x": local(0.5, torch.ones(2))}, tmp_path / "c")
    found = load({"x": None}, tmp_path / "c")["x"]
    assert type(found) is tuple
    assert found[0] == 0.5
    assert found[1].tolist() == [1, 1]


def test_integer_keys_are_found_again(tmp_path: Path) -> None:
    """DCP itself leaves the numbers under such keys as they are, without a word."""
    state = {"optim": {"state": {0: {"step": 5, "m": torch.ones(2)}, 1: {"step": 6, "m": torch.ones(2)}}, 3: "x"}}
    save(state, tmp_path / "c")
    adapter.save(state, tmp_path / "own", config=QUICK)
    for path in (tmp_path / "c", tmp_path / "own"):
        into = {"optim": {"state": {i: {"step": 0, "m": torch.zeros(2)} for i in (0, 1)}, 3: None}}
        load(into, path)
        assert list(into["optim"]["state"]) == [0, 1]
        assert [into["optim"]["state"][i]["step"] for i in (0, 1)] == [5, 6]
        assert into["optim"][3] == "x"
        assert list(into["optim"]) == ["state", 3]
        assert torch.equal(into["optim"]["state"][1]["m"], torch.ones(2))


def test_flat_and_odd_names(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    save({"a.b": torch.ones(2), "c": {"d": 1}}, tmp_path / "c", planner)
    assert list(fp.load(tmp_path / "c")) == ["a.b", "c"]
    into = {"a.b": torch.zeros(2), "c": None}
    load(into, tmp_path / "c", dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    assert into["a.b"].tolist() == [1, 1]
    assert into["c"] == {"d": 1}
    odd = {"~x": torch.ones(1), "__metadata__": torch.ones(2), "grün": torch.ones(3), "": {"": torch.ones(4)}}
    save(odd, tmp_path / "odd")
    fp.verify(tmp_path / "odd")
    into = {"~x": torch.zeros(1), "__metadata__": torch.zeros(2), "grün": torch.zeros(3), "": {"": torch.zeros(4)}}
    load(into, tmp_path / "odd")
    assert [float(into[key].sum()) for key in ("~x", "__metadata__", "grün")] == [1, 2, 3]
    assert float(into[""][""].sum()) == 4
    save({}, tmp_path / "nothing")
    fp.verify(tmp_path / "nothing")
    assert load({}, tmp_path / "nothing") == {}


class Thing:
    def __init__(self, value: int) -> None:
        self.value = value


def test_pickles_only_if_allowed(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "extra": {"thing": Thing(3)}}
    with pytest.raises(CheckpointException, match=r"extra\.thing") as caught:
        save(state, tmp_path / "c")
    assert isinstance(cause_of(caught), UnsupportedLeafError)
    assert not os.listdir(tmp_path)
    save(state, tmp_path / "c", allow_pickle=True)
    with pytest.raises(CheckpointException, match=r"extra\.thing") as caught:
        load({"extra": {"thing": None}}, tmp_path / "c")
    assert isinstance(cause_of(caught), PickleRefusedError)
    assert load({"model": {"w": torch.zeros(2)}}, tmp_path / "c")["model"]["w"].tolist() == [1, 1]
    assert load({"extra": {"thing": None}}, tmp_path / "c", allow_pickle=True)["extra"]["thing"].value == 3


class OwnBytes(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        if not isinstance(object, torch.Tensor):
            return io.BytesIO(b"own:" + repr(object).encode())
        return object.half()


class OwnBytesBack(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


def test_a_planner_of_ones_own(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "n": 5}
    with pytest.raises(CheckpointException, match="OwnBytes"):
        save(state, tmp_path / "c", OwnBytes())
    metadata = save(state, tmp_path / "c", OwnBytes(), allow_pickle=True)
    # The dtype is that of the tensor that was stored, not the plan's.
    assert metadata.state_dict_metadata["w"].properties.dtype == torch.float16
    into = load(
        {"w": torch.zeros(3, dtype=torch.float16), "n": None}, tmp_path / "c", OwnBytesBack(), allow_pickle=True
    )
    assert into["n"] == b"own:5"
    assert into["w"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointException, match="allow_pickle"):
        load({"n": None}, tmp_path / "c", OwnBytesBack())


def test_planner_data_of_ones_own(tmp_path: Path) -> None:
    class Planner(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = {"w": ("w",), "more": [1, {2: "x"}]}
            return plans, metadata

    save({"w": torch.ones(2), "a": {"b": 1}}, tmp_path / "c", Planner())
    assert StorageReader(tmp_path / "c").read_metadata().planner_data == {"w": ("w",), "more": [1, {2: "x"}]}
    assert load({"w": torch.zeros(2)}, tmp_path / "c")["w"].tolist() == [1, 1]


def test_metadata_is_what_dcp_had(tmp_path: Path) -> None:
    state = {"a": {"w": torch.ones(3, 2), "l": [torch.ones(1), {"x": 1}]}, "n": 1}
    metadata = save(state, tmp_path / "c", metadata={"run": "7"})
    found = StorageReader(tmp_path / "c").read_metadata()
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert found.planner_data == metadata.planner_data
    assert fp.read_manifest(tmp_path / "c").metadata["run"] == "7"
    with pytest.raises(ConfigError, match=r"torch\.distributed\.checkpoint"):
        StorageWriter(metadata={"torch.distributed.checkpoint": ""})


def test_what_others_saved(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "pair": (torch.ones(2), 3), "step": 4}
    adapter.save(state, tmp_path / "torch", config=QUICK)
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    its = torch.optim.Adam(other.parameters(), lr=5.0)
    other(torch.zeros(2, 3)).sum().backward()
    its.step()
    into = {"model": other.state_dict(), "optim": its.state_dict(), "pair": None, "step": 0}
    load(into, tmp_path / "torch")
    its.load_state_dict(into["optim"])
    assert its.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert torch.equal(into["pair"][0], torch.ones(2))
    assert into["step"] == 4
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    # NumPy's and JAX's arrays are tensors to DCP; what torch has no dtype for is a value.
    arrays = {"w": np.arange(6.0).reshape(2, 3), "when": np.array(["2026-11-30"], "M8[D]"), "lr": np.float32(2)}
    fp.save({"a": [arrays, 7]}, tmp_path / "numpy", config=QUICK)
    into = {"a": [{"w": torch.zeros(2, 3), "when": None, "lr": None}, None]}
    load(into, tmp_path / "numpy")
    assert into["a"][0]["w"].tolist() == arrays["w"].tolist()
    assert into["a"][0]["when"] == arrays["when"]
    assert into["a"][1] == 7
    fp.save({"a.b": np.ones(1), "a": {"b": np.ones(1)}}, tmp_path / "twice", config=QUICK)
    with pytest.raises(CheckpointException, match=r"'a\.b'"):
        load({"a.b": torch.zeros(1)}, tmp_path / "twice")


def test_stateful_objects(tmp_path: Path) -> None:
    class Counter:
        def __init__(self, count: int) -> None:
            self.count, self.sum = count, torch.full((2,), float(count))

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count, "sum": self.sum}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count, self.sum = state["count"], state["sum"]

    save({"counter": Counter(3), "model": torch.nn.Linear(2, 1)}, tmp_path / "c")
    into = {"counter": Counter(0), "model": torch.nn.Linear(2, 1)}
    load(into, tmp_path / "c")
    assert into["counter"].count == 3
    assert into["counter"].sum.tolist() == [3, 3]

    model, optimizer = torch.nn.Linear(2, 1), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    states = get_state_dict(model, optimizer)
    save({"model": states[0], "optim": states[1]}, tmp_path / "d")
    other = torch.nn.Linear(2, 1)
    its = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    found = dict(zip(("model", "optim"), get_state_dict(other, its), strict=True))
    load(found, tmp_path / "d")
    set_state_dict(other, its, model_state_dict=found["model"], optim_state_dict=found["optim"])
    assert torch.equal(other.weight, model.weight)
    assert its.param_groups[0]["lr"] == 0.5


def test_a_flipped_byte(tmp_path: Path) -> None:
    save({"a": torch.zeros(4096), "layers": {"w": torch.rand(64, 64)}}, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.safetensors")
    tensor = fp.read_manifest(tmp_path / "c").tensors[1]
    data = bytearray(shard.read_bytes())
    data[tensor.pieces[0].offset + 1000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointException, match=r"'layers\.w'") as caught:
        load({"a": torch.zeros(4096), "layers": {"w": torch.zeros(64, 64)}}, tmp_path / "c")
    assert isinstance(cause_of(caught), ChecksumError)
    # What is not read is not missed.
    load({"a": torch.zeros(4096)}, tmp_path / "c", dcp.DefaultLoadPlanner(allow_partial_load=True))
    shard.unlink()
    with pytest.raises(CheckpointException, match="missing"):
        load({"a": torch.zeros(4096)}, tmp_path / "c")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for name, files, why in (
        ("absent", (), "found nothing"),
        ("half", ("shard-00000-of-00001.safetensors",), "written last"),
        ("theirs", (".metadata", "__0_0.distcp"), "FileSystemWriter"),
    ):
        for file in files:
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).touch()
        with pytest.raises(CheckpointException, match=why):
            load({"w": torch.zeros(1)}, tmp_path / name)
    (tmp_path / f".absent.fp_multi-tmp-{'0' * 16}").mkdir()
    with pytest.raises(CheckpointException, match="interrupted"):
        load({"w": torch.zeros(1)}, tmp_path / "absent")
    save({"w": torch.zeros(1)}, tmp_path / "c")
    with pytest.raises(CheckpointException, match="Missing key"):
        load({"v": torch.zeros(1)}, tmp_path / "c")
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"w": torch.zeros(2)}, tmp_path / "c")


def test_what_is_there_already(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.mkdir()
    save({"w": torch.ones(1), "old": torch.ones(1)}, path)
    save({"w": torch.zeros(1)}, path)
    assert list(fp.load(path)) == ["w"]
    with pytest.raises(CheckpointException, match="Checkpoint already exists") as caught:
        save({"w": torch.ones(1)}, path, overwrite=False)
    assert isinstance(cause_of(caught), CheckpointExistsError)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").touch()
    save({"w": torch.ones(1)}, tmp_path / "other")
    assert (tmp_path / "other" / "precious").exists()
    (tmp_path / "other" / "inside").mkdir()
    with pytest.raises(CheckpointException, match=r"holds other directories \(inside\)"):
        save({"w": torch.zeros(1)}, tmp_path / "other")
    assert fp.load(tmp_path / "other")["w"].tolist() == [1]
    assert sorted(os.listdir(tmp_path)) == ["c", "other"]


def test_arguments_of_the_file_system_writer(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c", False, False, 4, 1000, True, True)
    assert writer.config.durable is False
    dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    into = {"w": torch.zeros(3)}
    dcp.load(into, storage_reader=StorageReader(tmp_path / "c"))
    assert into["w"].tolist() == [1, 1, 1]
    assert StorageWriter.validate_checkpoint_id(tmp_path / "a" / "b")
    assert not StorageWriter.validate_checkpoint_id("s3://bucket/x")
    assert StorageReader.validate_checkpoint_id(str(tmp_path))
    with pytest.raises(ConfigError, match="PerNode"):
        StorageWriter(config=fp.SaveConfig(writers=fp.per_node(2)))
    with pytest.raises(CheckpointException, match="checkpoint_id"):
        dcp.save({"w": torch.ones(1)}, storage_writer=StorageWriter())
    with pytest.raises(CheckpointException, match="checkpoint_id"):
        dcp.load({"w": torch.ones(1)}, storage_reader=StorageReader())


def descriptors() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def test_an_idle_writer_holds_nothing(tmp_path: Path) -> None:
    writer = StorageWriter(config=QUICK)
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a", storage_writer=writer)
    held = {one for one in descriptors() if str(tmp_path) in one}
    assert not held
    again = pickle.loads(pickle.dumps(writer))
    assert again.path == os.fspath(tmp_path / "a")
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "b", storage_writer=again)
    _engine.inject_fault("fallocate", error=28)
    with pytest.raises(CheckpointException, match="No space left"):
        dcp.save({"w": torch.ones(5)}, checkpoint_id=tmp_path / "a", storage_writer=writer)
    assert fp.load(tmp_path / "a")["w"].tolist() == [1, 1, 1]
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert not {one for one in descriptors() if str(tmp_path) in one}


class FailsElsewhere(dcp.DefaultSavePlanner):
    """As if another rank had failed: the storage is not told."""

    def finish_plan(self, new_plan: Any) -> Any:
        raise RuntimeError("elsewhere")


def test_what_a_failure_elsewhere_leaves(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    for retry in (True, False):
        writer = StorageWriter(config=QUICK)
        with pytest.raises(CheckpointException, match="elsewhere"):
            dcp.save(state, checkpoint_id=tmp_path / "a", storage_writer=writer, planner=FailsElsewhere())
        assert len(os.listdir(tmp_path)) == 1
        if retry:
            dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "b", storage_writer=writer)
            assert os.listdir(tmp_path) == ["b"]
            (tmp_path / "b").rename(tmp_path.parent / "b")
        del writer
        gc.collect()
        assert not os.listdir(tmp_path)


def test_saves_in_two_threads_share_a_writer(tmp_path: Path) -> None:
    writer = StorageWriter(config=QUICK)
    meet = threading.Barrier(2)

    class Meets(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            meet.wait(60)
            return super().finish_plan(new_plan)

    def run(number: int) -> None:
        state = {"w": torch.full((3,), float(number))}
        dcp.save(state, checkpoint_id=tmp_path / str(number), storage_writer=writer, planner=Meets())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [fp.load(tmp_path / str(number))["w"][0] for number in range(2)] == [0, 1]


def test_plans_of_another_writer(tmp_path: Path) -> None:
    """DCP's cache of plans is one for all writers of the process."""

    class Cached(dcp.DefaultSavePlanner):
        pass

    try:
        for number, writer in enumerate((dcp.FileSystemWriter(tmp_path / "0"), StorageWriter(), StorageWriter())):
            state = {"w": torch.full((3,), float(number)), "n": number}
            planner = Cached(enable_plan_caching=True)
            dcp.save(state, checkpoint_id=tmp_path / str(number), storage_writer=writer, planner=planner)
            if number:
                loaded = fp.load(tmp_path / str(number))
                assert loaded["n"] == number
                assert loaded["w"].tolist() == [number] * 3
    finally:
        for cache in vars(SavePlanner).values():
            if isinstance(cache, dict):
                cache.pop("Cached", None)


def test_a_planner_with_a_cache_of_its_own() -> None:
    item = _create_write_items("w", torch.ones(2))[0]
    plans = [SavePlan([], usable=False), SavePlan([item])]
    with pytest.raises(ConfigError, match="plan caching"):
        StorageWriter("c").prepare_global_plan(plans)
