"""What a save may replace, what it leaves alone, and what readers see meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
from support import (
    assert_same,
    check_child,
    config,
    hidden_names,
    injected,
    load_config,
    running,
    small_state,
)

import fp_multi as fp
from fp_multi import _commit, _engine
from fp_multi.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError

OLD, NEW = small_state(1), small_state(2)


def save(path: Path | str, state=NEW, **more) -> fp.SaveReport:
    return fp.save(state, path, config=config(), **more)


@pytest.fixture
def old(tmp_path):
    """A checkpoint that is there already."""
    save(tmp_path / "ckpt", OLD)
    return tmp_path / "ckpt"


def test_an_existing_checkpoint_is_replaced_only_on_request(old):
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        save(old)
    assert_same(fp.load(old), OLD)
    save(old, overwrite=True)
    assert_same(fp.load(old), NEW)
    assert os.listdir(old.parent) == ["ckpt"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path, overwrite):
    directory = tmp_path / "photos"
    directory.mkdir()
    (directory / "holiday.jpg").write_bytes(b"precious")
    file = tmp_path / "file"
    file.write_bytes(b"precious")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (directory, file, loop, fifo):
        with pytest.raises(CheckpointExistsError, match="not a checkpoint"):
            save(path, overwrite=overwrite)
    assert (directory / "holiday.jpg").read_bytes() == file.read_bytes() == b"precious"
    assert loop.is_symlink()
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert hidden_names(tmp_path) == []


def test_an_empty_directory_becomes_the_checkpoint(tmp_path):
    (tmp_path / "ckpt").mkdir()
    save(tmp_path / "ckpt")
    assert_same(fp.load(tmp_path / "ckpt"), NEW)


def test_a_link_stays_and_its_target_is_replaced(tmp_path, old):
    (tmp_path / "latest").symlink_to("ckpt")
    save(tmp_path / "latest", overwrite=True)
    assert (tmp_path / "latest").is_symlink()
    assert_same(fp.load(old), NEW)
    (tmp_path / "next").symlink_to("not-yet")
    save(tmp_path / "next")
    assert_same(fp.load(tmp_path / "not-yet"), NEW)


NAMES = [
    "plain",
    "with space",
    "[brackets]*?",
    "new\nline",
    "ünï-çödé-模型",
    "trailing.",
    "-dash",
    "quote'\"",
    ".hidden",
    ".x.fp_multi-notours",
    "n" * 255,
    "ü" * 127,
    os.fsdecode(b"not-\xff-utf8"),
]


@pytest.mark.parametrize("name", NAMES, ids=[ascii(name)[:20] for name in NAMES])
def test_any_name(tmp_path, name):
    path = tmp_path / name
    report = save(path, OLD)
    assert report.path == str(path)
    save(path, overwrite=True)
    assert_same(fp.load(path), NEW)
    fp.verify(path)
    with injected("fdatasync", error=errno.EIO), pytest.raises(StorageError) as caught:
        fp.save(OLD, path, overwrite=True)
    assert os.fspath(tmp_path) in caught.value.filename
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["short", "n" * 255, "n" * 254 + "m", "ü" * 127])
def test_any_name_is_found_again_after_an_interrupted_swap(tmp_path, name):
    path, other = tmp_path / name, tmp_path / ("n" * 253 + "xx")
    save(other, OLD)
    save(path, OLD)
    hidden = _commit.work_name(str(path), "old")
    assert len(os.fsencode(os.path.basename(hidden))) <= 255
    path.rename(hidden)
    assert_same(fp.load(path), OLD)
    save(other, overwrite=True)
    assert_same(fp.load(path), OLD)
    with pytest.raises(CheckpointExistsError):
        save(path)
    assert path.exists()
    save(path, overwrite=True)
    assert_same(fp.load(path), NEW)
    assert hidden_names(tmp_path) == []


def test_a_name_that_is_too_long_is_the_systems_error(tmp_path):
    with pytest.raises(StorageError) as caught:
        save(tmp_path / ("n" * 256))
    assert caught.value.errno == errno.ENAMETOOLONG
    assert os.listdir(tmp_path) == []


def test_paths_of_all_kinds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("relative")
    save("with/parents/that/are/missing")
    save("slash/")
    save(Path("a") / ".." / "dotted")
    save(os.fsencode(tmp_path / "bytes"))
    for name in ("relative", "with/parents/that/are/missing", "slash", "dotted", "bytes"):
        assert_same(fp.load(tmp_path / name), NEW)
    with pytest.raises(StorageError, match="empty"):
        save("", overwrite=True)
    with pytest.raises(CheckpointExistsError):
        save("/", overwrite=True)
    with pytest.raises(CheckpointExistsError):
        save(".", overwrite=True)


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError) as caught:
        save(tmp_path / "file" / "ckpt")
    assert caught.value.errno == errno.ENOTDIR


def test_nothing_to_find(tmp_path):
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "nothing" / "below"):
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
            fp.load(path)


def test_modes_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        save(tmp_path / "ckpt")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "ckpt").stat().st_mode) == 0o750
    for file in (tmp_path / "ckpt").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_state_that_cannot_be_saved_touches_nothing(old):
    with pytest.raises(fp.errors.UnsupportedLeafError):
        save(old, {"bad": object()}, overwrite=True)
    assert_same(fp.load(old), OLD)


# --- file systems without RENAME_NOREPLACE and RENAME_EXCHANGE


@pytest.fixture
def no_renameat2(monkeypatch):
    """renameat2 with flags answers as on such a file system; the renames it does are listed."""
    real = _engine.rename
    done: list[tuple[str, str]] = []

    def rename(source: str, target: str, mode: int = 0) -> int:
        if mode:
            return errno.EINVAL
        done.append((os.path.basename(source), os.path.basename(target)))
        return real(source, target)

    monkeypatch.setattr(_engine, "rename", rename)
    return done


def test_without_exchange_the_swap_takes_two_steps(old, no_renameat2):
    save(old, overwrite=True)
    assert_same(fp.load(old), NEW)
    assert os.listdir(old.parent) == ["ckpt"]
    (first, aside), (work, second), *_ = no_renameat2
    assert (first, second) == ("ckpt", "ckpt")
    assert ".fp_multi-old-" in aside
    assert ".fp_multi-tmp-" in work


def test_without_noreplace_new_and_empty_targets_work(tmp_path, no_renameat2):
    save(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty")
    assert_same(fp.load(tmp_path / "new"), NEW)
    assert_same(fp.load(tmp_path / "empty"), NEW)
    with pytest.raises(CheckpointExistsError):
        save(tmp_path / "new")


def test_a_failure_in_the_second_step_puts_the_old_one_back(old, no_renameat2, monkeypatch):
    both = _engine.rename

    def rename(source: str, target: str, mode: int = 0) -> int:
        return errno.EIO if not mode and target == str(old) and "-tmp-" in source else both(source, target, mode)

    monkeypatch.setattr(_engine, "rename", rename)
    with pytest.raises(StorageError) as caught:
        save(old, overwrite=True)
    assert caught.value.errno == errno.EIO
    assert_same(fp.load(old), OLD)
    assert os.listdir(old.parent) == ["ckpt"]


def test_no_sweep_takes_the_old_one_between_the_two_steps(old, no_renameat2, monkeypatch):
    both = _engine.rename
    seen = []

    def rename(source: str, target: str, mode: int = 0) -> int:
        if not mode and target == str(old) and "-tmp-" in source:
            assert_same(fp.load(old), OLD)  # a reader just now
            save(old.parent / "other")  # sweeps, just now
            seen.append(hidden_names(old.parent))
        return both(source, target, mode)

    monkeypatch.setattr(_engine, "rename", rename)
    save(old, overwrite=True)
    assert_same(fp.load(old), NEW)
    assert len(seen[0]) == 2
    assert hidden_names(old.parent) == []


def test_a_half_removed_old_one_is_never_taken_for_a_checkpoint(old):
    save(old.parent / "other")
    moved = _commit.work_name(str(old), "old")
    shutil.copytree(old, moved)
    save(old.parent / "other", overwrite=True)  # sweeps; the target is there, so the hidden one goes
    assert hidden_names(old.parent) == []
    shutil.rmtree(old)
    with pytest.raises(CheckpointNotFoundError):
        fp.load(old)


# --- several savers and readers


def test_leftovers_are_swept_and_names_of_others_are_not(tmp_path):
    for name in (".a.fp_multi-tmp-0123456789abcdef", ".b c.fp_multi-tmp-fedcba9876543210"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard").write_bytes(b"x")
    others = (".a.fp_multi-tmp-short", "a.fp_multi-tmp-0123456789abcdef", ".a.fp_multi-tmp-0123456789abcdef\n")
    for name in others:
        (tmp_path / name).mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"precious")
    link = tmp_path / ".l.fp_multi-tmp-0123456789abcdef"
    link.symlink_to(outside)
    save(tmp_path / "ckpt")
    assert set(os.listdir(tmp_path)) == {*others, "outside", link.name, "ckpt"}
    assert (outside / "file").read_bytes() == b"precious"


def test_a_running_save_is_not_swept(tmp_path):
    with _commit.DirectoryCommit(tmp_path / "mine", config(), overwrite=False, nbytes=0) as commit:
        Path(commit.path, "shard").write_bytes(b"x")
        save(tmp_path / "here")
        check_child("fp.save(small_state(), sys.argv[1])", tmp_path / "there")
        assert os.listdir(commit.path) == ["shard"]
    with _commit.FileCommit(tmp_path / "file", config(), nbytes=0) as file_commit:
        Path(file_commit.path).write_bytes(b"x")
        check_child("fp.save(small_state(), sys.argv[1], overwrite=True)", tmp_path / "there")
        file_commit.publish()
    assert (tmp_path / "file").read_bytes() == b"x"
    assert hidden_names(tmp_path) == []


def test_a_lock_on_the_parent_directory_is_nobodys_business(tmp_path):
    import fcntl

    fd = os.open(tmp_path, os.O_RDONLY)  # as `flock DIRECTORY python train.py` holds it
    fcntl.flock(fd, fcntl.LOCK_EX)
    check_child("fp.save(small_state(), sys.argv[1])", tmp_path / "ckpt", timeout_s=30)
    os.close(fd)


def test_a_sweep_that_comes_before_the_lock_is_survived(tmp_path, monkeypatch):
    real, left = _engine.mkdir, [3]

    def mkdir(path: str, mode: int = 0o777) -> int:
        code = real(path, mode)
        if ".fp_multi-tmp-" in path and left[0]:
            left[0] -= 1
            os.rmdir(path)
        return code

    monkeypatch.setattr(_engine, "mkdir", mkdir)
    save(tmp_path / "ckpt")
    assert_same(fp.load(tmp_path / "ckpt"), NEW)
    assert hidden_names(tmp_path) == []


def test_two_processes_that_want_the_same_new_name(tmp_path):
    code = """
    state = small_state(int(sys.argv[2]))
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        fp.save(state, sys.argv[1], config=config())
        print("saved")
    except fp.errors.CheckpointExistsError:
        print("exists")
    """
    for round_ in range(3):
        path = tmp_path / str(round_)
        with running(code, path, 1) as one, running(code, path, 2) as two:
            for saver in (one, two):
                assert saver.stdout.readline() == "ready\n"
            for saver in (one, two):
                saver.stdin.write("\n")
                saver.stdin.flush()
            said = [saver.stdout.readline().strip() for saver in (one, two)]
        assert sorted(said) == ["exists", "saved"]
        assert_same(fp.load(path), small_state(1 + said.index("saved")))
    assert hidden_names(tmp_path) == []


def test_overwriting_processes_and_a_reader(tmp_path):
    path = tmp_path / "ckpt"
    save(path, small_state(0))
    code = """
    for i in range(25):
        fp.save(small_state(int(sys.argv[2]) + i), sys.argv[1], overwrite=True, config=config())
    """
    with running(code, path, 100) as one, running(code, path, 200) as two:
        while one.poll() is None or two.poll() is None:
            found = fp.load(path)
            assert_same(found, small_state(found["seed"]))
            unchecked = fp.load(path, config=load_config(verify=False))
            assert_same(unchecked, small_state(unchecked["seed"]))
            fp.verify(path)
        for saver in (one, two):
            assert saver.returncode == 0, saver.stderr.read()
    assert fp.load(path)["seed"] in (124, 224)
    assert hidden_names(tmp_path) == []


def test_threads_save_side_by_side(tmp_path):
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(6):
                fp.save(small_state(number), tmp_path / f"ckpt-{number}", overwrite=True, config=config())
                fp.save_safetensors(
                    {"x": np.full(70_000, number)}, tmp_path / f"file-{number}.safetensors", config=config()
                )
                assert_same(fp.load(tmp_path / f"ckpt-{number}"), small_state(number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert hidden_names(tmp_path) == []
    for i in range(4):
        assert (fp.load_safetensors(tmp_path / f"file-{i}.safetensors")["x"] == i).all()


# --- one file


def save_file(path: Path, value: int) -> None:
    fp.save_safetensors({"x": np.full(70_000, value)}, path, config=fp.SaveConfig())


def test_a_file_is_replaced_atomically(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(path, 1)
    for point in ("fallocate", "write_completion", "fdatasync", "rename", "mkdir"):
        with injected(point, error=errno.EIO), pytest.raises(StorageError):
            save_file(path, 2)
        assert (fp.load_safetensors(path)["x"] == 1).all()
        assert os.listdir(tmp_path) == [path.name]
    save_file(path, 3)
    assert (fp.load_safetensors(path)["x"] == 3).all()
    (tmp_path / "link").symlink_to(path)
    save_file(tmp_path / "link", 4)
    assert (tmp_path / "link").is_symlink()
    assert (fp.load_safetensors(path)["x"] == 4).all()


def test_a_file_never_replaces_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    for name in ("fifo", "directory"):
        with pytest.raises(CheckpointExistsError):
            save_file(tmp_path / name, 1)
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["directory", "fifo"]


@pytest.mark.parametrize("old", [False, True])
def test_a_failed_last_flush_is_undone_without_renameat2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    if old:
        fp.save({"v": 1}, tmp_path / "c")
    rename, fsync_path = _engine.rename, _engine.fsync_path
    monkeypatch.setattr(_engine, "rename", lambda a, b, mode=0: errno.EINVAL if mode else rename(a, b))
    monkeypatch.setattr(_engine, "fsync_path", lambda p: errno.EIO if p == str(tmp_path) else fsync_path(p))
    with pytest.raises(fp.errors.StorageError, match="fsync"):
        fp.save({"v": 2}, tmp_path / "c", overwrite=old)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == (["c"] if old else [])
    if old:
        assert fp.load(tmp_path / "c") == {"v": 1}


def test_an_empty_directory_does_not_cost_the_old_one(old):
    """Killed between the two renames; then somebody makes the directory, as trainers do."""
    aside = Path(_commit.work_name(str(old), "old"))
    old.rename(aside)
    old.mkdir()
    assert_same(fp.load(old), OLD)
    save(old.parent / "neighbour")
    assert_same(fp.load(old), OLD)
    assert hidden_names(old.parent) == []
    # Anything that is really there is nobody's to replace.
    old.rename(aside)
    old.mkdir()
    (old / "notes.txt").write_text("mine")
    save(old.parent / "neighbour", overwrite=True)
    assert (old / "notes.txt").read_text() == "mine"


def test_on_a_network_file_system_only_own_leftovers_are_swept(tmp_path, monkeypatch):
    """Other hosts' locks on directories are not seen there."""
    assert not _engine.on_network(str(tmp_path))
    monkeypatch.setattr(_engine, "on_network", lambda path: True)
    of_others, own = (
        Path(_commit.work_name(str(tmp_path / "b"), "tmp")),
        Path(_commit.work_name(str(tmp_path / "a"), "tmp")),
    )
    of_others.mkdir()
    own.mkdir()
    save(tmp_path / "a")
    assert of_others.exists()
    assert not own.exists()


def test_a_save_does_not_sweep_its_own_directory(tmp_path, monkeypatch):
    """A member on another host, whose lock is not seen, may have made it first."""
    target = str(tmp_path / "c")
    directory = Path(_commit.work_name(target, "tmp", "0123456789abcdef"))
    directory.mkdir()
    (directory / "shard").write_bytes(b"of a member")
    with _commit.DirectoryCommit(
        target, fp.SaveConfig(), overwrite=False, nbytes=0, token="0123456789abcdef"
    ) as commit:
        assert (Path(commit.path) / "shard").read_bytes() == b"of a member"
