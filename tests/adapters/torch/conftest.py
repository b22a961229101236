from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from gates import Gate

torch = pytest.importorskip("torch")

import fp_multi as fp  # noqa: E402
import fp_multi.adapters.torch as adapter  # noqa: E402
from fp_multi.adapters.torch import _paths  # noqa: E402

RoundTrip: TypeAlias = Callable[..., Any]
Compare: TypeAlias = Callable[[Any, Any], None]


def bits_of(tensor: Any) -> bytes:
    """The values of a tensor in C order, bit by bit."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if not plain.numel():
        return b""
    # By way of an integer type of the same size: some small types cannot be copied.
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(plain.itemsize)
    plain = plain.view(carrier) if carrier is not None else plain
    # A single element may have any stride and still be contiguous; view() insists on 1.
    return bytes(plain.contiguous().reshape(-1).as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy())


def compare(a: Any, b: Any, path: str = "state") -> None:
    """Two states are the same: types, structure, and every bit."""
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad), path
        assert bits_of(a) == bits_of(b), path
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), path
    elif isinstance(a, dict):
        assert [(type(k), k) for k in a] == [(type(k), k) for k in b], path
        for key in a:
            compare(a[key], b[key], f"{path}[{key!r}]")
        compare(getattr(a, "__dict__", None), getattr(b, "__dict__", None), f"{path}.__dict__")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            compare(x, y, f"{path}[{i}]")
    else:
        assert a == b or (a != a and b != b), path


@pytest.fixture
def same() -> Compare:
    return compare


@pytest.fixture
def bits() -> Callable[[Any], bytes]:
    return bits_of


@pytest.fixture
def round_trip(tmp_path: Path) -> RoundTrip:
    # Nothing here has to survive a power cut.
    quick = fp.SaveConfig(durable=False)

    def run(state: Any, **how: Any) -> Any:
        adapter.save(state, tmp_path / "checkpoint", overwrite=True, config=quick)
        return adapter.load(tmp_path / "checkpoint", **how)

    return run


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models that are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """What is saved to a trainer's path with it cannot be read before it opens."""
    changing = _paths._PathCheckpointer.changing
    monkeypatch.setattr(
        _paths._PathCheckpointer,
        "changing",
        lambda self, sources: [i for i in changing(self, sources) if not isinstance(sources[i].keepalive, Gate)],
    )
    gate = Gate()
    yield gate
    gate.open()
