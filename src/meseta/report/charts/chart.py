"""Axes of charts with round ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meseta.report.charts.markup import Number, coordinate, escape, svg, svg_text, tag
from meseta.spec import Reuse
from meseta.telemetry.formatting import format_decimal, format_percent, format_si, is_drawable
from meseta.telemetry.metrics_file import ReliabilityPoint


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


WIDTH, HEIGHT = 340, 210
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 44, 64, 12, 30
MAX_POINTS = 400
LABEL_HEIGHT = 13


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one curve. Missing values interrupt the line."""

    name: str
    points: Sequence[tuple[float, float | None]]
    class_: str
    draws_dots: bool = False
    max_points: int = MAX_POINTS
    """Maximum number of drawn points. Adjacent points of longer curves are averaged."""

    def finite_points(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if y is not None and is_drawable(y)]


def line_chart(
    title: str,
    series: Sequence[Series],
    x_max: float,
    *,
    reference: tuple[str, float] | None = None,
    best_x: float | None = None,
    include_zero: bool = False,
    x_name: str = "samples",
    has_legend: bool = False,
) -> str:
    """Draw curves over a common x axis that starts at 0.

    Args:
        title: Description for screen readers.
        series: Curves. Those without finite values are left out.
        x_max: Right end of the x axis.
        reference: Name and value of a horizontal line, such as the metric of the teacher.
        best_x: x value of the best evaluation, marked by a vertical line.
        include_zero: Whether the y axis includes 0.
        x_name: Unit of the x axis.
        has_legend: Whether the page has a legend. Otherwise curves are labeled at their right ends.

    Returns:
        SVG, or an empty string if no curve has finite values.
    """
    series = [one for one in series if one.finite_points()]
    if not series:
        return ""
    values = [y for one in series for _, y in one.finite_points()] + ([reference[1]] if reference else [])
    y_axis = make_axis(values + [0.0] * include_zero, HEIGHT - MARGIN_BOTTOM, MARGIN_TOP)
    right = WIDTH - MARGIN_RIGHT
    # An axis without samples still needs a length.
    x_axis = make_axis([0.0, x_max if x_max > 0 else 1.0], MARGIN_LEFT, right, widen=False)
    marks, ends = [draw_axes(x_axis, y_axis, x_name)], []
    if reference:
        y = y_axis.to_pixel(reference[1])
        marks.append(tag("path", d=f"M{MARGIN_LEFT} {coordinate(y)}H{right}", class_="reference"))
        ends.append((y, reference[0], "reference-label"))
    if best_x is not None:
        x = x_axis.to_pixel(best_x)
        marks.append(tag("path", d=f"M{coordinate(x)} {MARGIN_TOP}V{coordinate(y_axis.start)}", class_="best"))
        marks.append(svg_text(x, MARGIN_TOP - 2, "best", "axis-name", "middle"))
    for one in series:
        marks.append(_dots(one, x_axis, y_axis, x_name) if one.draws_dots else _line(one, x_axis, y_axis, x_name))
        if not has_legend:
            ends.append((y_axis.to_pixel(one.finite_points()[-1][1]), one.name, f"{one.class_}-label"))
    marks += [svg_text(right + 7, y + 4, name, class_) for y, name, class_ in _separate_labels(ends)]
    return svg(WIDTH, HEIGHT, title, *marks)


def draw_axes(x_axis: Axis, y_axis: Axis, x_name: str) -> str:
    """Draw grid lines with labels on the left and at the bottom, and the name of the x axis at its right end."""
    marks = []
    for tick, name in zip(y_axis.ticks, y_axis.labels, strict=True):
        y = coordinate(y_axis.to_pixel(tick))
        marks.append(tag("path", d=f"M{coordinate(x_axis.start)} {y}H{coordinate(x_axis.end)}", class_="grid"))
        marks.append(svg_text(x_axis.start - 6, y_axis.to_pixel(tick) + 4, name, anchor="end"))
    for tick, name in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = x_axis.to_pixel(tick)
        marks.append(tag("path", d=f"M{coordinate(x)} {coordinate(y_axis.start)}v4", class_="grid"))
        marks.append(svg_text(x, y_axis.start + 16, name, anchor="middle"))
    marks.append(svg_text(x_axis.end + 17, y_axis.start + 16, x_name, "axis-name"))
    return "".join(marks)


