"""Exact order statistics of sequences that are larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Chunks = Callable[[], Iterator[NDArray[np.float64]]]
"""Returns an iterator over all numbers, in chunks. It is called once per pass."""

# The counters of 13 bits take 64 KiB per rank.
_DIGIT_BITS = (13, 13, 13, 13, 12)
"""Number of bits of the sort key that each pass determines, the highest bits first."""
_SIGN_BIT = np.uint64(1 << 63)


def order_statistics(chunks: Chunks, ranks: Sequence[int]) -> list[float]:
    """Return the numbers at positions `ranks` (from 0) of the sorted sequence without NaN, in five passes.

    Each rank must be less than the number of numbers.
    """
    prefixes = np.zeros(len(ranks), np.uint64)
    # A radix selection: each pass determines further bits of all results.
    left = np.array(ranks, np.int64)
    shift = 64
    for width in _DIGIT_BITS:
        shift -= width
        distinct_prefixes = np.unique(prefixes)
        counts = _count_digits(chunks, distinct_prefixes, shift, width)
        rows = np.cumsum(counts, axis=1)[np.searchsorted(distinct_prefixes, prefixes)]
        digits = np.array([np.searchsorted(row, place, side="right") for row, place in zip(rows, left, strict=True)])
        below = np.where(digits > 0, rows[np.arange(len(left)), digits - 1], 0)
        left, prefixes = left - below, prefixes << np.uint64(width) | digits.astype(np.uint64)
    return _from_sort_keys(prefixes).tolist()


def count_numbers(chunks: Chunks) -> int:
    """Return how many numbers are not NaN."""
    return sum(int(np.count_nonzero(~np.isnan(chunk))) for chunk in chunks())


def _count_digits(chunks: Chunks, known: NDArray[np.uint64], shift: int, width: int) -> NDArray[np.int64]:
    """Count the next digits [prefixes, digits] of sort keys, by their prefix in `known`."""
    counts = np.zeros((known.size, 1 << width), np.int64)
    for chunk in chunks():
        keys = _to_sort_keys(chunk[~np.isnan(chunk)])
        # NumPy cannot shift a uint64 by 64 bits.
        prefixes = keys >> np.uint64(shift) >> np.uint64(width)
        places = np.minimum(np.searchsorted(known, prefixes), known.size - 1)
        ours = known[places] == prefixes
        digits = (keys[ours] >> np.uint64(shift)).astype(np.int64) & (1 << width) - 1
        np.add.at(counts.reshape(-1), (places[ours] << width) + digits, 1)
    return counts


def _to_sort_keys(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    # Adding 0.0 turns -0.0 into 0.0, so that both zeros have the same key.
    bits = (values + 0.0).view(np.uint64)
    return np.where(bits & _SIGN_BIT, ~bits, bits | _SIGN_BIT)


def _from_sort_keys(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    return np.where(keys & _SIGN_BIT, keys & ~_SIGN_BIT, ~keys).view(np.float64)
