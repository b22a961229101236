"""What the README shows works as shown, and its numbers are those of the result files."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(6), ids=["numpy", "torch", "checkpointer", "torch loop", "orbax", "dcp"])
def test_quickstart(number: int, tmp_path: Path) -> None:
    for package in ("torch", "orbax"):
        if f"import {package}" in BLOCKS[number]:
            pytest.importorskip(package)
    done = subprocess.run([sys.executable, "-c", BLOCKS[number]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_quickstarts_are_short() -> None:
    assert len(BLOCKS) == 6
    assert all(len(block.splitlines()) <= 14 for block in BLOCKS)


def test_commands_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)$", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert re.findall(r"^make (\w+)$", README, re.MULTILINE) == ["demo", "test"]


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md", "benchmarks/README.md"])
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`((?:docs|examples|benchmarks|tests)/[\w./]*)`", (ROOT / page).read_text())
    assert named
    assert not [name for name in named if not (ROOT / name).exists()]


def test_numbers_are_those_of_the_result_files() -> None:
    assert load_report().stale() == []


def load_report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_report", ROOT / "benchmarks" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
