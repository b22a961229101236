"""CRC-32C in plain Python, from the definition: the reference for the native one."""

from __future__ import annotations


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: bytes, value: int = 0) -> int:
    """The CRC of ``data``, continued from ``value``."""
    value ^= 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF
