"""examples/cross_framework.py: from JAX to torch and back, on other numbers of devices and ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import fp_multi as fp

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "cross_framework.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_cross_framework", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_training_moves_from_jax_to_torch_and_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    module = example()
    module.main(tmp_path)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["JAX, 4 devices", "torch, 3 ranks", "JAX, 2 devices"]
    assert all("weights equal bit for bit" in line for line in lines[1:])
    states = {}
    for name in ("jax", "torch"):
        fp.verify(tmp_path / name)
        states[name] = fp.load(tmp_path / name)
        assert {key: value.shape for key, value in states[name]["params"].items()} == module.SHAPES
        assert states[name]["momentum"].keys() == module.SHAPES.keys()
    assert states["torch"]["step"] == states["jax"]["step"] + module.TORCH_STEPS
    assert not np.array_equal(states["torch"]["params"]["0.weight"], states["jax"]["params"]["0.weight"])
    # Each rank of torch has written its rows.
    (weight,) = [tensor for tensor in fp.read_manifest(tmp_path / "torch").tensors if tensor.name == "params.0.weight"]
    assert len(weight.pieces) == 3


def test_a_changed_weight_and_a_wrong_output_are_noticed(tmp_path: Path) -> None:
    module = example()
    params = {name: np.ones(shape, np.float32) for name, shape in module.SHAPES.items()}
    outputs = np.zeros((module.BATCH, 256), np.float32)
    fp.save({"params": params, "outputs": outputs}, tmp_path / "c", config=fp.SaveConfig(durable=False))
    assert "bit for bit" in module.compare("here", params, outputs + 1e-5, tmp_path / "c")
    with pytest.raises(SystemExit, match="the outputs differ"):
        module.compare("here", params, outputs + 1e-3, tmp_path / "c")
    params["2.bias"] = params["2.bias"].copy()
    params["2.bias"][7] = np.nextafter(np.float32(1), np.float32(2))
    with pytest.raises(SystemExit, match=r"2\.bias came back changed"):
        module.compare("here", params, outputs, tmp_path / "c")
