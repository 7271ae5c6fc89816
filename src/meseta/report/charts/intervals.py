"""Chart of confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meseta.report.charts.chart import make_axis
from meseta.report.charts.markup import coordinate, escape, svg, svg_text, tag

WIDTH, ROW_HEIGHT, MARGIN_LEFT, MARGIN_RIGHT = 360, 20, 122, 18
AXIS_HEIGHT = 26
MAX_NAME_LENGTH = 18
"""Maximum number of characters of a row's name. Longer names are truncated."""


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
    axis = make_axis([0.0, *ends], MARGIN_LEFT, WIDTH - MARGIN_RIGHT, num_ticks=4)
    height = len(rows) * ROW_HEIGHT + AXIS_HEIGHT
    bottom = height - AXIS_HEIGHT + 4
    marks = []
    for tick, name in zip(axis.ticks, axis.labels, strict=True):
        x = coordinate(axis.to_pixel(tick))
        marks.append(tag("path", d=f"M{x} 0V{coordinate(float(bottom))}", class_="grid" if tick else "zero"))
        marks.append(svg_text(axis.to_pixel(tick), bottom + 14, name, anchor="middle"))
    for place, row in enumerate(rows):
        y = place * ROW_HEIGHT + ROW_HEIGHT / 2
        shown = row.name if len(row.name) <= MAX_NAME_LENGTH else f"{row.name[: MAX_NAME_LENGTH - 1]}…"
        hover = tag("title", escape(row.tooltip))
        inside = [svg_text(MARGIN_LEFT - 10, y + 4, shown, "row-name", "end")]
        if math.isfinite(row.low) and math.isfinite(row.high):
            span = f"M{coordinate(axis.to_pixel(row.low))} {coordinate(y)}H{coordinate(axis.to_pixel(row.high))}"
            inside.append(tag("path", d=span, class_="span"))
        inside.append(tag("circle", cx=axis.to_pixel(row.estimate), cy=y, r=3.5))
        marks.append(tag("g", hover, *inside, class_=f"interval-row {row.class_}"))
    return svg(WIDTH, height, title, *marks, class_="chart intervals")
