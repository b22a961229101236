"""Every rank for itself: ``use_collectives=False`` of dcp.save, in a checkpoint of the rank's own (docs/dcp.md)."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Sequence

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from fp_multi.errors import CheckpointExistsError, TargetMismatchError
from fp_multi.storage import is_checkpoint, resolve

from ._dcp_metadata import Catalog

_NAME = re.compile(r"rank-\d{5,}")


def rank_directory(path: str | os.PathLike[str], rank: int) -> str:
    """Where a rank's own checkpoint is.

    Args:
        path: what dcp.save was given.
        rank: in the process group of the save.
    """
    return os.path.join(os.fspath(path), f"rank-{rank:05d}")


def check_shared_place(path: str | os.PathLike[str]) -> None:
    """Refuse a directory that is a checkpoint of all ranks, because dcp.load would read that one.

    Raises:
        CheckpointExistsError: it is.
    """
    place = resolve(path)
    if is_checkpoint(place):
        raise CheckpointExistsError(
            errno.EEXIST,
            "a checkpoint of all ranks is here, which dcp.load would read before those of single ranks "
            "(use_collectives=False); remove it first, or choose another path",
            place,
        )


def is_rank_directory(path: str) -> bool:
    """Whether a path is named as a rank's own checkpoint is."""
    return _NAME.fullmatch(os.path.basename(path)) is not None


def ranks_in(path: str) -> list[str]:
    """Names of the ranks' own checkpoints in a directory."""
    try:
        names = os.listdir(path)
    except OSError:
        return []
    return sorted([name for name in names if _NAME.fullmatch(name) and is_checkpoint(os.path.join(path, name))])


def check_covered(items: Sequence[ReadItem], planner: LoadPlanner, catalog: Catalog) -> None:
    """Refuse to load what a rank did not save: DCP itself would leave the rest of the tensors as they were.

    Args:
        items: of the plan.
        planner: of the load.
        catalog: of the checkpoint.

    Raises:
        TargetMismatchError: parts that are wanted are not there; with the tensor's name.
    """
    if not catalog.parts or not isinstance(planner, DefaultLoadPlanner):
        return
    found = dict.fromkeys(catalog.parts, 0)
    for item in items:
        if item.dest_index.fqn in found:
            found[item.dest_index.fqn] += math.prod(item.lengths)
    for fqn, number in found.items():
        if fqn not in planner.state_dict:
            continue
        wanted = sum([math.prod(chunk.sizes) for chunk in _create_chunk_list(planner.state_dict[fqn])])
        if number != wanted:
            have = ", ".join([f"{list(part.start)}" for part in catalog.parts[fqn]])
            raise TargetMismatchError(
                f"{fqn}: {wanted} elements are wanted, and {number} of them are here: this rank saved for itself "
                f"(use_collectives=False) only its own parts, at {have}. Load with the ranks and the sharding of the "
                "save, or save with use_collectives=True"
            )
