"""Table of the trials before a run, or of a sweep."""

from __future__ import annotations

from meseta.report.charts.markup import escape, table, tag
from meseta.report.record import format_value
from meseta.telemetry.formatting import format_decimal
from meseta.telemetry.metrics import METRICS
from meseta.telemetry.summary import TrialEntry, TrialsRecord

MAX_ROWS = 20
"""Number of rows that are visible. More are folded."""


def trials_table(record: TrialsRecord) -> str:
    """Return a table of trials in the order of `record`, and its decisions. The best one is marked."""
    metric = next((metric for metric in METRICS if metric.key == record.metric), None)
    name, decimals = (metric.name, metric.decimals) if metric else (record.metric, 4)
    keys = list(dict.fromkeys(key for trial in record.trials for key in trial.settings))
    has_name, has_problem = any(trial.name for trial in record.trials), any(trial.problem for trial in record.trials)

    def cells(index: int, trial: TrialEntry) -> list[str]:
        shown = [escape(trial.name)] * has_name
        shown += [escape(format_value(trial.settings[key])) if key in trial.settings else "" for key in keys]
        shown[0] += tag("b", " selected") * (index == record.selected)
        shown.append(escape(format_decimal(trial.value, decimals)))
        return shown + [escape(trial.problem)] * has_problem

    header = ["trial"] * has_name + [escape(key) for key in keys] + [escape(f"{record.split} {name}")]
    numeric = {len(header) - 1}
    header += ["problem"] * has_problem
    rows = [cells(index, trial) for index, trial in enumerate(record.trials)]
    decisions = tag("ul", *(tag("li", escape(decision)) for decision in record.decisions)) if record.decisions else ""
    visible = table(header, rows[:MAX_ROWS], numeric, "compact trials") + decisions
    if len(rows) <= MAX_ROWS:
        return visible
    rest = table(header, rows[MAX_ROWS:], numeric, "compact trials")
    return visible + tag("details", tag("summary", escape(f"{len(rows) - MAX_ROWS} more")), rest)
