"""Main metrics and measurements of a run, from its summary, or from its metrics if it has not ended."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from meseta.report.charts.chart import reliability_plot
from meseta.report.charts.markup import escape, table, tag
from meseta.report.record import RunRecord
from meseta.report.trials import trials_table
from meseta.telemetry.formatting import format_count, format_decimal, format_quantity, is_drawable
from meseta.telemetry.metrics import EVALUATED_SPLITS, metrics_in, selection_on_test_warning
from meseta.telemetry.metrics_file import EvalLine, EvalMetrics


@dataclass(frozen=True, kw_only=True)
class Headline:
    """Main metrics and measurements of a run. Unknown values are `None`."""

    is_done: bool
    """Whether the run was completed, and therefore has a summary."""
    evaluation: EvalLine | None
    """Final evaluation, or the newest one of an unfinished run."""
    samples_per_s: float | None
    """Mean speed over the training time. For an unfinished run, median of the logged speeds."""
    num_steps: int | None
    num_samples: int | None
    train_s: float | None
    """Seconds of training, without evaluations and checkpoints."""
    num_ranks: int | None
    peak_memory_bytes: int | None
    """Largest peak memory of a rank. `None` before the end of the run."""


def headline(record: RunRecord, splits: Sequence[str] = EVALUATED_SPLITS) -> Headline:
    """Return the headline of a run. Its evaluation is that of the first split in `splits` that was evaluated."""
    summary, last = record.summary, record.train_lines[-1] if record.train_lines else None
    rates = [r for line in record.train_lines if (r := line.samples_per_s) is not None and is_drawable(r)]
    num_ranks = summary.num_ranks if summary else None
    if num_ranks is None and record.plan is not None:
        num_ranks = record.plan.num_ranks
    return Headline(
        is_done=summary is not None,
        evaluation=final_evaluation(record, splits),
        samples_per_s=summary.samples_per_s if summary else statistics.median(rates) if rates else None,
        num_steps=summary.num_steps if summary else last.step if last else None,
        num_samples=summary.num_samples if summary else last.num_samples if last else None,
        train_s=summary.train_s if summary else last.time_s if last else None,
        num_ranks=num_ranks,
        peak_memory_bytes=max(summary.peak_memory_bytes_by_rank, default=None) if summary else None,
    )


def final_evaluation(record: RunRecord, splits: Sequence[str] = EVALUATED_SPLITS) -> EvalLine | None:
    """Return the final evaluation of the first split in `splits` that was evaluated, or `None`.

    If the summary has no evaluation, the newest one in the metrics is used. The default `splits` fall back to the last
    evaluation of any split.
    """
    ended = {split: record.summary.evaluation(split) for split in EVALUATED_SPLITS} if record.summary else {}
    lines = ended if any(ended.values()) else {line.split: line for line in record.eval_lines}
    final = next((lines[split] for split in splits if lines.get(split)), None)
    return record.eval_lines[-1] if final is None and record.eval_lines and tuple(splits) == EVALUATED_SPLITS else final


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
    segments = "".join(_segments_table(final, feature) for feature in final.segments)
    trials = tag("h3", "Trials before the run") + trials_table(record.trials) if record.trials else ""
    return whole + _tasks_table(final) + segments + trials


def _split_cell(line: EvalLine, record: RunRecord) -> str:
    # A single evaluation needs no mark.
    is_marked = record.is_best(line) and len(record.eval_lines) > 1
    return escape(line.split) + (tag("b", " best") if is_marked else "")


def _tasks_table(final: EvalLine) -> str:
    # Only a run with several labels has metrics by label.
    if not final.tasks:
        return ""
    return tag("h3", "By label") + metrics_table("label", list(final.tasks.items()))


def _segments_table(final: EvalLine, feature: str) -> str:
    rows: list[tuple[str, EvalMetrics]] = []
    for segment in final.segments[feature]:
        name = "all others" if segment.value is None else format_count(segment.value)
        # With several labels, a segment has one row per label.
        rows += [(f"{name}, {task}", metrics) for task, metrics in segment.tasks.items()] or [(name, segment)]
    return tag("h3", escape(f"By {feature}")) + metrics_table("row", rows)


def metrics_table(name: str, lines: Sequence[tuple[str, EvalMetrics]]) -> str:
    """Return a table of metrics with one row per (label, metrics). `name` is the header of the labels."""
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
