"""What every test may use: the helpers' directory on the path, and no injected fault left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from fp_multi import _engine


@pytest.fixture(autouse=True)
def no_fault_left() -> Iterator[None]:
    yield
    _engine.clear_faults()
