"""Result files of a suite: JSON, Markdown and an HTML page."""

from __future__ import annotations

from pathlib import Path

from meseta.report.charts.intervals import IntervalRow, interval_chart
from meseta.report.charts.markup import escape, html_document, table, tag
from meseta.report.quality.suite_result import EvalDatasetResult, PairedDifference, SuiteResult
from meseta.report.quality.tables import (
    DECIMALS,
    TextTable,
    configs_table,
    format_bounds,
    intro,
    pairs_table,
    rank_configs,
    settings_table,
    strengths_table,
    to_markdown,
)
from meseta.system.files import format_json, write_atomic
from meseta.telemetry.formatting import format_difference, format_quantity
from meseta.telemetry.metrics import Metric

JSON_FILE, TEXT_FILE, PAGE_FILE = "quality.json", "quality.md", "quality.html"


def write_suite_result(outcome: SuiteResult, out: Path) -> None:
    """Write quality.json, quality.md and quality.html into the folder `out`.

    Each file is replaced atomically. Raises MesetaError if a file cannot be written.
    """
    # Only the JSON file has unrounded values.
    write_atomic(out / JSON_FILE, format_json(outcome.to_dict(), levels=5))
    write_atomic(out / TEXT_FILE, to_markdown(outcome))
    write_atomic(out / PAGE_FILE, quality_page(outcome))


def quality_page(outcome: SuiteResult) -> str:
    """Return the HTML page about a suite."""
    num_configs = len({config.name for one in outcome.eval_datasets for config in one.configs})
    facts = [format_quantity(num_configs, "config"), ", ".join(one.eval_dataset.name for one in outcome.eval_datasets),
             format_quantity(outcome.num_seeds, "seed"),
             f"{format_quantity(outcome.num_trials, 'trial')} each"]  # fmt: skip
    header = tag("header", tag("h1", escape(outcome.name)), tag("p", escape(" · ".join(facts)), class_="facts"))
    problems = tag("ul", *(tag("li", escape(problem)) for problem in outcome.problems), class_="problems")
    body = [header, problems if outcome.problems else "", tag("p", escape(intro(outcome)), class_="note")]
    body += [_dataset_section(one, outcome.reference) for one in outcome.eval_datasets]
    strengths = strengths_table(outcome)
    if strengths.rows:
        body.append(tag("section", tag("h2", "Strengths"), _html_table(strengths), id="strengths"))
    return html_document(f"{outcome.name}: Meseta quality", *body)


def _dataset_section(outcome: EvalDatasetResult, reference: str) -> str:
    parts = [tag("h2", escape(outcome.eval_dataset.name)), tag("p", escape(f"{outcome.eval_dataset.facts}."))]
    parts.append(_html_table(configs_table(outcome, reference)))
    charts = [chart for metric in outcome.metrics if (chart := _chart(outcome, reference, metric))]
    if charts:
        parts.append(tag("h3", escape(f"Difference from {reference}, 95% intervals over seeds; gray: not significant")))
        parts.append(tag("div", *charts, class_="grid"))
    for name, cells in (("All pairs", pairs_table(outcome)), ("Selected settings", settings_table(outcome))):
        if cells.rows:
            parts.append(tag("details", tag("summary", escape(f"{name} ({len(cells.rows)})")), _html_table(cells)))
    return tag("section", *parts)


def _chart(outcome: EvalDatasetResult, reference: str, metric: Metric) -> str:
    """Return a figure with the difference of each config from the reference, or an empty string without differences."""
    differences = [
        outcome.paired_difference(config.name, reference, metric)
        for config in rank_configs(outcome)
        if config.name != reference
    ]
    rows = [_interval_row(one) for one in differences if one is not None]
    drawn = interval_chart(f"{metric.name}: difference from {reference}", rows)
    better = "lower" if metric.better_direction == "lower" else "higher"
    return (
        tag("figure", tag("figcaption", tag("b", escape(metric.name)), f", {better} is better"), drawn) if drawn else ""
    )


def _interval_row(one: PairedDifference) -> IntervalRow:
    interval = one.seed_interval
    verdict = {one.first: "better", one.second: "worse", None: "open"}[one.better_config]
    hover = (
        f"{one.first} minus {one.second}: {format_difference(interval.mean, DECIMALS)} {format_bounds(interval)}, "
        f"adjusted p = {one.p_holm:.2g}"
    )
    return IntervalRow(
        name=one.first, low=interval.low, estimate=interval.mean, high=interval.high, class_=verdict, tooltip=hover
    )


def _html_table(cells: TextTable) -> str:
    rows = [[escape(cell) for cell in row] for row in cells.rows]
    return table(
        [escape(name) for name in cells.header], rows, set(range(cells.num_name_columns, len(cells.header))), "narrow"
    )
