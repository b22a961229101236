"""Arguments that cannot be, and places that cannot be read: said at once, in the family of errors."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import check_child, hidden_names

import fp_multi as fp
from fp_multi.errors import CheckpointNotFoundError, ConfigError, KeyNotFoundError, StorageError

QUICK = fp.SaveConfig(durable=False)
STATE = {"w": np.arange(5.0), "step": 3}


@pytest.fixture
def there(tmp_path: Path) -> Path:
    fp.save(STATE, tmp_path / "there", config=QUICK)
    fp.save_safetensors({"w": STATE["w"]}, tmp_path / "there.safetensors", config=QUICK)
    return tmp_path


KNOWN = {"step_s": 1.0, "forward_backward_s": 1.0, "nbytes": 1, "bytes_per_s": 1.0, "stall_s": 0.0}
CALLS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "save config": (lambda at: fp.save(STATE, at / "new", config={"durable": False}), "config must be a SaveConfig"),
    "save no config": (lambda at: fp.save(STATE, at / "new", config=None), "config must be a SaveConfig, found None"),
    "save comm": (lambda at: fp.save(STATE, at / "new", comm="gloo"), "comm must be a Comm, found str: 'gloo'"),
    "save metadata": (lambda at: fp.save(STATE, at / "new", metadata=["a"]), "metadata must be a Mapping, found list"),
    "load config": (lambda at: fp.load(at / "there", config=QUICK), "config must be a LoadConfig, found SaveConfig"),
    "load comm": (lambda at: fp.load(at / "there", comm=3, broadcast=True), "comm must be a Comm, found int"),
    "load only": (lambda at: fp.load(at / "there", only=3), "only= must be a list of dotted paths"),
    "load in place of nothing": (lambda at: fp.load(at / "there", inplace=True), "inplace=True needs target="),
    "verify config": (lambda at: fp.verify(at / "there", config=QUICK), "config must be a LoadConfig"),
    "read config": (lambda at: fp.read_checkpoint(at / "there", len, config=QUICK), "config must be a LoadConfig"),
    "tensors": (lambda at: fp.save_safetensors([1], at / "new"), "tensors must be a Mapping, found list"),
    "file config": (lambda at: fp.save_safetensors({}, at / "new", config={}), "config must be a SaveConfig"),
    "file load config": (lambda at: fp.load_safetensors(at / "there.safetensors", config={}), "must be a LoadConfig"),
    "block_bytes": (lambda at: fp.SaveConfig(block_bytes="1M"), "block_bytes must be an integer, found '1M'"),
    "queue_depth": (lambda at: fp.LoadConfig(queue_depth=1.5), "queue_depth must be an integer, found 1.5"),
    "chunk_bytes": (lambda at: fp.SaveConfig(chunk_bytes=None), "chunk_bytes must be an integer, found None"),
    "keep": (lambda at: fp.Checkpointer(at / "new", keep="3"), "keep must be an integer, found '3'"),
    "half a step": (lambda at: fp.Checkpointer(at / "new", keep=2.5), "keep must be an integer, found 2.5"),
    "keep nothing": (lambda at: fp.Checkpointer(at / "new", keep=0), "keep must be at least 1, found 0"),
    "staging": (lambda at: fp.Checkpointer(at / "new", staging_bytes="1GB"), "staging_bytes must be an integer"),
    "in flight": (lambda at: fp.Checkpointer(at / "new", max_in_flight=1.0), "max_in_flight must be an integer"),
    "many in flight": (
        lambda at: fp.Checkpointer(at / "new", max_in_flight=3),
        "max_in_flight must be 1 or 2, found 3",
    ),
    "checkpointer comm": (lambda at: fp.Checkpointer(at / "new", comm=object()), "comm must be a Comm, found object"),
    "checkpointer config": (lambda at: fp.Checkpointer(at / "new", config={}), "config must be a SaveConfig"),
    "its load_config": (lambda at: fp.Checkpointer(at / "new", load_config=QUICK), "load_config must be a LoadConfig"),
    "progress": (lambda at: fp.Checkpointer(at / "new", progress=3), "progress must be a function, found 3"),
    "restore": (lambda at: fp.Checkpointer(at / "new").restore("3"), "step must be an integer, found '3'"),
    "restore half": (lambda at: fp.Checkpointer(at / "new").restore(1.0), "step must be an integer, found 1.0"),
    "restore the last": (lambda at: fp.Checkpointer(at / "new").restore(-1), "step must be at least 0, found -1"),
    "copy": (lambda at: fp.Checkpointer(at / "new").save(1, STATE, copy=3), "copy= must be a list of dotted paths"),
    "advise": (lambda at: fp.Checkpointer(at / "new").advise(mtbf_s="day", **KNOWN), "mtbf_s must be a number above 0"),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_another_type(there: Path, name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(ConfigError, match=message):
        call(there)
    assert {"there", "there.safetensors"} <= set(os.listdir(there)) <= {"there", "there.safetensors", "new"}
    assert not (there / "new").exists() or os.listdir(there / "new") == []


def test_what_is_not_in_the_state_is_said_of_the_state(tmp_path: Path) -> None:
    with fp.Checkpointer(tmp_path) as ckpt, pytest.raises(KeyNotFoundError, match="copy= names 'x', which the state"):
        ckpt.save(1, STATE, copy=["x"])


def test_steps_and_names_of_other_kinds(there: Path) -> None:
    with fp.Checkpointer(there / "steps", config=QUICK, keep=np.int64(1)) as ckpt:
        ckpt.save(np.int64(4), STATE).wait()
        step, _ = ckpt.restore(np.int32(4))
        assert type(step) is int
    assert list(fp.load_safetensors(there / "there.safetensors", names="w")) == ["w"]


PATHS: dict[str, tuple[str, int]] = {
    "empty": ("", errno.ENOENT),
    "zero byte": ("a\0b", errno.EINVAL),
    "no text": ("\ud800", errno.EINVAL),
}


@pytest.mark.parametrize("name", PATHS)
def test_paths_that_nothing_can_have(name: str) -> None:
    path, code = PATHS[name]
    calls: list[Callable[[], Any]] = [
        lambda: fp.save(STATE, path),
        lambda: fp.load(path),
        lambda: fp.verify(path),
        lambda: fp.Checkpointer(path),
        lambda: fp.save_safetensors({}, path),
        lambda: fp.load_safetensors(path),
        lambda: fp.read_safetensors_header(path),
    ]
    for call in calls:
        with pytest.raises(StorageError) as caught:
            call()
        assert caught.value.errno == code


def test_a_name_that_is_too_long_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for save in (fp.save, lambda state, path: fp.save_safetensors({"w": state["w"]}, path)):
        with pytest.raises(StorageError, match="prepare: File name too long"):
            save(STATE, tmp_path / ("x" * 256))
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointNotFoundError):
        fp.load(tmp_path / ("x" * 256))


def test_a_file_where_a_directory_should_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    for call in (lambda: fp.save(STATE, tmp_path / "file" / "new"), lambda: fp.Checkpointer(tmp_path / "file" / "new")):
        with pytest.raises(StorageError, match="Not a directory") as caught:
            call()
        assert caught.value.filename == str(tmp_path / "file")
    with pytest.raises(CheckpointNotFoundError):
        fp.load(tmp_path / "file" / "new")
    assert caplog.records == []


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that every user may enter; pytest's are closed."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_what_may_not_be_read_is_not_taken_for_missing(open_to_all: Path) -> None:
    """A run that finds no checkpoint begins from nothing: it must not find none because it may not look."""
    fp.save(STATE, open_to_all / "closed" / "there", config=QUICK)
    with fp.Checkpointer(open_to_all / "steps", config=QUICK) as ckpt:
        ckpt.save(1, STATE).wait()
        ckpt.save(2, STATE).wait()
    closed = (open_to_all / "closed", open_to_all / "steps" / "step_00000002")
    for directory in closed:
        directory.chmod(0)
    output = check_child(
        """
        from fp_multi.errors import FpMultiError
        at = sys.argv[1]
        fp.save({"a": 1}, at + "/other")
        fp.load(at + "/other"), fp.verify(at + "/other"), fp.Checkpointer  # later imports might be closed, too
        if os.geteuid() == 0:
            os.setgid(65534), os.setuid(65534)  # root may read everything
        for call in (
            lambda: fp.load(at + "/closed/there"),
            lambda: fp.verify(at + "/closed/there"),
            lambda: fp.Checkpointer(at + "/steps"),
            lambda: fp.save({"a": 1}, at + "/closed/new"),
        ):
            try:
                call()
            except FpMultiError as error:
                print(type(error).__name__, error.errno == errno.EACCES)
        """,
        open_to_all,
    )
    for directory in closed:
        directory.chmod(0o755)
    assert output == "StorageError True\n" * 4
    assert hidden_names(open_to_all / "closed") == []
