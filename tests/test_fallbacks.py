"""Systems that refuse things: real file systems, real limits, real filters. `auto` works and says why, `on` fails."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import assert_same, check_child, config, hidden_names, injected, load_config, random_bytes, small_state

import fp_multi as fp
from fp_multi import _commit, _engine
from fp_multi.errors import CapabilityError, NoSpaceError, StorageError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
STATE = small_state(4)


def run(*command: object) -> str:
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout.strip()


Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts file systems; all are gone afterwards."""
    undo: list[list[object]] = []

    def mounted(*options: object) -> Path:
        at = tmp_path / f"mount-{len(undo)}"
        at.mkdir()
        try:
            run("mount", *options, at)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"cannot mount: {getattr(error, 'stderr', error)}")
        undo.append(["umount", at])
        return at

    def on_loop(mebibytes: int, sector: int = 512, kind: str = "ext4") -> Path:
        if shutil.which(f"mkfs.{kind}") is None:
            pytest.skip(f"no mkfs.{kind}")
        image = tmp_path / f"image-{len(undo)}"
        with open(image, "wb") as file:
            file.truncate(mebibytes << 20)
        try:
            device = run("losetup", "--sector-size", sector, "-f", "--show", image)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no loop device: {getattr(error, 'stderr', error)}")
        undo.append(["losetup", "-d", device])
        run(f"mkfs.{kind}", "-q", *(["-b", 4096] if sector == 4096 else []), device)
        return mounted(device)

    mounted.on_loop = on_loop
    yield mounted
    for command in reversed(undo):
        run(*command)


def check_auto(directory: Path, **settings: str) -> fp.SaveReport:
    """`auto` saves and loads, whatever is missing."""
    report = fp.save(STATE, directory / "auto", overwrite=True, config=config(durable=True, **settings))
    assert_same(fp.load(directory / "auto", config=load_config(**settings)), STATE)
    fp.save(STATE, directory / "auto", overwrite=True, config=config(durable=True, **settings))
    fp.verify(directory / "auto", config=load_config(**settings))
    assert hidden_names(directory) == []
    return report


def check_on(directory: Path, match: str, **settings: str) -> None:
    """`on` refuses, and leaves nothing."""
    before = os.listdir(directory)
    with pytest.raises(CapabilityError, match=match):
        fp.save(STATE, directory / "on", config=config(**settings))
    assert os.listdir(directory) == before


# --- file systems


@needs_root
def test_tmpfs(mount):
    directory = mount("-t", "tmpfs", "-o", "size=32m", "tmpfs")
    report = check_auto(directory)
    assert not report.direct
    assert any(reason.startswith("direct: ") for reason in report.reasons)
    check_on(directory, "O_DIRECT", direct="on")
    check_on(directory, "DONTCACHE", direct="off", dontcache="on")
    with pytest.raises(CapabilityError, match="O_DIRECT"):
        fp.load(directory / "auto", config=load_config(direct="on"))


@needs_root
def test_a_drive_with_sectors_of_4096_bytes(mount):
    directory = mount.on_loop(32, 4096)
    (directory / "probe").write_bytes(bytes(8192))
    how, memory, offset = _engine.dio_alignment(str(directory / "probe"))
    if how == "supported":
        assert offset == 4096
    report = check_auto(directory)
    assert report.direct
    for io_uring in ("auto", "off"):
        fp.save(STATE, directory / "on", overwrite=True, config=config(direct="on", io_uring=io_uring))
        assert_same(fp.load(directory / "on", config=load_config(direct="on", io_uring=io_uring)), STATE)
    with injected("write_completion", times=40, short_nbytes=4096):
        fp.save(STATE, directory / "on", overwrite=True, config=config(direct="on"))
    with injected("write_completion", times=40, short_nbytes=512):  # not even a sector: resumed through the page cache
        fp.save(STATE, directory / "on", overwrite=True, config=config(direct="on"))
    fp.verify(directory / "on")
    assert memory <= 4096


