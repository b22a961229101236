"""The drive itself: raw rates with nothing to copy and nothing to check, in the same rounds as the contenders."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import _harness as harness
from _harness import MIB

import fp_multi as fp
from fp_multi import _ceiling, _engines

BUFFERED_NBYTES = 4 * MIB
"""What the buffered read asks for at once. Only one size: a second pass may find the file in a cache of the host's."""


class Direct:
    """O_DIRECT from or to huge-page memory, into a preallocated file, flushed.

    The first round tries many settings and is not counted; the others try again the one (reads) or two that were best.
    Not more: the best of many noisy medians says more about the noise.
    """

    def __init__(self, name: str, directory: Path, nbytes: int, *, read: bool = False, reuse: bool = False) -> None:
        self.name, self.directory, self.nbytes = name, directory, nbytes // 4096 * 4096
        self.read, self.reuse = read, reuse
        self.settings = [(in_flight // depth, depth) for in_flight in (16 * MIB, 32 * MIB) for depth in (4, 8, 16, 32)]
        self.rounds: list[dict[tuple[int, int], fp.CeilingResult]] = []
        self.path = directory / "direct"
        if read:
            # Once, like the files of those that load: what was written a moment ago may be in a cache of the host's.
            _ceiling._write(str(self.path), nbytes, _engines.options(fp.SaveConfig()), reuse=False)

    def measure(self) -> None:
        """Add a round."""
        found = {}
        for block_bytes, depth in self.settings:
            if self.read:
                found[block_bytes, depth] = self._read(block_bytes, depth)
                continue
            (found[block_bytes, depth],) = fp.measure_ceiling(
                self.directory, self.nbytes, reuse=self.reuse, block_bytes=[block_bytes], queue_depth=[depth]
            )
            harness.settle()  # the file is gone now
        self.rounds.append(found)
        if len(self.rounds) == 1:
            # Of a read only one: a second pass over a file may find it in a cache of the host's.
            best = sorted(found, key=lambda setting: found[setting].gbytes_per_s)
            self.settings = best[-1:] if self.read else best[-2:]

    def _read(self, block_bytes: int, depth: int) -> fp.CeilingResult:
        """Into new memory, as those that load."""
        harness.cool(self.path)
        harness.warm_memory(2 * self.nbytes)
        options = _engines.options(fp.LoadConfig(block_bytes=block_bytes, queue_depth=depth))
        begin = time.perf_counter()
        stats = _ceiling._read(str(self.path), self.nbytes, options)
        rate = self.nbytes / 1e9 / (time.perf_counter() - begin)
        return fp.CeilingResult(rate, block_bytes, depth, stats["engine"], stats["direct"], tuple(stats["reasons"]))

    def row(self) -> dict[str, Any]:
        """The setting with the best median."""
        rates = {key: [one[key].gbytes_per_s for one in self.rounds[1:]] for key in self.rounds[-1]}
        best = harness.best_median(rates)
        found = self.rounds[-1][best]
        setting = f"{found.engine}, {'O_DIRECT' if found.direct else 'no O_DIRECT'}, {best[0] / MIB:g} MiB x {best[1]}"
        return harness.row(self.name, rates[best], setting=setting)


class BufferedRead:
    """A cold file through the page cache, front to back, into huge-page memory that is there already."""

    def __init__(self, name: str, directory: Path, nbytes: int) -> None:
        self.name, self.nbytes = name, nbytes
        self.path = directory / "buffered"
        block = os.urandom(MIB)
        with open(self.path, "wb") as file:
            for at in range(0, nbytes, MIB):
                file.write(block[: nbytes - at])
        self.rates: list[float] = []

    def measure(self) -> None:
        """Add a round."""
        with harness.huge_pages(self.nbytes) as memory:
            harness.cool(self.path)
            harness.warm_memory(2 * self.nbytes)
            memory[:: 2 * MIB] = bytes(len(range(0, self.nbytes, 2 * MIB)))  # one touch for each page
            begin = time.perf_counter()
            self._read(memoryview(memory))
            self.rates.append(self.nbytes / 1e9 / (time.perf_counter() - begin))

    def _read(self, memory: memoryview) -> None:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            at = 0
            while at < self.nbytes:
                at += os.preadv(fd, [memory[at : at + BUFFERED_NBYTES]], at)
        finally:
            os.close(fd)
            memory.release()

    def row(self) -> dict[str, Any]:
        """The median; the first round warms up."""
        return harness.row(self.name, self.rates[1:], setting=f"preadv, {BUFFERED_NBYTES // MIB} MiB, sequential")
