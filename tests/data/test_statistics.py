"""Distinct rows of a feature, against numpy's own count, for tables of every size."""

from __future__ import annotations

import numpy as np
import pytest

from meseta.data.dataset import statistics
from meseta.data.dataset.statistics import FeatureStatistics


@pytest.mark.parametrize("num_rows", [1, 37, 5_000, 2**31 + 5, 2**40])
@pytest.mark.parametrize("windows", [0, 1, 9])
def test_distinct_rows_are_counted_once(num_rows: int, windows: int) -> None:
    draw, merged = np.random.default_rng(num_rows % 97 + windows), FeatureStatistics(num_rows)
    ids = [(draw.random(400) ** 6 * num_rows).astype(np.int64) for _ in range(windows)]
    for window in ids:
        merged.add_window(window, 100)
    result = merged.result()
    assert result.num_uniques == len(np.unique(np.concatenate(ids))) if ids else result.num_uniques == 0
    assert result.num_lookups == 400 * windows and result.num_rows == 100 * windows


def test_both_ways_to_count_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(0).zipf(1.3, (50, 300)) % 9_973
    results = []
    for largest in (10**6, 100):
        monkeypatch.setattr(statistics, "MAX_BITMAP_ROWS", largest)
        window_statistics = FeatureStatistics(9_973)
        for window in ids:
            window_statistics.add_window(window, 300)
        results.append(window_statistics.result())
    assert results[0] == results[1]
