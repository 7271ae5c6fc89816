"""Small histograms for table cells."""

from __future__ import annotations

from collections.abc import Sequence

from meseta.report.charts.markup import escape, svg, svg_text, tag
from meseta.spec import Reuse
from meseta.telemetry.formatting import format_percent, is_drawable

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
