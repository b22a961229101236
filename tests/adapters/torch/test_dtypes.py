"""Every element type, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import fp_multi as fp
from fp_multi.adapters.torch import load, save

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = [dtype for dtype in DTYPES if "qint" in str(dtype) or "quint" in str(dtype)]
PLAIN = [dtype for dtype in DTYPES if dtype not in QUANTIZED]
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
SHAPES = [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4, 5)]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bit pattern, among them NaNs with payloads and denormals; 0 and 1 for bool."""
    count = int(np.prod(shape)) * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    data = np.random.default_rng(seed).integers(0, limit, count, dtype=np.uint8)
    if not count:
        # torch.empty() would warn of some types.
        return torch.empty(shape, dtype=CARRIERS[dtype.itemsize]).view(dtype)
    return torch.from_numpy(data).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_every_dtype_keeps_every_bit(
    dtype: torch.dtype, round_trip: Callable[..., Any], same: Callable[..., None]
) -> None:
    state = {str(shape): random_tensor(dtype, shape, len(shape)) for shape in SHAPES}
    state["strided"] = random_tensor(dtype, (6, 4)).t()
    state["channels_last"] = random_tensor(dtype, (2, 5, 4, 3)).permute(0, 3, 1, 2)
    same(round_trip(state), state)


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_quantized_types_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.zeros(8, dtype=torch.uint8).view(torch.int32 if dtype is torch.qint32 else torch.uint8)
    with pytest.raises(fp.errors.UnsupportedLeafError, match=r"^deep\[0\]\.w: .*quint|qint"):
        save({"deep": [{"w": tensor.view(dtype)}]}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("torch_dtype", "numpy_dtype"),
    [
        (torch.float32, np.dtype(np.float32)),
        (torch.uint16, np.dtype(np.uint16)),
        (torch.complex128, np.dtype(np.complex128)),
        (torch.bfloat16, np.dtype(ml_dtypes.bfloat16)),
        (torch.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)),
        (torch.float8_e8m0fnu, np.dtype(ml_dtypes.float8_e8m0fnu)),
        (torch.float4_e2m1fn_x2, np.dtype(np.uint8)),
    ],
)
def test_the_core_reads_numpy_arrays(
    torch_dtype: torch.dtype, numpy_dtype: np.dtype[Any], tmp_path: Path, bits: Callable[..., bytes]
) -> None:
    tensor = random_tensor(torch_dtype, (3, 5)).t()
    save({"w": tensor}, tmp_path / "c")
    array = fp.load(tmp_path / "c")["w"]
    assert (array.dtype, array.shape) == (numpy_dtype, (5, 3))
    assert array.tobytes() == bits(tensor)


def test_types_without_a_torch_dtype_are_refused_when_loaded(tmp_path: Path) -> None:
    # What a jax.Array of this type would be on disk.
    class Holder:
        array = np.arange(4, dtype=np.uint8).view(ml_dtypes.float8_e3m4)

    def describe(holder: Holder, path: str) -> fp.LeafSource:
        return fp.LeafSource("float8_e3m4", (4,), 4, holder.array.ctypes.data, holder.array, kind="jax")

    fp.register_tensor_type(Holder, fp.TensorType(describe))
    fp.save({"w": Holder(), "n": 1}, tmp_path / "c")
    with pytest.raises(fp.errors.UnsupportedLeafError, match=r"^w: .*float8_e3m4.*only="):
        load(tmp_path / "c")
    assert load(tmp_path / "c", only=["n"]) == {"n": 1}
