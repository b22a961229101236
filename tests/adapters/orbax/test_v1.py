"""Orbax's newer interface: its functions, its training Checkpointer, and checkpoints of the older one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
from orbax.checkpoint import v1  # noqa: E402
from support import flip, injected  # noqa: E402

import fp_multi as fp  # noqa: E402
from fp_multi.adapters.orbax import (  # noqa: E402
    FastPersistCheckpointable,
    FastPersistRestore,
    FastPersistSave,
    fastpersist_registry,
)
from fp_multi.errors import ChecksumError, StorageError, TargetMismatchError  # noqa: E402

STATE = {"w": np.arange(12.0).reshape(3, 4), "opt": (np.int32(3), [1, "two", None]), "step": 7, "rate": 0.5}


@pytest.fixture(autouse=True)
def context() -> Iterator[Any]:
    context = v1.Context()
    context.checkpointables.registry = fastpersist_registry()
    with context:
        yield context


def make_state() -> dict[str, Any]:
    return {**STATE, "jax": jax.numpy.arange(6.0), "key": jax.random.key(3)}


def check(found: Any) -> None:
    assert found["step"] == 7
    assert found["rate"] == 0.5
    assert found["opt"] == (3, [1, "two", None])
    np.testing.assert_array_equal(found["w"], STATE["w"])
    np.testing.assert_array_equal(found["jax"], np.arange(6.0))
    assert (found["key"] == jax.random.key(3)).all()


def test_save_and_load(tmp_path: Path) -> None:
    v1.save(tmp_path / "ckpt", make_state())
    assert (tmp_path / "ckpt" / "state" / "_METADATA").exists()
    check(v1.load(tmp_path / "ckpt"))
    check(v1.load(tmp_path / "ckpt", make_state()))
    check(fp.load(tmp_path / "ckpt" / "state", tensor_builder=None) | {"key": jax.random.key(3)})
    fp.verify(tmp_path / "ckpt" / "state")


def test_metadata_is_a_target(tmp_path: Path) -> None:
    v1.save(tmp_path / "ckpt", {**STATE, "jax": jax.numpy.arange(6.0)})
    metadata = v1.metadata(tmp_path / "ckpt").metadata
    assert metadata["jax"].shape == (6,)
    assert metadata["jax"].dtype == np.float32
    assert metadata["jax"].sharding == jax.numpy.arange(6.0).sharding
    found = v1.load(tmp_path / "ckpt", metadata)
    np.testing.assert_array_equal(found["w"], STATE["w"])
    assert found["step"] == 7


def test_async_saves_copy_what_may_change(tmp_path: Path) -> None:
    state = make_state()
    state["w"] = state["w"].copy()
    response = v1.save_async(tmp_path / "ckpt", state)
    state["w"][:] = -1
    response.result()
    check(v1.load(tmp_path / "ckpt"))


def test_an_error_comes_out_of_the_response(tmp_path: Path) -> None:
    with injected("write_completion", at=1, error=5), pytest.raises(StorageError):
        v1.save(tmp_path / "ckpt", make_state())
    v1.save(tmp_path / "ckpt", make_state(), overwrite=True)
    check(v1.load(tmp_path / "ckpt"))


def test_options_of_the_context(tmp_path: Path) -> None:
    v1.save(tmp_path / "ckpt", make_state())
    context = v1.Context()
    context.checkpointables.registry = fastpersist_registry()
    with pytest.raises(TargetMismatchError, match="on disk only"):
        v1.load(tmp_path / "ckpt", {"step": 0})
    context.pytree.loading.partial_load = True
    context.array.loading.enable_padding_and_truncation = True
    with context:
        found = v1.load(tmp_path / "ckpt", {"step": 0, "w": np.zeros((2, 6))})
    expected = np.zeros((2, 6))
    expected[:, :4] = STATE["w"][:2]
    assert found["step"] == 7
    np.testing.assert_array_equal(found["w"], expected)
    context = v1.Context()
    context.checkpointables.registry = fastpersist_registry()
    context.array.saving.storage_options.dtype = np.float16
    with context:
        v1.save(tmp_path / "half", {"w": STATE["w"], "step": 7})
    assert fp.load(tmp_path / "half" / "state")["w"].dtype == np.float16


def test_several_checkpointables(tmp_path: Path) -> None:
    context = v1.Context()
    context.checkpointables.registry = fastpersist_registry("params", "opt")
    with context:
        v1.save_checkpointables(
            tmp_path / "ckpt", {"params": {"w": STATE["w"]}, "opt": {"m": STATE["w"]}, "x": {"a": 1}}
        )
        found = v1.load_checkpointables(tmp_path / "ckpt", {"params": {"w": np.zeros((3, 4))}, "opt": None})
    np.testing.assert_array_equal(found["params"]["w"], STATE["w"])
    np.testing.assert_array_equal(found["opt"]["m"], STATE["w"])
    assert (tmp_path / "ckpt" / "opt" / "manifest.json").exists()
    assert not (tmp_path / "ckpt" / "x" / "manifest.json").exists()


def test_training_checkpointer(tmp_path: Path, context: Any) -> None:
    with v1.training.Checkpointer(
        tmp_path,
        context=context,
        save_decision_policy=v1.training.save_decision_policies.FixedIntervalPolicy(1),
        preservation_policy=v1.training.preservation_policies.LatestN(2),
    ) as ckpt:
        for step in range(4):
            ckpt.save_async(step, {**make_state(), "at": step})
        ckpt.wait()
        assert [found.step for found in ckpt.checkpoints] == [2, 3]
        found = ckpt.load(3, {**make_state(), "at": 0})
        check(found)
        assert found["at"] == 3
        assert ckpt.load()["at"] == 3
        assert ckpt.metadata(3).metadata["w"].shape == (3, 4)
    assert "commit_success.txt" in os.listdir(tmp_path / "3" / "state")


def test_opens_what_the_older_interface_saved(tmp_path: Path, context: Any) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=FastPersistSave(make_state()))
    check(v1.load_checkpointables(tmp_path / "0", {"default": make_state()})["default"])
    check(v1.load_checkpointables(tmp_path / "0")["default"])
    check(v1.load(tmp_path / "0", checkpointable_name="default"))
    with v1.training.Checkpointer(tmp_path, context=context) as ckpt:
        check(ckpt.load(0, make_state(), checkpointable_name="default"))


def test_the_older_interface_opens_its_checkpoints(tmp_path: Path, context: Any) -> None:
    with v1.training.Checkpointer(tmp_path, context=context) as ckpt:
        ckpt.save(5, make_state())
    with ocp.CheckpointManager(tmp_path) as manager:
        check(manager.restore(5, args=ocp.args.Composite(state=FastPersistRestore()))["state"])


def test_damage_is_found(tmp_path: Path) -> None:
    v1.save(tmp_path / "ckpt", make_state())
    (shard,) = (tmp_path / "ckpt" / "state").glob("*.safetensors")
    flip(shard, -1)
    with pytest.raises(ChecksumError):
        v1.load(tmp_path / "ckpt")


def test_what_it_takes() -> None:
    handler = FastPersistCheckpointable()
    assert handler.is_handleable(make_state())
    assert not handler.is_handleable({"a": object()})
    assert handler.is_abstract_handleable(jax.eval_shape(lambda: {"a": jax.numpy.ones(3)}))
    assert handler.is_abstract_handleable(None) is None
    assert not handler.is_abstract_handleable({"a": object()})
