"""What users install: the sdist builds the wheel, and the wheel works where there is no source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build", reason="needs the package build")
pytest.importorskip("scikit_build_core", reason="needs scikit-build-core")

ROOT = Path(__file__).resolve().parent.parent

ROUND_TRIP = """
import sys
from pathlib import Path
import numpy as np
import fp_multi as fp
if "torch" in sys.argv:
    import torch
    from fp_multi.adapters import torch as adapter
here = Path(fp.__file__).resolve()
if not here.is_relative_to(sys.argv[1]):
    sys.exit(f"imported from {here}")
state = {"a": np.arange(10_000, dtype=np.float32), "b": [np.int64(7), b"bytes"], "step": 3}
fp.save(state, "plain")
back = fp.load("plain")
if not (np.array_equal(back["a"], state["a"]) and back["b"] == state["b"] and back["step"] == 3):
    sys.exit("the state came back changed")
fp.verify("plain")
if "torch" in sys.argv:
    tensors = {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)}
    adapter.save(tensors, "tensors")
    w = adapter.load("tensors")["w"]
    if not (isinstance(w, torch.Tensor) and torch.equal(w, tensors["w"])):
        sys.exit("the tensor came back changed")
"""


def run(*command: object, cwd: Path) -> str:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    # Not from the source tree itself: the wheel is made of the unpacked sdist, which must have everything.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with this one's packages, but without this one's editable installs."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, symlinks=True, with_pip=False)
    (wheel,) = dist.glob("*.whl")
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=home)
    # A path in a .pth file is appended as it is; the .pth files inside it, such as an editable install's, are not read.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def test_sdist_has_everything_and_nothing_built(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "fp_multi/__init__.py"}
    wanted |= {f"fp_multi/_native/{p.name}" for p in (ROOT / "fp_multi" / "_native").iterdir()}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "adapters").rglob("*.py")}
    assert wanted <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or ".venv" in name]


def test_wheel_has_adapters_and_no_sources(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"fp_multi/__init__.py", "fp_multi/adapters/torch/__init__.py"} <= names
    assert [name for name in names if name.startswith("fp_multi/_engine.") and name.endswith(".so")]
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert not [name for name in names if name.endswith((".cpp", ".h")) or name.startswith("tests")]
    assert not [name for name in names if name.startswith("adapters/")]


def test_wheel_works_without_the_source_tree(installed: Path, tmp_path: Path) -> None:
    run(installed / "bin" / "python", "-c", ROUND_TRIP, installed, cwd=tmp_path)


def test_wheel_works_with_torch(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs PyTorch")
    run(installed / "bin" / "python", "-c", ROUND_TRIP, installed, "torch", cwd=tmp_path)


def test_wheel_brings_the_command(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("typer", reason="needs the extra cli")
    assert "inspect" in run(installed / "bin" / "fp-multi", "--help", cwd=tmp_path)
