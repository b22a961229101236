"""Settings of a save and of a load: frozen, checked when made, never repaired silently."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fp_multi._arguments import whole_number
from fp_multi._policy import PerNode as PerNode
from fp_multi._policy import Writers as Writers
from fp_multi._policy import check_writers
from fp_multi._policy import per_node as per_node
from fp_multi.errors import ConfigError

Capability = Literal["on", "off", "auto"]
"""``"auto"`` uses it where it works and reports what was used and why; ``"on"`` fails loudly where it does not."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class IOConfig:
    """How files are read and written; shared by :class:`SaveConfig` and :class:`LoadConfig`."""

    block_bytes: int = MIB // 2
    """Size of one request and of one staging block, in bytes: a power of two from 64 KiB to 256 MiB."""
    queue_depth: int = 32
    """Requests in flight, 1 to 64. ``block_bytes * (queue_depth + 1)`` is the staging memory."""
    io_uring: Capability = "auto"
    """Submit through io_uring; otherwise through a few native threads that call pwrite and pread."""
    direct: Capability = "auto"
    """O_DIRECT: bypass the page cache."""
    dontcache: Capability = "auto"
    """RWF_DONTCACHE for buffered requests (Linux 6.14): do not leave the pages in the cache."""
    copy_threads: int = 0
    """Native threads that copy and checksum, 1 to 64; 0 chooses by the number of CPUs."""

    def __post_init__(self) -> None:
        """Reject what cannot work.

        Raises:
            ConfigError: a field is out of range.
        """
        for name in ("block_bytes", "queue_depth", "copy_threads"):
            whole_number(name, getattr(self, name), 0)
        if not (64 << 10) <= self.block_bytes <= 256 * MIB or self.block_bytes & (self.block_bytes - 1):
            raise ConfigError(f"block_bytes must be a power of two from 65536 to {256 * MIB}, found {self.block_bytes}")
        if not 1 <= self.queue_depth <= 64:
            raise ConfigError(f"queue_depth must be from 1 to 64, found {self.queue_depth}")
        if not 0 <= self.copy_threads <= 64:
            raise ConfigError(f"copy_threads must be from 0 to 64, found {self.copy_threads}")
        for name in ("io_uring", "direct", "dontcache"):
            value = getattr(self, name)
            if value not in ("on", "off", "auto"):
                raise ConfigError(f'{name} must be "on", "off" or "auto", found {value!r}')
        if self.direct == "on" and self.dontcache == "on":
            raise ConfigError(
                'direct="on" and dontcache="on" exclude each other: a direct request has no page cache to leave'
            )


@dataclass(frozen=True, slots=True)
class SaveConfig(IOConfig):
    """How a checkpoint is written."""

    durable: bool = True
    """Flush files and directories to the drive before a save is reported complete. Off only for tests and scratch."""
    chunk_bytes: int = 0
    """Bytes that one checksum covers: a multiple of 4096, at most 16 MiB. 0 chooses by the size of the state, 32 KiB to
    4 MiB: who reads a part of a tensor reads whole chunks."""
    writers: Writers = "auto"
    """Which of several ranks write what they all hold: a policy, or a tuple of ranks."""
    drive_bytes_per_s: float | None = None
    """Rate of the drive as one host sees it, in bytes per second; None lets ``writers="auto"`` measure it."""

    def __post_init__(self) -> None:
        """Reject what cannot work.

        Raises:
            ConfigError: a field is out of range.
        """
        IOConfig.__post_init__(self)
        whole_number("chunk_bytes", self.chunk_bytes, 0)
        if self.chunk_bytes and (not 4096 <= self.chunk_bytes <= 16 * MIB or self.chunk_bytes % 4096):
            raise ConfigError(
                f"chunk_bytes must be 0 or a multiple of 4096, at most {16 * MIB}, found {self.chunk_bytes}"
            )
        check_writers(self.writers)
        rate = self.drive_bytes_per_s
        if rate is not None and (
            isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < math.inf
        ):
            raise ConfigError(f"drive_bytes_per_s must be a number above 0, or None, found {rate!r}")


@dataclass(frozen=True, slots=True)
class LoadConfig(IOConfig):
    """How a checkpoint is read."""

    verify: bool = True
    """Compare the checksum of every chunk that is read."""
