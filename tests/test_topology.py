"""Drives, sockets and hosts, on made-up /sys and /proc trees and on this machine; the probe; the command."""

from __future__ import annotations

import dataclasses
import datetime
import errno
import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import injected

import fp_multi as fp
from fp_multi import _probe, _rate_cache
from fp_multi._drive import Device, device_of, existing, on_device
from fp_multi._kernel import Mount, Roots, mount_of
from fp_multi._machine import host_of
from fp_multi._topology import HEADINGS, RankPlace, decode, encode, local_place, topology_of
from fp_multi.errors import CommError

BUDGET_S = _probe._BUDGET_S
NO_MOUNT = Mount("ext4", "/dev/sda1", "rw")


class Sysfs:
    """A made-up /sys and /proc."""

    def __init__(self, at: Path) -> None:
        self.at = at
        self.roots = Roots(str(at / "sys"), str(at / "proc"))
        for name in ("dev/block", "class/block"):
            (at / "sys" / name).mkdir(parents=True)

    def write(self, path: str, text: object) -> None:
        file = self.at / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def block(self, where: str, number: str, *, slaves: tuple[str, ...] = (), **files: str) -> str:
        """A block device at a path below /sys/devices; slaves are such paths."""
        path = self.at / "sys/devices" / where
        path.mkdir(parents=True, exist_ok=True)
        self.write(f"sys/devices/{where}/dev", number)
        for name, text in files.items():
            self.write(f"sys/devices/{where}/{name.replace('__', '/')}", text)
        for folder, name in (("dev/block", number), ("class/block", path.name)):
            (self.at / "sys" / folder / name).symlink_to(path)
        for slave in slaves:
            (path / "slaves").mkdir(exist_ok=True)
            (path / "slaves" / Path(slave).name).symlink_to(self.at / "sys/devices" / slave)
        return where

    def disk(self, name: str, number: str, *, node: int = -1, bus: str = "0000:00:1f.2") -> str:
        self.write(f"sys/devices/pci/{bus}/numa_node", node)
        return self.block(f"pci/{bus}/host0/block/{name}", number, queue__rotational="1")

    def partition(self, disk: str, part: int, number: str) -> str:
        return self.block(f"{disk}/{Path(disk).name}{part}", number, partition=str(part))

    def cpus(self, sockets: dict[int, list[int]], nodes: dict[int, str] | None = None) -> None:
        for socket, cpus in sockets.items():
            for cpu in cpus:
                self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", socket)
        for node, text in (nodes or {}).items():
            self.write(f"sys/devices/system/node/node{node}/cpulist", text)

    def device(self, number: str, mount: Mount | None = NO_MOUNT) -> Device:
        return on_device(number, mount, self.roots)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "fake")


# Drives


def test_a_disk_and_its_partitions_share_a_queue(sysfs: Sysfs) -> None:
    disk = sysfs.disk("sda", "8:0", node=1)
    sysfs.partition(disk, 1, "8:1")
    sysfs.partition(disk, 2, "259:7")
    whole = sysfs.device("8:0")
    assert whole == Device("8:0", "disk", "sda", True, 1)
    assert sysfs.device("8:1") == sysfs.device("259:7") == whole


def test_volumes_lead_to_their_disks(sysfs: Sysfs) -> None:
    a, b = sysfs.disk("sda", "8:0", node=0), sysfs.disk("sdb", "8:16", node=0)
    part = sysfs.partition(a, 3, "8:3")
    sysfs.block("virtual/block/dm-0", "253:0", slaves=(part,), dm__name="vg-root", queue__rotational="0")
    both = sysfs.block("virtual/block/dm-1", "253:1", slaves=(part, b), dm__name="vg-data")
    sysfs.block("virtual/block/dm-2", "253:2", slaves=(both,), dm__name="crypt")
    # On one disk: its queue, whatever is between. On two: another queue than either, the same through all layers.
    assert sysfs.device("253:0") == Device("8:0", "dm", "dm-0 on sda", False, 0)
    assert sysfs.device("253:1") == Device("8:0+8:16", "dm", "dm-1 on sda, sdb", None, 0)
    assert sysfs.device("253:2").key == "8:0+8:16"


