"""Many more ways to keep a state. Each is imported when it is used, so that what is not installed is only left out."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _contenders import State, dcp_saver, load_dcp, load_safetensors_copied
from _harness import MIB, Arrays

import fp_multi as fp
from fp_multi.adapters import torch as fp_torch

Tensors = dict[str, torch.Tensor]


class Opened(NamedTuple):
    """A way that is installed, with the state it saves."""

    save: Callable[[Path], Callable[[], object] | None]
    """Returns when the caller has the state back; what it returns, if anything, waits for the rest."""
    load: Callable[[Path], object] | None
    """Every byte, into memory of its own."""
    close: Callable[[], object] = lambda: None


class Way(NamedTuple):
    """One way to keep a state."""

    name: str
    opened: Callable[[State], Opened]
    """Raises ImportError, or what else keeps it from running here."""
    how: str
    """Settings, where they are not the defaults."""
    takes_memory: bool = True
    """Whether a save takes memory for the state's bytes."""
    package: str | None = None
    """Whose version is shown."""

    def setting(self) -> str:
        """For the table."""
        version = f"{self.package} {importlib.metadata.version(self.package)}" if self.package else ""
        return ", ".join(part for part in (version, self.how) if part)


# Ours, and those that are always here


def _ours(**settings: Any) -> Callable[[State], Opened]:
    def opened(state: State) -> Opened:
        def save(path: Path) -> None:
            fp_torch.save(state.tensors, path, config=fp.SaveConfig(**settings))

        return Opened(save, lambda path: fp_torch.load(path, config=fp.LoadConfig(**settings)))

    return opened


def _torch_save(*, crc: bool) -> Callable[[State], Opened]:
    def opened(state: State) -> Opened:
        from torch.utils.serialization import config

        def save(path: Path) -> None:
            with config.patch({"save.compute_crc32": crc}):
                torch.save(state.tensors, path)

        return Opened(save, lambda path: torch.load(path, weights_only=True))

    return opened


def _safetensors(state: State) -> Opened:
    import safetensors.torch

    return Opened(lambda path: safetensors.torch.save_file(state.tensors, path), load_safetensors_copied)


def _dcp(threads: int) -> Callable[[State], Opened]:
    save = dcp_saver(threads)
    return lambda state: Opened(lambda path: save(state, path), load_dcp)


# Those that may be installed


def _torchsnapshot(state: State) -> Opened:
    from torchsnapshot import Snapshot, StateDict

    def load(path: Path) -> Any:
        into = StateDict(**{name: torch.empty_like(tensor) for name, tensor in state.tensors.items()})
        Snapshot(str(path)).restore({"state": into})
        return into

    def save(path: Path) -> None:
        Snapshot.take(str(path), {"state": StateDict(**state.tensors)})

    return Opened(save, load)


def _torch_checkpointing(*, asynchronous: bool) -> Callable[[State], Opened]:
    def opened(state: State) -> Opened:
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        config = (
            CheckpointManager.Config.with_async_save() if asynchronous else CheckpointManager.Config.with_sync_save()
        )
        # Its default opens with O_DIRECT and then writes from unaligned memory: EINVAL on ext4.
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        config.load.use_mmap = False
        config.items = {"state": ItemSpec()}
        if asynchronous and not torch.cuda.is_available():
            staging = config.save.staging_config
            staging.use_pinned_memory = staging.use_non_blocking_copy = False
        manager = config.build()

        def save(path: Path) -> Callable[[], object] | None:
            future = manager.save(str(path), {"state": state.tensors})
            return None if future is None else future.result

        return Opened(save, lambda path: manager.load(str(path)), manager.close)

    return opened


def _deepspeed(state: State) -> Opened:
    import deepspeed.io.fast_file_writer as writer
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.utils import UtilsBuilder

    # Plain C++, which DeepSpeed does not offer where there is no GPU.
    writer.UtilsBuilder = UtilsBuilder
    handle = (
        AsyncIOBuilder()
        .load()
        .aio_handle(block_size=MIB, queue_depth=8, single_submit=False, overlap_events=True, intra_op_parallelism=1)
    )
    buffer = handle.new_cpu_locked_tensor(64 * MIB, torch.empty(0, dtype=torch.uint8))

    def save(path: Path) -> None:
        config = writer.FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=buffer, double_buffer=True)
        file = writer.FastFileWriter(str(path), config)
        # It takes no seeks, so the older format.
        torch.save(state.tensors, file, _use_new_zipfile_serialization=False)
        file.close()

    return Opened(save, lambda path: torch.load(path, weights_only=True), lambda: handle.free_cpu_locked_tensor(buffer))


