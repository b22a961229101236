"""Helpers of the engine and commit tests: faults, child processes, and what a process must not leak."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import fp_multi as fp
from fp_multi import _engine

Bytes = npt.NDArray[np.uint8]

SMALL_BLOCK = 64 << 10
"""The smallest block size: many blocks for few bytes."""


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def small_state(seed: int = 0) -> dict[str, Any]:
    """A state whose save takes several blocks, a tail, and some tensors that share a block."""
    rng = np.random.default_rng(seed)
    return {
        "seed": seed,
        "paged": rng.integers(0, 256, 5 * SMALL_BLOCK, np.uint8),
        "odd": rng.standard_normal(12_345),
        "strided": rng.integers(0, 1 << 30, (211, 97), np.int64).T,
        "tiny": [rng.standard_normal(i) for i in range(9)],
    }


def assert_same(found: Any, expected: Any) -> None:
    """Both states are equal, bit for bit."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    else:
        assert found == expected


def hidden_names(directory: Path) -> list[str]:
    """What interrupted saves left in a directory."""
    return [name for name in os.listdir(directory) if ".fp_multi-" in name]


def sealed(value: Any) -> bytes:
    """A manifest of any object (or its bytes), with a trailer that is right."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    body = body.removesuffix(b"}")
    return body + b',"manifest_crc32c":"%08x"}\n' % _engine.crc32c(body)


def flip(path: Path, offset: int) -> None:
    """Damage one byte of a file; a negative offset counts from its end."""
    with open(path, "r+b") as file:
        at = file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def open_files() -> set[str]:
    """What this process has open, without what the engine and Python keep for good."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if link.startswith("/") and not link.startswith(("/dev/", "/proc/")):
            found.add(f"{fd}: {link}")
    return found


def descriptor_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def thread_count() -> int:
    """Threads of this process, without the kernel's own workers for a ring, which come and go."""
    count = 0
    for task in os.listdir("/proc/self/task"):
        try:
            count += not Path(f"/proc/self/task/{task}/comm").read_text().startswith("iou-")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return count


@contextmanager
def injected(point: str, **what: Any) -> Iterator[None]:
    """A fault at a system call or completion, for a while."""
    _engine.clear_faults()
    _engine.inject_fault(point, **what)
    try:
        yield
    finally:
        _engine.clear_faults()


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often each fault point is passed meanwhile; filled in at the end."""
    counts: dict[str, int] = {}
    _engine.clear_faults()
    _engine.count_faults()
    try:
        yield counts
    finally:
        counts.update(_engine.fault_counts())
        _engine.clear_faults()


class FakeDevice:
    """Memory that only ``fetch`` can read, each copy made by another thread at a moment of its own."""

    def __init__(self, delay_s: float = 0.0005, asynchronous_nbytes: int = 1024) -> None:
        self.delay_s = delay_s
        self.asynchronous_nbytes = asynchronous_nbytes
        self.copies = 0
        self.outstanding = 0
        self.pinned: list[tuple[int, int]] = []
        self.unpinned: list[tuple[int, int]] = []
        self.fail: Callable[[int], None] = lambda copy: None
        """Called with the number of each copy: in ``fetch`` with a positive one, in its end with a negative one."""
        self._lock = threading.Lock()
        self._type = type("FakeTensor", (FakeTensor,), {})
        fp.register_tensor_type(self._type, fp.TensorType(describe=_describe, pin=lambda *where: self.pin(*where)))

    def tensor(self, array: npt.NDArray[Any]) -> FakeTensor:
        return self._type(np.ascontiguousarray(array), self)

    def fetch(self, source: Bytes, address: int, start: int, nbytes: int) -> Callable[[], None]:
        with self._lock:
            self.copies += 1
            number = self.copies
        self.fail(number)

        def copy() -> None:
            ctypes.memmove(address, source[start:].ctypes.data, nbytes)
            with self._lock:
                self.outstanding -= 1

        def late_copy() -> None:
            time.sleep(self.delay_s)
            copy()

        with self._lock:
            self.outstanding += 1
        if nbytes < self.asynchronous_nbytes:
            copy()
            return lambda: self.fail(-number)
        ctypes.memset(address, 0xEE, nbytes)  # seen in the file if anybody reads too early
        thread = threading.Thread(target=late_copy)
        thread.start()

        def finish() -> None:
            self.fail(-number)
            thread.join()

        return finish

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        self.pinned.append((address, nbytes))
        return lambda: self.unpinned.append((address, nbytes))


class FakeTensor:
    def __init__(self, data: npt.NDArray[Any], device: FakeDevice) -> None:
        self.data = data
        self.device = device


def _describe(tensor: FakeTensor, path: str) -> fp.LeafSource:
    raw = tensor.data.reshape(-1).view(np.uint8)
    return fp.LeafSource(
        dtype=str(tensor.data.dtype),
        shape=tensor.data.shape,
        nbytes=tensor.data.nbytes,
        address=0,
        keepalive=tensor,
        itemsize=tensor.data.itemsize,
        fetch=partial(tensor.device.fetch, raw),
        identity=id(tensor),
    )


PRELUDE = """
import errno, os, signal, sys, threading, time
sys.path.append({tests!r})
import numpy as np
import numpy.random
import fp_multi as fp
from fp_multi import _engine
from support import *
"""


def child(code: str, *arguments: object, timeout_s: float = 60, **popen: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that has this module's names; its arguments are ``sys.argv[1:]``."""
    command, pipe = _command(code, arguments), subprocess.PIPE
    # A session of its own: what the child forked goes with it if it hangs.
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **popen) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@contextmanager
def running(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A fresh interpreter that runs code beside the test; it does not outlive the block."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(_command(code, arguments), stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _command(code: str, arguments: tuple[object, ...]) -> list[str]:
    prelude = PRELUDE.format(tests=str(Path(__file__).parent))
    return [sys.executable, "-c", prelude + textwrap.dedent(code), *map(str, arguments)]


def check_child(code: str, *arguments: object, timeout_s: float = 60, **popen: Any) -> str:
    """Run code in a fresh interpreter; it must end by itself and without complaint. Returns what it printed."""
    done = child(code, *arguments, timeout_s=timeout_s, **popen)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def config(**settings: Any) -> fp.SaveConfig:
    """A configuration with many small requests."""
    return fp.SaveConfig(**{"block_bytes": SMALL_BLOCK, "queue_depth": 3, "durable": False, **settings})


def load_config(**settings: Any) -> fp.LoadConfig:
    return fp.LoadConfig(**{"block_bytes": SMALL_BLOCK, "queue_depth": 3, **settings})
