"""Permutations and windows: complete, even, and of the promised size."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meseta.data.read.order import EpochOrder, permutation, random_words

LITERAL_ORDER = [3, 4, 2, 6, 7, 0, 1, 5]
LITERAL_WORDS = [5197578548964807871, 12035550249420947055]


@given(size=st.integers(0, 1000), key=st.lists(st.integers(-(2**70), 2**70), max_size=3))
def test_permutations_are_complete(size: int, key: list[int]) -> None:
    assert sorted(permutation(size, *key).tolist()) == list(range(size))


def test_permutations_are_even_and_literal() -> None:
    """All 24 orders of 4 things come equally often; chi-square with 23 degrees of freedom is below 49.7 at 0.1 %."""
    counts = np.unique([permutation(4, seed, 0) for seed in range(4800)], axis=0, return_counts=True)[1]
    assert counts.size == 24
    assert np.square(counts - 200).sum() / 200 < 49.7
    assert permutation(8, 1, 2).tolist() == LITERAL_ORDER
    assert random_words(np.arange(2), 0).tolist() == LITERAL_WORDS


def test_words_are_distinct_and_even() -> None:
    words = random_words(np.arange(100_000), 7)
    assert np.unique(words).size == words.size
    bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 0.01


@given(group_rows=st.lists(st.integers(1, 50), min_size=1), window_rows=st.integers(1, 200), shuffle=st.booleans())
def test_windows_tile_the_epoch(group_rows: list[int], window_rows: int, shuffle: bool) -> None:
    order = EpochOrder(group_rows, window_rows, (3, 4) if shuffle else None)
    windows = [order.window(index) for index in range(len(order))]
    groups = [group for window in windows for group in window.groups]
    assert sorted(groups) == list(range(len(group_rows)))
    assert shuffle or groups == sorted(groups)
    start = 0
    for index, window in enumerate(windows):
        assert window.start == start
        assert window.num_rows == sum(group_rows[group] for group in window.groups)
        assert window.num_rows <= window_rows or len(window.groups) == 1
        assert order.find_window(start) == order.find_window(start + window.num_rows - 1) == index
        assert (window.rows is None) != shuffle
        start += window.num_rows
    assert start == sum(group_rows)
