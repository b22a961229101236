"""Steps in a directory: their names, which are complete, which may go."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable

from fp_multi import _hidden

_STEP_NAME = re.compile(r"step_([0-9]+)")


def step_path(directory: str, step: int) -> str:
    """Where the checkpoint of a step is."""
    return os.path.join(directory, f"step_{step:08d}")


def complete_steps(directory: str) -> dict[int, str]:
    """The committed steps of a directory and their paths, in order."""
    found = {}
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return {}
    for name in names:
        match = _STEP_NAME.fullmatch(name)
        path = os.path.join(directory, name)
        if match and _hidden.is_checkpoint(path):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def retired_steps(
    steps: Iterable[int], *, keep: int | None, keep_every: int | None, in_use: Collection[int] = ()
) -> list[int]:
    """Which steps retention lets go.

    Args:
        steps: the complete steps.
        keep: the newest so many stay; None keeps all.
        keep_every: steps that are a multiple of it stay, too.
        in_use: steps that stay whatever the policy says.

    Returns:
        The steps to retire, oldest first; never the newest.
    """
    ordered = sorted(steps)
    if keep is None:
        return []
    return [
        step
        for step in ordered[: -max(keep, 1)]
        if step not in in_use and not (keep_every is not None and step % keep_every == 0)
    ]
