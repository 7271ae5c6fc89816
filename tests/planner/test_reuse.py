"""Tests of the distinct rows of a batch against closed forms and simulation."""

import numpy as np
import pytest

from meseta.data.dataset.statistics import FeatureStatistics
from meseta.planner.cost.reuse import row_classes
from meseta.spec import Reuse

EDGES = (0, *(2**i for i in range(16)))


def one_bin(count_bin: int, window: int = 1000) -> Reuse:
    shares = tuple(float(i == count_bin) for i in range(len(EDGES)))
    return Reuse(window_samples=window, edges=EDGES, rows=shares, lookups=shares)


def zipf(random: np.random.Generator, count: int, num_rows: int, exponent: float) -> np.ndarray:
    weights = np.arange(1, num_rows + 1) ** -exponent
    return random.choice(num_rows, count, p=weights / weights.sum())


def test_equally_likely_rows_follow_the_closed_form() -> None:
    classes = row_classes([1000], [2.0], [None])
    expected = 1000 * (1 - (1 - 1 / 1000) ** 500)
    assert classes.distinct_rows(np.array([500.0]))[0] == pytest.approx(expected, rel=1e-3)
    assert classes.distinct_rows(np.array([1e9]))[0] == pytest.approx(1000)


def test_rows_that_came_once_are_all_distinct() -> None:
    classes = row_classes([10_000], [1.0], [one_bin(0)])
    assert classes.distinct_rows(np.array([250.0]))[0] == pytest.approx(250, rel=1e-6)
    assert classes.distinct_rows(np.array([1000.0]))[0] == pytest.approx(1000, rel=1e-6)


def test_rows_that_came_twice_follow_the_closed_form() -> None:
    classes = row_classes([10_000], [1.0], [one_bin(1)])
    assert classes.distinct_rows(np.array([500.0]))[0] == pytest.approx(500 * (1 - 0.5**2), rel=1e-6)


def test_distinct_rows_grow_and_never_exceed_the_table_or_the_lookups() -> None:
    reuse = Reuse(window_samples=1000, edges=(0, 1, 2), rows=(0.5, 0.3, 0.2), lookups=(0.1, 0.12, 0.78))
    classes = row_classes([700] * 60, [3.0] * 60, [reuse] * 60)
    ids = np.geomspace(1, 1e7, 60)
    distinct_rows = classes.distinct_rows(ids)
    assert (np.diff(distinct_rows) >= -1e-9).all()
    assert (distinct_rows <= np.minimum(ids, 700) + 1e-6).all()
    assert distinct_rows[-1] == pytest.approx(700, rel=1e-3)


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.05, 1.3])
@pytest.mark.parametrize("num_rows", [2_000, 200_000])
def test_batches_of_other_sizes_agree_with_simulation(exponent: float, num_rows: int) -> None:
    random, window = np.random.default_rng(3), 65_536
    ids = zipf(random, 2 * window, num_rows, exponent)
    counted = FeatureStatistics(num_rows)
    counted.add_window(ids[:window], window)
    classes = row_classes([num_rows], [1.0], [counted.result().reuse])
    for size in (256, 2048, 16_384, 65_536, 131_072):
        batches = [np.unique(ids[start : start + size]).size for start in range(0, 2 * window - size + 1, size)][:8]
        assert classes.distinct_rows(np.array([float(size)]))[0] == pytest.approx(np.mean(batches), rel=0.06)
