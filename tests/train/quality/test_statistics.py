"""Intervals and corrections, beside scipy, published tables and plain counting."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import special, stats

from meseta.report.quality.statistics import (
    ConfidenceInterval,
    holm_adjust,
    incomplete_beta,
    normal_interval,
    t_interval,
    t_quantile,
    t_two_sided,
)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 29, 200, 5000])
def test_students_t_is_that_of_scipy(freedom: int) -> None:
    for share in (0.5, 0.6, 0.9, 0.975, 0.9995, 0.9999999):
        assert t_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-7, abs=1e-12)
    for t in (0.0, 1e-3, 0.7, 2.0, 12.7, 400.0):
        assert t_two_sided(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), rel=1e-9, abs=1e-300)
        assert t_two_sided(-t, freedom) == t_two_sided(t, freedom)


def test_quantiles_are_those_of_printed_tables() -> None:
    found = [round(t_quantile(0.975, freedom), 3) for freedom in (1, 2, 3, 9, 15)]
    assert found == [12.706, 4.303, 3.182, 2.262, 2.131]


def test_the_incomplete_beta_function_is_that_of_scipy() -> None:
    for a in (0.5, 1.0, 4.5, 60.0):
        for b in (0.5, 2.0, 7.0):
            for x in (0.0, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-6, 1.0):
                assert incomplete_beta(x, a, b) == pytest.approx(special.betainc(a, b, x), rel=1e-11, abs=1e-14)


def test_an_interval_over_seeds_is_that_of_scipy() -> None:
    values = [0.3, -0.1, 0.25, 0.4]
    found, oracle = t_interval(values), stats.ttest_1samp(values, 0.0)
    low, high = oracle.confidence_interval(0.95)
    assert (found.mean, found.low, found.high, found.p) == pytest.approx((np.mean(values), low, high, oracle.pvalue))
    assert not found.excludes_zero and t_interval([0.3, 0.31, 0.29]).excludes_zero


def test_what_does_not_vary_is_known_and_one_seed_says_nothing() -> None:
    assert t_interval([0.0, 0.0, 0.0]) == ConfidenceInterval(0.0, 0.0, 0.0, 1.0)
    assert t_interval([0.1, 0.1]) == ConfidenceInterval(0.1, 0.1, 0.1, 0.0)
    assert t_interval([0.1]) == ConfidenceInterval(0.1, -math.inf, math.inf, 1.0)
    assert normal_interval(0.0, 0.0) == ConfidenceInterval(0.0, 0.0, 0.0, 1.0)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    draw = random.Random(3)
    found = [t_interval([draw.gauss(0, 1) for _ in range(3)]) for _ in range(600)]
    assert abs(sum(not one.excludes_zero for one in found) / 600 - 0.95) < 0.027  # three standard errors


def test_an_interval_of_a_known_error_is_that_of_scipy() -> None:
    found = normal_interval(0.3, 0.2)
    low, high = stats.norm.interval(0.95, 0.3, 0.2)
    assert (found.low, found.high, found.p) == pytest.approx((low, high, 2 * stats.norm.sf(1.5)))


def test_holm_goes_down_step_by_step() -> None:
    # By hand: 4 * 0.01, 3 * 0.013, 2 * 0.03, 1 * 0.04, and none below the one before it.
    assert holm_adjust([0.013, 0.04, 0.01, 0.03]) == pytest.approx([0.04, 0.06, 0.04, 0.06])
    assert holm_adjust([]) == [] and holm_adjust([1.0, 0.9]) == [1.0, 1.0]


def test_holm_rejects_what_its_steps_reject() -> None:
    draw = random.Random(0)
    for _ in range(50):
        ps = [draw.random() ** 6 for _ in range(12)]
        rejected = set[int]()
        for place, index in enumerate(sorted(range(12), key=ps.__getitem__)):  # the procedure as published
            if ps[index] > 0.05 / (12 - place):
                break
            rejected.add(index)
        assert {index for index, p in enumerate(holm_adjust(ps)) if p <= 0.05} == rejected
