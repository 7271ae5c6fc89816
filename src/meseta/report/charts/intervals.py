"""Intervals below each other, beside a line at 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meseta.report.charts.axis import make_axis
from meseta.report.charts.markup import label, number, picture, tag, text

WIDTH, ROW_HEIGHT, LEFT, RIGHT = 360, 20, 122, 18
FOOT = 26
NAME_LENGTH = 18
"""Characters of a row's name that have room."""


@dataclass(frozen=True, kw_only=True)
class IntervalRow:
    """One of them."""

    name: str
    low: float
    """Without bound where it is -inf, as `high` where it is inf."""
    middle: float
    high: float
    class_: str
    """Of style.css: 'better', 'worse' or 'open'."""
    hover: str


def interval_rows(title: str, rows: Sequence[IntervalRow]) -> str:
    """A row for each: its name, a bar from low to high, a dot in the middle; what has no bounds is a dot alone.

    Returns an empty string where there is nothing to draw.
    """
    rows = [row for row in rows if math.isfinite(row.middle)]
    if not rows:
        return ""
    ends = [value for row in rows for value in (row.low, row.middle, row.high) if math.isfinite(value)]
    axis = make_axis([0.0, *ends], LEFT, WIDTH - RIGHT, num_ticks=4)
    height = len(rows) * ROW_HEIGHT + FOOT
    bottom = height - FOOT + 4
    marks = []
    for tick, name in zip(axis.ticks, axis.labels, strict=True):
        x = number(axis.place(tick))
        marks.append(tag("path", d=f"M{x} 0V{number(float(bottom))}", class_="grid" if tick else "zero"))
        marks.append(label(axis.place(tick), bottom + 14, name, anchor="middle"))
    for place, row in enumerate(rows):
        y = place * ROW_HEIGHT + ROW_HEIGHT / 2
        shown = row.name if len(row.name) <= NAME_LENGTH else f"{row.name[: NAME_LENGTH - 1]}…"
        hover = tag("title", text(row.hover))
        inside = [label(LEFT - 10, y + 4, shown, "row-name", "end")]
        if math.isfinite(row.low) and math.isfinite(row.high):
            span = f"M{number(axis.place(row.low))} {number(y)}H{number(axis.place(row.high))}"
            inside.append(tag("path", d=span, class_="span"))
        inside.append(tag("circle", cx=axis.place(row.middle), cy=y, r=3.5))
        marks.append(tag("g", hover, *inside, class_=f"interval-row {row.class_}"))
    return picture(WIDTH, height, title, *marks, class_="chart intervals")
