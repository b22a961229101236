"""The whole disks below a block device, as /sys shows them (sysfs(5), the kernel's ABI notes on block and nvme)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from fp_multi._kernel import Roots, names_in, read_text

_CONTROLLER = re.compile(r"nvme\d+")


class Disk(NamedTuple):
    """A whole disk: one queue."""

    key: str
    name: str
    numa_node: int | None


def blocks_of(source: str, roots: Roots) -> list[str]:
    """The block devices that a mount's source names: btrfs and bcachefs give their files a made-up number."""
    found = []
    for path in source.split(":"):
        name = os.path.basename(os.path.realpath(path))
        block = f"{roots.sys}/class/block/{name}"
        if path.startswith("/dev/") and os.path.exists(block):
            found.append(block)
            # btrfs names one of its devices and lists the others here.
            for file_system in names_in(f"{roots.sys}/fs/btrfs"):
                devices = names_in(f"{roots.sys}/fs/btrfs/{file_system}/devices")
                if name in devices:
                    found = [f"{roots.sys}/fs/btrfs/{file_system}/devices/{one}" for one in devices]
    return found


def disks_below(block: str, roots: Roots, above: frozenset[str] = frozenset()) -> Iterator[Disk]:
    """The whole disks below a block device."""
    path = os.path.realpath(block)
    if os.path.exists(f"{path}/partition"):
        path = os.path.dirname(path)  # partitions share their disk's queue
    # A loop device has no slaves, and stays a drive of its own: it has its own queue and its own limit, whatever file
    # it is made of, and that is what its users mean it to be.
    slaves = names_in(f"{path}/slaves")
    if slaves and path not in above:
        for slave in slaves:
            yield from disks_below(f"{path}/slaves/{slave}", roots, above | {path})
        return
    name = os.path.basename(path)
    number = read_text(f"{path}/dev") or name
    owner = os.path.basename(os.path.dirname(path))
    if name.startswith("nvme") and owner.startswith("nvme"):
        # Namespaces of one controller, or of one subsystem that is reached through several, share its queues.
        number = f"nvme:{owner}"
    yield Disk(number, name, _numa_node(path, roots))


def _numa_node(path: str, roots: Roots) -> int | None:
    nodes = {_node_above(path, roots)}
    owner = os.path.dirname(path)
    if os.path.basename(owner).startswith("nvme-subsys"):
        # The head of a multipath drive is virtual; its controllers hang somewhere.
        controllers = [name for name in names_in(owner) if _CONTROLLER.fullmatch(name)]
        nodes = {_node_above(os.path.realpath(f"{owner}/{name}"), roots) for name in controllers}
    return nodes.pop() if len(nodes) == 1 else None


def _node_above(path: str, roots: Roots) -> int | None:
    """The ``numa_node`` of the nearest device above that has one."""
    top = os.path.realpath(roots.sys)
    while len(path) > len(top):
        text = read_text(f"{path}/numa_node")
        if text is not None:
            return int(text) if text.isdigit() else None  # -1: none
        path = os.path.dirname(path)
    return None
