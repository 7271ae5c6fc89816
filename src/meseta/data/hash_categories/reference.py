"""Reference hashes in plain Python, written from the specification of XXH64, version 0.1.1."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_MASK = 2**64 - 1


def hash_categories(strings: Iterable[str | bytes | None], seed: int = 0) -> NDArray[np.uint64]:
    """Return the XXH64 of each string, uint64 [n]. `None` hashes like the empty string."""
    encoded = (s.encode() if isinstance(s, str) else s or b"" for s in strings)
    return np.array([xxh64(s, seed) for s in encoded], np.uint64)


def hash_to_rows(strings: Iterable[str | bytes | None], num_rows: int, seed: int = 0) -> NDArray[np.int64]:
    """Return the high 64 bits of hash * num_rows for each string, int64 [n]."""
    return np.array([int(h) * num_rows >> 64 for h in hash_categories(strings, seed)], np.int64)


def xxh64(data: bytes, seed: int) -> int:
    """Return the XXH64 of one string."""
    p1, p2, p3, p4, p5 = _PRIMES
    position = 0
    if len(data) >= 32:
        lanes = [seed + p1 + p2, seed + p2, seed, seed - p1]
        while len(data) - position >= 32:
            for i in range(4):
                lanes[i] = _round(lanes[i], _word(data, position + 8 * i, 8))
            position += 32
        value = sum(_rotate(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            value = (value ^ _round(0, lane)) * p1 + p4 & _MASK
    else:
        value = seed + p5
    value = value + len(data) & _MASK
    while len(data) - position >= 8:
        value = _rotate(value ^ _round(0, _word(data, position, 8)), 27) * p1 + p4
        position += 8
    if len(data) - position >= 4:
        value = _rotate(value ^ (_word(data, position, 4) * p1 & _MASK), 23) * p2 + p3
        position += 4
    for byte in data[position:]:
        value = _rotate(value ^ byte * p5, 11) * p1
    value &= _MASK
    value = (value ^ value >> 33) * p2 & _MASK
    value = (value ^ value >> 29) * p3 & _MASK
    return value ^ value >> 32


def _word(data: bytes, start: int, size: int) -> int:
    return int.from_bytes(data[start : start + size], "little")


def _rotate(value: int, bits: int) -> int:
    value &= _MASK
    return (value << bits | value >> 64 - bits) & _MASK


def _round(lane: int, word: int) -> int:
    return _rotate(lane + word * _PRIMES[1], 31) * _PRIMES[0] & _MASK
