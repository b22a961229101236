"""Copies made in the call of save: the right bytes, out of memory of every shape, and how they are counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import FakeDevice, random_bytes

import fp_multi as fp
from fp_multi import _eager
from fp_multi._contents import Contents, lay_out_shard
from fp_multi._tree import describe
from fp_multi._types import Described, LeafSource
from fp_multi.errors import KeyNotFoundError


def content(source: LeafSource) -> bytes:
    assert source.fetch is None
    return _eager._bytes_of(source).tobytes()


def copies(state: Any) -> tuple[Described, Described]:
    described = describe(state)
    return described, _eager.copy_indices(described, set(range(len(described.sources))))


ARRAYS = {
    "contiguous": np.arange(5000.0),
    "small": np.arange(7, dtype=np.int16),
    "transposed": np.arange(600, dtype=np.int32).reshape(20, 30).T,
    "reversed": np.arange(600, dtype=np.int64)[::-1],
    "both": np.arange(900, dtype=np.float32).reshape(30, 30)[::-2, ::3],
    "broadcast": np.broadcast_to(np.arange(3), (1000, 3)),
    "scalar": np.array(3.5),
    "one": np.array([[[7]]], np.uint8),
    "empty": np.empty((0, 4)),
    "empty and strided": np.empty((4, 0))[::2],
    "big-endian": np.arange(3000, dtype=">i4"),
    "big-endian and strided": np.arange(3000, dtype=">u2")[::3],
    "complex": np.arange(3000)[::2] * 1j,
    "bool": np.arange(5000) % 3 == 0,
    "record": np.zeros(400, [("a", "i1"), ("b", "f8")])[::3],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_copies_have_the_same_bytes_in_other_memory(name: str) -> None:
    array = ARRAYS[name].copy(order="K") if ARRAYS[name].flags.owndata else ARRAYS[name]
    described, copied = copies([array])
    (before,), (after,) = described.sources, copied.sources
    if not array.nbytes:
        assert after is before
        return
    little = array.astype(array.dtype.newbyteorder("<"))
    assert content(after) == content(before) == little.tobytes()
    assert after.strides is None
    assert isinstance(after.keepalive, _eager.Copy)
    assert not np.may_share_memory(after.keepalive.memory, array)
    assert after._replace(address=0, strides=None, keepalive=0) == before._replace(address=0, strides=None, keepalive=0)


def test_an_item_size_is_needed_for_strides_only() -> None:
    # What adapters leave at its default for contiguous memory.
    array = np.arange(9000.0)
    source = LeafSource("float64", array.shape, array.nbytes, array.ctypes.data, array)
    assert source.itemsize == 1
    (after,) = _eager.copy_indices(Described(0, ["x"], [source]), {0}).sources
    assert content(after) == array.tobytes()


def test_changes_after_the_copy_are_not_seen() -> None:
    small, large = np.zeros(3), np.zeros(10_000)
    _, copied = copies([small, large])
    small[:] = large[:] = 1
    assert not any(content(copied.sources[0]))
    assert not any(content(copied.sources[1]))


def test_only_what_was_asked_for_is_copied() -> None:
    state = {"a": {"x": np.zeros(10), "y": np.ones(5000)}, "b": np.zeros(3)}
    described = describe(state)
    chosen = _eager.selected(described, ["a", ("b",)])
    assert chosen == {0, 1, 2}
    assert _eager.selected(described, ["a.y"]) == {1}
    assert _eager.selected(described, ()) == set()
    assert _eager.nbytes_of(described, {0, 1}) == 80 + 40_000
    copied = _eager.copy_indices(described, {1})
    assert [isinstance(source.keepalive, _eager.Copy) for source in copied.sources] == [False, True, False]
    assert copied.sources[0] is described.sources[0]
    with pytest.raises(KeyNotFoundError):
        _eager.selected(described, ["c"])


def test_device_copies_overlap_and_are_complete() -> None:
    device = FakeDevice()
    arrays = [random_bytes(50_000, seed) for seed in range(4)]
    _, copied = copies([device.tensor(array) for array in arrays])
    assert device.copies == 4
    assert device.outstanding == 0
    assert [content(source) for source in copied.sources] == [array.tobytes() for array in arrays]
    assert all(source.pin is None for source in copied.sources)


def test_plain_values_are_those_that_python_changes_in_passing() -> None:
    device = FakeDevice()
    state = {
        "array": np.zeros(1),
        "counter": np.array(1),
        "bytearray": bytearray(b"xy"),
        "bytes": b"xy",
        "numpy scalar": np.float32(1),
        "device": device.tensor(np.array(2.0)),
    }
    described = describe(state)
    found = {described.names[i] for i in _eager.plain_values(described.sources)}
    assert found == {"counter", "bytearray"}


def test_a_bytearray_is_free_at_once(tmp_path: Any) -> None:
    data = bytearray(b"before")
    with fp.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"data": data})
        data[:] = b"after, and longer"
        assert ckpt.wait() is None
        assert ckpt.restore()[1] == {"data": bytearray(b"before")}


@given(st.lists(st.tuples(st.sampled_from([0, 1, 100, 4096, 5000, 8192]), st.booleans()), max_size=8), st.data())
def test_copies_in_the_end_of_a_file_are_counted(tensors: list[tuple[int, bool]], data: st.DataObject) -> None:
    sources = [
        LeafSource("uint8", (nbytes,), nbytes, 0, _eager.Copy(np.empty(0, np.uint8)) if copied else None)
        for nbytes, copied in tensors
    ]
    shard = lay_out_shard(Contents("file", range(len(sources)), [f"t{i}" for i in range(len(sources))], sources))
    copied_nbytes = data.draw(st.integers(0, shard.data.nbytes + len(shard.header)))
    own = np.zeros(shard.data.nbytes, bool)
    for index, at in zip(shard.data.order, shard.data.begins, strict=True):
        own[at : at + sources[index].nbytes] = not tensors[index][1]
    begin = max(shard.data.nbytes - copied_nbytes, 0)
    assert _eager.copied_at_fence(shard, copied_nbytes) == own[begin:].sum()
