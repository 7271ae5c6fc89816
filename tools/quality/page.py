"""Result files of a suite: JSON, Markdown and an HTML page."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from string import Template

from meseta.system import write_atomic
from tools.quality.chart import IntervalRow, interval_chart
from tools.quality.comparison import EvalDatasetResult, Metric, PairedDifference, SuiteResult
from tools.quality.tables import (
    TextTable,
    configs_table,
    format_bounds,
    format_difference,
    format_quantity,
    intro,
    pairs_table,
    rank_configs,
    settings_table,
    strengths_table,
    to_markdown,
)

JSON_FILE, TEXT_FILE, PAGE_FILE = "quality.json", "quality.md", "quality.html"


def write_suite_result(outcome: SuiteResult, out: Path) -> None:
    """Write quality.json, quality.md and quality.html into the folder `out`. Each file is replaced atomically."""
    # Only the JSON file has unrounded values.
    write_atomic(out / JSON_FILE, json.dumps(outcome.to_dict(), indent=1) + "\n")
    write_atomic(out / TEXT_FILE, to_markdown(outcome))
    write_atomic(out / PAGE_FILE, quality_page(outcome))


def quality_page(outcome: SuiteResult) -> str:
    """Return the HTML page about a suite."""
    num_configs = len({config.name for one in outcome.eval_datasets for config in one.configs})
    facts = [format_quantity(num_configs, "config"), ", ".join(one.eval_dataset.name for one in outcome.eval_datasets),
             format_quantity(outcome.num_seeds, "seed"),
             f"{format_quantity(outcome.num_trials, 'trial')} each"]  # fmt: skip
    body = [f"<h1>{escape(outcome.name)}</h1><p>{escape(' · '.join(facts))}</p>"]
    if outcome.problems:
        body.append(f"<ul>{''.join(f'<li>{escape(problem)}</li>' for problem in outcome.problems)}</ul>")
    body.append(f"<p>{escape(intro(outcome))}</p>")
    body += [_dataset_section(one, outcome.reference) for one in outcome.eval_datasets]
    strengths = strengths_table(outcome)
    if strengths.rows:
        body.append(f'<section id="strengths"><h2>Strengths</h2>{_html_table(strengths)}</section>')
    template = Template(Path(__file__).with_name("page.html").read_text())
    return template.substitute(title=escape(outcome.name), body="\n".join(body))


def _dataset_section(outcome: EvalDatasetResult, reference: str) -> str:
    parts = [f"<h2>{escape(outcome.eval_dataset.name)}</h2><p>{escape(outcome.eval_dataset.facts)}.</p>"]
    parts.append(_html_table(configs_table(outcome, reference)))
    charts = [chart for metric in outcome.metrics if (chart := _chart(outcome, reference, metric))]
    if charts:
        heading = f"Difference from {reference}, 95% intervals over seeds; gray: not significant"
        parts.append(f'<h3>{escape(heading)}</h3><div class="charts">{"".join(charts)}</div>')
    for name, cells in (("All pairs", pairs_table(outcome)), ("Selected settings", settings_table(outcome))):
        if cells.rows:
            summary = f"<summary>{name} ({len(cells.rows)})</summary>"
            parts.append(f"<details>{summary}{_html_table(cells)}</details>")
    return f"<section>{''.join(parts)}</section>"


def _chart(outcome: EvalDatasetResult, reference: str, metric: Metric) -> str:
    """Return a figure with the difference of each config from the reference, or an empty string without differences."""
    differences = [
        outcome.paired_difference(config.name, reference, metric)
        for config in rank_configs(outcome)
        if config.name != reference
    ]
    rows = [_interval_row(one) for one in differences if one is not None]
    chart = interval_chart(f"{metric.name}: difference from {reference}", rows)
    better = "higher" if metric.is_higher_better else "lower"
    caption = f"<figcaption><b>{escape(metric.name)}</b>, {better} is better</figcaption>"
    return f"<figure>{caption}{chart}</figure>" if chart else ""


def _interval_row(one: PairedDifference) -> IntervalRow:
    interval = one.seed_interval
    verdict = {one.first: "better", one.second: "worse", None: "open"}[one.better_config]
    tooltip = (
        f"{one.first} minus {one.second}: {format_difference(interval.mean)} {format_bounds(interval)}, "
        f"adjusted p = {one.p_holm:.2g}"
    )
    return IntervalRow(
        name=one.first, low=interval.low, estimate=interval.mean, high=interval.high, class_=verdict, tooltip=tooltip
    )


def _html_table(table: TextTable) -> str:
    def row(tag: str, cells: list[str]) -> str:
        kinds = ["" if place < table.num_name_columns else ' class="number"' for place in range(len(cells))]
        marked = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(marked)}</tr>"

    rows = "".join(row("td", cells) for cells in table.rows)
    return f'<div class="scroll"><table>{row("th", table.header)}{rows}</table></div>'
