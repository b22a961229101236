"""save() and load() for what trainers give to ``torch.save``: nested state of tensors and plain values."""

from __future__ import annotations

import os
from typing import Any

import fp_multi
from fp_multi import Comm, SaveReport
from fp_multi.config import LoadConfig, SaveConfig
from fp_multi.errors import ConfigError

from ._builder import builder_for
from ._location import MapLocation
from ._together import saving_together


def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    metadata: dict[str, str] | None = None,
    config: SaveConfig = SaveConfig(),
    allow_pickle: bool = False,
    comm: Comm | None = None,
) -> SaveReport:
    """Write a state as a checkpoint directory; it is durable on return.

    With ``comm=`` the ranks of a job save one checkpoint together. What all of them have (replicated parameters, as
    under DDP) is divided among them. A DTensor (FSDP2, tensor parallelism, or both) is stored as one whole tensor, of
    which each rank writes the part that it has; any other number of ranks can load it. A rank may have keys of its own
    (a sharded optimizer's states of its own parameters) and parts of tensors (flat buffers, as
    :class:`fp_multi.ShardOf`).

    Tensors keep dtype and bits, ``requires_grad``, being a Parameter, and the channels-last memory format; other
    strides are not kept. Two names of one tensor stay one tensor. Views that overlap otherwise become tensors of their
    own, and of a view only the view is stored. Python attributes set on a tensor, and its ``.grad``, are not stored.

    Args:
        obj: dicts, lists, tuples and named tuples of tensors and plain values, such as ``model.state_dict()``,
            ``optimizer.state_dict()``, or a dict of both.
        path: the checkpoint directory to make.
        overwrite: replace a checkpoint at ``path``.
        metadata: strings to keep with it.
        config: how to write.
        allow_pickle: pickle values (not tensors) that the format has no form for, instead of refusing them.
        comm: the ranks that save this together; all of them call this, with the same path. It may have only some of
            the job's ranks, if these have all parts of every DTensor.

    Returns:
        What was done, and how fast.

    Raises:
        UnsupportedLeafError: a value cannot be stored exactly; the message names its place and the way out, and
            nothing has been written.
        CheckpointExistsError: ``path`` exists and ``overwrite`` was not given.
        StorageError: the operating system refused an operation.
        CommError: another rank failed (RankFailedError) or is gone (CommTimeoutError); ``path`` is untouched.

    Example:
        >>> save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "step_100")  # doctest: +SKIP
    """
    with saving_together(comm):
        return fp_multi.save(
            obj,
            path,
            overwrite=overwrite,
            metadata=metadata,
            config=config,
            allow_pickle=allow_pickle,
            comm=comm,
        )


def load(
    path: str | os.PathLike[str],
    map_location: MapLocation = None,
    *,
    weights_only: bool = True,
    target: Any = None,
    only: Any = None,
    inplace: bool = False,
    config: LoadConfig = LoadConfig(),
    allow_pickle: bool = False,
    comm: Comm | None = None,
    broadcast: bool = False,
) -> Any:
    """Read a checkpoint directory.

    What torch or JAX saved comes back as torch tensors, each with memory of its own; NumPy arrays stay NumPy arrays. No
    code that a checkpoint names is ever imported or run, unless ``allow_pickle`` is given.

    Args:
        path: the checkpoint directory, whoever wrote it.
        map_location: where tensors go. None: to the device on which they were saved. A name (``"cpu"``, ``"cuda:0"``),
            a ``torch.device`` or the number of an accelerator: all of them there. A dict such as
            ``{"cuda:1": "cuda:0"}``: device by device. A function of a storage and the name of the device it was saved
            on: to the storage it returns, or back if it returns None.
        weights_only: only True, which is how it always is; taken for the sake of calls written for ``torch.load``.
        target: a state of the same structure to load into or like, see :func:`fp_multi.load`. A DTensor in it becomes
            one with the same mesh and placements: each rank reads just its part, however many ranks saved it. Without a
            target what was a DTensor is a whole tensor.
        only: the paths of the subtrees wanted.
        inplace: read into the memory of the target's tensors.
        config: how to read.
        allow_pickle: unpickle the values that were saved with ``allow_pickle=True``. Only for files you trust.
        comm: the ranks that load this together. Without ``broadcast`` each reads by itself what it needs.
        broadcast: all ranks of ``comm`` load the same: each reads a share of the bytes from the drive, and they give
            each other the rest over gloo. Parts of DTensors are read by each rank for itself, unless they lie between
            each other's (columns of what was written by rows): those the ranks of a host read together.

    Returns:
        The state.

    Raises:
        CapabilityError: a tensor belongs on a device that is not here.
        CheckpointNotFoundError: there is no checkpoint at ``path``.
        ConfigError: ``map_location`` has none of the known forms, or ``weights_only=False`` was passed.
        CorruptCheckpointError: stored bytes are not what was written.
        PickleRefusedError: the checkpoint holds a pickled value.
        TargetMismatchError: ``target`` does not fit; the message names the leaf.
        UnsupportedLeafError: this torch does not have the dtype of a tensor.

    Example:
        >>> state = load("step_100", map_location="cpu")  # doctest: +SKIP
        >>> model.load_state_dict(state["model"])  # doctest: +SKIP
    """
    if weights_only is not True and weights_only is not None:
        raise ConfigError(
            f"weights_only={weights_only!r}: loading never runs code from a checkpoint; if it was saved with pickled "
            "values and you trust it, pass allow_pickle=True instead"
        )
    return fp_multi.load(
        path,
        target=target,
        only=only,
        inplace=inplace,
        config=config,
        allow_pickle=allow_pickle,
        tensor_builder=builder_for(map_location, inplace=inplace),
        comm=comm,
        broadcast=broadcast,
    )
