"""Drives of a known rate: loop devices, each throttled, under one striped file system. Needs root.

Nothing of it outlives the processes that use it, however they end: the files have no names, the mount is in a
namespace of this process and of those that it starts, the loop devices let go when the last one closes them, and a
process beside this one lifts the limits when this one is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from _harness import MIB

THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")

_CLONE_NEWNS = 0x20000
_LOOP_CONFIGURE, _LOOP_CTL_GET_FREE = 0x4C0A, 0x4C82
_LOOP_AUTOCLEAR, _LOOP_DIRECT_IO = 4, 16
# struct loop_config: fd and block size; loop_info64 (five sizes, four numbers of which the last are the flags, two
# names, a key, two words); eight reserved words.
_LOOP_CONFIG = struct.Struct("<II5Q4I64s64s32s2Q8Q")


def why_not() -> str | None:
    """What is missing here, None if nothing is."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("mkfs.btrfs", "mount", "umount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    for path in (THROTTLE, Path("/dev/loop-control")):
        if not path.exists():
            return f"no {path}"
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
    _leave_namespace()
    with contextlib.ExitStack() as stack:
        loops = [stack.enter_context(_loop(directory, nbytes + 512 * MIB)) for _ in range(drives)]
        profile = "raid0" if drives > 1 else "single"
        _run("mkfs.btrfs", "-q", "-f", "-d", profile, "-m", "raid1" if drives > 1 else "single", *loops)
        mount = directory / "striped"
        mount.mkdir()
        stack.callback(mount.rmdir)
        options = ",".join(["nodatacow", *[f"device={loop}" for loop in loops]])
        _run("mount", "-o", options, loops[0], str(mount))
        stack.callback(_run, "umount", str(mount))
        stack.enter_context(_throttled([os.stat(loop).st_rdev for loop in loops], bytes_per_s))
        yield mount


def _leave_namespace() -> None:
    """Give this thread, and the processes that it starts, mounts of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise SystemExit(f"unshare: {os.strerror(ctypes.get_errno())}")
    _run("mount", "--make-rprivate", "/")


@contextlib.contextmanager
def _loop(directory: Path, nbytes: int) -> Iterator[str]:
    """A loop device over a file without a name; both are gone when nobody has the device open."""
    file = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(file, 0, nbytes)
        device, fd = _configured(file)
    finally:
        os.close(file)
    try:
        yield device
    finally:
        os.close(fd)


def _configured(file: int) -> tuple[str, int]:
    config = _LOOP_CONFIG.pack(
        *(file, 0), *[0] * 8, _LOOP_AUTOCLEAR | _LOOP_DIRECT_IO, b"fp_multi benchmark", b"", b"", *[0] * 10
    )
    while True:
        control = os.open("/dev/loop-control", os.O_RDWR)
        try:
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
        finally:
            os.close(control)
        fd = os.open(device, os.O_RDWR)
        try:
            fcntl.ioctl(fd, _LOOP_CONFIGURE, config)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EBUSY:  # somebody else was quicker
                raise SystemExit(f"{device}: {error.strerror}") from error
        else:
            return device, fd


@contextlib.contextmanager
def _throttled(numbers: list[int], bytes_per_s: int) -> Iterator[None]:
    """Limit the rates of some devices."""
    names = [f"{os.major(number)}:{os.minor(number)}" for number in numbers]
    # It waits for the end of its input, which comes when this process ends, in whatever way.
    lift = "cat; for name; do echo $name 0 > " + str(THROTTLE) + "; done"
    command = ["sh", "-c", lift, "sh", *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        for name in names:
            THROTTLE.write_text(f"{name} {bytes_per_s}")
        yield


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
