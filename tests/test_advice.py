"""How often to save: exact numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp_multi import _advice
from fp_multi._advice import Advice
from fp_multi.errors import ConfigError

EXAMPLE = Advice(
    step_s=2.0,
    forward_backward_s=1.6,
    nbytes=8_000_000_000,
    bytes_per_s=4e9,
    stall_s=0.1,
    mtbf_s=20_000.0,
    overhead=0.05,
)


def test_what_the_drive_must_give() -> None:
    assert _advice.needed_bytes_per_s(8_000_000_000, 1.6) == 5e9
    assert EXAMPLE.needed_bytes_per_s == 5e9
    assert not EXAMPLE.every_step_is_free
    assert replace(EXAMPLE, bytes_per_s=5e9).every_step_is_free


@pytest.mark.parametrize(
    ("step_s", "write_s", "stall_s", "overhead", "steps"),
    [
        (1.0, 0.5, 0.0, 0.05, 1),  # written long before the next one
        (1.0, 1.0, 0.0, 0.05, 1),
        (1.0, 1.05, 0.0, 0.05, 1),  # the wait for the drive is just what may be lost
        (1.0, 1.06, 0.0, 0.05, 2),
        (1.0, 10.5, 0.0, 0.05, 10),
        (1.0, 0.5, 0.05, 0.05, 1),  # the stall alone is
        (1.0, 0.5, 0.06, 0.05, 2),
        (0.5, 0.1, 0.2, 0.1, 4),
        (1.0, 3.0, 0.15, 0.05, 3),
        (1.0, 100.0, 5.0, 0.05, 100),
    ],
)
def test_how_often_an_overhead_allows(
    step_s: float, write_s: float, stall_s: float, overhead: float, steps: int
) -> None:
    assert _advice.least_interval_steps(step_s, write_s, stall_s, overhead) == steps


@given(st.floats(0.001, 100), st.floats(0, 1000), st.floats(0, 100), st.sampled_from([0.01, 0.05, 0.3, 1.0]))
def test_the_interval_is_the_shortest_that_keeps_the_overhead(
    step_s: float, write_s: float, stall_s: float, overhead: float
) -> None:
    def share(steps: int) -> float:
        apart_s = steps * step_s
        return (stall_s + max(write_s - apart_s, 0.0)) / apart_s

    steps = _advice.least_interval_steps(step_s, write_s, stall_s, overhead)
    assert share(steps) <= overhead * (1 + 1e-9)
    if steps > 1:
        assert share(steps - 1) > overhead * (1 - 1e-9)


def test_young_and_daly() -> None:
    assert _advice.young_interval_s(2.0, 10_000.0) == 200.0
    # 200 * (1 + 0.01 / 3 + 0.0001 / 9) - 2
    assert _advice.daly_interval_s(2.0, 10_000.0) == pytest.approx(200 + 2 / 3 + 0.02 / 9 - 2, rel=1e-15)
    assert _advice.daly_interval_s(50.0, 10.0) == 10.0
    assert _advice.young_interval_s(0.0, 10_000.0) == _advice.daly_interval_s(0.0, 10_000.0) == 0.0


def test_what_is_lost() -> None:
    assert _advice.lost_share(99.0, 1.0, 0.5, 1000.0) == 0.01 + 0.05


def test_the_example_in_numbers() -> None:
    assert EXAMPLE.write_s == 2.0
    assert EXAMPLE.least_interval_steps == 1
    assert EXAMPLE.overhead_share == 0.05
    assert EXAMPLE.young_s == math.sqrt(4000)
    assert EXAMPLE.daly_s == _advice.daly_interval_s(0.1, 20_000.0)
    assert EXAMPLE.interval_steps == 32  # 63.2 s
    assert EXAMPLE.lost_share == 0.1 / 64.1 + (32 + 2) / 20_000
    assert EXAMPLE.blocking_daly_s == _advice.daly_interval_s(2.0, 20_000.0)
    assert EXAMPLE.blocking_lost_share > 2 * EXAMPLE.lost_share
    # The overhead may ask for more than failures do.
    slow = replace(EXAMPLE, stall_s=10.0, mtbf_s=1000.0)
    assert slow.least_interval_steps == slow.interval_steps == 100
    free = replace(EXAMPLE, stall_s=0.0, bytes_per_s=8e9)
    assert free.interval_steps == 1
    assert free.overhead_share == 0.0


def test_the_example_in_words() -> None:
    assert str(EXAMPLE).splitlines() == [
        "A checkpoint of 8 GB takes 2 s at 4 GB/s. A step takes 2 s, 1.6 s of it forward and backward.",
        "Saving every step beside forward and backward needs 5 GB/s; the drive gives 4 GB/s, which is less.",
        "With at most 5.0% overhead: every step (2 s), which costs 5.00%.",
        "With a failure every 5.56 h and 100 ms of waiting for each save, Young's interval is 63.2 s and Daly's "
        "63.2 s.",
        "Save every 32 steps: saving and failures then cost 0.33% together. Saves that training waits for would cost "
        "1.41% at their best interval, 4.69 min.",
    ]
    assert "so every step can be saved without a wait" in str(replace(EXAMPLE, bytes_per_s=6e9))


@pytest.mark.parametrize("name", ["step_s", "forward_backward_s", "bytes_per_s", "mtbf_s", "overhead"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_values_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a number above 0, found"):
        replace(EXAMPLE, **{name: value})


@pytest.mark.parametrize("name", ["stall_s", "nbytes"])
def test_values_that_may_be_zero(name: str) -> None:
    assert getattr(replace(EXAMPLE, **{name: 0}), name) == 0
    with pytest.raises(ConfigError, match=f"{name} must be a number at least 0"):
        replace(EXAMPLE, **{name: -1})
