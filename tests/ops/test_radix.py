"""Tests of the compiled radix sort against numpy's stable sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from meseta.ops.core import core


def check(entries: NDArray[np.uint64], first_bit: int, last_bit: int) -> None:
    mask = np.uint64(((1 << last_bit) - 1) & ~((1 << first_bit) - 1))
    expected = entries[np.argsort(entries & mask, kind="stable")]
    core().radix_sort(entries, first_bit, last_bit)
    assert np.array_equal(entries, expected)


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(0, 200) | st.sampled_from([1000, 5000, 30_000]),
    bits=st.integers(0, 64),
    span=st.tuples(st.integers(0, 63), st.integers(0, 64)),
)
def test_equals_numpy(seed: int, size: int, bits: int, span: tuple[int, int]) -> None:
    entries = np.random.default_rng(seed).integers(0, 2**64, size, np.uint64)
    # Equal high bits, as rows of one table have, and many equal entries.
    entries = entries & np.uint64((1 << bits) - 1) | np.uint64((0xA5 << 56) & ~((1 << bits) - 1) & (2**64 - 1))
    check(entries, span[0], max(span))


@pytest.mark.parametrize("size", [0, 1, 2, 23, 24, 25, 63, 64, 2047, 2048, 100_000])
def test_sizes_at_which_the_method_changes(size: int) -> None:
    random = np.random.default_rng(size)
    check(random.integers(0, 2**64, size, np.uint64), 0, 64)
    check(random.integers(0, 3, size).astype(np.uint64) << np.uint64(40) | np.arange(size, dtype=np.uint64), 40, 64)


def test_bits_outside_the_word_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bits 3\.\.65 are not within 0\.\.64"):
        core().radix_sort(np.zeros(3, np.uint64), 3, 65)
