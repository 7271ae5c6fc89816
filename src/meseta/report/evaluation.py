"""Section of a run's page about its evaluations."""

from __future__ import annotations

from collections.abc import Sequence

from meseta.report.charts.chart import reliability_plot
from meseta.report.charts.markup import escape, table, tag
from meseta.report.headline import final_evaluation
from meseta.report.record import RunRecord
from meseta.telemetry.formatting import format_count, format_decimal, format_quantity, is_drawable
from meseta.telemetry.metrics import metrics_in
from meseta.telemetry.metrics_file import EvalLine, EvalMetrics
from meseta.telemetry.splits import selection_on_test_warning

MAX_EVALS = 12


def evaluation_section(record: RunRecord) -> str:
    """Return the reliability plot and tables of metrics, or an empty string if the run has no evaluation."""
    final = final_evaluation(record)
    if final is None:
        return ""
    lines = list(record.eval_lines) or [final]
    metrics = metrics_in(lines)
    last = lines[-MAX_EVALS:]
    # Earlier evaluations are shown only if they are the best or the final one.
    shown = [v for v in lines if v in last or record.is_best(v) or (v.step, v.split) == (final.step, final.split)]
    rows = [
        [
            format_count(v.step),
            _split_cell(v, record),
            *(escape(format_decimal(m.value_in(v), m.decimals)) for m in metrics),
        ]
        for v in shown
    ]
    teacher = record.summary.teacher if record.summary else None
    if teacher:
        rows.append(["", "teacher", *(escape(format_decimal(getattr(teacher, m.key, None))) for m in metrics)])
    header = ["step", "split", *(escape(m.name) for m in metrics)]
    parts = [table(header, rows, {0, *range(2, len(header))}, "compact")]
    if len(lines) > len(shown):
        more = ", and the best and the final one" if len(shown) > MAX_EVALS else ""
        parts.append(tag("p", escape(f"The last {MAX_EVALS} of {len(lines)} evaluations{more}."), class_="note"))
    selected = record.summary.selected if record.summary else None
    if selected and (note := selection_on_test_warning(selected.split, selected.what)):
        parts.append(tag("p", escape(f"{note[0].upper()}{note[1:]}."), class_="note"))
    parts.append(tag("p", escape(_calibration_note(final)), class_="note"))
    plot = reliability_plot(final.reliability)
    drawn = (
        tag("div", tag("h3", "Reliability"), plot)
        if plot
        else tag("p", "No reliability curve was recorded.", class_="absent")
    )
    whole = tag("div", drawn, tag("div", tag("h3", "Metrics"), *parts), class_="narrow-wide")
    return whole + _tasks_table(final) + "".join(_segments_table(final, feature) for feature in final.segments)


def _split_cell(line: EvalLine, record: RunRecord) -> str:
    # A single evaluation needs no mark.
    is_marked = record.is_best(line) and len(record.eval_lines) > 1
    return escape(line.split) + (tag("b", " best") if is_marked else "")


def _tasks_table(final: EvalLine) -> str:
    # Only a run with several labels has metrics by label.
    if not final.tasks:
        return ""
    return tag("h3", "By label") + _metrics_table("label", list(final.tasks.items()))


def _segments_table(final: EvalLine, feature: str) -> str:
    rows: list[tuple[str, EvalMetrics]] = []
    for segment in final.segments[feature]:
        name = "all others" if segment.value is None else format_count(segment.value)
        # With several labels, a segment has one row per label.
        rows += [(f"{name}, {task}", metrics) for task, metrics in segment.tasks.items()] or [(name, segment)]
    return tag("h3", escape(f"By {feature}")) + _metrics_table("row", rows)


def _metrics_table(name: str, lines: Sequence[tuple[str, EvalMetrics]]) -> str:
    metrics = metrics_in(line for _, line in lines)
    rows = [
        [escape(label), format_count(line.num_samples), format_count(line.num_positives)]
        + [escape(format_decimal(metric.value_in(line), metric.decimals)) for metric in metrics]
        for label, line in lines
    ]
    header = [name, "samples", "positives", *(escape(metric.name) for metric in metrics)]
    return table(header, rows, set(range(1, len(header))), "compact")


def _calibration_note(final: EvalLine) -> str:
    note = "Calibration is the mean prediction divided by the mean label"
    if final.calibration is not None and is_drawable(final.calibration):
        off = final.calibration - 1.0
        note += f"; the model predicts {abs(off):.1%} {'more' if off >= 0 else 'fewer'} positives than the data have"
    if final.num_samples:
        note += f", over {format_quantity(final.num_samples, 'sample')}"
    dots = (
        "Each dot is a bin of predictions with its 95% interval; all bins have the same number of samples. On the "
        "diagonal, the mean prediction is the observed rate."
    )
    return f"{note}. {dots}" if final.reliability else f"{note}."