def stacked_bars(
    title: str, spans: Sequence[tuple[float, float]], layers: Sequence[tuple[str, str, list[float]]]
) -> str:
    """Draw stacked bars over the number of samples.

    Args:
        title: Description for screen readers.
        spans: Numbers of samples at the left and right edge of each bar.
        layers: (name, CSS class, milliseconds of each bar) of each layer, from bottom to top.
    """
    width, height, left = 620, 250, 48
    totals = [sum(values[i] for _, _, values in layers) for i in range(len(spans))]
    y_axis = make_axis([0.0, *totals], height - MARGIN_BOTTOM, MARGIN_TOP, num_ticks=5)
    x_axis = make_axis([0.0, max(spans[-1][1], 1.0)], left, width - 56, num_ticks=6, widen=False)
    marks = [draw_axes(x_axis, y_axis, "samples")]
    base = [0.0] * len(spans)
    for name, class_, values in layers:
        for i, (start, end) in enumerate(spans):
            x, top, bottom = x_axis.to_pixel(start), y_axis.to_pixel(base[i] + values[i]), y_axis.to_pixel(base[i])
            bar_width = max(x_axis.to_pixel(end) - x - 1.0, 0.5)
            hover = tag("title", escape(f"{name}: {values[i]:.3g} ms at {format_si(end)} samples"))
            size = {"width": bar_width, "height": max(bottom - top, 0.0)}
            marks.append(tag("rect", hover, x=x, y=top, class_=f"stage {class_}", **size))
            base[i] += values[i]
    return svg(width, height, title, *marks)


def horizontal_bars(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, str, float]]]], unit: str) -> str:
    """Draw one bar per row, divided into segments.

    Args:
        title: Description for screen readers.
        rows: Name of each row with its segments (name, CSS class, length), from left to right.
        unit: Unit of the lengths.
    """
    width, height, row_height, left = 720, len(rows) * 26 + 34, 26, 150
    x_axis = make_axis([0.0, *(sum(v for _, _, v in pieces) for _, pieces in rows)], left, width - 30, num_ticks=6)
    marks = []
    for tick, name in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = x_axis.to_pixel(tick)
        marks.append(tag("path", d=f"M{coordinate(x)} 0V{height - 28}", class_="grid"))
        marks.append(svg_text(x, height - 12, name if tick else f"0 {unit}", anchor="middle"))
    for i, (row, pieces) in enumerate(rows):
        base, y = 0.0, float(i * row_height + 4)
        shown = row if len(row) <= 24 else row[:23] + "…"
        marks.append(svg_text(left - 8, y + 13, shown, "row-name", "end"))
        for name, class_, value in pieces:
            x, end = x_axis.to_pixel(base), x_axis.to_pixel(base + value)
            hover = tag("title", escape(f"{row}, {name}: {value:.3g} {unit}"))
            size = {"width": max(end - x - 0.5, 0.0), "height": row_height - 8.0}
            marks.append(tag("rect", hover, x=x, y=y, class_=f"stage {class_}", **size))
            base += value
    return svg(width, height, title, *marks, class_="chart rows")


def interval_bars(title: str, rows: Sequence[tuple[str, str, tuple[float, float, float]]]) -> str:
    """Draw one horizontal bar per row with an interval.

    Args:
        title: Description for screen readers.
        rows: Name, CSS class and (value, lower bound, upper bound) of each bar. Values may be negative.
    """
    width, height, row_height, left = 720, len(rows) * 22 + 34, 22, 150
    x_axis = make_axis([0.0, *(value for *_, values in rows for value in values)], left, width - 30, num_ticks=6)
    zero, marks = x_axis.to_pixel(0.0), []
    for tick, label in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = x_axis.to_pixel(tick)
        marks.append(tag("path", d=f"M{coordinate(x)} 0V{height - 28}", class_="grid"))
        marks.append(svg_text(x, height - 12, label, anchor="middle"))
    for i, (name, class_, (value, low, high)) in enumerate(rows):
        y, x = float(i * row_height + 4), x_axis.to_pixel(value)
        shown = name if len(name) <= 24 else name[:23] + "…"
        marks.append(svg_text(left - 8, y + 11, shown, "row-name", "end"))
        hover = tag("title", escape(f"{name}: {value:.3g} ({low:.3g} to {high:.3g})"))
        size = {"width": abs(x - zero), "height": row_height - 8.0}
        marks.append(tag("rect", hover, x=min(x, zero), y=y, class_=f"stage {class_}", **size))
        ends = f"M{coordinate(x_axis.to_pixel(low))} {coordinate(y + 7)}H{coordinate(x_axis.to_pixel(high))}"
        marks.append(tag("path", d=ends, class_="whisker"))
    return svg(width, height, title, *marks, class_="chart rows")


