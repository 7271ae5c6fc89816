"""The order of rows in an epoch, a function of (seed, epoch) and of the files alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from meseta.data.counter_rng import permutation
from meseta.data.read.options import ReaderOptions

_GROUPS_KEY, _ROWS_KEY = 0, 1  # keys of the two kinds of permutation


@dataclass(frozen=True, kw_only=True)
class Window:
    """Row groups that are in memory and shuffled together."""

    start: int
    """Rows of the epoch before it."""
    num_rows: int
    groups: tuple[int, ...]
    """Row groups, by their number in the split, in the order of reading."""
    rows: NDArray[np.int64] | None
    """Row at each place of the window [num_rows]; None: as read."""


def group_into_windows(group_rows: Sequence[int], window_rows: int) -> list[list[int]]:
    """Cut consecutive row groups into windows of at most `window_rows` rows, or of one group where that is larger.

    Returns the places of the groups per window.
    """
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
    """Windows of one epoch: row groups permuted by (seed, epoch), rows inside a window by (seed, epoch, window)."""

    def __init__(self, group_rows: Sequence[int], window_rows: int, shuffle_key: tuple[int, int] | None) -> None:
        """`group_rows`: rows of each row group; `shuffle_key`: (seed, epoch), or None for the order of the files."""
        groups = np.arange(len(group_rows))
        if shuffle_key is not None:
            groups = permutation(len(group_rows), *shuffle_key, _GROUPS_KEY)
        rows = np.array(group_rows, np.int64)[groups]
        self._shuffle_key = shuffle_key
        self._windows = [groups[places].tolist() for places in group_into_windows(rows.tolist(), window_rows)]
        sizes = [sum(group_rows[group] for group in window) for window in self._windows]
        self._starts = list(accumulate(sizes, initial=0))

    def find_window(self, row: int) -> int:
        """The window that holds a row of the epoch."""
        return bisect_right(self._starts, row) - 1

    @property
    def num_rows(self) -> int:
        """Rows of the epoch."""
        return self._starts[-1]

    def __len__(self) -> int:
        return len(self._windows)

    def bounds(self, index: int) -> tuple[int, int]:
        """The first row of the epoch in window `index`, and the one after its last."""
        return self._starts[index], self._starts[index + 1]

    def window(self, index: int) -> Window:
        """Window `index`, with its permutation worked out."""
        start, stop = self.bounds(index)
        rows = None if self._shuffle_key is None else permutation(stop - start, *self._shuffle_key, _ROWS_KEY, index)
        return Window(start=start, num_rows=stop - start, groups=tuple(self._windows[index]), rows=rows)


def epoch_order(
    group_rows: Sequence[int], options: ReaderOptions, epoch: int, *, is_served: bool = False
) -> EpochOrder:
    """The order of rows in one epoch. Where they are not shuffled, and are decoded where they are used, each row group
    is a window, which stays in the caches; what is served (`is_served`) costs something for each window."""
    if options.shuffle:
        return EpochOrder(group_rows, options.window_rows, (options.seed, epoch))
    return EpochOrder(group_rows, options.window_rows if is_served else 1, None)
