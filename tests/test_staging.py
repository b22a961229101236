"""Device tensors on their way through the page-locked ring: right bytes, no deadlock, and a tidy end in every case."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import (
    SMALL_BLOCK,
    FakeDevice,
    FakeTensor,
    assert_same,
    check_child,
    config,
    hidden_names,
    injected,
    random_bytes,
    thread_count,
)

import fp_multi as fp
from fp_multi import _staging
from fp_multi._types import LeafSource

RING = 4 * SMALL_BLOCK


def plain(state):
    """What loading gives for a state with device tensors."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    return state.data if isinstance(state, FakeTensor) else state


def check(tmp_path, state, **settings_) -> fp.SaveReport:
    report = fp.save(state, tmp_path / "ckpt", overwrite=True, config=config(**settings_))
    assert_same(fp.load(tmp_path / "ckpt"), plain(state))
    fp.verify(tmp_path / "ckpt")
    return report


@pytest.fixture
def device():
    one = FakeDevice()
    yield one
    assert one.outstanding == 0, "no copy is under way when a save returns"
    assert one.pinned == one.unpinned, "each page lock is undone, once"


def test_small_and_huge_interleaved_with_host_tensors(tmp_path, device):
    rng = np.random.default_rng(0)
    state = {}
    for i, nbytes in enumerate([1, 3 * RING + 17, 4, SMALL_BLOCK, 0, 5000, SMALL_BLOCK // 2, 2 * RING, 7] * 2):
        state[f"device-{i}"] = device.tensor(rng.integers(0, 256, nbytes, np.uint8))
        state[f"host-{i}"] = rng.standard_normal(int(rng.integers(0, 9000)))
        if i % 3 == 0:
            state[f"strided-{i}"] = rng.standard_normal((90, 50)).T
    check(tmp_path, state)
    assert len(device.pinned) == 1
    assert device.pinned[0][1] == RING


@pytest.mark.parametrize("block_bytes", [64 << 10, 1 << 20, 8 << 20])
@pytest.mark.parametrize("io_uring", ["auto", "off"])
def test_one_large_tensor(tmp_path, device, block_bytes, io_uring):
    tensor = device.tensor(random_bytes((3 << 20) + 12_345))
    check(tmp_path, {"x": tensor}, block_bytes=block_bytes, io_uring=io_uring, queue_depth=2)


def test_copies_that_arrive_late(tmp_path):
    slow = FakeDevice(delay_s=0.02)
    check(tmp_path, {"x": slow.tensor(random_bytes(10 * SMALL_BLOCK)), "host": np.arange(100_000)})


def test_only_empty_device_tensors(tmp_path, device):
    check(tmp_path, {"empty": device.tensor(np.empty((0, 3), np.float32)), "host": np.arange(5)})
    assert device.copies == 0


def test_a_shared_device_tensor_is_copied_once(tmp_path, device):
    tensor = device.tensor(random_bytes(100))
    fp.save({"a": tensor, "b": [tensor]}, tmp_path / "ckpt", config=config())
    assert device.copies == 1


FLOOD = """
device = FakeDevice()
sizes = eval(sys.argv[2])
state = {str(i): device.tensor(random_bytes(n, i)) for i, n in enumerate(sizes)}
fp.save(state, sys.argv[1], config=config(chunk_bytes=4096))
found = fp.load(sys.argv[1])
for key, tensor in state.items():
    assert found[key].tobytes() == tensor.data.tobytes()
assert device.outstanding == 0 and device.pinned == device.unpinned
"""


@pytest.mark.parametrize(
    "sizes",
    ["[1] * 20_000", "[4] * 9_000 + [100_000] + [1, 8] * 5_000", "[1, 65] * 3_000", "[SMALL_BLOCK // 2 - 1, 1] * 12"],
)
def test_more_tiny_tensors_than_the_ring_has_slots(tmp_path, sizes):
    # In a child: the failure is that it never ends.
    check_child(FLOOD, tmp_path / "ckpt", sizes, timeout_s=60)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.one_of(st.integers(1, 70), st.integers(1, 2 * RING), st.sampled_from([SMALL_BLOCK // 2, SMALL_BLOCK])),
        ),
        min_size=1,
        max_size=120,
    ),
    st.integers(0, 3),
)
@example([(0, 1)] * 120, 0)
@example([(0, SMALL_BLOCK // 2 - 1)] * 30, 3)
@settings(max_examples=200, deadline=None)
def test_ring_slots(tensors, repeat):
    """No slot is overwritten before the engine has read it, and feeding never waits for what cannot come."""
    slices = []
    at = 4096
    for host_pages, nbytes in tensors * (1 + 3 * repeat):
        at += 4096 * host_pages
        source = LeafSource("uint8", (nbytes,), nbytes, 0, None)
        slices.extend(_staging._cut(source, at, SMALL_BLOCK // _staging._SLICES_A_BLOCK))
        at += nbytes
    base = 1 << 40
    _staging._assign_slots(slices, RING, base)
    freed = 0
    live = []
    for cut in slices:
        begin, end = cut.slot - base, cut.slot - base + cut.nbytes
        assert 0 <= begin < end <= RING
        # What feed() waits for must be staged while only what is in front of this slice is ready.
        assert cut.after <= cut.file_begin // SMALL_BLOCK * SMALL_BLOCK
        freed = max(freed, cut.after)
        live = [other for other in live if other[2] > freed]
        assert all(end <= other[0] or other[1] <= begin for other in live)
        live.append((begin, end, cut.file_begin + cut.nbytes))


class DeviceError(Exception):
    pass


@pytest.mark.parametrize("when", [1, 2, 5, 30, -1, -2, -5, -30], ids=lambda n: f"{'fetch' if n > 0 else 'end'}{abs(n)}")
@pytest.mark.parametrize("kind", [DeviceError, KeyboardInterrupt])
def test_an_error_of_the_device(tmp_path, device, when, kind):
    old = {"x": np.arange(10)}
    fp.save(old, tmp_path / "ckpt", config=config())
    threads = thread_count()

    def fail(copy: int) -> None:
        if copy == when:
            device.fail = lambda copy: None
            raise kind

    state = {"a": device.tensor(random_bytes(40 * SMALL_BLOCK // 2)), "b": np.arange(1000)}
    device.fail = fail
    with pytest.raises(kind):
        fp.save(state, tmp_path / "ckpt", overwrite=True, config=config())
    assert device.outstanding == 0
    assert_same(fp.load(tmp_path / "ckpt"), old)
    assert hidden_names(tmp_path) == []
    assert thread_count() <= threads + 6  # those of the engine, made by the first save
    check(tmp_path, state)


@pytest.mark.parametrize("at", [1, 2, 7])
def test_an_error_of_the_drive(tmp_path, device, at):
    state = {"x": device.tensor(random_bytes(12 * SMALL_BLOCK))}
    with (
        injected("write_completion", at=at, error=errno.EIO),
        pytest.raises(fp.errors.StorageError) as caught,
    ):
        fp.save(state, tmp_path / "ckpt", config=config())
    assert caught.value.errno == errno.EIO
    assert os.listdir(tmp_path) == []


def test_memory_that_cannot_be_page_locked(tmp_path, device):
    other = FakeDevice()

    def refuse(address: int, nbytes: int):
        raise DeviceError("no more page-locked memory")

    other.pin = refuse
    state = {"a": device.tensor(random_bytes(10)), "b": other.tensor(random_bytes(10))}
    with pytest.raises(DeviceError):
        fp.save(state, tmp_path / "ckpt", config=config())
    assert os.listdir(tmp_path) == []
    assert len(device.pinned) == 1


def test_two_devices_pin_the_ring_each_and_undo_in_reverse():
    order = []
    devices = [SimpleNamespace(name=name) for name in "ab"]

    def pin(name):
        def lock(address, nbytes):
            order.append(name)
            return lambda: order.append(f"-{name}")

        return lock

    sources = []
    for one in devices:
        one.pin = pin(one.name)
        for _ in range(3):
            sources.append(
                LeafSource("uint8", (10,), 10, 0, None, fetch=lambda *_: lambda: None, pin=one.pin, identity=object())
            )
    parts = _staging.extents(b"", sources, SMALL_BLOCK)
    assert order == ["a", "b"]
    _staging.release(parts)
    _staging.release(parts)
    assert order == ["a", "b", "-b", "-a"]
