"""Section of a run's page about the importance of features, and the trials before the run."""

from __future__ import annotations

from collections.abc import Sequence

from meseta.report.charts.chart import interval_bars
from meseta.report.charts.markup import escape, table, tag
from meseta.report.record import RunRecord, format_value
from meseta.telemetry.formatting import format_count, format_decimal, is_drawable
from meseta.telemetry.summary import FeatureImportance, ImportanceSummary

MAX_FEATURES = 40
"""Maximum number of bars. Less important features are counted only."""


def importance_section(record: RunRecord) -> str:
    """Return a bar chart of importances with intervals and a table of baselines, or an empty string without them."""
    measured = None if record.summary is None else record.summary.importance
    if measured is None:
        return baseline_table(record)
    drawable = [f for f in measured.features if all(is_drawable(value) for value in (f.logloss, f.low, f.high))]
    if not drawable:
        return baseline_table(record)
    # The sort is stable, so that equal features keep the order of the dataset.
    shown = sorted(drawable, key=lambda feature: -feature.logloss)[:MAX_FEATURES]
    unit, scale = _unit(measured)
    rows = [(f.name, f"stage-{'dense_forward' if f.kind == 'dense' else 'lookup'}", _scaled(f, scale)) for f in shown]
    chart = interval_bars(f"Increase of {unit} by feature", rows)
    parts = [tag("p", escape(_intro(measured, unit))), _legend(shown), tag("div", chart, class_="scroll")]
    if len(shown) < len(measured.features):
        num_hidden = len(measured.features) - len(shown)
        parts.append(
            tag("p", escape(f"{format_count(num_hidden)} less important features are not shown."), class_="note")
        )
    baselines = tag("div", _baselines(measured), baseline_table(record))
    return tag("div", tag("div", *parts), baselines, class_="wide-narrow")


def _unit(measured: ImportanceSummary) -> tuple[str, float]:
    """Return the name of the metric, and the factor that converts a log loss to it."""
    # NE is undefined if only one class is present.
    return ("NE", 1.0 / measured.constant_logloss) if measured.constant_logloss > 1e-9 else ("log loss", 1.0)


def _scaled(feature: FeatureImportance, scale: float) -> tuple[float, float, float]:
    return feature.logloss * scale, feature.low * scale, feature.high * scale


def _intro(measured: ImportanceSummary, unit: str) -> str:
    permutations = measured.num_permutations
    times = "once" if permutations == 1 else f"{permutations} times"
    return (
        f"Increase of {unit} if the values of one feature are permuted between rows, with 95% intervals over rows. "
        f"Label {measured.label!r}, {format_count(measured.num_rows)} rows of the {measured.split} split, each column "
        f"permuted {times}. Features that carry the same information share their importance."
    )


def _legend(shown: Sequence[FeatureImportance]) -> str:
    classes = {"dense": "stage-dense_forward", "sparse": "stage-lookup"}
    entries = [
        tag("li", tag("span", class_=f"swatch {class_}"), escape(kind))
        for kind, class_ in classes.items()
        if any(feature.kind == kind for feature in shown)
    ]
    return tag("ul", *entries, class_="legend")


def _baselines(measured: ImportanceSummary) -> str:
    unit, scale = _unit(measured)
    predictions = [("model", measured.logloss, measured.auc), ("constant", measured.constant_logloss, None)]
    note = "The constant prediction is the rate of positives in these rows."
    if measured.logistic_logloss is not None:
        predictions.insert(1, ("logistic regression", measured.logistic_logloss, measured.logistic_auc))
        fitted = format_count(measured.num_logistic_rows)
        note += f" Logistic regression was fitted briefly, to {fitted} training rows, without regularization."
    rows = [
        [name, *(escape(format_decimal(number)) for number in (auc, loss, loss * scale if unit == "NE" else None))]
        for name, loss, auc in predictions
    ]
    return (
        tag("h3", "Baselines on these rows")
        + table(["prediction", "AUC", "log loss", "NE"], rows, {1, 2, 3}, "compact")
        + tag("p", escape(note), class_="note")
    )


def baseline_table(record: RunRecord) -> str:
    """Return a table that compares the model with the baseline of `report.baseline`, or an empty string without it."""
    summary = record.summary
    if summary is None or summary.baseline is None:
        return ""
    rows = []
    for split, metrics in summary.baseline.splits.items():
        for name, values in (("model", summary.evaluation(split)), ("LightGBM", metrics)):
            if values is not None:
                numbers = (values.auc, values.logloss, values.ne)
                rows.append([f"{name}, {split}", *(escape(format_decimal(number)) for number in numbers)])
    note = (
        f"LightGBM {summary.baseline.version} with default parameters, fitted to "
        f"{format_count(summary.baseline.num_rows)} training rows. It uses categories of single-valued features, and "
        "the number of ids of multi-valued ones. Missing numbers have fill values, because the dataset does not mark "
        "them."
    )
    if left_out := record.config_value("data.without"):
        note += f" It lacks the features that the model lacks: {format_value(left_out)}."
    return (
        tag("h3", "LightGBM on all rows of these splits")
        + table(["prediction", "AUC", "log loss", "NE"], rows, {1, 2, 3}, "compact")
        + tag("p", escape(note), class_="note")
    )
