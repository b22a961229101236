"""The command line on real checkpoints and real damage, in a process of its own and through typer's runner."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import flip

import fp_multi as fp

pytest.importorskip("typer", reason="needs the extra cli: pip install 'fp_multi[cli]'")
pytest.importorskip("rich", reason="needs the extra cli: pip install 'fp_multi[cli]'")

from typer.testing import CliRunner

from fp_multi._cli_app import app

SHARD = "shard-00000-of-00001.safetensors"
OK, CORRUPT, OTHER = 0, 1, 2


class Point(NamedTuple):
    x: int
    y: Any


def example_state() -> dict[str, Any]:
    weight = np.arange(3 * 4096, dtype=np.float32).reshape(3, 4096)
    return {
        "model": OrderedDict(weight=weight, bias=np.ones(3, np.complex128), tied=weight),
        "optimizer": {"lr": 0.1, "betas": (0.9, 0.999), 7: [np.float16(1.5), None]},
        "point": Point(1, np.zeros((0, 2), np.int8)),
        "history": list(range(1000)),
        "blob": b"bytes",
        "step": 3,
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step_3"
    fp.save(example_state(), path, metadata={"run": "a"})
    return path


def invoke(*args: object) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


def command(*args: object, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """The real thing, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from fp_multi.cli import main; main()", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | environ,
    )


# inspect


def test_inspect_shows_the_tree(checkpoint: Path) -> None:
    done = invoke("inspect", checkpoint)
    assert done.exit_code == OK, done.output
    lines = [line.strip("│├└─ ") for line in done.stdout.splitlines()]
    nbytes = 3 * 4096 * 4
    assert "metadata run = 'a'" in lines
    assert f"weight  float32 [3, 4096]  {nbytes / 1000:.1f} kB" in lines
    assert "bias  complex128 [3]  48 bytes" in lines
    assert "tied  the same tensor as model.weight" in lines
    assert "betas = (0.9, 0.999)" in lines
    assert "lr = 0.1" in lines
    assert "0  float16 []  2 bytes  numpy.scalar" in lines
    assert "y  int8 [0, 2]  0 bytes" in lines
    assert "blob  uint8 [5]  5 bytes  bytes" in lines
    assert "step = 3" in lines
    assert "and 980 plain values more" in lines
    assert len(lines) < 60


def test_inspect_json_is_complete(checkpoint: Path) -> None:
    done = command("inspect", checkpoint, "--json")
    assert (done.returncode, done.stderr) == (OK, "")
    found = json.loads(done.stdout)
    manifest = fp.read_manifest(checkpoint)
    assert found["version"] == 1
    assert found["metadata"] == {"run": "a"}
    assert found["totals"]["tensors"] == len(found["tensors"]) == len(manifest.tensors)
    assert found["shards"][0]["nbytes"] == (checkpoint / SHARD).stat().st_size
    assert found["tree"] == manifest.tree
    assert found["tensors"][0] == {
        "name": "model.weight",
        "dtype": "float32",
        "shape": [3, 4096],
        "nbytes": 3 * 4096 * 4,
        "kind": "numpy",
        "attrs": {},
        "shards": [0],
    }


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_inspect_reads_any_safetensors_file(checkpoint: Path, option: tuple[str, ...]) -> None:
    done = invoke("inspect", checkpoint / SHARD, *option)
    assert done.exit_code == OK, done.output
    assert "model.weight" in done.stdout
    assert "F32" in done.stdout
    if option:
        assert json.loads(done.stdout)["metadata"]["fp_multi"] == "1"


def test_a_single_value_is_a_state(tmp_path: Path) -> None:
    fp.save(np.zeros(2), tmp_path / "one")
    assert "state  float64 [2]  16 bytes" in invoke("inspect", tmp_path / "one").stdout


def test_names_from_a_file_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\n\x9b31m[bold]"
    fp.save({evil: np.zeros(2), "value": evil, "\ud800": 1}, tmp_path / "evil", metadata={"k": evil})
    done = command("inspect", tmp_path / "evil", PYTHONIOENCODING="utf-8")
    assert done.returncode == OK, done.stderr
    assert not any(c in done.stdout for c in "\x1b\x07\x9b")
    assert r"\x1b]0;owned\x07\n\x9b31m[bold]  float64 [2]" in done.stdout
    assert r"\ud800 = 1" in done.stdout


def test_long_lines_are_not_wrapped_in_a_pipe(tmp_path: Path) -> None:
    name = "layer." * 50 + "weight"
    fp.save({name: np.zeros(2)}, tmp_path / "long")
    assert f"{name}  float64 [2]" in command("inspect", tmp_path / "long", COLUMNS="40").stdout


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_closed_pipe_is_no_error(tmp_path: Path, option: tuple[str, ...]) -> None:
    fp.save({f"t{i}": np.zeros(1) for i in range(5000)}, tmp_path / "many")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", "from fp_multi.cli import main; main()", "inspect", tmp_path / "many", *option],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


