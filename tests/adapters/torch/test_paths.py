"""Saves to places that a trainer names: what the plug-ins for trainers share, without a trainer."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gates import Gate
from trainers import QUICK, names

from fp_multi import _engine
from fp_multi.adapters.torch import Checkpointer, load
from fp_multi.adapters.torch._borrow import steady_storages
from fp_multi.adapters.torch._paths import PathSaver
from fp_multi.errors import CheckpointExistsError, ConfigError, StorageError

MODES = ("hybrid", "borrow", "snapshot")
Same = Callable[..., None]


def saver(overlap: Any = "hybrid", optimizer: Any = None, **options: Any) -> PathSaver:
    optimizers = [] if optimizer is None else [optimizer]
    return PathSaver(overlap, lambda: steady_storages(optimizers), config=QUICK, **options)


@pytest.mark.parametrize("overlap", MODES)
def test_steady_memory_is_read_until_the_fence_and_the_rest_is_copied(
    tmp_path: Path, gate: Gate, same: Same, overlap: Any
) -> None:
    weight, other = torch.nn.Parameter(torch.randn(50, 50)), torch.randn(7)
    saves = saver(overlap, torch.optim.SGD([weight], lr=0.1))
    expected = {"weight": weight.detach().clone(), "other": other.clone()}
    saves.save(3, {"gate": gate, "weight": weight.detach(), "other": other}, tmp_path / "a" / "b")
    other.zero_()  # may change at once
    assert not (tmp_path / "a" / "b").exists()
    gate.open_soon()
    saves.wait_for_staging()
    assert gate.event.is_set()
    with torch.no_grad():
        weight.zero_()
    saves.close()
    found = load(tmp_path / "a" / "b")
    same({name: found[name] for name in expected}, expected)
    assert names(tmp_path / "a") == ["b"]


def test_saves_to_two_places_are_under_way_at_once_and_one_place_is_replaced(tmp_path: Path, gate: Gate) -> None:
    saves = saver()
    saves.save(1, {"gate": gate, "n": 1}, tmp_path / "a")
    saves.save(1, {"n": 2}, tmp_path / "b")
    saves._saves[str(tmp_path.resolve() / "b")].wait()
    assert load(tmp_path / "b") == {"n": 2}
    gate.open_soon()
    saves.save(2, {"n": 3}, tmp_path / "a")  # waits for the first
    saves.close()
    assert load(tmp_path / "a") == {"n": 3}
    saves.save(3, {"n": 4}, tmp_path / "a")  # it can be used again
    saves.close()
    assert load(tmp_path / "a") == {"n": 4}


@pytest.mark.parametrize("overlap", [None, "hybrid"])
def test_what_follows_is_done_when_the_save_is_complete(tmp_path: Path, overlap: Any) -> None:
    saves, seen = saver(overlap), []
    saves.save(1, {"n": 1}, tmp_path / "a")
    saves.afterwards(lambda: seen.append(load(tmp_path / "a")["n"]))
    saves.wait()
    assert seen == [1]
    saves.close()


@pytest.mark.parametrize("known", [False, True])
def test_what_follows_is_not_done_if_the_save_fails(tmp_path: Path, gate: Gate, known: bool) -> None:
    saves, seen = saver(), []
    _engine.inject_fault("write_completion", error=errno.EIO)
    saves.save(1, {"gate": gate}, tmp_path / "a")
    if known:
        gate.open()
        saves._saves[str(tmp_path.resolve() / "a")].join()
    saves.afterwards(lambda: seen.append(1))
    gate.open()
    with pytest.raises(StorageError):
        saves.wait()
    saves.close()
    assert seen == []


def test_what_goes_wrong_afterwards_is_raised(tmp_path: Path, gate: Gate) -> None:
    def fail() -> None:
        raise ConfigError("no")

    saves = saver()
    saves.save(1, {"gate": gate}, tmp_path / "a")
    saves.afterwards(fail)
    gate.open()
    with pytest.raises(ConfigError, match="no"):
        saves.close()
    saves.close()


def test_removing_leaves_nothing_and_follows_no_link(tmp_path: Path) -> None:
    saves = saver(None)
    saves.save(1, {"n": 1}, tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "file").write_text("old")
    for name in ("link", "file", "missing"):
        saves.remove(tmp_path / name)
    assert load(tmp_path / "a") == {"n": 1}
    saves.remove(tmp_path / "a")
    assert names(tmp_path) == []


# The Checkpointer's own part of it


def test_a_checkpointer_saves_to_another_place(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run", keep=1, config=QUICK) as ckpt:
        ckpt.save(1, {"n": 1}).wait()
        other = ckpt.save(7, {"n": 7}, path=tmp_path / "elsewhere" / "best")
        other.wait()
        assert (other.step, other.path) == (7, str(tmp_path.resolve() / "elsewhere" / "best"))
        assert ckpt.steps() == [1]
        ckpt.save(2, {"n": 2}).wait()
        with pytest.raises(CheckpointExistsError):
            ckpt.save(8, {"n": 8}, path=tmp_path / "elsewhere" / "best")
        ckpt.save(8, {"n": 8}, path=tmp_path / "elsewhere" / "best", overwrite=True).wait()
        assert ckpt.steps() == [2]
        assert ckpt.restore()[1] == {"n": 2}
    assert load(tmp_path / "elsewhere" / "best") == {"n": 8}
    assert names(tmp_path / "run") == ["step_00000002"]
