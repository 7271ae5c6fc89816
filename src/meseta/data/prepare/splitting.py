"""Assignment of rows to the training, valid and test splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meseta.data.dataset.dataset import SPLITS
from meseta.data.formats.format import Block
from meseta.data.formats.raw_rows import RawRows
from meseta.data.read.order import random_words
from meseta.spec import MesetaError

SplitBy = Literal["time", "group"]
TRAIN, VALID, TEST = range(len(SPLITS))
NO_SPLIT = -1
"""Split of a row that is left out."""
# A separate key, so that the random words of groups differ from those of row numbers.
_GROUPS_KEY = 1


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """Assigns each row to a split, independently of other rows."""

    seed: int
    test_fraction: float = 0.0
    """Share of the rows or groups in the test split. They are drawn by `seed`, or are the last rows if split by
    time."""
    valid_fraction: float = 0.0
    """Share of the rows or groups in the valid split. They are drawn by `seed`, or precede the test split if split by
    time."""
    by: SplitBy | None = None
    """Column that decides the split. `None` means that the row number decides."""
    test_from: float | None = None
    """First second of the test split. `None` if it is unknown yet, or if there is no such split by time."""
    valid_from: float | None = None
    """First second of the valid split. `None` if it is unknown yet, or if there is no such split by time."""

    def assign_splits(self, block: Block, first_global_row: int, rows: RawRows) -> NDArray[np.int8]:
        """Return TRAIN, VALID or TEST for each row [n] of a block. `first_global_row` is its first row in all sources.

        The split of a row depends on its file, its time, or the seed with its group or row number. It does not depend
        on the block size. Raises MesetaError if a row without a time is split by time.
        """
        if block.source.split != "both":
            return np.full(block.num_rows, SPLITS.index(block.source.split), np.int8)
        if self.by == "time":
            assert rows.time is not None
            self._check_times(block, rows.time)
            return self._by_time(rows.time)
        if self.by == "group":
            assert rows.group is not None
            return self._by_word(random_words(rows.group, self.seed, _GROUPS_KEY))
        return self._by_number(block, first_global_row)

    def assign_splits_by_number(self, block: Block, first_global_row: int) -> NDArray[np.int8] | None:
        """Return the splits of `assign_splits` if row numbers alone decide them, or `None` otherwise."""
        is_drawn = block.source.split == "both" and self.by is None
        return self._by_number(block, first_global_row) if is_drawn else None

    def check_order(self) -> None:
        """Raise MesetaError unless the valid split starts before the test split."""
        if self.valid_from is not None and self.test_from is not None and self.valid_from >= self.test_from:
            raise MesetaError(
                f"prepare: --valid-after is {self.valid_from:.17g} in seconds, but the test split begins at "
                f"{self.test_from:.17g}; use an earlier --valid-after"
            )

    def _by_time(self, time: NDArray[np.float64]) -> NDArray[np.int8]:
        splits = np.full(time.size, TRAIN, np.int8)
        if self.valid_from is not None:
            splits[time >= self.valid_from] = VALID
        if self.test_from is not None:
            splits[time >= self.test_from] = TEST
        return splits

    def _by_number(self, block: Block, first_global_row: int) -> NDArray[np.int8]:
        numbers = np.arange(first_global_row, first_global_row + block.num_rows)
        return self._by_word(random_words(numbers, self.seed))

    def _by_word(self, words: NDArray[np.uint64]) -> NDArray[np.int8]:
        # Test rows have the smallest words and valid rows the next ones. The test split is then the same with and
        # without a valid split.
        test, valid = (int(share * 2**64) for share in (self.test_fraction, self.valid_fraction))
        splits = np.full(words.size, TRAIN, np.int8)
        for limit, place in ((test + valid, VALID), (test, TEST)):
            # A limit of 2**64 does not fit into uint64.
            splits[words < np.uint64(min(limit, 2**64 - 1))] = place
        return splits

    def _check_times(self, block: Block, time: NDArray[np.float64]) -> None:
        missing = np.flatnonzero(np.isnan(time))
        if missing.size:
            raise MesetaError(
                f"source {str(block.source.path)!r}, row {block.first_row + int(missing[0]) + 1}: the row has no time, "
                "so it cannot be split by time; add the time, remove the row, or use another split"
            )
