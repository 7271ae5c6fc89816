"""Confidence intervals of means over few seeds, and adjustment for multiple comparisons.

Only the standard library is used.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE_LEVEL = 0.95
"""Confidence level of all intervals."""
_NUM_BISECTIONS = 80  # More than the 53 bits of a float64.
_MAX_TERMS = 300
_TINY = 1e-300  # Replaces zeros in Lentz's method, which would be divisors.


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

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 is outside the interval. Use `holm_adjust` to judge several comparisons together."""
        return self.low > 0 or self.high < 0

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
    half = t_quantile((1 + CONFIDENCE_LEVEL) / 2, num - 1) * error
    return ConfidenceInterval(mean, mean - half, mean + half, t_two_sided(mean / error, num - 1))


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


def t_two_sided(t: float, freedom: int) -> float:
    """Return the probability of a value at least as far from 0 as `t` under Student's t-distribution.

    `freedom` is the number of degrees of freedom.
    """
    return incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def t_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's t-distribution for a probability `share` in [0.5, 1).

    `freedom` is the number of degrees of freedom.
    """
    # Double the upper bound until it exceeds the quantile, then bisect.
    low, high = 0.0, 1.0
    while 1 - t_two_sided(high, freedom) / 2 < share:
        high *= 2
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - t_two_sided(middle, freedom) / 2 < share else (low, middle)
    return high


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b) for x in [0, 1].

    The continued fraction (Abramowitz and Stegun 26.5.8) is evaluated by Lentz's method (Applied Optics 15, 1976).
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    # For large x, the fraction of the complement converges faster.
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    value, above, below = 1.0, 1.0, 0.0
    for term in range(_MAX_TERMS):
        half = term // 2
        if term == 0:
            numerator = 1.0
        elif term % 2:
            numerator = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            numerator = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        below = 1 / (1 + numerator * below or _TINY)
        above = 1 + numerator / above or _TINY
        value *= above * below
        if term and abs(above * below - 1) < 1e-15:
            break
    return math.exp(log_front) / a * (value - 1)
