"""CRC-32C against the published vectors, against its definition, and its two implementations against each other."""

from __future__ import annotations

import crc_reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_bytes

from fp_multi import _engine

ISCSI_READ = bytes.fromhex(
    "01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018 28000000 00000000 02000000 00000000"
)
VECTORS = [  # RFC 3720, appendix B.4; and the check value of the polynomial's catalogue entry
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (ISCSI_READ, 0xD9963A56),
    (b"123456789", 0xE3069283),
    (b"", 0),
]
IMPLEMENTATIONS = [_engine.crc32c, _engine.crc32c_portable, crc_reference.crc32c]


@pytest.mark.parametrize("crc", IMPLEMENTATIONS, ids=["engine", "portable", "reference"])
@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_published_vectors(crc, data, expected):
    assert crc(data) == expected


@pytest.mark.parametrize(
    "nbytes",
    # around the lengths at which the three-stream loops begin (3 x 256 bytes, 8 KiB, 64 KiB), and several of each
    [1, 7, 8, 9, 63, 64, 767, 768, 769, 1536, 24575, 24576, 24577, 50_000, 196_607, 196_608, 196_609, 1_000_003],
)
def test_implementations_agree_at_the_edges_of_their_loops(nbytes):
    data = random_bytes(nbytes, nbytes).tobytes()
    expected = _engine.crc32c_portable(data)
    assert _engine.crc32c(data) == expected
    assert _engine.crc32c(data, 0x12345678) == _engine.crc32c_portable(data, 0x12345678)
    if nbytes < 60_000:
        assert crc_reference.crc32c(data) == expected


@given(st.binary(max_size=3000), st.binary(max_size=3000), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_continuation_and_combination(a, b, start):
    whole = crc_reference.crc32c(a + b)
    for crc in IMPLEMENTATIONS:
        assert crc(b, crc(a)) == whole
    assert _engine.crc32c_shift(_engine.crc32c(a), len(b)) ^ _engine.crc32c(b) == whole
    assert _engine.crc32c(a, start) == _engine.crc32c_portable(a, start) == crc_reference.crc32c(a, start)


def test_shift_is_additive_and_linear_up_to_the_largest_files():
    rng = np.random.default_rng(5)
    for _ in range(100):
        x, y = (int(v) for v in rng.integers(0, 1 << 32, 2))
        m, n = (int(v) for v in rng.integers(0, 1 << 61, 2))
        shift = _engine.crc32c_shift
        assert shift(shift(x, m), n) == shift(x, m + n)
        assert shift(x ^ y, n) == shift(x, n) ^ shift(y, n)
    assert _engine.crc32c_shift(0xDEADBEEF, 0) == 0xDEADBEEF


def test_shift_equals_appending_zeros():
    data = b"fp_multi"
    for n in (1, 100, 4096, 100_000):
        zeros = bytes(n)
        assert _engine.crc32c_shift(_engine.crc32c(data), n) ^ _engine.crc32c(zeros) == _engine.crc32c(data + zeros)


def test_implementation_is_named():
    assert _engine.crc32c_implementation() in ("sse4.2", "armv8-crc", "portable")
