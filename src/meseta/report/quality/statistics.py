"""Intervals of means over few paired seeds, and what holds of many comparisons at once. Needs no library."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE_LEVEL = 0.95
"""Of all intervals."""
_NUM_BISECTIONS = 80
_MAX_TERMS = 300
_TINY = 1e-300


@dataclass(frozen=True)
class ConfidenceInterval:
    """A mean over seeds, and where it lies with a probability of LEVEL."""

    mean: float
    low: float
    """-inf with less than two seeds, which bound nothing."""
    high: float
    p: float
    """Two-sided, of the mean being 0; 1 with less than two seeds."""

    @property
    def excludes_zero(self) -> bool:
        """Whether 0 lies outside; of one comparison alone, see `holm_adjust` for many."""
        return self.low > 0 or self.high < 0

    def negated(self) -> ConfidenceInterval:
        """Of the values with the other sign."""
        return ConfidenceInterval(-self.mean, -self.high, -self.low, self.p)

    def is_disjoint_from(self, other: ConfidenceInterval) -> bool:
        """Whether the two have no value in common."""
        return self.low > other.high or self.high < other.low

    def to_dict(self) -> dict[str, float | None]:
        """Plain data for JSON, which has no infinity."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}


def t_interval(values: Sequence[float]) -> ConfidenceInterval:
    """Student's interval of the mean of one or more independent values, and the t-test that it is 0 (Student,
    Biometrika 6, 1908). Values that are all the same are known without doubt: the interval is their value, and p is 0,
    or 1 where that is 0."""
    mean, num = statistics.fmean(values), len(values)
    if num < 2:
        return ConfidenceInterval(mean, -math.inf, math.inf, 1.0)
    error = statistics.stdev(values) / math.sqrt(num)
    if error == 0:
        return ConfidenceInterval(values[0], values[0], values[0], float(values[0] == 0))
    half = t_quantile((1 + CONFIDENCE_LEVEL) / 2, num - 1) * error
    return ConfidenceInterval(mean, mean - half, mean + half, t_two_sided(mean / error, num - 1))


def normal_interval(mean: float, error: float) -> ConfidenceInterval:
    """The interval of a mean whose standard error is known, as a bootstrap gives it; `error` 0 as in `t_interval`."""
    if error == 0:
        return ConfidenceInterval(mean, mean, mean, float(mean == 0))
    normal = statistics.NormalDist()
    half = normal.inv_cdf((1 + CONFIDENCE_LEVEL) / 2) * error
    return ConfidenceInterval(mean, mean - half, mean + half, math.erfc(abs(mean) / error / math.sqrt(2)))


def holm_adjust(ps: Sequence[float]) -> list[float]:
    """The p of each comparison of a family, adjusted so that the chance of any false one among those below 0.05 is at
    most 0.05, however they depend on each other (Holm, Scandinavian Journal of Statistics 6, 1979)."""
    order = sorted(range(len(ps)), key=ps.__getitem__)
    adjusted, largest = [1.0] * len(ps), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min((len(ps) - place) * ps[index], 1.0))
        adjusted[index] = largest
    return adjusted


def t_two_sided(t: float, freedom: int) -> float:
    """The chance that Student's t of so many degrees of freedom lies at least as far from 0."""
    return incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def t_quantile(share: float, freedom: int) -> float:
    """Below which Student's t lies with a chance of `share`, from 0.5 to less than 1."""
    low, high = 0.0, 1.0
    while 1 - t_two_sided(high, freedom) / 2 < share:
        high *= 2
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - t_two_sided(middle, freedom) / 2 < share else (low, middle)
    return high


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), x in 0..1: its continued fraction (Abramowitz and Stegun
    26.5.8) by the method of Lentz (Applied Optics 15, 1976)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the other one converges faster
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
