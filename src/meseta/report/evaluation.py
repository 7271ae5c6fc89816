"""What the evaluations of a run found."""

from __future__ import annotations

from collections.abc import Sequence

from meseta.report.charts.chart import reliability_plot
from meseta.report.charts.markup import table, tag, text
from meseta.report.headline import final_evaluation
from meseta.report.record import RunRecord
from meseta.telemetry.figures import metrics_in
from meseta.telemetry.lines import EvalLine, Figures
from meseta.telemetry.shown import count, drawable, fixed, plural
from meseta.telemetry.splits import note_flattered

MAX_EVALS = 12


def evaluation_section(record: RunRecord) -> str:
    """Reliability beside the figures of the last evaluations; an empty string where there is none."""
    final = final_evaluation(record)
    if final is None:
        return ""
    lines = list(record.evals) or [final]
    metrics = metrics_in(lines)
    last = lines[-MAX_EVALS:]
    shown = [v for v in lines if v in last or record.is_best(v) or (v.step, v.split) == (final.step, final.split)]
    rows = [[count(v.step), _split(v, record), *(text(fixed(m.of(v), m.decimals)) for m in metrics)] for v in shown]
    teacher = record.summary.teacher if record.summary else None
    if teacher:
        rows.append(["", "teacher", *(text(fixed(getattr(teacher, m.key, None))) for m in metrics)])
    header = ["step", "split", *(text(m.name) for m in metrics)]
    parts = [table(header, rows, {0, *range(2, len(header))}, "compact")]
    if len(lines) > len(shown):
        more = ", the best and the final one" if len(shown) > MAX_EVALS else ""
        parts.append(tag("p", text(f"The last {MAX_EVALS} of {len(lines)} evaluations{more}."), class_="note"))
    chosen = record.summary.chosen if record.summary else None
    if chosen and (note := note_flattered(chosen.split, chosen.what)):
        parts.append(tag("p", text(f"{note[0].upper()}{note[1:]}."), class_="note"))
    parts.append(tag("p", text(_calibration_note(final)), class_="note"))
    plot = reliability_plot(final.reliability)
    drawn = (
        tag("div", tag("h3", "Reliability"), plot)
        if plot
        else tag("p", "No reliability curve was recorded.", class_="absent")
    )
    whole = tag("div", drawn, tag("div", tag("h3", "Figures"), *parts), class_="narrow-wide")
    return whole + _tasks(final) + "".join(_segments(final, feature) for feature in final.segments)


def _split(line: EvalLine, record: RunRecord) -> str:
    """Its split, marked where it is the best evaluation of several."""
    is_marked = record.is_best(line) and len(record.evals) > 1
    return text(line.split) + (tag("b", " best") if is_marked else "")


def _tasks(final: EvalLine) -> str:
    """The labels beside each other, where there are several."""
    if not final.tasks:
        return ""
    return tag("h3", "By label") + _figures_table("label", list(final.tasks.items()))


def _segments(final: EvalLine, feature: str) -> str:
    """The values of one feature; with several labels, each value once per label."""
    rows: list[tuple[str, Figures]] = []
    for segment in final.segments[feature]:
        name = "all others" if segment.value is None else count(segment.value)
        rows += [(f"{name}, {task}", figures) for task, figures in segment.tasks.items()] or [(name, segment)]
    return tag("h3", text(f"By {feature}")) + _figures_table("row", rows)


def _figures_table(name: str, lines: Sequence[tuple[str, Figures]]) -> str:
    metrics = metrics_in(figures for _, figures in lines)
    rows = [
        [text(label), count(figures.num_samples), count(figures.num_positives)]
        + [text(fixed(metric.of(figures), metric.decimals)) for metric in metrics]
        for label, figures in lines
    ]
    header = [name, "samples", "positives", *(text(metric.name) for metric in metrics)]
    return table(header, rows, set(range(1, len(header))), "compact")


def _calibration_note(final: EvalLine) -> str:
    note = "Calibration is mean prediction / mean label"
    if final.calibration is not None and drawable(final.calibration):
        off = final.calibration - 1.0
        note += f"; the model predicts {abs(off):.1%} {'more' if off >= 0 else 'fewer'} positives than there are"
    if final.num_samples:
        note += f", over {plural(final.num_samples, 'sample')}"
    dots = "The dots are bins of equal count with 95% intervals; on the diagonal, predictions are right on average."
    return f"{note}. {dots}" if final.reliability else f"{note}."