def reliability_plot(points: Sequence[ReliabilityPoint]) -> str:
    """Plot observed rates over mean predictions with 95% intervals (Wilson 1927) and diagonal. Empty without bins."""
    size = 330
    points = [p for p in points if p.num_samples and is_drawable(p.mean_prediction) and is_drawable(p.mean_label)]
    if not points:
        return ""
    bounds = [_wilson_interval(p.mean_label, p.num_samples) for p in points]
    values = [0.0, *(p.mean_prediction for p in points), *(p.mean_label for p in points)]
    y_axis = make_axis(values, size - 40, MARGIN_TOP, num_ticks=5)
    x_axis = make_axis([y_axis.low, y_axis.high], MARGIN_LEFT, size - 18, num_ticks=5)
    diagonal = (
        f"M{coordinate(x_axis.start)} {coordinate(y_axis.start)}L{coordinate(x_axis.end)} {coordinate(y_axis.end)}"
    )
    marks = [draw_axes(x_axis, y_axis, ""), tag("path", d=diagonal, class_="diagonal")]
    for point, (low, high) in zip(points, bounds, strict=True):
        # Wide intervals are clipped at the top of the chart.
        x, ends = x_axis.to_pixel(point.mean_prediction), [y_axis.to_pixel(min(v, y_axis.high)) for v in (low, high)]
        marks.append(tag("path", d=f"M{coordinate(x)} {coordinate(ends[0])}V{coordinate(ends[1])}", class_="interval"))
    # Dots are drawn after all intervals, so that they are on top.
    for point in points:
        hover = (
            f"predicted {point.mean_prediction:.4g}, observed {point.mean_label:.4g}, "
            f"{format_si(point.num_samples)} rows"
        )
        place = {"cx": x_axis.to_pixel(point.mean_prediction), "cy": y_axis.to_pixel(point.mean_label)}
        marks.append(tag("circle", tag("title", escape(hover)), r=3.5, class_="test-dot", **place))
    marks.append(svg_text((x_axis.start + x_axis.end) / 2, size - 4, "mean prediction", "axis-name", "middle"))
    marks.append(svg_text(x_axis.start + 6, MARGIN_TOP + 10, "observed rate", "axis-name"))
    return svg(size, size, "Reliability curve", *marks)


def _wilson_interval(rate: float, num_samples: int) -> tuple[float, float]:
    """Return the bounds of the 95% score interval of a rate (E. B. Wilson 1927)."""
    z = 1.959964  # 97.5th percentile of the standard normal distribution.
    rate = min(max(rate, 0.0), 1.0)
    centre = rate + z * z / (2 * num_samples)
    spread = z * math.sqrt(rate * (1 - rate) / num_samples + z * z / (4 * num_samples**2))
    scale = 1 + z * z / num_samples
    return max((centre - spread) / scale, 0.0), min((centre + spread) / scale, 1.0)


def _line(one: Series, x_axis: Axis, y_axis: Axis, x_name: str) -> str:
    points = _downsample(one.points, one.max_points)
    # A line with a single point would be invisible.
    if len(points) == 1:
        return _dots(one, x_axis, y_axis, x_name)
    path, pen_is_down = [], False
    for x, y in points:
        if y is None or not is_drawable(y):
            pen_is_down = False
            continue
        path.append(f"{'L' if pen_is_down else 'M'}{coordinate(x_axis.to_pixel(x))} {coordinate(y_axis.to_pixel(y))}")
        pen_is_down = True
    hover = [tag("title", escape(one.name))] if one.name else []
    return tag("path", *hover, d="".join(path), class_=f"{one.class_}-line")


def _dots(one: Series, x_axis: Axis, y_axis: Axis, x_name: str) -> str:
    marks = []
    for x, y in one.finite_points():
        hover = tag("title", escape(f"{one.name} {format_decimal(y)} at {format_si(x)} {x_name}"))
        marks.append(
            tag("circle", hover, cx=x_axis.to_pixel(x), cy=y_axis.to_pixel(y), r=3.5, class_=f"{one.class_}-dot")
        )
    links = [f"{coordinate(x_axis.to_pixel(x))} {coordinate(y_axis.to_pixel(y))}" for x, y in one.finite_points()]
    return tag("path", d="M" + "L".join(links), class_=f"{one.class_}-link") + "".join(marks)