# verify


def test_verify_intact(checkpoint: Path) -> None:
    done = command("verify", checkpoint)
    assert (done.returncode, done.stderr) == (OK, "")
    assert "intact; 5 tensors in 1 shard" in done.stdout


def test_verify_shows_a_bar_on_a_terminal(checkpoint: Path) -> None:
    master, slave = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", "from fp_multi.cli import main; main()", "verify", checkpoint],
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(slave)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert done.returncode == OK
    assert "verify " in shown
    assert "\x1b" not in done.stdout


def test_verify_names_every_flipped_chunk(tmp_path: Path) -> None:
    path = tmp_path / "c"
    config = fp.SaveConfig(chunk_bytes=4096)
    fp.save({"a": np.zeros(4096 * 3, np.uint8), "b": np.ones(10, np.uint8)}, path, config=config)
    a, b = fp.read_manifest(path).tensors
    flip(path / SHARD, a.pieces[0].offset + 2 * 4096 + 5)
    flip(path / SHARD, a.pieces[0].offset)
    flip(path / SHARD, b.pieces[0].offset + 9)
    done = command("verify", path)
    assert done.returncode == CORRUPT
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 3
    for line, where in zip(lines, ("'a', chunk 0", "'a', chunk 2", "'b', chunk 0"), strict=True):
        assert f"tensor {where}" in line
        assert SHARD in line
    assert done.stderr == f"fp-multi: {path} is corrupt: 3 faults\n"


def test_verify_names_a_flipped_header(checkpoint: Path) -> None:
    flip(checkpoint / SHARD, 20)
    done = invoke("verify", checkpoint)
    assert done.exit_code == CORRUPT
    assert "header" in done.stdout
    assert SHARD in done.stdout


def test_verify_a_cut_shard(checkpoint: Path) -> None:
    os.truncate(checkpoint / SHARD, (checkpoint / SHARD).stat().st_size - 1)
    done = command("verify", checkpoint)
    assert done.returncode == CORRUPT
    assert f"{SHARD}: expected " in done.stdout
    assert "Traceback" not in done.stderr


def test_verify_a_missing_shard(checkpoint: Path) -> None:
    (checkpoint / SHARD).unlink()
    done = command("verify", checkpoint)
    assert done.returncode == CORRUPT
    assert f"{SHARD}: the shard is missing" in done.stdout
    assert done.stderr.endswith("is corrupt: 1 fault\n")


def test_verify_a_damaged_manifest(checkpoint: Path) -> None:
    flip(checkpoint / "manifest.json", 30)
    done = command("verify", checkpoint)
    assert (done.returncode, done.stdout) == (CORRUPT, "")
    assert done.stderr.startswith("fp-multi: ")
    assert done.stderr.count("\n") == 1


