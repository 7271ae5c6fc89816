"""Exact order statistics of more numbers than memory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Chunks = Callable[[], Iterator[NDArray[np.float64]]]
"""Gives all numbers anew at each call, some at a time."""

_DIGIT_BITS = (13, 13, 13, 13, 12)
"""Bits of a key that a pass over the numbers decides, the highest first: 64 KiB of counters for each rank."""
_SIGN_BIT = np.uint64(1 << 63)


def order_statistics(chunks: Chunks, ranks: Sequence[int]) -> list[float]:
    """The numbers at the given places (from 0) of the sorted sequence without NaN, in five passes.

    Every place must be less than the count of the numbers.
    """
    prefixes = np.zeros(len(ranks), np.uint64)
    left = np.array(ranks, np.int64)
    shift = 64
    for width in _DIGIT_BITS:
        shift -= width
        known = np.unique(prefixes)
        counts = _count_digits(chunks, known, shift, width)
        rows = np.cumsum(counts, axis=1)[np.searchsorted(known, prefixes)]
        digits = np.array([np.searchsorted(row, place, side="right") for row, place in zip(rows, left, strict=True)])
        below = np.where(digits > 0, rows[np.arange(len(left)), digits - 1], 0)
        left, prefixes = left - below, prefixes << np.uint64(width) | digits.astype(np.uint64)
    return _from_sort_keys(prefixes).tolist()


def count_numbers(chunks: Chunks) -> int:
    """How many there are without NaN."""
    return sum(int(np.count_nonzero(~np.isnan(chunk))) for chunk in chunks())


def _count_digits(chunks: Chunks, known: NDArray[np.uint64], shift: int, width: int) -> NDArray[np.int64]:
    """For each of the `known` prefixes, how many numbers that begin with it go on with each digit."""
    counts = np.zeros((known.size, 1 << width), np.int64)
    for chunk in chunks():
        keys = _to_sort_keys(chunk[~np.isnan(chunk)])
        # All bits at once cannot be shifted out.
        prefixes = keys >> np.uint64(shift) >> np.uint64(width)
        places = np.minimum(np.searchsorted(known, prefixes), known.size - 1)
        ours = known[places] == prefixes
        digits = (keys[ours] >> np.uint64(shift)).astype(np.int64) & (1 << width) - 1
        np.add.at(counts.reshape(-1), (places[ours] << width) + digits, 1)
    return counts


def _to_sort_keys(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    """Words that sort as the numbers do; both zeros have one."""
    bits = (values + 0.0).view(np.uint64)
    return np.where(bits & _SIGN_BIT, ~bits, bits | _SIGN_BIT)


def _from_sort_keys(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    return np.where(keys & _SIGN_BIT, keys & ~_SIGN_BIT, ~keys).view(np.float64)
