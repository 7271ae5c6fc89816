"""Exact order statistics of numbers that do not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Chunks = Callable[[], Iterator[NDArray[np.float64]]]
"""Function that iterates over all numbers in chunks. Each call starts again."""

# Bits of a key that each pass over the numbers determines, highest first. A pass takes 64 KiB of counters per rank.
_DIGIT_BITS = (13, 13, 13, 13, 12)
_SIGN_BIT = np.uint64(1 << 63)


def order_statistics(chunks: Chunks, ranks: Sequence[int]) -> list[float]:
    """Return the numbers at the given positions (from 0) of the sorted sequence without NaN, in five passes.

    Each position must be less than the count of numbers.
    """
    prefixes = np.zeros(len(ranks), np.uint64)
    left = np.array(ranks, np.int64)
    shift = 64
    for width in _DIGIT_BITS:
        shift -= width
        distinct = np.unique(prefixes)
        counts = _count_digits(chunks, distinct, shift, width)
        rows = np.cumsum(counts, axis=1)[np.searchsorted(distinct, prefixes)]
        digits = np.array([np.searchsorted(row, place, side="right") for row, place in zip(rows, left, strict=True)])
        below = np.where(digits > 0, rows[np.arange(len(left)), digits - 1], 0)
        left, prefixes = left - below, prefixes << np.uint64(width) | digits.astype(np.uint64)
    return _from_sort_keys(prefixes).tolist()


def count_numbers(chunks: Chunks) -> int:
    """Return the count of numbers without NaN."""
    return sum(int(np.count_nonzero(~np.isnan(chunk))) for chunk in chunks())


def _count_digits(chunks: Chunks, known: NDArray[np.uint64], shift: int, width: int) -> NDArray[np.int64]:
    """Return how often each digit follows each of the prefixes `known`, as counts [num_prefixes, num_digits]."""
    counts = np.zeros((known.size, 1 << width), np.int64)
    for chunk in chunks():
        keys = _to_sort_keys(chunk[~np.isnan(chunk)])
        # In two steps, because a shift by all 64 bits is undefined.
        prefixes = keys >> np.uint64(shift) >> np.uint64(width)
        places = np.minimum(np.searchsorted(known, prefixes), known.size - 1)
        is_known = known[places] == prefixes
        digits = (keys[is_known] >> np.uint64(shift)).astype(np.int64) & (1 << width) - 1
        np.add.at(counts.reshape(-1), (places[is_known] << width) + digits, 1)
    return counts


def _to_sort_keys(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Return unsigned integers in the order of the numbers. Both zeros have the same key."""
    bits = (values + 0.0).view(np.uint64)
    return np.where(bits & _SIGN_BIT, ~bits, bits | _SIGN_BIT)


def _from_sort_keys(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    return np.where(keys & _SIGN_BIT, keys & ~_SIGN_BIT, ~keys).view(np.float64)