@needs_root
@pytest.mark.parametrize("below", ["ext4", "tmpfs"])
def test_overlayfs(mount, below):
    base = mount.on_loop(48) if below == "ext4" else mount("-t", "tmpfs", "-o", "size=48m", "tmpfs")
    for name in ("lower", "upper", "work"):
        (base / name).mkdir()
    fp.save(small_state(1), base / "lower" / "shipped", config=config())
    layers = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
    directory = mount("-t", "overlay", "-o", layers, "overlay")
    check_auto(directory)
    assert_same(fp.load(directory / "shipped"), small_state(1))
    # A directory of the lower layer cannot be renamed; the save says so and it stays as it was.
    with pytest.raises(StorageError) as caught:
        fp.save(STATE, directory / "shipped", overwrite=True, config=config())
    assert caught.value.errno == errno.EXDEV
    assert_same(fp.load(directory / "shipped"), small_state(1))
    assert hidden_names(directory) == []


@needs_root
@pytest.mark.parametrize("kind", ["xfs", "btrfs", "vfat"])
def test_other_file_systems(mount, kind):
    directory = mount.on_loop({"xfs": 320, "btrfs": 128, "vfat": 64}[kind], kind=kind)
    check_auto(directory)
    check_auto(directory, io_uring="off")
    check_auto(directory, direct="off")


@needs_root
def test_btrfs_is_direct_where_its_files_have_no_checksums(mount):
    directory = mount.on_loop(128, kind="btrfs")
    nocow = directory / "nocow"
    nocow.mkdir()
    run("chattr", "+C", nocow)
    report = check_auto(nocow)
    assert report.direct
    assert report.reasons == ()
    check_auto(nocow, direct="on")
    report = check_auto(directory)
    assert not report.direct
    assert "direct: the file system buffers direct writes" in report.reasons


@needs_root
def test_no_room_is_said_before_anything_is_written(mount):
    directory = mount.on_loop(16)
    fp.save({"old": np.arange(10)}, directory / "ckpt", config=config())
    before = os.statvfs(directory).f_bfree
    with pytest.raises(NoSpaceError) as caught:
        fp.save({"x": np.zeros(64 << 20, np.uint8)}, directory / "ckpt", overwrite=True, config=config())
    assert caught.value.needed_nbytes > caught.value.free_nbytes
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(NoSpaceError):
        fp.save_safetensors({"x": np.zeros(64 << 20, np.uint8)}, directory / "file", config=config())
    assert os.statvfs(directory).f_bfree == before
    assert fp.load(directory / "ckpt")["old"].sum() == 45
    assert sorted(set(os.listdir(directory)) - {"lost+found"}) == ["ckpt"]


@needs_root
@pytest.mark.parametrize("fallocate", [True, False], ids=["preallocated", "extending"])
@pytest.mark.parametrize("settings", [{}, {"io_uring": "off"}, {"direct": "off"}], ids=["auto", "threads", "buffered"])
def test_room_that_vanishes_after_it_was_asked_for(mount, monkeypatch, fallocate, settings):
    directory = mount.on_loop(24)
    old = {"old": np.arange(10)}
    fp.save(old, directory / "ckpt", config=config())
    ask = _commit.require_space

    def then_somebody_fills_it(where: str, nbytes: int) -> None:
        ask(where, nbytes)
        stat = os.statvfs(where)
        with open(directory / "other", "wb") as file:
            left = (stat.f_bfree * stat.f_frsize - nbytes // 2) >> 16
            for _ in range(left):
                file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())

    monkeypatch.setattr(_commit, "require_space", then_somebody_fills_it)
    point = "fallocate" if not fallocate else "statx"
    with (
        injected(point, times=1 if not fallocate else 0, error=errno.EOPNOTSUPP),
        pytest.raises(StorageError) as caught,
    ):
        fp.save(
            {"x": random_bytes(8 << 20)}, directory / "ckpt", overwrite=True, config=config(durable=True, **settings)
        )
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.op in (("fallocate",) if fallocate else ("write", "fdatasync"))
    assert_same(fp.load(directory / "ckpt"), old)
    assert hidden_names(directory) == []
    monkeypatch.undo()
    (directory / "other").unlink()
    fp.save({"x": random_bytes(8 << 20)}, directory / "ckpt", overwrite=True, config=config())
    fp.verify(directory / "ckpt")


