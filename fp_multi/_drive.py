"""The drive behind a directory: which queue its writes go to, through partitions, volumes, arrays and mounts.

Read from the kernel's own account: ``/proc/self/mountinfo`` and ``/proc/self/fdinfo`` (proc(5)), ``/sys/dev/block``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal

from fp_multi._block import blocks_of, disks_below
from fp_multi._kernel import REAL, Mount, Roots, mount_id, mount_of, read_text

Kind = Literal["disk", "nvme", "dm", "md", "loop", "network", "memory", "unknown"]

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_NETWORK = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "wekafs", "panfs", "orangefs"),
        *("pvfs2", "glusterfs", "afs", "9p", "virtiofs"),
        # through FUSE
        *("fuse.ceph-fuse", "fuse.glusterfs", "fuse.moosefs", "fuse.juicefs", "fuse.sshfs", "fuse.rclone"),
        *("fuse.s3fs", "fuse.goofys", "fuse.geesefs", "fuse.gcsfuse"),
    }
)


@dataclass(frozen=True, slots=True)
class Device:
    """What takes the writes of a directory."""

    key: str
    """Two directories of one host with the same key share a queue. ``254:0``, ``nvme:nvme0``, ``8:0+8:16``,
    ``nfs4:server:/export``, ``memory``."""
    kind: Kind
    """What the file system lies on directly: a volume on one disk has that disk's key, and the kind ``dm``."""
    name: str
    """For people: ``vda``, ``dm-0 on sda, sdb``, ``server:/export``."""
    rotational: bool | None = None
    """As the kernel says, which of a virtual drive may be wrong; None if it does not say."""
    numa_node: int | None = None
    """The memory node that the drive hangs at; None if the kernel does not say, or its disks hang at several."""


def existing(directory: str | os.PathLike[str]) -> str:
    """The directory, or its nearest parent that exists: a target that will be made lies on the same drive."""
    at = os.path.realpath(os.fsdecode(directory))
    while not os.path.isdir(at) and at != os.path.dirname(at):
        at = os.path.dirname(at)
    return at


def device_of(directory: str | os.PathLike[str], roots: Roots = REAL) -> Device:
    """Find the drive behind a directory.

    Args:
        directory: it need not exist yet.
        roots: where the kernel's files are.

    Returns:
        The drive. What the kernel hides (in a sandbox) makes it ``unknown``; nothing is raised for that.
    """
    at = existing(directory)
    try:
        # The dot makes an automounter mount what is to come here, which opening the name alone does not.
        fd = os.open(os.path.join(at, "."), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            mount = mount_of(mount_id(fd, roots), roots)
        finally:
            os.close(fd)
    except OSError:
        shown = os.fsencode(at).decode(errors="backslashreplace")
        return Device(f"path:{shown}", "unknown", shown)
    return on_device(f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}", mount, roots)


def on_device(number: str, mount: Mount | None, roots: Roots = REAL) -> Device:
    """The drive of a file system.

    Args:
        number: ``major:minor``, as stat gives for the directory.
        mount: what is mounted there, if that is known.
        roots: where the kernel's files are.
    """
    block = f"{roots.sys}/dev/block/{number}"
    if os.path.exists(block):
        return _block_device([block], roots)
    if mount is None:
        return Device(number, "unknown", number)
    if mount.fstype in _MEMORY:
        # Whatever the mount: the bytes go through one memory.
        return Device("memory", "memory", mount.fstype, False)
    if mount.fstype in _NETWORK:
        return Device(f"{mount.fstype}:{mount.source}", "network", mount.source)
    blocks = blocks_of(mount.source, roots)
    if blocks:
        return _block_device(blocks, roots)
    upper = next((o.removeprefix("upperdir=") for o in mount.options.split(",") if o.startswith("upperdir=")), None)
    if mount.fstype == "overlay" and upper is not None:
        # In a container the upper directory is mostly out of sight; its path still tells the container's layer.
        return device_of(upper, roots) if os.path.isdir(upper) else Device(f"overlay:{upper}", "unknown", "overlay")
    if number.startswith("0:"):
        # A made-up number: the source is what two mounts of one file system have in common (zfs: the pool).
        source = mount.source.partition("/")[0] if mount.fstype == "zfs" else mount.source
        return Device(f"{mount.fstype}:{source}", "unknown", f"{mount.fstype} {source}")
    return Device(number, "unknown", mount.source)


def _block_device(blocks: list[str], roots: Roots) -> Device:
    top = os.path.realpath(blocks[0])
    if os.path.exists(f"{top}/partition"):
        top = os.path.dirname(top)
    disks = sorted({disk for block in blocks for disk in disks_below(block, roots)})
    nodes = {disk.numa_node for disk in disks}
    names = ", ".join(dict.fromkeys(disk.name for disk in disks))
    name = os.path.basename(top)
    kind: Kind = "disk"
    if os.path.isdir(f"{top}/dm"):
        kind = "dm"
    elif os.path.isdir(f"{top}/md"):
        kind = "md"
    elif os.path.isdir(f"{top}/loop") or re.fullmatch(r"loop\d+", name):
        kind = "loop"
    elif name.startswith("nvme"):
        kind = "nvme"
    elif re.fullmatch(r"(zram|ram)\d+", name):
        kind = "memory"
    return Device(
        "+".join(dict.fromkeys(disk.key for disk in disks)),
        kind,
        name if names == name else names if len(blocks) > 1 else f"{name} on {names}",
        {"0": False, "1": True}.get(read_text(f"{top}/queue/rotational") or ""),
        nodes.pop() if len(nodes) == 1 else None,
    )
