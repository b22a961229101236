"""What the tests of trainers have in common: many small saves, and frameworks that warn a lot."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp_multi as fp

QUICK = fp.SaveConfig(durable=False, block_bytes=64 << 10, queue_depth=2)

TRAINER_MARKS = [
    # Their advice about workers, loggers and the like, and their own use of what torch has deprecated.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())