def test_a_newer_format_is_not_corrupt(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(*_: object, **__: object) -> None:
        raise fp.errors.FormatVersionError("format version 2, this software knows 1; update fp_multi")

    monkeypatch.setattr(fp, "verify", newer)
    done = invoke("verify", checkpoint)
    assert (done.exit_code, done.stderr) == (
        OTHER,
        "fp-multi: format version 2, this software knows 1; update fp_multi\n",
    )


# errors and help


@pytest.mark.parametrize("name", ["inspect", "verify"])
def test_nothing_there(tmp_path: Path, name: str) -> None:
    done = command(name, tmp_path / "no")
    assert (done.returncode, done.stdout) == (OTHER, "")
    assert done.stderr.startswith(f"fp-multi: {tmp_path / 'no'}: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["inspect", "verify"])
def test_a_directory_that_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    done = command(name, tmp_path)
    assert done.returncode == OTHER
    assert "manifest.json" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("args", [(), ("nonsense",), ("verify",), ("inspect", "--nonsense", "x")])
def test_wrong_usage(args: tuple[str, ...]) -> None:
    done = command(*args)
    assert done.returncode == OTHER
    assert "Traceback" not in done.stderr


def test_help_documents_the_exit_codes() -> None:
    for args in ((), ("inspect",), ("verify",), ("bench",), ("convert",), ("topology",)):
        text = " ".join(command(*args, "--help", COLUMNS="200").stdout.split())
        assert "Exit codes: 0 done; 1 the checkpoint is corrupt; 2 wrong usage" in text, args


def test_version() -> None:
    assert command("--version").stdout == f"fp_multi {fp.__version__}\n"


def test_a_missing_extra_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no typer', name='typer')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = command("--help", PYTHONPATH=path)
    assert done.returncode == OTHER
    assert done.stderr == ("fp-multi: typer is not installed; the command line needs: pip install 'fp_multi[cli]'\n")


# bench


def test_bench(tmp_path: Path) -> None:
    done = command("bench", tmp_path, "--size-mib", 16)
    assert done.returncode == OK, done.stderr
    for text in ("drive, write", "save, durable", "drive, read", "load, verified", "saved with "):
        assert text in done.stdout
    assert not list(tmp_path.iterdir())


def test_bench_in_full_is_for_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp, "__file__", str(tmp_path / "fp_multi" / "__init__.py"))
    done = invoke("bench", tmp_path, "--full")
    assert done.exit_code == 2
    assert "make bench" in done.stderr
    scripts = tmp_path / "benchmarks"
    scripts.mkdir()
    (scripts / "run.py").write_text("import sys; sys.exit(sys.argv[1:] != ['--all', '--directory', sys.argv[3]])")
    assert invoke("bench", tmp_path, "--full").exit_code == 0


def test_bench_where_there_is_nothing(tmp_path: Path) -> None:
    done = command("bench", tmp_path / "no")
    assert done.returncode == OTHER
    assert done.stderr.startswith("fp-multi: ")
    assert done.stderr.count("\n") == 1


# convert: safetensors


def same(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def test_safetensors_to_checkpoint_and_back(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        "model.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array(3, np.int64),
        "half": np.arange(4, dtype=np.uint16).view(fp.numpy_dtype("bfloat16")),
    }
    source, ckpt, back = tmp_path / "m.safetensors", tmp_path / "ckpt", tmp_path / "b.safetensors"
    fp.save_safetensors(tensors, source, metadata={"format": "pt", "x": "y"})
    done = command("convert", source, ckpt)
    assert (done.returncode, done.stderr) == (OK, "")
    assert "3 tensors" in done.stdout
    fp.verify(ckpt)
    assert fp.read_manifest(ckpt).metadata == {"format": "pt", "x": "y"}
    assert all(same(array, tensors[name]) for name, array in fp.load(ckpt).items())

    done = command("convert", ckpt, back)
    assert (done.returncode, done.stderr) == (OK, "")
    loaded = fp.load_safetensors(back)
    assert loaded.keys() == tensors.keys()
    assert all(same(loaded[name], tensors[name]) for name in tensors)
    assert fp.read_safetensors_header(back)[1] == {"format": "pt", "x": "y"}


def test_what_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    shared = np.ones(2, np.float32)
    state = {"a": shared, "list": [shared, np.float16(2)], "step": 3, "raw": b"xyz", "empty": {}}
    fp.save(state, tmp_path / "ckpt")
    done = command("convert", tmp_path / "ckpt", tmp_path / "out.safetensors")
    assert done.returncode == OK, done.stderr
    assert done.stderr == ("fp-multi: 2 values left out, a safetensors file holds tensors only: step, empty\n")
    loaded = fp.load_safetensors(tmp_path / "out.safetensors")
    assert loaded.keys() == {"a", "list.1", "raw"}
    assert loaded["raw"].tobytes() == b"xyz"


def test_a_dtype_that_safetensors_lacks(checkpoint: Path, tmp_path: Path) -> None:
    done = command("convert", checkpoint, tmp_path / "out.safetensors")
    assert done.returncode == OTHER
    assert "model.bias" in done.stderr
    assert "complex128" in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


# convert: PyTorch


def test_torch_to_checkpoint_and_back(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    adapter = pytest.importorskip("fp_multi.adapters.torch", reason="needs an installed fp_multi")
    weight = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    state = {"w": weight, "tied": weight, "n": {"step": 3, "lr": 0.1, "ids": [torch.tensor(5)]}}
    state["model"] = model = torch.nn.Linear(2, 2).state_dict()
    source, ckpt, back = tmp_path / "m.pt", tmp_path / "ckpt", tmp_path / "back.pth"
    torch.save(state, source)
    done = command("convert", source, ckpt)
    assert (done.returncode, done.stderr) == (OK, "")
    assert "4 tensors" in done.stdout
    fp.verify(ckpt)
    assert adapter.load(ckpt)["w"].dtype == torch.bfloat16

    done = command("convert", ckpt, back)
    assert (done.returncode, done.stderr) == (OK, "")
    loaded = torch.load(back, weights_only=True)
    assert torch.equal(loaded["w"], weight)
    assert loaded["tied"].data_ptr() == loaded["w"].data_ptr()
    assert loaded["n"]["step"] == 3
    assert loaded["model"]._metadata == model._metadata
    assert torch.equal(loaded["model"]["weight"], model["weight"])
    assert torch.equal(loaded["n"]["ids"][0], torch.tensor(5))


def test_numpy_leaves_become_tensors_in_a_torch_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    pytest.importorskip("fp_multi.adapters.torch", reason="needs an installed fp_multi")
    arrays: dict[str, Any] = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
        "bool": np.array([True, False]),
        "big": np.arange(3, dtype=">i4"),
        "scalar": np.float64(2.5),
        "empty": np.zeros((0, 3), np.int16),
        "bf16": np.arange(4, dtype=np.uint16).view(fp.numpy_dtype("bfloat16")),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    fp.save({**arrays, "raw": b"\0\xff"}, tmp_path / "ckpt")
    done = invoke("convert", tmp_path / "ckpt", tmp_path / "out.pt")
    assert (done.exit_code, done.stderr) == (OK, "")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded.pop("raw") == b"\0\xff"
    for name, array in arrays.items():
        assert tuple(loaded[name].shape) == array.shape, name
        assert loaded[name].to(torch.float64).tolist() == array.astype(np.float64).tolist(), name
    assert loaded["bf16"].dtype == torch.bfloat16


def test_a_dtype_that_torch_lacks(tmp_path: Path) -> None:
    pytest.importorskip("fp_multi.adapters.torch", reason="needs PyTorch and an installed fp_multi")
    fp.save({"when": np.zeros(2, "M8[s]")}, tmp_path / "ckpt")
    done = invoke("convert", tmp_path / "ckpt", tmp_path / "out.pt")
    assert done.exit_code == OTHER
    assert done.stderr.startswith("fp-multi: when: ")
    assert not (tmp_path / "out.pt").exists()


def test_a_torch_file_cannot_run_code(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    pytest.importorskip("fp_multi.adapters.torch", reason="needs an installed fp_multi")

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"w": Evil()}, tmp_path / "evil.pt")
    done = invoke("convert", tmp_path / "evil.pt", tmp_path / "ckpt")
    assert done.exit_code == OTHER
    assert "weights_only=True" in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.pt"]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 not a zip file"])
