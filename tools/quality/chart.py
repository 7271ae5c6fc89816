"""Chart of confidence intervals as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, ROW_HEIGHT, MARGIN_LEFT, MARGIN_RIGHT = 360, 20, 122, 18
AXIS_HEIGHT = 26
MAX_NAME_LENGTH = 18
"""Maximum number of characters of a row's name. Longer names are truncated."""
NUM_TICKS = 4
"""Approximate number of ticks of the axis."""


@dataclass(frozen=True, kw_only=True)
class IntervalRow:
    """Row of an interval chart."""

    name: str
    low: float
    """Lower bound of the interval. -inf if it is unbounded."""
    estimate: float
    high: float
    """Upper bound of the interval. inf if it is unbounded."""
    class_: str
    """CSS class of the row: 'better', 'worse' or 'open'."""
    tooltip: str


def interval_chart(title: str, rows: Sequence[IntervalRow]) -> str:
    """Draw each interval as a bar with a dot at its estimate, and a line at 0. Unbounded intervals are only a dot.

    Returns an empty string if no estimate is finite.
    """
    rows = [row for row in rows if math.isfinite(row.estimate)]
    if not rows:
        return ""
    ends = [value for row in rows for value in (row.low, row.estimate, row.high) if math.isfinite(value)]
    ticks = _round_ticks(min(0.0, *ends), max(0.0, *ends))
    height = len(rows) * ROW_HEIGHT + AXIS_HEIGHT

    def to_pixel(value: float) -> float:
        share = (value - ticks[0]) / (ticks[-1] - ticks[0])
        return round(MARGIN_LEFT + share * (WIDTH - MARGIN_RIGHT - MARGIN_LEFT), 2)

    bottom = height - AXIS_HEIGHT + 4
    marks = []
    for tick in ticks:
        marks.append(f'<path d="M{to_pixel(tick)} 0V{bottom}" class="{"grid" if tick else "zero"}"/>')
        marks.append(f'<text x="{to_pixel(tick)}" y="{bottom + 14}" text-anchor="middle">{tick:.6g}</text>')
    for place, row in enumerate(rows):
        y = place * ROW_HEIGHT + ROW_HEIGHT // 2
        name = row.name if len(row.name) <= MAX_NAME_LENGTH else f"{row.name[: MAX_NAME_LENGTH - 1]}…"
        marks.append(f'<g class="interval-row {row.class_}"><title>{escape(row.tooltip)}</title>')
        marks.append(f'<text x="{MARGIN_LEFT - 10}" y="{y + 4}" text-anchor="end" class="name">{escape(name)}</text>')
        if math.isfinite(row.low) and math.isfinite(row.high):
            marks.append(f'<path d="M{to_pixel(row.low)} {y}H{to_pixel(row.high)}" class="span"/>')
        marks.append(f'<circle cx="{to_pixel(row.estimate)}" cy="{y}" r="3.5"/></g>')
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(marks)}</svg>'


def _round_ticks(low: float, high: float) -> list[float]:
    """Return ticks from at most `low` to at least `high`, at multiples of 1, 2 or 5 times a power of ten."""
    if low == high:
        low, high = low - 1, high + 1
    rough = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]
