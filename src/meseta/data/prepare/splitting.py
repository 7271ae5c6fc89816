"""Which rows make the test split and the valid split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meseta.data.counter_rng import random_words
from meseta.data.dataset.dataset import SPLITS
from meseta.data.formats.format import Block
from meseta.data.raw_rows import RawRows
from meseta.spec import MesetaError

SplitBy = Literal["time", "group"]
TRAIN, VALID, TEST = range(len(SPLITS))
"""Places in SPLITS."""
NO_SPLIT = -1
"""Stands for the split of a row that is left out."""
_GROUPS_KEY = 1
"""Key of the words drawn for groups, so that they do not repeat those of rows."""


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """Tells each row its split, by itself."""

    seed: int
    test_fraction: float = 0.0
    """Share of rows, or of groups, drawn by seed; by time, of the last rows."""
    valid_fraction: float = 0.0
    """The same of the valid split; by time, of the rows just before the test split."""
    by: SplitBy | None = None
    """None: by the number of the row."""
    test_from: float | None = None
    """By time: the first second of the test split; None: there is no test split, or it is not known yet."""
    valid_from: float | None = None
    """By time: the first second of the valid split, which ends where the test split begins; None: as above."""

    def assign_splits(self, block: Block, first_global_row: int, rows: RawRows) -> NDArray[np.int8]:
        """TRAIN, VALID or TEST for the rows [n] of a block, whose first is row `first_global_row` of all sources.

        A function of the file, the time, the seed and the group, or the seed and the row's number, however files are
        cut into blocks. Raises MesetaError for a row without a time where that decides.
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
        """The same where the numbers of rows tell it alone; None elsewhere."""
        is_drawn = block.source.split == "both" and self.by is None
        return self._by_number(block, first_global_row) if is_drawn else None

    def check_order(self) -> None:
        """Raise MesetaError where the valid split begins no sooner than the test split."""
        if self.valid_from is not None and self.test_from is not None and self.valid_from >= self.test_from:
            raise MesetaError(
                f"prepare: --valid-after is {self.valid_from:.17g} in seconds, but the test split begins at "
                f"{self.test_from:.17g} already; give an earlier one"
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
        """The least words are for testing and those above them for validation, so that the rows for testing are the
        same with and without a valid split."""
        test, valid = (int(share * 2**64) for share in (self.test_fraction, self.valid_fraction))
        splits = np.full(words.size, TRAIN, np.int8)
        for limit, place in ((test + valid, VALID), (test, TEST)):
            splits[words < np.uint64(min(limit, 2**64 - 1))] = place
        return splits

    def _check_times(self, block: Block, time: NDArray[np.float64]) -> None:
        missing = np.flatnonzero(np.isnan(time))
        if missing.size:
            raise MesetaError(
                f"source {str(block.source.path)!r}, row {block.first_row + int(missing[0]) + 1}: without a time it is "
                "neither before nor after; fill it, remove the row, or split otherwise than by time"
            )