@needs_root
def test_a_read_only_file_system(mount):
    directory = mount.on_loop(16)
    fp.save(STATE, directory / "ckpt", config=config())
    run("mount", "-o", "remount,ro", directory)
    for overwrite in (directory / "ckpt", directory / "new"):
        with pytest.raises(StorageError) as caught:
            fp.save(STATE, overwrite, overwrite=True, config=config())
        assert caught.value.errno == errno.EROFS
    assert_same(fp.load(directory / "ckpt"), STATE)


# --- filters


SECCOMP = """
import ctypes, struct

def refuse(number, code):
    # if nr == number: return ERRNO(code); else ALLOW
    program = b"".join(struct.pack("HBBI", *line) for line in (
        (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | code), (0x06, 0, 0, 0x7FFF0000)))
    buffer = ctypes.create_string_buffer(program)

    class Filter(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    filter_ = Filter(4, ctypes.addressof(buffer))
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "no_new_privs"
    if libc.prctl(22, 2, ctypes.byref(filter_), 0, 0):
        print("no seccomp here")
        sys.exit(0)

directory, number, code = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
refuse(number, code)
report = fp.save(small_state(4), directory + "/auto", config=config())
assert report.engine == "threads", report
print(report.reasons)
assert_same(fp.load(directory + "/auto"), small_state(4))
for settings in ({"io_uring": "on"}, {"io_uring": "on", "direct": "off"}):
    try:
        fp.save(small_state(4), directory + "/on", config=config(**settings))
    except fp.errors.CapabilityError as error:
        print(error)
    else:
        raise AssertionError("on did not fail")
    try:
        fp.load(directory + "/auto", config=load_config(**settings))
    except fp.errors.CapabilityError:
        pass
    else:
        raise AssertionError("on did not fail")
assert os.listdir(directory) == ["auto"]
"""


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize(("step", "number"), [("io_uring_setup", 425), ("io_uring_enter", 426)])
def test_a_container_that_forbids_io_uring(tmp_path, step, number, code):
    said = check_child(SECCOMP, tmp_path, number, code)
    if "no seccomp" in said:
        pytest.skip("no seccomp here")
    lines = said.splitlines()
    assert f"io_uring: {step}: {os.strerror(code)}" in lines[0]
    assert step in lines[1]
    assert os.strerror(code) in lines[1]
    assert '"auto"' in lines[1]


@pytest.mark.parametrize(
    ("name", "number"), [("statx", 332), ("fallocate", 285), ("renameat2", 316), ("cachestat", 451), ("pwritev2", 328)]
)
def test_an_old_kernel_or_a_strict_filter(tmp_path, name, number):
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86_64")
    code = (
        SECCOMP[: SECCOMP.index("report =")]
        + """
for settings in ({}, {"io_uring": "off"}, {"direct": "off"}, {"io_uring": "off", "direct": "off"}):
    for _ in range(2):
        fp.save(small_state(4), directory + "/auto", overwrite=True, config=config(**settings))
    assert_same(fp.load(directory + "/auto", config=load_config(**settings)), small_state(4))
    fp.verify(directory + "/auto", config=load_config(**settings))
assert os.listdir(directory) == ["auto"]
"""
    )
    check_child(code, tmp_path, number, errno.ENOSYS)


# --- limits


@pytest.fixture
def anybody() -> Iterator[Path]:
    """A directory that a process without privileges can use."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


UNPRIVILEGED = """
import resource
import numpy.random
import fp_multi.checkpoint, fp_multi._verify, fp_multi._safetensors  # their files may be out of reach later
directory = sys.argv[1]
os.setgid(65534)
os.setuid(65534)
"""


@needs_root
def test_no_locked_memory_for_an_ordinary_user(anybody):
    check_child(
        UNPRIVILEGED
        + """
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
report = fp.save(small_state(4), directory + "/ckpt", config=config())
assert report.engine == "io_uring" or any("io_uring" in reason for reason in report.reasons), report
assert_same(fp.load(directory + "/ckpt"), small_state(4))
""",
        anybody,
    )


@needs_root
def test_few_threads_for_an_ordinary_user(anybody):
    # Each limit in a process of its own: the thread count of the user is what the limit looks at.
    said = check_child(
        UNPRIVILEGED
        + """