def test_an_array_of_disks_at_two_nodes_has_none(sysfs: Sysfs) -> None:
    a, b = sysfs.disk("sda", "8:0", node=0), sysfs.disk("sdb", "8:16", node=1, bus="0000:80:1f.2")
    sysfs.block("virtual/block/md0", "9:0", slaves=(sysfs.partition(a, 1, "8:1"), b), md__level="raid0")
    sysfs.partition("virtual/block/md0", 1, "259:0")
    assert sysfs.device("9:0") == sysfs.device("259:0") == Device("8:0+8:16", "md", "md0 on sda, sdb", None, None)


def test_namespaces_of_one_controller_share_its_queues(sysfs: Sysfs) -> None:
    for controller, node in (("nvme0", 0), ("nvme1", 1)):
        sysfs.write(f"sys/devices/pci/{controller}/nvme/{controller}/numa_node", node)
    first = sysfs.block("pci/nvme0/nvme/nvme0/nvme0n1", "259:0", queue__rotational="0")
    sysfs.partition(first, 1, "259:1")
    sysfs.block("pci/nvme0/nvme/nvme0/nvme0n2", "259:2", queue__rotational="0")
    other = sysfs.block("pci/nvme1/nvme/nvme1/nvme1n1", "259:3", queue__rotational="0")
    assert sysfs.device("259:1") == Device("nvme:nvme0", "nvme", "nvme0n1", False, 0)
    assert sysfs.device("259:2").key == "nvme:nvme0"
    assert sysfs.device("259:3") == Device("nvme:nvme1", "nvme", "nvme1n1", False, 1)
    sysfs.block("virtual/block/md127", "9:127", slaves=(first, other), md__level="raid0")
    assert sysfs.device("9:127") == Device("nvme:nvme0+nvme:nvme1", "md", "md127 on nvme0n1, nvme1n1", None, None)


@pytest.mark.parametrize(("nodes", "expected"), [((1, 1), 1), ((0, 1), None), ((-1, -1), None)])
def test_a_multipath_nvme_drive_hangs_at_its_controllers(
    sysfs: Sysfs, nodes: tuple[int, int], expected: int | None
) -> None:
    head = sysfs.block("virtual/nvme-subsystem/nvme-subsys0/nvme0n1", "259:0", queue__rotational="0")
    for path, node in enumerate(nodes):
        sysfs.write(f"sys/devices/pci/{path}/nvme/nvme{path}/numa_node", node)
        link = sysfs.at / f"sys/devices/virtual/nvme-subsystem/nvme-subsys0/nvme{path}"
        link.symlink_to(sysfs.at / f"sys/devices/pci/{path}/nvme/nvme{path}")
    assert sysfs.device("259:0") == Device("nvme:nvme-subsys0", "nvme", Path(head).name, False, expected)


def test_a_loop_device_is_a_drive_of_its_own(sysfs: Sysfs) -> None:
    sysfs.block("virtual/block/loop0", "7:0", loop__backing_file="/disk.img", queue__rotational="0")
    sysfs.partition("virtual/block/loop0", 1, "259:0")
    sysfs.block("virtual/block/loop1", "7:1", loop__backing_file="/other.img")
    assert sysfs.device("7:0") == sysfs.device("259:0") == Device("7:0", "loop", "loop0", False, None)
    assert sysfs.device("7:1").key == "7:1"


def test_volumes_that_name_each_other_do_not_hang(sysfs: Sysfs) -> None:
    sysfs.block("virtual/block/dm-1", "253:1", slaves=("virtual/block/dm-2",), dm__name="a")
    sysfs.block("virtual/block/dm-2", "253:2", slaves=("virtual/block/dm-1",), dm__name="b")
    assert sysfs.device("253:1").kind == "dm"


