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


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is remembered of measured drives is the user's: tests, and what they start, have a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