def _downsample(points: Sequence[tuple[float, float | None]], max_points: int) -> list[tuple[float, float | None]]:
    """Average groups of adjacent points, so that at most `max_points` remain."""
    # A page remains small for long runs.
    group = -(-len(points) // max_points)
    if group <= 1:
        return list(points)
    thinned: list[tuple[float, float | None]] = []
    for start in range(0, len(points), group):
        part = points[start : start + group]
        ys = [y for _, y in part if y is not None and is_drawable(y)]
        thinned.append((sum(x for x, _ in part) / len(part), sum(ys) / len(ys) if ys else None))
    return thinned


def _separate_labels(ends: list[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """Move overlapping labels apart. Their order is kept, and they remain inside the chart."""
    placed = sorted(ends)
    for _ in placed:
        for i in range(len(placed) - 1):
            overlap = placed[i][0] + LABEL_HEIGHT - placed[i + 1][0]
            if overlap > 0:
                placed[i] = (placed[i][0] - overlap / 2, *placed[i][1:])
                placed[i + 1] = (placed[i + 1][0] + overlap / 2, *placed[i + 1][1:])
    return [(min(max(y, float(MARGIN_TOP)), float(HEIGHT - MARGIN_BOTTOM)), name, class_) for y, name, class_ in placed]


BAR_WIDTH, BAR_HEIGHT = 7, 26
NOTE_WIDTH = 54


def histogram(title: str, values: Sequence[float], hovers: Sequence[str], class_: str, notes: tuple[str, str]) -> str:
    """Draw one bar per value. The tallest bar has the full height.

    Args:
        title: Description for screen readers.
        values: Values of the bars. Negative, huge and non-finite values become 0.
        hovers: Tooltips of the bars.
        class_: CSS class of the bars.
        notes: Two short lines to the right of the bars, '' for none.

    Returns:
        SVG, or an empty string if no value is positive.
    """
    heights = [value if is_drawable(value) and value > 0 else 0.0 for value in values]
    tallest = max(heights, default=0.0)
    if not tallest:
        return ""
    marks = []
    for i, (value, hover) in enumerate(zip(heights, hovers, strict=True)):
        # The smallest positive value remains visible.
        height = max(value / tallest * BAR_HEIGHT, 0.75 if value else 0.0)
        x = float(i * BAR_WIDTH)
        # A transparent column over the full height shows the tooltip above short bars, too.
        column = {"x": x, "y": 0.0, "width": float(BAR_WIDTH), "height": float(BAR_HEIGHT), "class_": "bar-back"}
        bar = {"x": x, "y": BAR_HEIGHT - height, "width": BAR_WIDTH - 1.5, "height": height, "class_": class_}
        marks.append(tag("g", tag("title", escape(hover)), tag("rect", **column), tag("rect", **bar)))
    width = len(heights) * BAR_WIDTH
    marks.append(tag("path", d=f"M0 {BAR_HEIGHT}H{width}", class_="grid"))
    marks.append(svg_text(width + 4, 11, notes[0], "tick"))
    marks.append(svg_text(width + 4, 24, notes[1], "axis-name"))
    return svg(width + NOTE_WIDTH * any(notes), BAR_HEIGHT + 1, title, *marks, class_="chart bars")


def reuse_histogram(reuse: Reuse, shares: Sequence[float], noun: str, class_: str) -> str:
    """Draw the shares of rows or lookups by the number of uses of a row within a window.

    The share and the uses of the tallest bar are shown next to the bars.

    Args:
        reuse: Reuse statistics with the edges of the bins.
        shares: Share of each bin.
        noun: Name of the counted items, "rows" or "lookups".
        class_: CSS class of the bars.

    Returns:
        SVG, or an empty string if no share is positive.
    """
    heights = [value if is_drawable(value) else 0.0 for value in shares]
    if not any(value > 0 for value in heights):
        return ""
    hovers = [
        f"{format_percent(value)} of {noun}: used {_bin_label(reuse.edges, i)}" for i, value in enumerate(heights)
    ]
    peak = heights.index(max(heights))
    notes = format_percent(heights[peak]), _bin_label(reuse.edges, peak, is_short=True)
    return histogram(f"Reuse histogram, share of {noun}", heights, hovers, class_, notes)


def _bin_label(edges: Sequence[int], index: int, *, is_short: bool = False) -> str:
    """Format the bin (edges[i], edges[i + 1]] as a number of uses. The last bin has no upper edge."""
    if index >= len(edges):
        return ""
    low = edges[index] + 1
    if index + 1 == len(edges):
        return f">{edges[index]:,}×" if is_short else f"more than {edges[index]:,} times"
    high = edges[index + 1]
    if low == high:
        return f"{high:,}×" if is_short else ("once" if high == 1 else f"{high} times")
    return f"≤{high:,}×" if is_short else f"{low:,} to {high:,} times"
