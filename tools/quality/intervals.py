"""Confidence intervals of means over few seeds, and adjustment for multiple comparisons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENCE_LEVEL = 0.95
"""Confidence level of all intervals."""


@dataclass(frozen=True)
class ConfidenceInterval:
    """Mean with its confidence interval at `CONFIDENCE_LEVEL`."""

    mean: float
    low: float
    """Lower bound of the interval. -inf if there are fewer than two values."""
    high: float
    """Upper bound of the interval. inf if there are fewer than two values."""
    p: float
    """Two-sided p-value of the hypothesis that the mean is 0. 1 if there are fewer than two values."""

    def negated(self) -> ConfidenceInterval:
        """Return the interval of the negated values."""
        return ConfidenceInterval(-self.mean, -self.high, -self.low, self.p)

    def is_disjoint_from(self, other: ConfidenceInterval) -> bool:
        """Whether the intervals have no value in common."""
        return self.low > other.high or self.high < other.low

    def to_dict(self) -> dict[str, float | None]:
        """Return plain data for JSON. Infinite bounds become `None`."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}


def t_interval(values: Sequence[float]) -> ConfidenceInterval:
    """Return Student's t-interval of the mean of independent values (Student, Biometrika 6, 1908).

    Args:
        values: At least one value.

    Returns:
        Interval with the p-value of the t-test that the mean is 0. The interval of equal values is their value, and its
        p-value is 0, or 1 if the value is 0.
    """
    mean, num = statistics.fmean(values), len(values)
    if num < 2:
        return ConfidenceInterval(mean, -math.inf, math.inf, 1.0)
    error = statistics.stdev(values) / math.sqrt(num)
    if error == 0:
        return ConfidenceInterval(values[0], values[0], values[0], float(values[0] == 0))
    student = stats.t(num - 1)
    half = float(student.ppf((1 + CONFIDENCE_LEVEL) / 2)) * error
    return ConfidenceInterval(mean, mean - half, mean + half, 2 * float(student.sf(abs(mean) / error)))


def normal_interval(mean: float, error: float) -> ConfidenceInterval:
    """Return the normal interval of a mean with standard error `error`, for example from a bootstrap.

    If `error` is 0, the interval is the mean itself, as in `t_interval`.
    """
    if error == 0:
        return ConfidenceInterval(mean, mean, mean, float(mean == 0))
    normal = statistics.NormalDist()
    half = normal.inv_cdf((1 + CONFIDENCE_LEVEL) / 2) * error
    return ConfidenceInterval(mean, mean - half, mean + half, math.erfc(abs(mean) / error / math.sqrt(2)))


def holm_adjust(ps: Sequence[float]) -> list[float]:
    """Adjust the p-values of several comparisons (Holm, Scandinavian Journal of Statistics 6, 1979).

    The probability of any false positive among the adjusted values below 0.05 is at most 0.05. The comparisons may
    depend on each other.
    """
    order = sorted(range(len(ps)), key=ps.__getitem__)
    adjusted, largest = [1.0] * len(ps), 0.0
    # Adjusted values must not decrease in the order of the p-values.
    for place, index in enumerate(order):
        largest = max(largest, min((len(ps) - place) * ps[index], 1.0))
        adjusted[index] = largest
    return adjusted
