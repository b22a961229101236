"""Which host this is, and its CPUs, memory nodes and sockets, as /proc and /sys tell."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from fp_multi._kernel import REAL, Roots, names_in, read_text

HOST_VARIABLE = "FP_MULTI_HOST_ID"
"""Names the host in place of what the kernel says."""


def host_of(roots: Roots = REAL) -> tuple[str, str]:
    """What tells this host from others, and its name.

    Containers and namespaces on one machine run on one kernel, and so on the same sockets and drives: they are one
    host, whatever names they have. That is what the boot id tells. A machine id would not: images are copied with it.
    Only where the boot id is hidden, the name has to do. Machines that were cloned while they ran have the same boot
    id; they need ``FP_MULTI_HOST_ID``.
    """
    name = os.uname().nodename
    named = os.environ.get(HOST_VARIABLE)
    if named:
        return named, named
    return read_text(f"{roots.proc}/sys/kernel/random/boot_id") or name, name


def cpus_of_nodes(roots: Roots) -> dict[int, frozenset[int]]:
    """The CPUs of each memory node."""
    base = f"{roots.sys}/devices/system/node"
    names = [name for name in names_in(base) if re.fullmatch(r"node\d+", name)]
    return {int(name[4:]): _parsed(read_text(f"{base}/{name}/cpulist") or "") for name in names}


def sockets_of(cpus: Iterable[int], roots: Roots) -> tuple[int, ...]:
    """The sockets of CPUs, ascending; those that the kernel does not know are left out."""
    texts = (read_text(f"{roots.sys}/devices/system/cpu/cpu{cpu}/topology/physical_package_id") for cpu in cpus)
    return tuple(sorted({int(text) for text in texts if text and text.isdigit()}))  # -1: the firmware does not say


def _parsed(text: str) -> frozenset[int]:
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def ranges(numbers: Iterable[int]) -> str:
    """``0-3,8``: neighbours as ranges."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
