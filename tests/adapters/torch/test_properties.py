"""Random nested states come back the same."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings

import fp_multi as fp
from fp_multi.adapters.torch import load, save

# Files of a test that runs hundreds of times need not survive a power cut.
_QUICK = fp.SaveConfig(durable=False)

_DTYPES = [
    *(torch.bool, torch.uint8, torch.int64, torch.uint16, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(_DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=5))
    high = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    raw = torch.randint(0, high, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    if not raw.numel():
        return torch.empty(shape, dtype=dtype)
    tensor = raw.view(-1).view(_CARRIERS[dtype.itemsize]).view(shape)
    if shape:
        tensor = tensor.permute(*draw(st.permutations(range(len(shape)))))
        axis = draw(st.integers(0, len(shape) - 1))
        tensor = tensor.narrow(axis, draw(st.integers(0, tensor.shape[axis] - 1)), 1) if draw(st.booleans()) else tensor
        tensor = tensor.expand(2, *tensor.shape) if draw(st.booleans()) else tensor
    tensor = tensor.view(dtype)
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    if dtype.is_floating_point and draw(st.booleans()):
        return torch.nn.Parameter(tensor)
    return tensor


_PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from([torch.float32, torch.Size([2]), torch.device("cpu"), torch.strided])
)
_STATES = st.recursive(
    tensors() | _PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(-3, 99), inner, max_size=4)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3).map(OrderedDict)
        # The same object at two places.
        | inner.map(lambda value: [value, {"again": value}])
    ),
    max_leaves=12,
)


def _tie_pattern(state: Any, seen: dict[int, int]) -> Any:
    if isinstance(state, torch.Tensor):
        return seen.setdefault(id(state), len(seen))
    if isinstance(state, dict):
        return [_tie_pattern(value, seen) for value in state.values()]
    if isinstance(state, (list, tuple)):
        return [_tie_pattern(value, seen) for value in state]
    return None


@given(state=_STATES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_states(state: Any, same: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        save(state, Path(directory) / "c", config=_QUICK)
        loaded = load(Path(directory) / "c")
        fp.verify(Path(directory) / "c")
    same(loaded, state)
    # Views can be one tensor without being one object, but nothing that was one may come apart.
    before, after = _tie_pattern([state], {}), _tie_pattern([loaded], {})
    assert before == after