def test_file_systems_with_made_up_numbers(sysfs: Sysfs) -> None:
    disk = sysfs.disk("sda", "8:0")
    sysfs.disk("sdb", "8:16")
    sysfs.partition(disk, 1, "8:1")
    # btrfs: the source names one of its devices, sysfs all of them
    assert sysfs.device("0:40", Mount("btrfs", "/dev/sda1", "rw")).key == "8:0"
    devices = sysfs.at / "sys/fs/btrfs/some-uuid/devices"
    devices.mkdir(parents=True)
    (devices / "sda1").symlink_to(sysfs.at / "sys/class/block/sda1")
    (devices / "sdb").symlink_to(sysfs.at / "sys/class/block/sdb")
    assert sysfs.device("0:40", Mount("btrfs", "/dev/sda1", "rw")) == Device("8:0+8:16", "disk", "sda, sdb", True, None)
    assert sysfs.device("0:41", Mount("bcachefs", "/dev/sda1:/dev/sdb", "rw")).key == "8:0+8:16"
    # two exports of a server are two queues, two mounts of one export are one
    export = Mount("nfs4", "server:/export", "rw,vers=4.2")
    assert sysfs.device("0:50", export) == Device("nfs4:server:/export", "network", "server:/export")
    assert sysfs.device("0:51", export).key == sysfs.device("0:50", export).key
    assert sysfs.device("0:50", Mount("nfs4", "server:/other", "rw")).key == "nfs4:server:/other"
    assert sysfs.device("0:52", Mount("fuse.gcsfuse", "bucket", "rw")).kind == "network"
    assert sysfs.device("0:53", Mount("tmpfs", "tmpfs", "rw")) == Device("memory", "memory", "tmpfs", False)
    assert (
        sysfs.device("0:54", Mount("zfs", "pool/a", "rw")).key == sysfs.device("0:55", Mount("zfs", "pool/b", "")).key
    )
    assert sysfs.device("0:56", Mount("fuse.strange", "x", "rw")) == Device(
        "fuse.strange:x", "unknown", "fuse.strange x"
    )


