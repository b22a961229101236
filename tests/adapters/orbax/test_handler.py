"""FastPersistHandler in every host that Orbax has for it, and what a save must survive."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import Gate
from support import flip, injected

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
import jax.numpy as jnp  # noqa: E402

import fp_multi as fp  # noqa: E402
from fp_multi import _engine  # noqa: E402
from fp_multi.adapters.orbax import (  # noqa: E402
    FastPersistHandler,
    FastPersistRestore,
    FastPersistSave,
    load,
)
from fp_multi.errors import (  # noqa: E402
    ChecksumError,
    CommError,
    ConfigError,
    StorageError,
    TargetMismatchError,
    UnsupportedLeafError,
)

COUNT = 1 << 18


def state_of(step: int = 0) -> dict[str, Any]:
    return {"w": jnp.arange(12.0).reshape(3, 4) + step, "n": np.arange(5) * step, "step": step}


def check(found: Any, step: int = 0) -> None:
    expected = state_of(step)
    assert set(found) == set(expected)
    assert isinstance(found["w"], jax.Array)
    assert type(found["n"]) is np.ndarray
    np.testing.assert_array_equal(found["w"], expected["w"])
    np.testing.assert_array_equal(found["n"], expected["n"])
    assert found["step"] == step


def quick() -> FastPersistHandler:
    return FastPersistHandler(config=fp.SaveConfig(block_bytes=64 << 10, queue_depth=2))


# Ways in


def registry_of(handler: FastPersistHandler) -> Any:
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("default", FastPersistSave, handler)
    registry.add("default", FastPersistRestore, handler)
    return registry


HOSTS: dict[str, Callable[[], dict[str, Any]]] = {
    "args alone": dict,
    "item_handlers": lambda: {"item_handlers": FastPersistHandler()},
    "registry": lambda: {"handler_registry": registry_of(FastPersistHandler())},
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("in_background", [True, False])
def test_manager(tmp_path: Path, host: str, in_background: bool) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=in_background)
    with ocp.CheckpointManager(tmp_path, options=options, **HOSTS[host]()) as manager:
        for step in range(4):
            assert manager.save(step, args=FastPersistSave(state_of(step), custom_metadata={"at": step}))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        check(manager.restore(3, args=FastPersistRestore(state_of())), 3)
        check(manager.restore(2), 2)
        assert manager.item_metadata(3).custom_metadata == {"at": 3}
    # Who wrote it is in the checkpoint: another process, so to say, needs no args.
    with ocp.CheckpointManager(tmp_path, **(HOSTS[host]() if host == "item_handlers" else {})) as manager:
        check(manager.restore(3), 3)
        assert manager.item_metadata(3)["w"].shape == (3, 4)
        assert manager.metadata(3).item_metadata["w"].dtype == np.float32
    item = tmp_path / "3" / "default"
    assert sorted(os.listdir(item)) == [
        "_METADATA",
        "commit_success.txt",
        "manifest.json",
        "shard-00000-of-00001.safetensors",
    ]
    fp.verify(item)
    np.testing.assert_array_equal(fp.load(item)["w"], state_of(3)["w"])
    check(load(item), 3)
    torch = pytest.importorskip("torch")
    from fp_multi.adapters.torch import load as load_torch

    assert torch.equal(load_torch(item)["w"], torch.arange(12.0).reshape(3, 4) + 3)


def test_composite(tmp_path: Path) -> None:
    handlers = {"params": FastPersistHandler(), "opt": FastPersistHandler()}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
        args = ocp.args.Composite(params=FastPersistSave(state_of(1)), opt=FastPersistSave(state_of(2)))
        assert manager.save(0, args=args)
        manager.wait_until_finished()
        found = manager.restore(0, args=ocp.args.Composite(opt=FastPersistRestore(state_of())))
        check(found["opt"], 2)
        assert "params" not in found
    with ocp.CheckpointManager(tmp_path) as manager:
        args = ocp.args.Composite(params=FastPersistSave(state_of(1)), cfg=ocp.args.JsonSave({"lr": 1}))
        assert manager.save(1, args=args)
        manager.wait_until_finished()
        found = manager.restore(1)
        check(found["params"], 1)
        assert found["cfg"] == {"lr": 1}


def test_best_and_preservation(tmp_path: Path) -> None:
    policy = ocp.checkpoint_managers.BestN(get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=2)
    options = ocp.CheckpointManagerOptions(
        best_fn=lambda metrics: metrics["loss"], best_mode="min", preservation_policy=policy
    )
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step, loss in enumerate((3.0, 1.0, 2.0, 5.0)):
            assert manager.save(step, args=FastPersistSave(state_of(step)), metrics={"loss": loss})
        manager.wait_until_finished()
        assert manager.best_step() == 1
        assert manager.all_steps() == [1, 2]
        check(manager.restore(manager.best_step()), 1)


@pytest.mark.parametrize("host", [ocp.Checkpointer, ocp.AsyncCheckpointer])
def test_checkpointers(tmp_path: Path, host: Any) -> None:
    with host(FastPersistHandler()) as ckpt:

        def save(*args: Any, **how: Any) -> None:
            ckpt.save(*args, **how)
            if host is ocp.AsyncCheckpointer:
                ckpt.wait_until_finished()

        save(tmp_path / "a", args=FastPersistSave(state_of(1), custom_metadata={"x": [1]}))
        check(ckpt.restore(tmp_path / "a"), 1)
        check(ckpt.restore(tmp_path / "a", args=FastPersistRestore(state_of())), 1)
        check(ckpt.restore(tmp_path / "a", item=state_of()), 1)
        with pytest.raises(ValueError, match="already exists"):
            save(tmp_path / "a", args=FastPersistSave(state_of(2)))
        save(tmp_path / "a", state_of(3), force=True)
        check(ckpt.restore(tmp_path / "a"), 3)
        metadata = ckpt.metadata(tmp_path / "a")
        assert metadata.item_handlers == "fp_multi.adapters.orbax.FastPersistHandler"
        assert metadata.item_metadata["w"].shape == (3, 4)
        with pytest.raises(FileNotFoundError):
            ckpt.restore(tmp_path / "nothing")


def test_the_handler_alone(tmp_path: Path) -> None:
    handler = FastPersistHandler()
    handler.save(tmp_path, args=FastPersistSave(state_of(1)))
    with pytest.raises(FileNotFoundError):
        handler.restore(tmp_path)
    handler.finalize(tmp_path)
    check(handler.restore(tmp_path), 1)
    check(handler.restore(tmp_path, state_of()), 1)
    with pytest.raises(ConfigError, match="args="):
        handler.save(tmp_path, FastPersistSave(state_of()))
    with pytest.raises(ConfigError, match="args="):
        handler.restore(tmp_path, FastPersistRestore(state_of()))
    handler.close()


def test_names_are_lazy() -> None:
    from support import check_child

    code = """
        import fp_multi.adapters.orbax as adapter
        assert not {"orbax", "flax", "tensorstore"} & set(sys.modules)
        assert "FastPersistSave" in dir(adapter)
        import orbax.checkpoint as ocp
        assert adapter.FastPersistHandler().typestr() == "fp_multi.adapters.orbax.FastPersistHandler"
        assert ocp.args.has_registered_args(adapter.FastPersistHandler)
    """
    check_child(code)


@pytest.mark.parametrize("name", ["a [1]", "*", "sp ace", "ünï 😀", "100%", "a{b}", "'q'\"", "back\\slash", "~x"])
def test_paths(tmp_path: Path, name: str) -> None:
    with ocp.CheckpointManager(tmp_path / name / "run[0]", item_handlers={name: FastPersistHandler()}) as manager:
        assert manager.save(0, args=ocp.args.Composite(**{name: FastPersistSave(state_of(1))}))
        manager.wait_until_finished()
        check(manager.restore(0, args=ocp.args.Composite(**{name: FastPersistRestore(state_of())}))[name], 1)
        assert manager.item_metadata(0)[name]["w"].shape == (3, 4)
    fp.verify(tmp_path / name / "run[0]" / "0" / name)


# What may happen while a save is on its way


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


def saved_while(tmp_path: Path, gate: Gate, array: Any, meanwhile: Callable[[], Any]) -> Any:
    """Save an array; when save() has returned and nothing is read yet, do something; return what was saved."""
    with ocp.CheckpointManager(tmp_path, item_handlers=quick()) as manager:
        manager.save(0, args=FastPersistSave({"gate": gate, "array": array}))
        kept = meanwhile()
        assert manager.is_saving_in_progress()
        gate.open()
        manager.wait_until_finished()
        del kept
        return manager.restore(0)["array"]


def test_donation(tmp_path: Path, gate: Gate) -> None:
    donating = jax.jit(lambda weights: weights * 2 + 1, donate_argnums=0)
    array = jnp.arange(COUNT, dtype=jnp.float32)

    def train() -> Any:
        weights = array
        for _ in range(5):
            weights = donating(weights)
        return weights.block_until_ready()

    found = saved_while(tmp_path, gate, array, train)
    np.testing.assert_array_equal(found, np.arange(COUNT, dtype=np.float32))


def test_donation_is_in_place_again_after_the_save(tmp_path: Path) -> None:
    donating = jax.jit(lambda weights: weights * 2 + 1, donate_argnums=0)
    array = jnp.arange(COUNT, dtype=jnp.float32)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=FastPersistSave({"array": array}))
        manager.wait_until_finished()
        place = array.unsafe_buffer_pointer()
        assert donating(array).unsafe_buffer_pointer() == place


def test_deletion(tmp_path: Path, gate: Gate) -> None:
    array = jnp.arange(COUNT, dtype=jnp.float32)

    def reuse() -> Any:
        array.delete()
        return [jnp.full(COUNT, i, jnp.float32).block_until_ready() for i in range(8)]

    found = saved_while(tmp_path, gate, array, reuse)
    np.testing.assert_array_equal(found, np.arange(COUNT, dtype=np.float32))


@pytest.mark.parametrize("kind", ["array", "strided", "bytearray"])
def test_mutation(tmp_path: Path, gate: Gate, kind: str) -> None:
    base = np.arange(2 * COUNT, dtype=np.float32)
    value: Any = {"array": base, "strided": base[::2], "bytearray": bytearray(base.tobytes())}[kind]
    expected = np.array(value)

    def change() -> None:
        if kind == "bytearray":
            value[:4] = b"1234"
            value.extend(b"more")
        else:
            value[:] = -1

    np.testing.assert_array_equal(np.array(saved_while(tmp_path, gate, value, change)), expected)


def test_a_save_in_the_foreground_copies_nothing(tmp_path: Path) -> None:
    array = np.zeros(1 << 20)
    handler = FastPersistHandler()
    from fp_multi.adapters.orbax._plain import Plain

    assert Plain({"a": array}, copy=False).state["a"] is array
    copied = Plain({"a": array, "b": [array]}, copy=True).state
    assert copied["a"] is not array
    assert copied["a"] is copied["b"][0]
    handler.save(tmp_path, args=FastPersistSave({"a": array}))


def test_jax_arrays_are_not_copied() -> None:
    from fp_multi._tree import describe
    from fp_multi.adapters.orbax._plain import Plain

    array = jnp.arange(1 << 16)
    (source,) = describe(Plain({"a": array}, copy=True).state).sources
    assert source.address == array.unsafe_buffer_pointer()


def test_deleting_the_step_that_is_being_saved(tmp_path: Path, gate: Gate) -> None:
    with ocp.CheckpointManager(tmp_path, item_handlers=quick()) as manager:
        manager.save(0, args=FastPersistSave(state_of(0)))
        manager.wait_until_finished()
        manager.save(1, args=FastPersistSave({"gate": gate, "array": jnp.arange(COUNT)}))
        while not list(tmp_path.glob("1.*/*/*.safetensors")):
            time.sleep(0.01)  # Orbax makes its directories in the background
        deleting = threading.Thread(target=manager.delete, args=(1,))
        deleting.start()
        deleting.join(30)
        assert not deleting.is_alive()
        gate.open()
        with pytest.raises(Exception, match=r"does not exist|No such file|not found|missing"):
            manager.wait_until_finished()
        assert manager.save(2, args=FastPersistSave(state_of(2)))
        manager.wait_until_finished()
        assert 2 in manager.all_steps()
        check(manager.restore(2), 2)


# Failures


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize(
    ("point", "code"), [("write_completion", errno.EIO), ("write_completion", errno.ENOSPC), ("fdatasync", errno.EIO)]
)
def test_a_failed_save_leaves_what_was_there(tmp_path: Path, point: str, code: int, in_background: bool) -> None:
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=in_background)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        manager.save(0, args=FastPersistSave(state_of(0)))
        manager.wait_until_finished()

        def fail() -> None:
            manager.save(1, args=FastPersistSave(state_of(1)))
            manager.wait_until_finished()

        with injected(point, at=1, error=code), pytest.raises(StorageError) as caught:
            fail()
        assert caught.value.errno == code
        if in_background:
            assert manager.all_steps() == [0]
        check(manager.restore(0), 0)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [0]
        assert manager.save(1, args=FastPersistSave(state_of(1)))
        manager.wait_until_finished()
        check(manager.restore(1), 1)


def test_every_flush_comes_before_the_rename(tmp_path: Path) -> None:
    order: list[str] = []
    real_rename, real_fsync = os.rename, _engine.fsync_path
    handler = FastPersistHandler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_engine, "fsync_path", lambda path: (order.append("fsync"), real_fsync(path))[1])
        patch.setattr(os, "rename", lambda *paths, **how: (order.append("rename"), real_rename(*paths, **how))[1])
        finalize = handler.finalize

        def watched(directory: Any) -> None:
            finalize(directory)
            order.append("finalized")

        patch.setattr(handler, "finalize", watched)
        with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
            manager.save(0, args=FastPersistSave(state_of()))
            manager.wait_until_finished()
    assert order.index("fsync") < order.index("finalized")
    assert "rename" not in order[: order.index("finalized")]


def test_damage_is_found(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=FastPersistSave(state_of()))
        manager.wait_until_finished()
        (shard,) = (tmp_path / "0" / "default").glob("*.safetensors")
        flip(shard, -1)
        with pytest.raises(ChecksumError):
            manager.restore(0)
        manager.item_metadata(0)


def test_parts_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(CommError, match="expected parts of all processes, found 0"):
        FastPersistHandler().finalize(tmp_path)


@pytest.mark.parametrize(
    ("item", "error", "match"),
    [
        ({}, ValueError, "nothing to save"),
        (None, ValueError, "nothing to save"),
        ({"a": {"b": object()}}, UnsupportedLeafError, r"a\.b"),
        ({"a": jax.ShapeDtypeStruct((3,), np.float32)}, UnsupportedLeafError, "a: cannot store"),
        ({"a": ...}, UnsupportedLeafError, "a: cannot store"),
        ({"a": {1, 2}}, UnsupportedLeafError, "a: cannot store"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, item: Any, error: Any, match: str) -> None:
    # Not in the background: Orbax's own threads wait for minutes for directories of a save that has not begun.
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        with pytest.raises(error, match=match):
            manager.save(0, args=FastPersistSave(item))
        assert manager.save(1, args=FastPersistSave({"a": 1}))
        assert manager.restore(1) == {"a": 1}


def test_what_else_cannot_be_saved(tmp_path: Path) -> None:
    handler = FastPersistHandler()
    with pytest.raises(ConfigError, match="custom_metadata"):
        handler.save(tmp_path, args=FastPersistSave({"a": 1}, custom_metadata={"a": object()}))
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UnsupportedLeafError, match="nested deeper"):
        handler.save(tmp_path, args=FastPersistSave({"a": loop}))
    deleted = jnp.ones(3)
    deleted.delete()
    with pytest.raises(UnsupportedLeafError, match="a: the array was deleted"):
        handler.save(tmp_path, args=FastPersistSave({"a": deleted}))
    assert not os.listdir(tmp_path)


def test_pickled_values_stay_pickled(tmp_path: Path) -> None:
    fp.save({"a": object}, tmp_path / "ckpt", allow_pickle=True)
    with pytest.raises(ValueError, match="pickled"):
        FastPersistHandler().restore(tmp_path / "ckpt")


def test_process_options() -> None:
    with pytest.raises(ConfigError, match="primary_host 1"):
        FastPersistHandler(
            multiprocessing_options=ocp.options.MultiprocessingOptions(primary_host=1, active_processes={0})
        )


def test_every_process_can_be_primary(tmp_path: Path) -> None:
    options = ocp.options.MultiprocessingOptions(primary_host=None)
    with ocp.Checkpointer(FastPersistHandler(multiprocessing_options=options)) as ckpt:
        ckpt.save(tmp_path / "a", args=FastPersistSave(state_of(1)))
        check(ckpt.restore(tmp_path / "a"), 1)


def test_metadata_is_no_state(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=FastPersistSave(state_of(1)))
        manager.wait_until_finished()
        metadata = manager.item_metadata(0)
        with pytest.raises(ConfigError, match="metadata of a checkpoint"):
            FastPersistSave(metadata)
        check(manager.restore(0, args=FastPersistRestore(metadata)), 1)
        with pytest.raises(TargetMismatchError, match="on disk only: n"):
            manager.restore(0, args=FastPersistRestore({"w": metadata["w"], "step": 0}))
