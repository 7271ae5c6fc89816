"""Unseen values: category values that do not occur in the training rows, and limits for warnings and errors.

A value of a vocabulary is unseen if it has row 0, because it occurs in training less than `--min-count` times. A hashed
value is unseen if no training row looks up its table row. A new value that shares its row with a training value counts
as seen, so the share of a hashed feature is a lower bound. Buckets have no unseen values.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meseta.data.dataset.records import LookupCounts
from meseta.data.dataset.statistics import FeatureStatistics
from meseta.spec import MesetaError

MIN_LOOKUPS = 1_000
"""Minimum number of lookups of a feature in new rows for an error."""
MIN_ERROR_SHARE = 0.99
"""Minimum unseen share of new rows for an error."""
MAX_TEST_SHARE = 0.5
"""Unseen share of the test split at and above which there is no error."""
MIN_WARNING_SHARE = 0.5
"""Unseen share of new rows at and below which there is no warning."""
MIN_WARNING_FACTOR = 2.0
"""Minimum ratio of the unseen share of new rows to that of the test split for a warning."""
CHECK_SPELLING_REMEDY = "check that the files spell values like the training files (encoding, number format, prefixes)"


def count_unseen(ids: NDArray[np.integer], seen: NDArray[np.uint8] | None) -> int:
    """Return the number of ids [nnz] that belong to unseen values.

    `seen` has one bit per row of a hashed table, as `read_touched` returns it. `None` means that the feature has a
    vocabulary, where unseen values have row 0.
    """
    is_seen = ids if seen is None else seen.take(ids >> 3) >> (ids.astype(np.uint8) & 7) & 1
    return ids.size - int(np.count_nonzero(is_seen))


class LookupCounter:
    """Thread-safe counter of the lookups of one feature in the test split, and of the unseen values among them."""

    def __init__(self, training: FeatureStatistics | None) -> None:
        """Create an empty counter.

        `training` is the statistics of a hashed feature. It must be complete before the first window is added. `None`
        means that the feature has a vocabulary.
        """
        self._training = training
        self._num_lookups = self._num_unseen = 0
        self._lock = threading.Lock()

    def add_window(self, ids: NDArray[np.integer], num_samples: int) -> None:
        num_unseen = count_unseen(ids, None if self._training is None else self._training.touched_bits())
        with self._lock:
            self._num_lookups += ids.size
            self._num_unseen += num_unseen

    def get_state(self) -> tuple[list[int], bytes]:
        with self._lock:
            return [self._num_lookups, self._num_unseen], b""

    def set_state(self, numbers: Sequence[int], seen: bytes) -> None:
        self._num_lookups, self._num_unseen = numbers

    def result(self) -> LookupCounts | None:
        """Return the counts of all windows, or `None` if there was no lookup."""
        if not self._num_lookups:
            return None
        return LookupCounts(num_lookups=self._num_lookups, num_unseen=self._num_unseen)


@dataclass(kw_only=True)
class UnseenValues:
    """Numbers of unseen values in new rows, by feature."""

    unseen_counts: Counter[str] = field(default_factory=Counter)
    value_counts: Counter[str] = field(default_factory=Counter)
    """Number of all values of each feature whose unseen values can be counted."""
    uncounted_features: tuple[str, ...] = ()
    """Hashed features whose unseen values cannot be counted, because the dataset does not store their trained rows."""
    test_shares: Mapping[str, float] = field(default_factory=dict)
    """Unseen share in the test split, by feature, if it was recorded."""

    def add(self, other: UnseenValues) -> None:
        self.unseen_counts.update(other.unseen_counts)
        self.value_counts.update(other.value_counts)

    def shares(self) -> list[tuple[str, float]]:
        """Return (feature, unseen share) pairs with the largest share first. Features without values are left out."""
        shares = [(name, self.unseen_counts[name] / number) for name, number in self.value_counts.items() if number]
        return sorted(shares, key=lambda pair: -pair[1])

    def warnings(self) -> list[str]:
        """Return a warning for each feature whose share is far above that of the test split, the largest share
        first."""
        names = [name for name, share in self.shares() if self._is_warning(name, share)]
        return [f"{self._describe(name)}; {CHECK_SPELLING_REMEDY}" for name in names]

    def check(self) -> None:
        """Raise MesetaError if almost all values of a feature are unseen and its test split does not explain it."""
        names = [name for name, share in self.shares() if self._is_error(name, share)]
        if names:
            suffix = f", and so are those of {len(names) - 1:,} other features" if len(names) > 1 else ""
            raise MesetaError(
                f"predict: {self._describe(names[0])}{suffix}; {CHECK_SPELLING_REMEDY}, or predict with --allow-unseen"
            )

    def _is_error(self, name: str, share: float) -> bool:
        test_share = self.test_shares.get(name, 1.0)
        return self.value_counts[name] >= MIN_LOOKUPS and share >= MIN_ERROR_SHARE and test_share < MAX_TEST_SHARE

    def _is_warning(self, name: str, share: float) -> bool:
        test_share = self.test_shares.get(name, 0.0)
        return self._is_error(name, share) or (share > MIN_WARNING_SHARE and share >= MIN_WARNING_FACTOR * test_share)

    def _describe(self, name: str) -> str:
        share, test_share = self.unseen_counts[name] / self.value_counts[name], self.test_shares.get(name)
        before = "not stored" if test_share is None else f"{test_share:.2%}"
        return f"{share:.2%} of the {self.value_counts[name]:,} values of {name!r} are unseen (test split: {before})"
