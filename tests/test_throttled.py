"""The benchmarks' throttled drives: there while they are used, and nothing of them is left, however the user ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

HANG_LIMIT_S = 60.0
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

USE = """
import os, sys
from pathlib import Path
sys.path.append(sys.argv[2])
import _throttled
with _throttled.striped(Path(sys.argv[1]), 2, 64 << 20, 300 << 20) as mount:
    (mount / "file").write_bytes(bytes(1 << 20))
    devices = {line.split()[0] for line in _throttled.THROTTLE.read_text().splitlines()}
    print(*devices, flush=True)
    if sys.stdin.readline() == "leave\\n":
        sys.exit(3)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def throttled(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import _throttled

    why = _throttled.why_not()
    if why is not None:
        pytest.skip(f"throttled drives: {why}")
    return _throttled


def is_used(device: str) -> bool:
    return Path(f"/sys/dev/block/{device}/loop/backing_file").exists()


@pytest.mark.parametrize("end", ["leave", "kill"])
def test_nothing_is_left(tmp_path: Path, throttled: Any, end: str) -> None:
    command = [sys.executable, "-c", USE, str(tmp_path), str(BENCHMARKS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        devices = process.stdout.readline().split()
        assert len(devices) == 2
        assert all(is_used(device) for device in devices)
        assert all(f"{device} {300 << 20}" in throttled.THROTTLE.read_text() for device in devices)
        # Only that process sees the mount, and its files have no names.
        assert os.listdir(tmp_path) == ["striped"]
        assert not os.path.ismount(tmp_path / "striped")
        process.stdin.write(f"{end}\n")
        process.stdin.close()
    assert process.returncode == (3 if end == "leave" else -signal.SIGKILL)
    # The kernel and the process that lifts the limits take a moment.
    deadline_s = time.monotonic() + HANG_LIMIT_S
    while any(map(is_used, devices)) or any(device in throttled.THROTTLE.read_text().split() for device in devices):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert os.listdir(tmp_path) == ([] if end == "leave" else ["striped"])
