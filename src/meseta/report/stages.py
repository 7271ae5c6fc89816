"""Section of a run's page about the time of a step, and the order and colors of its stages."""

from __future__ import annotations

from collections.abc import Sequence

from meseta.report.charts.chart import stacked_bars
from meseta.report.charts.markup import escape, table, tag
from meseta.report.charts.timeline_chart import timeline_section
from meseta.report.exchanges import row_traffic_table, transfers_table
from meseta.report.record import RunRecord
from meseta.report.row_waits import row_waits_table
from meseta.spec.stages import STAGE_NAMES
from meseta.telemetry.formatting import format_count, format_percent, is_drawable
from meseta.telemetry.metrics_file import TrainLine

NUM_SPARE_COLORS = 3
MAX_BARS = 48


def stages_section(record: RunRecord) -> str:
    """Return charts and tables of stages, transfers and waits, or an empty string if no stage was timed."""
    lines = [line for line in record.train_lines if line.stages_s]
    if not lines:
        return ""
    names = order_stages({name for line in lines for name in line.stages_s})
    groups = _group_lines(lines)
    # Each bar starts at the last sample of the previous bar.
    starts = [0, *(group[-1].num_samples for group in groups[:-1])]
    spans = [(float(start), float(group[-1].num_samples)) for start, group in zip(starts, groups, strict=True)]
    layers = [(name, stage_css_class(names, name), [_mean_ms(group, name) for group in groups]) for name in names]
    means = {name: _mean_ms(lines, name) for name in names}
    total = sum(means.values())
    rows = [
        [
            tag("span", class_=f"swatch {stage_css_class(names, name)}") + escape(name),
            escape(f"{means[name]:.2f}"),
            escape(format_percent(means[name] / total) if total else format_percent(None)),
        ]
        for name in reversed(names)  # The last stage is at the top of the bars.
    ]
    rows.append([tag("b", "all stages"), tag("b", escape(f"{total:.2f}")), ""])
    chart = stacked_bars("Milliseconds per step by stage", spans, layers)
    caption = tag("h3", "Milliseconds per step, rank 0")
    pictures = tag(
        "div",
        tag("div", caption, chart),
        tag("div", table(["stage", "mean ms", "share"], rows, {1, 2}, "compact")),
        class_="wide-narrow",
    )
    waited = row_waits_table(record, groups, spans)
    over_time = transfers_table(record) + row_traffic_table(record) + timeline_section(record.timeline)
    return tag("p", escape(_intro(record, total))) + pictures + waited + over_time


def mean_stages_s(record: RunRecord) -> dict[str, float]:
    """Return the mean seconds per step of each stage on rank 0. Empty if no stage was timed."""
    lines = [line for line in record.train_lines if line.stages_s]
    names = order_stages({name for line in lines for name in line.stages_s})
    return {name: _mean_ms(lines, name) / 1000.0 for name in names}


def _intro(record: RunRecord, total_ms: float) -> str:
    intro = f"The timed stages of a step take {total_ms:.3g} ms on rank 0."
    summary = record.summary
    if summary and summary.num_steps and summary.train_s is not None and is_drawable(summary.train_s):
        whole_ms = 1000.0 * summary.train_s / summary.num_steps
        intro += (
            f" The mean over the whole run is {whole_ms:.3g} ms ({format_count(summary.num_steps)} steps, without "
            "evaluations and checkpoints)."
        )
    return intro


def order_stages(names: set[str]) -> list[str]:
    """Sort stages by their order within a step. Unknown stages follow in alphabetical order."""
    return [name for name in STAGE_NAMES if name in names] + sorted(names - set(STAGE_NAMES))


def stage_css_class(names: Sequence[str], name: str) -> str:
    """Return the CSS class that sets the color of the stage `name`. `names` are all stages of the chart."""
    if name in STAGE_NAMES:
        return f"stage-{name}"
    # Unknown stages of one chart share a few spare colors in turn.
    unknown = [other for other in names if other not in STAGE_NAMES]
    return f"stage-spare-{unknown.index(name) % NUM_SPARE_COLORS}"


def _group_lines(lines: Sequence[TrainLine]) -> list[Sequence[TrainLine]]:
    # Long runs have more lines than bars fit into the chart.
    size = -(-len(lines) // MAX_BARS)
    return [lines[start : start + size] for start in range(0, len(lines), size)]


def _mean_ms(lines: Sequence[TrainLine], name: str) -> float:
    # A stage took no time in a line that does not contain it.
    values = [line.stages_s.get(name, 0.0) for line in lines]
    return 1000.0 * sum(max(v, 0.0) for v in values if is_drawable(v)) / len(lines)
