"""Which rows of a split are read: those that fulfil a condition, and a share of the negatives."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.data.counter_rng import random_words
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.row_filter import RowFilter
from meseta.spec import MesetaError

_NEGATIVES_KEY = 2  # key of these draws beside those of the order of rows


@dataclass(frozen=True)
class ExcludedRows:
    """Rows of a split that are not read."""

    by_filter: int = 0
    negatives: int = 0
    """Negatives that were not drawn, among the rows that the filter leaves."""


class RowSelection:
    """The rule by which rows are chosen, a function of their values, their number in the split and the seed."""

    def __init__(self, dataset: Dataset, *, condition: str | None, negative_keep: float, seed: int) -> None:
        """Raises MesetaError for a condition that does not fit the dataset, for `negative_keep` outside (0, 1], and
        for several labels where negatives are left out."""
        if not 0 < negative_keep <= 1:
            raise MesetaError(f"reader: negative_keep must be above 0 and at most 1, got {negative_keep}")
        if negative_keep < 1 and len(dataset.labels) > 1:
            raise MesetaError(
                f"reader: negative_keep needs one label, since a row may be negative for one and positive for another; "
                f"choose one of {', '.join(dataset.labels)} by data.labels, or leave it out"
            )
        self._filter = None if condition is None else RowFilter(condition, dataset)
        self._label = dataset.labels[0] if negative_keep < 1 else None
        self._limit = np.uint64(min(int(negative_keep * 2**64), 2**64 - 1))
        self._seed = seed

    @property
    def columns(self) -> list[str]:
        """Columns that decide; none where all rows are read."""
        decisive = [] if self._filter is None else list(self._filter.columns)
        return list(dict.fromkeys([*decisive, *([] if self._label is None else [self._label])]))

    def mask(self, table: pa.Table, first_row: int) -> tuple[NDArray[np.bool_], ExcludedRows]:
        """Which rows of a table are read [n]; its first row is row `first_row` of the split."""
        kept = np.ones(table.num_rows, bool) if self._filter is None else self._filter(table)
        by_filter = int(kept.size - kept.sum())
        if self._label is None:
            return kept, ExcludedRows(by_filter)
        numbers = np.arange(first_row, first_row + table.num_rows)
        drawn = random_words(numbers, self._seed, _NEGATIVES_KEY) < self._limit
        chosen = kept & (drawn | (table.column(self._label).to_numpy() != 0))
        return chosen, ExcludedRows(by_filter, int(kept.sum() - chosen.sum()))


def calibration_shift(negative_keep: float) -> float:
    """What must be added to the logit of a model trained on this share of the negatives, so that its probabilities are
    those of all rows: log(negative_keep).

    Source: He et al., "Practical lessons from predicting clicks on ads at Facebook", ADKDD 2014, section 6.3: with p
    predicted in the sampled space and w the share kept, q = p / (p + (1 - p) / w); logit(q) is logit(p) + log(w).
    """
    return math.log(negative_keep)