def _orbax(*, asynchronous: bool, ocdbt: bool = True, compress: bool = True) -> Callable[[State], Opened]:
    def opened(state: State) -> Opened:
        import jax
        import orbax.checkpoint as ocp

        logging.getLogger("absl").setLevel(logging.ERROR)
        values = {name: jax.device_put(array) for name, array in state.arrays.items()}
        like = {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for n, v in values.items()}
        # StandardSave is this handler with its defaults, and has no setting for compression.
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_compression=compress)
        checkpointer = ocp.AsyncCheckpointer(handler) if asynchronous else ocp.Checkpointer(handler)
        restore = ocp.args.PyTreeRestore(like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))

        def save(path: Path) -> Callable[[], object] | None:
            checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(values))
            return checkpointer.wait_until_finished if asynchronous else None

        def load(path: Path) -> Any:
            return jax.block_until_ready(checkpointer.restore(path.absolute(), args=restore))

        return Opened(save, load, checkpointer.close)

    return opened


def _tensorstore(state: State) -> Opened:
    import tensorstore as ts

    def opened(path: Path, name: str, **create: Any) -> Any:
        return ts.open({"driver": "zarr3", "kvstore": f"file://{path.absolute()}/{name}/"}, **create)

    def save(path: Path) -> None:
        stores = [
            opened(
                path,
                name,
                create=True,
                dtype=array.dtype,
                shape=array.shape,
                chunk_layout=ts.ChunkLayout(chunk_shape=array.shape),
            )
            for name, array in state.arrays.items()
        ]
        writes = [store.result().write(array) for store, array in zip(stores, state.arrays.values(), strict=True)]
        for write in writes:
            write.result()

    def load(path: Path) -> Arrays:
        stores = [opened(path, name) for name in state.arrays]
        reads = [store.result().read() for store in stores]
        return {name: read.result() for name, read in zip(state.arrays, reads, strict=True)}

    return Opened(save, load)


WAYS = (
    Way("fp_multi", _ours(), "io_uring, O_DIRECT", takes_memory=False),
    Way("fp_multi, threads", _ours(io_uring="off"), "O_DIRECT", takes_memory=False),
    Way("fp_multi, uncached", _ours(direct="off"), "io_uring, RWF_DONTCACHE where it is there"),
    Way("fp_multi, page cache", _ours(direct="off", dontcache="off"), "io_uring"),
    Way("torch.save", _torch_save(crc=True), "", package="torch"),
    Way("torch.save, no CRC", _torch_save(crc=False), "save.compute_crc32 = False", package="torch"),
    Way("safetensors", _safetensors, "", package="safetensors"),
    *(Way(f"torch DCP, {n} thread{'s' if n > 1 else ''}", _dcp(n), "sync_files", package="torch") for n in (1, 2, 4)),
    Way("torchsnapshot", _torchsnapshot, "", package="torchsnapshot"),
    *(
        Way(
            f"torch_checkpointing, {'async' if asynchronous else 'sync'}",
            _torch_checkpointing(asynchronous=asynchronous),
            "use_direct_io = False",
            package="torch_checkpointing",
        )
        for asynchronous in (False, True)
    ),
    *(
        Way(
            f"Orbax, {'async' if asynchronous else 'sync'}{what}",
            _orbax(asynchronous=asynchronous, **settings),
            how,
            package="orbax-checkpoint",
        )
        for what, settings, how in (
            ("", {}, "as StandardSave"),
            (", no OCDBT", {"ocdbt": False}, "use_ocdbt = False"),
            (", uncompressed", {"compress": False}, "use_compression = False"),
        )
        for asynchronous in (False, True)
    ),
    Way(
        "DeepSpeed FastFileWriter",
        _deepspeed,
        "libaio, double buffer of 64 MiB, 1 MiB x 8",
        takes_memory=False,
        package="deepspeed",
    ),
    Way("TensorStore zarr3", _tensorstore, "one chunk an array, no compression", package="tensorstore"),
)
