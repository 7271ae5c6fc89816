"""Selection of the rows of a split by a filter and by a share of the negatives."""

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

_NEGATIVES_KEY = 2  # Differs from the keys of the row order.


@dataclass(frozen=True)
class ExcludedRows:
    """Number of rows of a split that are not read."""

    by_filter: int = 0
    negatives: int = 0
    """Number of negatives that were not drawn, among the rows that pass the filter."""


class RowSelection:
    """Rule that selects rows. It depends on the values of a row, its number in the split, and the seed."""

    def __init__(self, dataset: Dataset, *, condition: str | None, negative_keep: float, seed: int) -> None:
        """Create the rule.

        Raises MesetaError if the condition does not match the dataset, `negative_keep` is not in (0, 1], or negatives
        are excluded from a dataset with several labels.
        """
        if not 0 < negative_keep <= 1:
            raise MesetaError(f"reader: negative_keep must be above 0 and at most 1, got {negative_keep}")
        if negative_keep < 1 and len(dataset.labels) > 1:
            raise MesetaError(
                "reader: negative_keep needs one label, because a row may be negative for one label and positive for "
                f"another; choose one of {', '.join(dataset.labels)} with data.labels, or omit negative_keep"
            )
        self._filter = None if condition is None else RowFilter(condition, dataset)
        self._label = dataset.labels[0] if negative_keep < 1 else None
        self._limit = np.uint64(min(int(negative_keep * 2**64), 2**64 - 1))
        self._seed = seed

    @property
    def columns(self) -> list[str]:
        """Columns on which the selection depends. Empty if all rows are read."""
        decisive = [] if self._filter is None else list(self._filter.columns)
        return list(dict.fromkeys([*decisive, *([] if self._label is None else [self._label])]))

    def mask(self, table: pa.Table, first_row: int) -> tuple[NDArray[np.bool_], ExcludedRows]:
        """Return (mask [n] of the selected rows, excluded rows) of a table. `first_row` is its first row in the
        split."""
        kept = np.ones(table.num_rows, bool) if self._filter is None else self._filter(table)
        by_filter = int(kept.size - kept.sum())
        if self._label is None:
            return kept, ExcludedRows(by_filter)
        numbers = np.arange(first_row, first_row + table.num_rows)
        drawn = random_words(numbers, self._seed, _NEGATIVES_KEY) < self._limit
        # Positives are always kept.
        chosen = kept & (drawn | (table.column(self._label).to_numpy() != 0))
        return chosen, ExcludedRows(by_filter, int(kept.sum() - chosen.sum()))


def calibration_shift(negative_keep: float) -> float:
    """Return log(negative_keep), the shift of a model's logits that corrects for training on this share of the
    negatives.

    Source: He et al., "Practical lessons from predicting clicks on ads at Facebook", ADKDD 2014, section 6.3. If p is
    the prediction on the sampled rows and w the share of the negatives, q = p / (p + (1 - p) / w), so logit(q) is
    logit(p) + log(w).
    """
    return math.log(negative_keep)