def test_an_overlay_lies_where_its_upper_directory_does(sysfs: Sysfs, tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    options = f"rw,lowerdir=/l1:/l2,upperdir={upper},workdir={tmp_path}"
    hidden = sysfs.device("0:60", Mount("overlay", "overlay", options))
    assert hidden == Device(f"overlay:{upper}", "unknown", "overlay")
    upper.mkdir()
    real = on_device("0:60", Mount("overlay", "overlay", options))
    assert real == device_of(tmp_path)


def test_what_the_kernel_hides_is_unknown(sysfs: Sysfs) -> None:
    assert sysfs.device("8:1", None) == Device("8:1", "unknown", "8:1")
    assert sysfs.device("8:1").key == "8:1"


def test_mountinfo_is_read_by_number(sysfs: Sysfs) -> None:
    lines = r"""
        20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
        21 20 0:50 / /mnt/a\040b rw shared:2 master:1 - nfs4 server:/with\040space rw,addr=10.0.0.1
        22 20 0:51 / /mnt/- rw - tmpfs - rw,size=4k
        23 20 0:52 / /mnt/none rw - tmpfs
        cut
    """
    sysfs.write("proc/self/mountinfo", textwrap.dedent(lines).strip())
    assert mount_of("20", sysfs.roots) == Mount("ext4", "/dev/sda1", "rw")
    assert mount_of("21", sysfs.roots) == Mount("nfs4", "server:/with space", "rw,addr=10.0.0.1")
    assert mount_of("22", sysfs.roots) == Mount("tmpfs", "-", "rw,size=4k")
    for number in ("23", "cut", "99", None):
        assert mount_of(number, sysfs.roots) is None


def test_the_target_need_not_exist(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert existing(tmp_path / "a" / "b") == existing(tmp_path / "file") == str(tmp_path)
    assert device_of(tmp_path / "a" / "b") == device_of(tmp_path)


def test_this_machine(tmp_path: Path) -> None:
    found = device_of(tmp_path)
    number = os.stat(tmp_path).st_dev
    assert found.key
    assert found.name
    if os.major(number) and os.path.exists(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"):
        assert found.kind not in ("network", "unknown")
    if os.path.ismount("/dev/shm"):
        shm = device_of("/dev/shm")
        assert (shm.key, shm.kind) == ("memory", "memory")
        assert device_of("/dev/shm/no/such").key == "memory"


# Places


def test_a_place_on_a_machine_with_two_sockets(sysfs: Sysfs, tmp_path: Path) -> None:
    sysfs.cpus({0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}, {0: "0-1,4-5", 1: "2-3,6-7"})
    bound = local_place(3, tmp_path, cpus={2, 3, 6}, roots=sysfs.roots)
    assert (bound.numa_node, bound.socket, bound.cpus) == (1, 1, "2-3,6")
    free = local_place(0, tmp_path, cpus=range(8), roots=sysfs.roots)
    assert (free.numa_node, free.socket) == (None, None)
    assert (free.numa_nodes, free.sockets, free.cpus) == ((0, 1), (0, 1), "0-7")
    assert bound.row()[2:5] == ("1", "1", "2-3,6")
    assert free.row()[2:5] == ("0-1", "0-1", "0-7")


def test_the_socket_of_a_drive(sysfs: Sysfs, tmp_path: Path) -> None:
    # the made-up disk has the real number of the directory's file system
    number = os.stat(tmp_path).st_dev
    sysfs.disk("sda", f"{os.major(number)}:{os.minor(number)}", node=2)
    sysfs.cpus({0: [0, 1], 1: [2, 3]}, {0: "0", 1: "1", 2: "2", 3: "3"})
    place = local_place(0, tmp_path, cpus={0}, roots=sysfs.roots)
    assert place.device.numa_node == 2
    assert place.drive_socket == 1


def test_a_machine_that_says_nothing(sysfs: Sysfs, tmp_path: Path) -> None:
    place = local_place(0, tmp_path, cpus={0, 5}, roots=sysfs.roots)
    assert (place.numa_node, place.socket, place.drive_socket) == (None, None, None)
    assert place.cpus == "0,5"
    assert place.row()[2:4] == ("-", "-")
    sysfs.write("sys/devices/system/cpu/cpu0/topology/physical_package_id", -1)
    assert local_place(0, tmp_path, cpus={0, 5}, roots=sysfs.roots).sockets == ()


def test_hosts_are_kernels_unless_they_are_named(sysfs: Sysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP_MULTI_HOST_ID", raising=False)
    name = os.uname().nodename
    assert host_of(sysfs.roots) == (name, name)
    sysfs.write("proc/sys/kernel/random/boot_id", "a-b-c")
    assert host_of(sysfs.roots) == ("a-b-c", name)
    monkeypatch.setenv("FP_MULTI_HOST_ID", "node7")
    assert host_of(sysfs.roots) == ("node7", "node7")


def test_processes_of_this_machine_agree_on_the_host(tmp_path: Path) -> None:
    code = "import sys; from fp_multi._topology import *; sys.stdout.buffer.write(encode(local_place(1, sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, check=True)
    topology = decode([done.stdout, encode(local_place(0, tmp_path))])
    assert topology.size == 2
    assert len(topology.hosts()) == 1
    assert topology.places[0] == dataclasses.replace(topology.places[1], rank=0)


def places(count: int) -> list[RankPlace]:
    device = Device("8:0", "disk", "sda")
    return [RankPlace(i, f"h{i // 2}", f"h{i // 2}", "0-3", (0,), (0,), device, None, 1, 2.5e9) for i in range(count)]


def test_places_travel_as_bytes_in_any_order() -> None:
    messages = [encode(place) for place in places(5)]
    topology = decode(messages[::-1])
    assert topology == topology_of(places(5))
    assert {host: [p.rank for p in found] for host, found in topology.hosts().items()} == {
        "h0": [0, 1],
        "h1": [2, 3],
        "h2": [4],
    }
    assert all(len(row) == len(HEADINGS) for row in topology.table())
    assert topology.table()[3] == ("3", "h1", "0", "0", "0-3", "sda", "disk", "2.50")
    assert max(map(len, messages)) < 500


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "rank 0 is not among them"),
        ([encode(p) for p in places(3)[1:]], "rank 0 is not among them"),
        ([encode(p) for p in [*places(3), *places(1)]], "rank 3 is not among them, or came twice"),
        ([b"\x80", encode(places(1)[0])], "do all ranks run one version"),
        ([b""], "do all ranks run one version"),
    ],
)
def test_places_that_make_no_topology(messages: list[bytes], text: str) -> None:
    with pytest.raises(CommError, match=text):
        decode(messages)


# The probe


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_probe, "_BUDGET_S", 0.02)  # any rate will do, except where a test asks for the real thing
    _probe._known.clear()
    yield tmp_path / "cache" / "fp_multi" / "drives.json"
    _probe._known.clear()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that are measured."""
    sizes: list[int] = []
    real = _probe.measure_ceiling

    def measure(directory: str, nbytes: int, **more: Any) -> Any:
        sizes.append(nbytes)
        return real(directory, nbytes, **more)

    monkeypatch.setattr(_probe, "measure_ceiling", measure)
    return sizes


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    path.mkdir()
    return path


def rate(target: Path, config: fp.SaveConfig | None = None, host: str = "h") -> _probe.DriveRate:
    return _probe.drive_rate(target / "not" / "yet", device_of(target), host, config)


def forget() -> None:
    _probe._known.clear()


def test_a_drive_is_measured_once(
    cache: Path, measured: list[int], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as real:
        real.setattr(_probe, "_BUDGET_S", BUDGET_S)
        first = rate(target)
    assert first.how == "measured"
    assert first.bytes_per_s is not None
    assert first.bytes_per_s > 0
    assert measured
    assert max(measured) <= 256 << 20
    assert not list(target.iterdir())
    (entry,) = json.loads(cache.read_text())["drives"]
    assert entry["key"]["device"] == device_of(target).key
    del measured[:]
    assert rate(target) == first
    forget()  # another process
    again = rate(target)
    assert again.bytes_per_s == first.bytes_per_s
    assert again.how.startswith("measured on 20")
    assert not measured
    # another host, and other capabilities, make another rate
    assert rate(target, host="other").how == "measured"
    assert rate(target, fp.SaveConfig(io_uring="off")).how == "measured"
    assert len(json.loads(cache.read_text())["drives"]) == 3
    assert list(cache.parent.iterdir()) == [cache]


def test_a_declared_rate_needs_no_measuring(cache: Path, measured: list[int], target: Path) -> None:
    assert rate(target, fp.SaveConfig(drive_bytes_per_s=7e9)) == (7e9, "declared")
    assert not measured
    assert not cache.exists()


def test_slow_drives_are_given_little(cache: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    clock = [0.0]

    def measure(_: str, nbytes: int, **more: Any) -> list[fp.CeilingResult]:
        sizes.append(nbytes)
        clock[0] += nbytes / speed
        return [fp.CeilingResult(speed / 1e9, 1, 1, "threads", True, ())]

    monkeypatch.setattr(_probe, "_BUDGET_S", BUDGET_S)
    monkeypatch.setattr(_probe, "measure_ceiling", measure)
    monkeypatch.setattr(_probe.time, "perf_counter", lambda: clock[0])
    for speed, most in ((1e6, 1 << 20), (20e6, 9 << 20), (1e9, 256 << 20), (1e12, 256 << 20)):
        forget()
        cache.unlink(missing_ok=True)
        clock[0] = 0.0
        del sizes[:]
        assert rate(target).bytes_per_s == speed
        assert max(sizes) <= most
        assert clock[0] <= max(0.5, (1 << 20) / speed)
        # a burst at the start must not lead to a large write at the rate that comes after it
        assert all(after <= 8 * before for before, after in itertools.pairwise(sizes))


def test_a_drive_has_one_entry(cache: Path) -> None:
    for number, device in enumerate(("8:0", "8:16", "8:0")):
        _rate_cache.remember(_rate_cache.Key("h", device, ""), 1e9 + number)
    found = {entry["key"]["device"]: entry["bytes_per_s"] for entry in json.loads(cache.read_text())["drives"]}
    assert found == {"8:0": 1e9 + 2, "8:16": 1e9 + 1}
    assert len(json.loads(cache.read_text())["drives"]) == 2


def old(entry: dict[str, Any]) -> None:
    entry["date"] = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=31)).isoformat()


def no_zone(entry: dict[str, Any]) -> None:
    entry["date"] = "2026-01-01T00:00:00"


def zero(entry: dict[str, Any]) -> None:
    entry["bytes_per_s"] = 0


@pytest.mark.parametrize("damage", [old, no_zone, zero])
def test_an_odd_entry_is_ignored(
    cache: Path, measured: list[int], target: Path, damage: Callable[[dict[str, Any]], None]
) -> None:
    rate(target)
    found = json.loads(cache.read_text())
    damage(found["drives"][0])
    cache.write_text(json.dumps(found))
    forget()
    del measured[:]
    assert rate(target).how == "measured"
    assert measured
    assert len(json.loads(cache.read_text())["drives"]) == 1


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b'{"format": "other", "drives": []}', b"0" * (2 << 20)])
def test_an_odd_cache_is_ignored(cache: Path, target: Path, content: bytes) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert rate(target).how == "measured"
    forget()
    assert rate(target).how.startswith("measured on")


def test_no_place_for_a_cache(cache: Path, target: Path) -> None:
    cache.parent.parent.write_text("a file where the directory should be")
    assert rate(target).how == "measured"


def test_without_xdg_the_cache_is_below_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert _rate_cache.cache_file() == "/home/somebody/.cache/fp_multi/drives.json"


def test_a_drive_that_fails_is_not_known(cache: Path, target: Path) -> None:
    with injected("fdatasync", error=errno.EIO):
        found = rate(target)
    assert found.bytes_per_s is None
    assert "Input/output error" in found.how
    assert not list(target.iterdir())
    assert not cache.exists()


def test_a_drive_without_room_is_not_known(
    cache: Path, measured: list[int], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(target)
    fields = [*real]
    fields[3] = fields[4] = (4 << 20) // real.f_frsize
    monkeypatch.setattr(_probe.os, "statvfs", lambda _: os.statvfs_result(fields))
    found = rate(target)
    assert found.bytes_per_s is None
    assert found.how == f"not known: {4 << 20} bytes free are too few to measure"
    assert not measured


def test_a_place_where_nothing_can_be_written(cache: Path) -> None:
    found = _probe.drive_rate("/proc/self", device_of("/proc/self"), "h")
    assert found.bytes_per_s is None
    assert found.how.startswith("not known: ")


def test_processes_take_turns(cache: Path, target: Path) -> None:
    code = (
        "import sys; from fp_multi import _probe; from fp_multi._drive import device_of; _probe._WAIT_S = 60;"
        "print(*_probe.drive_rate(sys.argv[1], device_of(sys.argv[1]), 'h'))"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, target], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    answers = [process.communicate()[0].split(maxsplit=1) for process in running]
    assert all(process.returncode == 0 for process in running)
    assert sorted(how.strip()[:11] for _, how in answers) == ["measured", "measured on", "measured on"]
    assert len({found for found, _ in answers}) == 1


# The command


def invoke(*args: object, **environ: str) -> Any:
    pytest.importorskip("typer", reason="needs the extra cli: pip install 'fp_multi[cli]'")
    pytest.importorskip("rich", reason="needs the extra cli: pip install 'fp_multi[cli]'")
    from typer.testing import CliRunner

    from fp_multi._cli_app import app

    cleared = {"RANK": None, "WORLD_SIZE": None, "FP_MULTI_HOST_ID": None}
    return CliRunner().invoke(app, [str(arg) for arg in args], env={**cleared, "COLUMNS": "200", **environ})


def test_the_command_shows_this_process(cache: Path, target: Path) -> None:
    done = invoke("topology", target, FP_MULTI_HOST_ID="node7")
    assert done.exit_code == 0, done.output
    head, row, drive, writers = done.stdout.splitlines()
    assert head.split() == " ".join(HEADINGS).split()
    assert row.startswith("0     node7")
    assert device_of(target).name in row
    assert drive == "drive: measured; host: node7"
    assert writers.startswith("writers: 0; auto: 1 of 1 ranks write (hosts: 1, drives: 1); a drive takes ")


def test_the_command_as_json(cache: Path, target: Path) -> None:
    done = invoke("topology", target, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["place"]["device"]["key"] == device_of(target).key
    assert found["place"]["drive_bytes_per_s"] > 0
    assert (found["size"], found["writers"], found["drive_rate"]) == (1, [0], "measured")


def test_the_command_under_a_launcher_speaks_for_itself_only(cache: Path, target: Path) -> None:
    done = invoke("topology", target, RANK="3", WORLD_SIZE="8")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1].startswith("3 ")
    assert "only rank 3 of 8" in done.stdout
    found = json.loads(invoke("topology", target, "--json", RANK="3", WORLD_SIZE="8").stdout)
    assert (found["size"], found["place"]["rank"], found["writers"]) == (8, 3, None)


@pytest.mark.parametrize(("rank", "size"), [("8", "8"), ("x", "8"), ("0", "0"), ("-1", "2")])
def test_the_command_and_variables_that_make_no_sense(target: Path, rank: str, size: str) -> None:
    done = invoke("topology", target, RANK=rank, WORLD_SIZE=size)
    assert done.exit_code == 2
    assert done.stderr == f"fp-multi: RANK={rank} WORLD_SIZE={size} in the environment: not a rank of so many\n"


def test_the_command_where_nothing_can_be_written(cache: Path) -> None:
    done = invoke("topology", "/proc/self")
    assert done.exit_code == 0, done.output
    assert "drive: not known: " in done.stdout
    assert "the drives' rates are not known" in done.stdout
