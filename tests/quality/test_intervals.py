"""Confidence intervals and Holm's adjustment, compared with scipy and with the published procedure."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats

from tools.quality.intervals import ConfidenceInterval, holm_adjust, normal_interval, t_interval


def test_t_interval_matches_scipy() -> None:
    values = [0.3, -0.1, 0.25, 0.4]
    interval, expected = t_interval(values), stats.ttest_1samp(values, 0.0)
    low, high = expected.confidence_interval(0.95)
    assert (interval.mean, interval.low, interval.high, interval.p) == pytest.approx(
        (np.mean(values), low, high, expected.pvalue)
    )


def test_intervals_of_equal_values_and_of_one_value() -> None:
    assert t_interval([0.0, 0.0, 0.0]) == ConfidenceInterval(0.0, 0.0, 0.0, 1.0)
    assert t_interval([0.1, 0.1]) == ConfidenceInterval(0.1, 0.1, 0.1, 0.0)
    assert t_interval([0.1]) == ConfidenceInterval(0.1, -math.inf, math.inf, 1.0)
    assert normal_interval(0.0, 0.0) == ConfidenceInterval(0.0, 0.0, 0.0, 1.0)


@pytest.mark.soak
def test_t_intervals_cover_the_mean_at_their_confidence_level() -> None:
    draw = random.Random(3)
    intervals = [t_interval([draw.gauss(0, 1) for _ in range(3)]) for _ in range(600)]
    assert abs(sum(one.low <= 0 <= one.high for one in intervals) / 600 - 0.95) < 0.027  # three standard errors


def test_normal_interval_matches_scipy() -> None:
    interval = normal_interval(0.3, 0.2)
    low, high = stats.norm.interval(0.95, 0.3, 0.2)
    assert (interval.low, interval.high, interval.p) == pytest.approx((low, high, 2 * stats.norm.sf(1.5)))


def test_holm_adjusts_a_worked_example() -> None:
    # 4 * 0.01, 3 * 0.013, 2 * 0.03 and 1 * 0.04, and no value is below the previous one.
    assert holm_adjust([0.013, 0.04, 0.01, 0.03]) == pytest.approx([0.04, 0.06, 0.04, 0.06])
    assert holm_adjust([]) == [] and holm_adjust([1.0, 0.9]) == [1.0, 1.0]


def test_holm_matches_the_published_procedure() -> None:
    draw = random.Random(0)
    for _ in range(50):
        ps = [draw.random() ** 6 for _ in range(12)]
        rejected = set[int]()
        for place, index in enumerate(sorted(range(12), key=ps.__getitem__)):  # Holm's published procedure
            if ps[index] > 0.05 / (12 - place):
                break
            rejected.add(index)
        assert {index for index, p in enumerate(holm_adjust(ps)) if p <= 0.05} == rejected
