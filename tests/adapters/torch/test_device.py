"""CUDA: copies on a side stream, page locks, tensors back on their device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fp_multi as fp
from fp_multi.adapters.torch import _device, load, load_file, save, save_file

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class _Recorder:
    """Stands in for torch.cuda's streams and events and writes down what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        log = self.log

        class Event:
            def record(self, stream: Any = None) -> None:
                log.append(f"record on {stream}")

            def synchronize(self) -> None:
                log.append("synchronize")

        class Stream:
            def __init__(self, device: torch.device) -> None:
                log.append("new stream")

            def wait_event(self, event: Any) -> None:
                log.append("side waits")

            def __str__(self) -> str:
                return "side"

            def __enter__(self) -> None:
                log.append("enter")

            def __exit__(self, *error: object) -> None:
                log.append("exit")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
        monkeypatch.setattr(_device, "_streams", {})


def test_fetch_without_a_gpu(monkeypatch: pytest.MonkeyPatch, bits: Callable[..., bytes]) -> None:
    recorder = _Recorder(monkeypatch)
    tensor = torch.randn(7, 5, dtype=torch.complex64).t().conj()
    memory = np.zeros(tensor.nbytes, np.uint8)
    fetch = _device.DeviceFetch(tensor)
    for start in range(0, tensor.nbytes, 100):
        nbytes = min(100, tensor.nbytes - start)
        fetch(memory.ctypes.data + start, start, nbytes)()
    assert memory.tobytes() == bits(tensor)
    assert recorder.log[:7] == [
        *("record on current", "new stream", "enter", "side waits", "record on side"),
        *("exit", "synchronize"),
    ]
    assert recorder.log.count("new stream") == 1
    assert fetch._bytes is None


def test_pin_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    buffer = (ctypes.c_uint8 * 4096)()
    _device.pin(ctypes.addressof(buffer), 4096)()


class _Runtime:
    def __init__(self, code: int) -> None:
        self.code = code
        self.log: list[tuple[object, ...]] = []

    def cudaHostRegister(self, *arguments: int) -> int:
        self.log.append(("register", *arguments))
        return self.code

    def cudaHostUnregister(self, *arguments: int) -> int:
        self.log.append(("unregister", *arguments))
        return 0


@pytest.mark.parametrize("code", [0, 2])
def test_pin(code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runtime = _Runtime(code)
    cleared: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(_device, "_clear_error", lambda: cleared.append(True))
    _device.pin(4096, 8192)()
    if code == 0:
        assert runtime.log == [("register", 4096, 8192, 0), ("unregister", 4096)]
        assert not cleared
    else:
        assert runtime.log == [("register", 4096, 8192, 0)]
        assert cleared
        assert "CUDA error 2" in caplog.text


class TestGpu:
    """On a real device."""

    pytestmark = gpu

    def test_round_trip(self, tmp_path: Path, same: Callable[..., None]) -> None:
        base = torch.randn(1000, 777, device="cuda")
        state = {
            "w": base,
            "t": base.t(),
            "tied": base,
            "cl": torch.randn(2, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last),
            "conj": torch.randn(9, dtype=torch.complex64, device="cuda").conj(),
            "f8": torch.randn(64, device="cuda").to(torch.float8_e4m3fn),
            "p": torch.nn.Parameter(torch.randn(5, device="cuda")),
            "scalar": torch.tensor(2.0, device="cuda"),
            "empty": torch.empty(0, 3, device="cuda"),
            "big": torch.randint(0, 255, (70 << 20,), dtype=torch.uint8, device="cuda"),
            "host": torch.arange(5),
        }
        save(state, tmp_path / "c")
        loaded = load(tmp_path / "c")
        same(loaded, state)
        assert loaded["tied"] is loaded["w"]
        assert all(loaded[name].device == state[name].device for name in state)
        assert loaded["cl"].is_contiguous(memory_format=torch.channels_last)
        fp.verify(tmp_path / "c")
        on_host = load(tmp_path / "c", map_location="cpu")
        assert {tensor.device.type for tensor in on_host.values()} == {"cpu"}
        same(on_host, loaded)

    def test_work_queued_before_is_waited_for(self, tmp_path: Path) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            tensor = torch.zeros(1 << 24, device="cuda")
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
            tensor.fill_(3.0)
            save({"w": tensor}, tmp_path / "c")
        assert bool((load(tmp_path / "c", map_location="cpu")["w"] == 3.0).all())

    def test_inplace(self, tmp_path: Path) -> None:
        state = {"w": torch.randn(100, 100, device="cuda")}
        save(state, tmp_path / "c")
        target = {"w": torch.zeros(100, 100, device="cuda").t()}
        assert load(tmp_path / "c", target=target, inplace=True)["w"] is target["w"]
        assert torch.equal(target["w"], state["w"])

    def test_safetensors(self, tmp_path: Path) -> None:
        tensors = {"w": torch.randn(33, 7, device="cuda").t()}
        save_file(tensors, tmp_path / "m.safetensors")
        assert torch.equal(load_file(tmp_path / "m.safetensors", device="cuda:0")["w"], tensors["w"])
        assert torch.equal(load_file(tmp_path / "m.safetensors", device=0)["w"], tensors["w"])
        assert load_file(tmp_path / "m.safetensors")["w"].device.type == "cpu"

    def test_a_refused_page_lock_leaves_no_error_behind(self) -> None:
        _device.pin(8, 4096)()  # not our memory: CUDA refuses
        assert torch.ones(3, device="cuda").sum().item() == 3.0
        torch.cuda.synchronize()

    def test_page_lock(self) -> None:
        memory = torch.empty(1 << 20, dtype=torch.uint8)
        undo = _device.pin(memory.data_ptr(), memory.nbytes)
        assert memory.is_pinned()
        undo()