pids = []
outcomes = []
for more in range(12):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_NPROC, (2 + more, 2 + more))
        try:
            settings = config(io_uring="off", block_bytes=1 << 20, copy_threads=3)
            fp.save(small_state(4), f"{directory}/{more}", config=settings)
            assert_same(fp.load(f"{directory}/{more}", config=load_config(io_uring="off")), small_state(4))
            os.write(write, b"saved")
        except fp.errors.StorageError as error:
            assert error.errno == errno.EAGAIN, error
            os.write(write, b"refused")
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    assert status == 0, (more, status)
    outcomes.append(os.read(read, 100).decode())
assert hidden_names(directory) == []
print(*outcomes)
""",
        anybody,
    )
    outcomes = said.split()
    assert outcomes[-1] == "saved"
    assert sorted(outcomes) == outcomes, "refused with few threads, saved with more"
    assert outcomes[0] == "refused"


def test_a_limit_on_file_size(tmp_path):
    check_child(
        """
        import resource
        directory = sys.argv[1]
        fp.save(small_state(1), directory + "/ckpt", config=config())
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        for settings in ({}, {"io_uring": "off"}, {"direct": "off"}):
            for point in ("statx", "fallocate"):
                try:
                    with injected(point, times=9, error=errno.EOPNOTSUPP):
                        fp.save(small_state(2), directory + "/ckpt", overwrite=True, config=config(**settings))
                except fp.errors.StorageError as error:
                    assert error.errno == errno.EFBIG, error
                else:
                    raise AssertionError("no error")
        assert_same(fp.load(directory + "/ckpt"), small_state(1))
        assert os.listdir(directory) == ["ckpt"]
        """,
        tmp_path,
    )


def test_a_limit_on_open_files(tmp_path):
    said = check_child(
        """
        import resource
        directory = sys.argv[1]
        path = directory + "/ckpt"
        fp.save(small_state(1), path, config=config())
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

        def limited(act):
            # What is open stays open; `more` more are allowed.
            filler = []
            outcomes = []
            for more in range(16):
                free = os.dup(0)
                os.close(free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, hard))
                try:
                    act()
                    outcomes.append("done")
                except fp.errors.StorageError as error:
                    assert error.errno == errno.EMFILE, error
                    outcomes.append("failed")
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                found = fp.load(path)
                assert_same(found, small_state(found["seed"]))
                assert hidden_names(directory) == [], hidden_names(directory)
            print(*outcomes)

        limited(lambda: fp.save(small_state(2), path, overwrite=True, config=config(durable=True)))
        limited(lambda: fp.load(path))
        """,
        tmp_path,
    )
    saves, loads = (line.split() for line in said.splitlines())
    for outcomes in (saves, loads):
        assert outcomes[0] == "failed"
        assert outcomes[-1] == "done"


def test_a_limit_on_memory(tmp_path):
    check_child(
        """
        import resource
        path = sys.argv[1]
        fp.save({"x": np.zeros(64 << 20, np.uint8)}, path, config=config())
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), hard))
        try:
            fp.load(path)
        except MemoryError:
            pass
        else:
            raise AssertionError("no error")
        try:
            big = config(block_bytes=64 << 20, queue_depth=8)
            fp.save({"x": np.zeros(600 << 10, np.uint8)}, path + "-big", config=big)
        except (fp.errors.StorageError, MemoryError) as error:
            assert isinstance(error, MemoryError) or error.errno == errno.ENOMEM
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        assert fp.load(path)["x"].nbytes == 64 << 20
        """,
        tmp_path / "ckpt",
    )


@needs_root
def test_a_directory_of_somebody_else(anybody):
    fp.save(STATE, anybody / "ckpt", config=config())
    os.chmod(anybody, 0o755)
    check_child(
        UNPRIVILEGED
        + """
for target in (directory + "/ckpt", directory + "/new", directory + "/a/b"):
    try:
        fp.save(small_state(1), target, overwrite=True, config=config())
    except fp.errors.StorageError as error:
        assert error.errno == errno.EACCES, error
        assert isinstance(error, PermissionError) or error.errno == errno.EACCES
    else:
        raise AssertionError("no error")
assert_same(fp.load(directory + "/ckpt"), small_state(4))
""",
        anybody,
    )
    assert os.listdir(anybody) == ["ckpt"]
