"""Axes of charts with round ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meseta.report.charts.markup import Number


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Linear scale from values to pixels."""

    low: Number
    high: Number
    start: Number
    """Pixel coordinate of `low`."""
    end: Number
    """Pixel coordinate of `high`."""
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    def to_pixel(self, value: Number) -> float:
        """Return the pixel coordinate of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def make_axis(values: Sequence[Number], start: Number, end: Number, *, num_ticks: int = 4, widen: bool = True) -> Axis:
    """Create an axis over `values` with about `num_ticks` round ticks.

    Args:
        values: Finite values that the axis covers.
        start: Pixel coordinate of the low end.
        end: Pixel coordinate of the high end.
        num_ticks: Approximate number of ticks.
        widen: Whether to extend the axis to the next ticks.
    """
    low, high = min(values), max(values)
    # Equal values would give an axis of length zero, so pad it on both sides.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(high) * 0.1 or 1.0
        low, high = (low - pad, high + pad) if low < 0 else (max(low - pad, 0.0), high + pad)
    step = _round_step((high - low) / num_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if widen:
        low, high = first * step, last * step
    ticks = tuple(k * step for k in range(first, last + 1) if low - 1e-9 * step <= k * step <= high + 1e-9 * step)
    return Axis(low=low, high=high, start=start, end=end, ticks=ticks, labels=_tick_labels(ticks, step))


def _round_step(rough: float) -> float:
    """Return the smallest step of at least `rough` that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _tick_labels(ticks: Sequence[float], step: float) -> tuple[str, ...]:
    """Format ticks with equal decimals and a common unit prefix, such as "1.5M"."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    # Very small and very large values have no prefix.
    if largest < 1e-3 or largest >= 1e15:
        return tuple(f"{tick:.6g}" if tick else "0" for tick in ticks)
    factor, suffix = next(
        ((f, s) for f, s in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= f), (1.0, "")
    )
    decimals = max(0, -math.floor(math.log10(step / factor) + 1e-9))
    return tuple(f"{tick / factor:.{decimals}f}{suffix}" if tick else "0" for tick in ticks)
