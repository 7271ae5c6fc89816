"""Reference of the hashes in plain PyTorch."""
# Products of int64 wrap around as the methods require. Masks make shifts logical.

from __future__ import annotations

import torch
from torch import Tensor

_LOW_MASK = 0xFFFFFFFF
_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


def hash_ids(ids: Tensor, num_rows: int, seed: int, method: str) -> Tensor:
    """Implement `meseta.ops.hash_ids.hash_ids` in plain PyTorch."""
    ids = ids.to(torch.int64)
    words = splitmix64(ids + _to_int64(seed * 0x9E3779B97F4A7C15)) if method == "splitmix64" else xxh64(ids, seed)
    return multiply_high(words, num_rows)


def splitmix64(x: Tensor) -> Tensor:
    """Return the first output of SplitMix64 seeded with each element, as int64."""
    x = x + _to_int64(0x9E3779B97F4A7C15)
    x = (x ^ _logical_shift_right(x, 30)) * _to_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _logical_shift_right(x, 27)) * _to_int64(0x94D049BB133111EB)
    return x ^ _logical_shift_right(x, 31)


def xxh64(x: Tensor, seed: int) -> Tensor:
    """Return XXH64 of the eight bytes of each element, least significant first, as int64."""
    p1, p2, p3, p4 = (_to_int64(prime) for prime in _PRIMES[:4])
    word = _to_int64(seed + _PRIMES[4] + 8) ^ (_rotate_left(x * p2, 31) * p1)
    word = _rotate_left(word, 27) * p1 + p4
    word = (word ^ _logical_shift_right(word, 33)) * p2
    word = (word ^ _logical_shift_right(word, 29)) * p3
    return word ^ _logical_shift_right(word, 32)


def multiply_high(words: Tensor, size: int) -> Tensor:
    """Return the upper 64 bits of word * size for unsigned words and 0 <= size < 2^63."""
    a, b, c, d = _logical_shift_right(words, 32), words & _LOW_MASK, size >> 32, size & _LOW_MASK
    middle = a * d  # Less than 2^64, so read the int64 as unsigned.
    middle_sum = _logical_shift_right(b * d, 32) + (middle & _LOW_MASK) + (b * c & _LOW_MASK)
    return a * c + _logical_shift_right(middle, 32) + _logical_shift_right(b * c, 32) + (middle_sum >> 32)


def _to_int64(word: int) -> int:
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def _logical_shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return (x << bits) | _logical_shift_right(x, 64 - bits)
