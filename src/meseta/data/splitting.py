"""Which rows make the test split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from meseta.data.counter import random_words
from meseta.data.raw_rows import RawRows
from meseta.data.sources import Block
from meseta.spec import MesetaError

SplitBy = Literal["time", "group"]
_GROUPS = 1
"""Key of the words drawn for groups, so that they do not repeat those of rows."""


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """Tells training rows from test rows, each by itself."""

    seed: int
    test_fraction: float = 0.0
    """Share of rows, or of groups, drawn by seed."""
    by: SplitBy | None = None
    """None: by the number of the row."""
    test_from: float | None = None
    """By time: the first second of the test split; None: there is no test split."""

    def is_test(self, block: Block, first_global_row: int, rows: RawRows) -> NDArray[np.bool_]:
        """For the rows [n] of a block, whose first is row `first_global_row` of all sources.

        A function of the file, the time, the seed and the group, or the seed and the row's number, however files are
        cut into blocks. Raises MesetaError for a row without a time where that decides.
        """
        if block.source.split != "both":
            return np.full(block.num_rows, block.source.split == "test")
        if self.by == "time":
            assert rows.time is not None
            self._check_times(block, rows.time)
            return np.zeros(block.num_rows, bool) if self.test_from is None else rows.time >= self.test_from
        limit = np.uint64(min(int(self.test_fraction * 2**64), 2**64 - 1))
        if self.by == "group":
            assert rows.group is not None
            return random_words(rows.group, self.seed, _GROUPS) < limit
        numbers = np.arange(first_global_row, first_global_row + block.num_rows)
        return random_words(numbers, self.seed) < limit

    def _check_times(self, block: Block, time: NDArray[np.float64]) -> None:
        missing = np.flatnonzero(np.isnan(time))
        if missing.size:
            raise MesetaError(
                f"source {str(block.source.path)!r}, row {block.first_row + int(missing[0]) + 1}: without a time it is "
                "neither before nor after; fill it, remove the row, or split otherwise than by time"
            )