def test_a_torch_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("fp_multi.adapters.torch", reason="needs PyTorch and an installed fp_multi")
    (tmp_path / "x.pt").write_bytes(content)
    done = invoke("convert", tmp_path / "x.pt", tmp_path / "ckpt")
    assert done.exit_code == OTHER
    assert done.stderr.startswith(f"fp-multi: {tmp_path / 'x.pt'}: ")
    assert done.stderr.count("\n") == 1


def test_without_torch_the_command_says_what_to_install(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = command("convert", checkpoint, tmp_path / "out.pt", PYTHONPATH=path)
    assert done.returncode == OTHER
    assert "pip install 'fp_multi[torch]'" in done.stderr
    assert done.stderr.count("\n") == 1


# convert: direction and replacing


def test_convert_refuses_what_makes_no_direction(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes((checkpoint / SHARD).read_bytes())
    (tmp_path / "x.bin").touch()
    (tmp_path / "folder.pt").mkdir()
    for source, target, text in (
        (checkpoint, tmp_path / "other", "must end with"),
        (tmp_path / "x.bin", tmp_path / "other", "must end with"),
        (tmp_path / "x.safetensors", tmp_path / "y.pt", "both files"),
        (tmp_path / "no", tmp_path / "other", "nothing here"),
    ):
        done = invoke("convert", source, target)
        assert done.exit_code == OTHER
        assert text in done.stderr
        assert done.stderr.count("\n") == 1
    done = invoke("convert", checkpoint, tmp_path / "folder.pt", "--overwrite")
    assert done.exit_code == OTHER
    assert "is a directory" in done.stderr


@pytest.mark.parametrize("suffix", [".safetensors", ""])
def test_convert_replaces_only_on_request(tmp_path: Path, suffix: str) -> None:
    state = {"w": np.ones(3, np.float32)}
    fp.save(state, tmp_path / "ckpt")
    fp.save_safetensors(state, tmp_path / "w.safetensors")
    source = tmp_path / ("ckpt" if suffix else "w.safetensors")
    target = tmp_path / f"target{suffix}"
    assert invoke("convert", source, target).exit_code == OK
    done = invoke("convert", source, target)
    assert done.exit_code == OTHER
    assert "--overwrite" in done.stderr
    assert invoke("convert", source, target, "--overwrite").exit_code == OK


def test_convert_of_a_corrupt_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "ckpt"
    fp.save({"model": {"weight": np.arange(5000.0)}}, checkpoint)
    flip(checkpoint / SHARD, fp.read_manifest(checkpoint).tensors[0].pieces[0].offset)
    done = invoke("convert", checkpoint, tmp_path / "out.safetensors")
    assert done.exit_code == CORRUPT
    assert "tensor 'model.weight', chunk 0" in done.stderr
    assert not (tmp_path / "out.safetensors").exists()
