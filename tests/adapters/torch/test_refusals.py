"""What cannot be stored exactly is refused by its path, says the way out, and leaves nothing behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fp_multi as fp
from fp_multi.adapters.torch import load, save


def _freed() -> torch.Tensor:
    tensor = torch.zeros(10, 10)
    view = tensor[3:]
    tensor.untyped_storage().resize_(0)
    return view


def _cut() -> torch.Tensor:
    tensor = torch.zeros(10)
    tensor.untyped_storage().resize_(36)
    return tensor


def _cut_strided() -> torch.Tensor:
    tensor = torch.zeros(10, 10)
    view = tensor.t()
    tensor.untyped_storage().resize_(396)
    return view


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8)


def _nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


def _fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


def _functional() -> torch.Tensor:
    return torch._to_functional_tensor(torch.zeros(3))


class Labelled(torch.Tensor):
    """A subclass that is only a label."""


def _wrapper() -> torch.Tensor:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls: Any) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (3,))

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise NotImplementedError

    return Wrapper()  # type: ignore[no-any-return]


CASES: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "sparse coo": (lambda: torch.eye(3).to_sparse(), "to_dense"),
    "sparse csr": (lambda: _csr(), "to_dense"),
    "mkldnn": (lambda: torch.zeros(3, 3).to_mkldnn(), "to_dense"),
    "meta": (lambda: torch.zeros(3, device="meta"), "to_empty"),
    "empty meta": (lambda: torch.zeros(0, device="meta"), "to_empty"),
    "quantized": (_quantized, "int_repr"),
    "nested": (lambda: _nested(torch.strided), "unbind"),
    "jagged": (lambda: _nested(torch.jagged), "offsets"),
    "fake": (_fake, "FakeTensorMode"),
    "functional": (_functional, "torch.func"),
    "label": (lambda: torch.zeros(3).as_subclass(Labelled), "as_subclass"),
    "wrapper": (_wrapper, "made of"),
    "uninitialized": (torch.nn.UninitializedParameter, "run the module once"),
    "freed": (_freed, "gather"),
    "cut": (_cut, "gather"),
    "cut strided": (_cut_strided, "gather"),
    "zero tensor": (lambda: torch._efficientzerotensor(3), "memory to read"),
}


def _csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


@pytest.mark.parametrize("case", list(CASES))
def test_refused_by_path(case: str, tmp_path: Path) -> None:
    make, way_out = CASES[case]
    with pytest.raises(fp.errors.UnsupportedLeafError, match=way_out) as caught:
        save({"ok": torch.ones(3), "layers": [{"w": make()}]}, tmp_path / "c", allow_pickle=True)
    assert caught.value.path == "layers[0].w"
    assert str(caught.value).startswith("layers[0].w: ")
    assert not list(tmp_path.iterdir())


def test_inside_a_transform(tmp_path: Path) -> None:
    def inner(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(fp.errors.UnsupportedLeafError, match=r"^w: .*outside torch\.func"):
            save({"w": tensor}, tmp_path / "c")
        return tensor.sum()

    torch.vmap(inner)(torch.zeros(3, 3))
    torch.func.grad(inner)(torch.zeros(3))


def test_a_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fp.errors.UnsupportedLeafError, match=r"^model: "):
        save({"model": torch.nn.Linear(2, 2)}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_an_existing_checkpoint_survives_a_refusal(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "c")
    with pytest.raises(fp.errors.UnsupportedLeafError):
        save({"w": torch.zeros(3, device="meta")}, tmp_path / "c", overwrite=True)
    assert load(tmp_path / "c")["w"].tolist() == [1.0, 1.0, 1.0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_pickle_needs_permission_on_both_sides(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "object": {1, 2}}
    with pytest.raises(fp.errors.UnsupportedLeafError, match=r"^object: "):
        save(state, tmp_path / "c")
    save(state, tmp_path / "c", allow_pickle=True)
    with pytest.raises(fp.errors.PickleRefusedError, match="allow_pickle"):
        load(tmp_path / "c")
    assert load(tmp_path / "c", allow_pickle=True)["object"] == {1, 2}


def test_weights_only(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path / "c")
    assert load(tmp_path / "c", weights_only=True)["w"].tolist() == [1.0, 1.0]
    with pytest.raises(fp.errors.ConfigError, match="allow_pickle=True"):
        load(tmp_path / "c", weights_only=False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"torch.dtype","float32"', '"torch.dtype","float99"'),
        ('"torch.device","cpu"', '"torch.device","nowhere"'),
        ('"torch.Size",["tuple",[["int",3]]]', '"torch.Size","three"'),
        ('"memory_format":"channels_last"', '"memory_format":"channels_first"'),
        ('"memory_format":"channels_last"', '"memory_format":"channels_last_3d"'),
        ('"dtype":"float32","shape":[7]', '"dtype":"int32","shape":[7]'),
    ],
)
def test_damaged_manifests_are_refused(old: str, new: str, tmp_path: Path) -> None:
    state = {
        "values": [torch.float32, torch.device("cpu"), torch.Size([3])],
        "w": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "p": torch.nn.Parameter(torch.zeros(7)),
    }
    save(state, tmp_path / "c")
    manifest = tmp_path / "c" / "manifest.json"
    body = manifest.read_bytes()[:-31]
    assert body.count(old.encode()) == 1
    body = body.replace(old.encode(), new.encode())
    # The last 31 bytes are comma, checksum and line feed; the checksum is over all before.
    checksum = _crc32c(body)
    manifest.write_bytes(body + f',"manifest_crc32c":"{checksum:08x}"}}\n'.encode())
    with pytest.raises(fp.errors.ManifestError):
        load(tmp_path / "c")


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
