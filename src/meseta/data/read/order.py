"""Counter-based random numbers that are identical on every machine and for every numpy version.

A number is a function of a key and a counter. The mixer is the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast
splittable pseudorandom number generators", OOPSLA 2014). It is a bijection of 64-bit words, so distinct counters have
distinct words.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from meseta.data.read.options import ReaderOptions

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def random_words(counters: NDArray[np.integer], *key: int) -> NDArray[np.uint64]:
    """Return one uint64 per counter. Distinct counters give distinct words. `key` is any tuple of integers."""
    base = 0
    for part in key:
        base = int(_splitmix64(np.array([(base ^ (part & _MASK)) + _GOLDEN_GAMMA & _MASK], np.uint64))[0])
    return _splitmix64(counters.astype(np.uint64) * np.uint64(_GOLDEN_GAMMA) + np.uint64(base))


def permutation(size: int, *key: int) -> NDArray[np.int64]:
    """Return a random order of 0..size-1, int64 [size]."""
    # The words are distinct, so there are no ties.
    return np.argsort(random_words(np.arange(size), *key))


def _splitmix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


_GROUPS_KEY, _ROWS_KEY = 0, 1  # Keys of the two kinds of permutations.


@dataclass(frozen=True, kw_only=True)
class Window:
    """Row groups that are decoded and shuffled together."""

    start: int
    """Number of rows of the epoch before the window."""
    num_rows: int
    groups: tuple[int, ...]
    """Numbers of the row groups in the split, in the order of reading."""
    rows: NDArray[np.int64] | None
    """Index of the decoded row at each position of the window [num_rows]. `None` keeps the decoded order."""


def group_into_windows(group_rows: Sequence[int], window_rows: int) -> list[list[int]]:
    """Return the group indices of windows of at most `window_rows` consecutive rows, or of one larger row group."""
    windows: list[list[int]] = []
    held = 0
    for place, rows in enumerate(group_rows):
        if not windows or held + rows > window_rows:
            windows.append([])
            held = 0
        windows[-1].append(place)
        held += rows
    return windows


class EpochOrder:
    """Windows of one epoch. Row groups are permuted by (seed, epoch), rows within a window by (seed, epoch, window)."""

    def __init__(self, group_rows: Sequence[int], window_rows: int, shuffle_key: tuple[int, int] | None) -> None:
        """Create the order. `group_rows` are the sizes of row groups. `shuffle_key` is (seed, epoch), or `None` for the
        order of the files."""
        groups = np.arange(len(group_rows))
        if shuffle_key is not None:
            groups = permutation(len(group_rows), *shuffle_key, _GROUPS_KEY)
        rows = np.array(group_rows, np.int64)[groups]
        self._shuffle_key = shuffle_key
        self._windows = [groups[places].tolist() for places in group_into_windows(rows.tolist(), window_rows)]
        sizes = [sum(group_rows[group] for group in window) for window in self._windows]
        self._starts = list(accumulate(sizes, initial=0))

    def find_window(self, row: int) -> int:
        """Return the index of the window that contains a row of the epoch."""
        return bisect_right(self._starts, row) - 1

    @property
    def num_rows(self) -> int:
        return self._starts[-1]

    def __len__(self) -> int:
        return len(self._windows)

    def bounds(self, index: int) -> tuple[int, int]:
        """Return (first row of window `index` in the epoch, row after its last one)."""
        return self._starts[index], self._starts[index + 1]

    def window(self, index: int) -> Window:
        start, stop = self.bounds(index)
        rows = None if self._shuffle_key is None else permutation(stop - start, *self._shuffle_key, _ROWS_KEY, index)
        return Window(start=start, num_rows=stop - start, groups=tuple(self._windows[index]), rows=rows)


def epoch_order(
    group_rows: Sequence[int], options: ReaderOptions, epoch: int, *, is_served: bool = False
) -> EpochOrder:
    """Return the order of the rows in one epoch. `is_served` means that reader processes decode the rows."""
    if options.shuffle:
        return EpochOrder(group_rows, options.window_rows, (options.seed, epoch))
    # Without shuffling, a window of one row group stays in the CPU caches. Served windows have an overhead per window.
    return EpochOrder(group_rows, options.window_rows if is_served else 1, None)
