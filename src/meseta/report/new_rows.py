"""Section of a run's page about a run that continues from another run on new rows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from meseta.report.charts.chart import Series, line_chart
from meseta.report.charts.markup import escape, table, tag
from meseta.report.evaluation import metrics_table
from meseta.report.record import RunRecord
from meseta.telemetry.continued import ContinuedSummary, DriftRecord, EpochMetricsRecord, GroupMetrics, HistoryLine
from meseta.telemetry.formatting import (
    NO_VALUE,
    format_count,
    format_decimal,
    format_duration,
    format_percent,
    is_drawable,
)

MAX_COLUMNS = 40
"""Maximum number of columns in a table of drift. Columns with smaller changes are counted only."""
MAX_RUNS = 12
"""Maximum number of runs in the table of the history."""
MAX_DOTS = 60
"""Maximum number of points of a curve that are drawn as dots."""
TEST_FIRST, PROGRESSIVE = "test first", "progressive"
_CLASSES = {TEST_FIRST: "other", PROGRESSIVE: "test"}
_CHARTS = (("Normalized entropy", "ne"), ("AUC", "auc"), ("Calibration", "calibration"))
_HOUR_FORMAT = "%Y-%m-%dT%H"


def new_rows_section(record: RunRecord) -> str:
    """Return metrics on the new rows, their drift and the history, or an empty string for a run without any."""
    continued = record.summary.continued if record.summary else None
    parts = [] if continued is None else [_metrics(continued), _by_hour(continued), _drift(continued.drift)]
    return "".join([*parts, _history(record.history)])


def measured_epochs(continued: ContinuedSummary) -> dict[str, EpochMetricsRecord]:
    """Return the metrics on the new rows by the name of the kind of measurement."""
    records = {TEST_FIRST: continued.test_first, PROGRESSIVE: continued.progressive}
    return {name: one for name, one in records.items() if one is not None}


def _metrics(continued: ContinuedSummary) -> str:
    rows: list[tuple[str, GroupMetrics]] = []
    bounds = []
    for name, epoch in measured_epochs(continued).items():
        groups = {"": epoch.total, ", with new ids": epoch.with_new_ids, ", without new ids": epoch.without_new_ids}
        rows += [(f"{name}{group}", metrics) for group, metrics in groups.items() if metrics is not None]
        if epoch.total.auc_error_bound is not None:
            bounds.append(f"The AUC of {name} is binned, with an error of at most {epoch.total.auc_error_bound:.2g}.")
    checkpoint = f", checkpoint {continued.checkpoint}" if continued.checkpoint else ""
    note = (
        f"The run continues from {continued.parent}{checkpoint}. \u201cTest first\u201d is the parent on all new rows. "
        "\u201cProgressive\u201d are the predictions that were made before the update of each step. A sample has a new "
        "id if the parent has no row for one of its values."
    )
    shown = metrics_table("measurement", rows) if rows else ""
    return tag("p", escape(note)) + shown + "".join(tag("p", escape(bound), class_="note") for bound in bounds)


def _by_hour(continued: ContinuedSummary) -> str:
    epochs = {name: epoch for name, epoch in measured_epochs(continued).items() if epoch.by_hour}
    positions, note = _hour_positions(list(dict.fromkeys(hour for epoch in epochs.values() for hour in epoch.by_hour)))
    if len(positions) < 2:
        return ""
    charts = []
    for title, key in _CHARTS:
        series = [
            _series(name, [(positions[h], getattr(m, key)) for h, m in epoch.by_hour.items() if h in positions])
            for name, epoch in epochs.items()
        ]
        chart = line_chart(f"{title} by hour", series, max(positions.values()), x_name="hours")
        charts.append(tag("div", tag("h3", escape(f"{title} by hour")), chart) if chart else "")
    return tag("div", *charts, class_="grid") + tag("p", escape(note), class_="note")


def _hour_positions(hours: Sequence[str]) -> tuple[dict[str, float], str]:
    """Return the x value of each hour, and a note on the x axis. Rows without a time have no hour."""
    times = {hour: time for hour in hours if (time := _parse_hour(hour)) is not None}
    if not times:
        return {f"{hour:02}": float(hour) for hour in range(24) if f"{hour:02}" in hours}, "Hours of the day in UTC."
    first = min(times.values())
    since = {hour: (time - first) / timedelta(hours=1) for hour, time in times.items()}
    return since, f"Hours since {first:%Y-%m-%d %H:%M} UTC."


def _parse_hour(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, _HOUR_FORMAT)
    except ValueError:
        return None


def _series(name: str, points: Sequence[tuple[float, float | None]]) -> Series:
    return Series(name=name, points=points, class_=_CLASSES[name], draws_dots=len(points) <= MAX_DOTS)


def _drift(drift: DriftRecord | None) -> str:
    if drift is None:
        return ""
    parts = [tag("h3", "Drift")]
    if drift.large:
        parts.append(tag("ul", *(tag("li", escape(line)) for line in drift.large), class_="problems"))
    else:
        parts.append(tag("p", "No change of the new rows is large.", class_="note"))
    tables = [_dense_table(drift), _sparse_table(drift), _label_table(drift)]
    return "".join([*parts, tag("div", *(tag("div", one) for one in tables if one), class_="stack")])


def _dense_table(drift: DriftRecord) -> str:
    ordered = sorted(drift.dense.items(), key=lambda pair: -abs(pair[1].mean_shift))
    rows = [
        [
            escape(name),
            escape(f"{change.mean_shift:+.2f}"),
            escape(f"{change.std_ratio:.2f}"),
            _before(format_percent(change.fill_share), change.fill_share_before),
        ]
        for name, change in ordered[:MAX_COLUMNS]
    ]
    header = ["dense column", "mean shift", "deviation ratio", "missing or 0"]
    note = "The shift is in standard deviations of the encoding. Missing values are encoded as 0."
    return _limited_table(header, rows, len(drift.dense), note)


def _before(text: str, share: float | None) -> str:
    return escape(text if share is None else f"{text} (before {format_percent(share)})")


def _sparse_table(drift: DriftRecord) -> str:
    ordered = sorted(drift.sparse.items(), key=lambda pair: -pair[1].new_lookup_share)
    rows = [
        [
            escape(name),
            format_percent(change.new_row_share),
            format_percent(change.new_lookup_share),
            format_count(change.num_added),
            format_count(change.num_retired),
        ]
        for name, change in ordered[:MAX_COLUMNS]
    ]
    header = ["sparse column", "rows with new values", "lookups", "rows added", "retired"]
    return _limited_table(header, rows, len(drift.sparse), "")


def _label_table(drift: DriftRecord) -> str:
    rows = [
        [escape(name), format_percent(change.rate), format_percent(change.rate_before)]
        for name, change in list(drift.labels.items())[:MAX_COLUMNS]
    ]
    return _limited_table(["label", "rate", "before"], rows, len(drift.labels), "")


def _limited_table(header: list[str], rows: list[list[str]], num_all: int, note: str) -> str:
    if not rows:
        return ""
    hidden = f"{format_count(num_all - len(rows))} more are not shown." if num_all > len(rows) else ""
    text = " ".join(one for one in (note, hidden) if one)
    shown = table(header, rows, set(range(1, len(header))), "compact narrow")
    return shown + (tag("p", escape(text), class_="note") if text else "")


def _history(lines: Sequence[HistoryLine]) -> str:
    if len(lines) < 2:
        return ""
    numbered = list(enumerate(lines, 1))
    charts = []
    for title, key in _CHARTS:
        series = []
        for name, field in ((TEST_FIRST, "test_first"), (PROGRESSIVE, "progressive")):
            epochs = [(float(number), getattr(line, field)) for number, line in numbered]
            series.append(_series(name, [(x, None if one is None else getattr(one.total, key)) for x, one in epochs]))
        chart = line_chart(f"{title} by run", series, float(len(lines)), x_name="run")
        charts.append(tag("div", tag("h3", escape(f"{title} by run")), chart) if chart else "")
    rows = [_history_row(number, line) for number, line in numbered[-MAX_RUNS:]]
    header = ["", "run", "rows", *(f"{kind} {name}" for kind in (TEST_FIRST, PROGRESSIVE) for name in ("NE", "AUC"))]
    header += ["large changes", "time"]
    hidden = len(lines) - len(rows)
    note = tag("p", escape(f"The last {MAX_RUNS} of {format_count(len(lines))} runs."), class_="note") if hidden else ""
    shown = table(header, rows, {0, *range(2, len(header))}, "compact")
    return "".join([tag("h3", "History"), tag("div", *charts, class_="grid"), shown, note])


def _history_row(number: int, line: HistoryLine) -> list[str]:
    totals = [None if epoch is None else epoch.total for epoch in (line.test_first, line.progressive)]
    values = [None if total is None else total.metric(key) for total in totals for key in ("ne", "auc")]
    return [
        format_count(number),
        escape(line.run),
        format_count(line.num_rows),
        *(escape(format_decimal(value if is_drawable(value) else None)) for value in values),
        NO_VALUE if line.drift is None else format_count(len(line.drift.large)),
        escape(format_duration(line.seconds)),
    ]
