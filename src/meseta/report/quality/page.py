"""The page of a suite, and the files beside it."""

from __future__ import annotations

from pathlib import Path

from meseta.machine.files import json_text, write_whole
from meseta.report.charts.intervals import IntervalRow, interval_rows
from meseta.report.charts.markup import table, tag, text
from meseta.report.document import document
from meseta.report.quality.outcome import GroundOutcome, PairedDifference, QualityOutcome
from meseta.report.quality.tables import (
    DECIMALS,
    CellTable,
    as_text,
    bounds,
    chosen_table,
    configs_table,
    intro,
    pairs_table,
    ranked,
    strengths_table,
)
from meseta.telemetry.figures import Metric
from meseta.telemetry.shown import plural, signed

JSON_NAME, TEXT_NAME, PAGE_NAME = "quality.json", "quality.md", "quality.html"


def write_outcome(outcome: QualityOutcome, out: Path) -> None:
    """All digits as JSON, tables as text, and the page, each whole. Raises MesetaError where one cannot be written."""
    write_whole(out / JSON_NAME, json_text(outcome.to_dict(), levels=5))
    write_whole(out / TEXT_NAME, as_text(outcome))
    write_whole(out / PAGE_NAME, quality_page(outcome))


def quality_page(outcome: QualityOutcome) -> str:
    """The whole page."""
    num_configs = len({config.name for one in outcome.grounds for config in one.configs})
    facts = [plural(num_configs, "config"), ", ".join(one.ground.name for one in outcome.grounds),
             plural(outcome.num_seeds, "seed"), f"{plural(outcome.num_trials, 'trial')} each"]  # fmt: skip
    header = tag("header", tag("h1", text(outcome.name)), tag("p", text(" · ".join(facts)), class_="facts"))
    problems = tag("ul", *(tag("li", text(problem)) for problem in outcome.problems), class_="problems")
    body = [header, problems if outcome.problems else "", tag("p", text(intro(outcome)), class_="note")]
    body += [_ground_section(one, outcome.reference) for one in outcome.grounds]
    strengths = strengths_table(outcome)
    if strengths.rows:
        body.append(tag("section", tag("h2", "Strengths"), _shown(strengths), id="strengths"))
    return document(f"{outcome.name}: Meseta quality", *body)


def _ground_section(outcome: GroundOutcome, reference: str) -> str:
    parts = [tag("h2", text(outcome.ground.name)), tag("p", text(f"{outcome.ground.facts}."))]
    parts.append(_shown(configs_table(outcome, reference)))
    charts = [chart for metric in outcome.metrics if (chart := _chart(outcome, reference, metric))]
    if charts:
        parts.append(tag("h3", text(f"Less {reference}, with 95 % intervals over seeds; grey: not shown to differ")))
        parts.append(tag("div", *charts, class_="grid"))
    for name, cells in (("All pairs", pairs_table(outcome)), ("Settings chosen", chosen_table(outcome))):
        if cells.rows:
            parts.append(tag("details", tag("summary", text(f"{name} ({len(cells.rows)})")), _shown(cells)))
    return tag("section", *parts)


def _chart(outcome: GroundOutcome, reference: str, metric: Metric) -> str:
    """The difference of each config to the reference."""
    found = [outcome.beside(config.name, reference, metric) for config in ranked(outcome) if config.name != reference]
    rows = [_interval_row(one) for one in found if one is not None]
    drawn = interval_rows(f"{metric.name} less that of {reference}", rows)
    better = "lower" if metric.better == "lower" else "higher"
    return (
        tag("figure", tag("figcaption", tag("b", text(metric.name)), f", {better} is better"), drawn) if drawn else ""
    )


def _interval_row(one: PairedDifference) -> IntervalRow:
    interval = one.over_seeds
    verdict = {one.first: "better", one.second: "worse", None: "open"}[one.better]
    hover = (
        f"{one.first} less {one.second}: {signed(interval.mean, DECIMALS)} {bounds(interval)}, p {one.p_holm:.2g} "
        "adjusted"
    )
    return IntervalRow(
        name=one.first, low=interval.low, middle=interval.mean, high=interval.high, class_=verdict, hover=hover
    )


def _shown(cells: CellTable) -> str:
    rows = [[text(cell) for cell in row] for row in cells.rows]
    return table([text(name) for name in cells.header], rows, set(range(cells.num_names, len(cells.header))), "narrow")
