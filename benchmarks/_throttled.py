"""Drives of a known rate: loop devices, each throttled, under one striped file system. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from _harness import MIB

THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")


def why_not() -> str | None:
    """What is missing here, None if nothing is."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("losetup", "mkfs.btrfs", "mount", "umount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if not THROTTLE.exists():
        return f"no {THROTTLE}"
    return None


@contextlib.contextmanager
def striped(directory: Path, drives: int, nbytes: int, bytes_per_s: int) -> Iterator[Path]:
    """A file system whose data is striped over so many drives.

    Args:
        directory: where the drives' files are.
        drives: how many.
        nbytes: room on each, beside what the file system itself takes.
        bytes_per_s: rate at which each takes writes.
    """
    with contextlib.ExitStack() as stack:
        loops = [stack.enter_context(_loop(directory / f"drive_{i}", nbytes + 512 * MIB)) for i in range(drives)]
        profile = "raid0" if drives > 1 else "single"
        _run("mkfs.btrfs", "-q", "-f", "-d", profile, "-m", "raid1" if drives > 1 else "single", *loops)
        mount = directory / "striped"
        mount.mkdir()
        stack.callback(mount.rmdir)
        options = ",".join(["nodatacow", *[f"device={loop}" for loop in loops]])
        _run("mount", "-o", options, loops[0], str(mount))
        stack.callback(_run, "umount", str(mount))
        for loop in loops:
            number = os.stat(loop).st_rdev
            name = f"{os.major(number)}:{os.minor(number)}"
            THROTTLE.write_text(f"{name} {bytes_per_s}")
            stack.callback(THROTTLE.write_text, f"{name} 0")
        yield mount


@contextlib.contextmanager
def _loop(path: Path, nbytes: int) -> Iterator[str]:
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    try:
        device = _run("losetup", "-f", "--show", "--direct-io=on", str(path)).strip()
        try:
            yield device
        finally:
            _run("losetup", "-d", device)
    finally:
        path.unlink()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
