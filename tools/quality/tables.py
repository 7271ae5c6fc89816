"""Tables of a suite, which its page and its Markdown file share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.quality.comparison import (
    COMPARED_METRICS,
    REGRET,
    ConfigScores,
    EvalDatasetResult,
    PairedDifference,
    SuiteResult,
)
from tools.quality.intervals import ConfidenceInterval

DECIMALS = 5
"""Number of decimals of metrics and their differences."""
# Published models differ in the fourth decimal.
NO_VALUE = "–"
"""Text for a missing or non-finite value."""
TRUTH_LABEL = "true probabilities"


@dataclass(frozen=True)
class TextTable:
    """Table of unescaped text cells."""

    header: list[str]
    rows: list[list[str]]
    num_name_columns: int
    """Number of columns on the left that contain names. All other columns contain numbers."""


def configs_table(outcome: EvalDatasetResult, reference: str) -> TextTable:
    """Return the table of configs with their metrics, sizes and speeds, as sorted by `rank_configs`."""
    metrics = outcome.metrics
    has_ratio = REGRET in metrics
    beside = next((config for config in outcome.configs if config.name == reference), None)
    base = beside.mean(REGRET) if beside is not None and has_ratio else None
    ratio_of = [f"regret / that of {reference}"] if has_ratio else []
    header = ["config", *(metric.name for metric in metrics), *ratio_of, "seeds",
              "parameters", "in tables", "operations", "samples/s"]  # fmt: skip
    rows = []
    for config in rank_configs(outcome):
        score, regret = config.any_score, config.mean(REGRET)
        ratio = [format_metric(regret / base, 3) if base and regret is not None else NO_VALUE] if has_ratio else []
        rows.append([
            config.name,
            *(format_metric(config.mean(metric)) for metric in metrics),
            *ratio,
            str(len(config.scores)),
            *([NO_VALUE] * 3 if score is None else [
                format_count(score.num_dense_parameters), format_count(score.num_table_parameters),
                format_si(score.flops_per_sample),
            ]),
            format_count(config.samples_per_s),
        ])  # fmt: skip
    best = outcome.eval_dataset.best_reachable
    if best:
        rows.append(
            [
                TRUTH_LABEL,
                *(format_metric(best.get(metric.key)) for metric in metrics),
                *[""] * (5 + has_ratio),
            ]
        )
    return TextTable(header, rows, 1)


def rank_configs(outcome: EvalDatasetResult) -> list[ConfigScores]:
    """Sort configs by the mean of the first metric, the best one first. Configs without a value are last."""
    metric = next(iter(outcome.metrics), COMPARED_METRICS[0])

    def key(config: ConfigScores) -> tuple[bool, float]:
        mean = config.mean(metric)
        # False is sorted before True, so configs without a mean are last.
        return mean is None, 0.0 if mean is None else metric.to_loss(mean)

    return sorted(outcome.configs, key=key)


def pairs_table(outcome: EvalDatasetResult) -> TextTable:
    """Return the table of all comparisons."""
    has_rows = any(one.row_interval is not None for one in outcome.differences)
    header = ["metric", "config", "minus", "difference", "95% over seeds", *(["95% over rows"] if has_rows else []),
              "adjusted p", "better"]  # fmt: skip
    rows = []
    for one in outcome.differences:
        shown = [
            one.metric.name, one.first, one.second, format_difference(one.seed_interval.mean),
            format_bounds(one.seed_interval),
            *([format_bounds(one.row_interval)] if has_rows else []), f"{one.p_holm:.2g}",
            one.better_config or "not significant",
        ]  # fmt: skip
        rows.append(shown)
    return TextTable(header, rows, 3)


def strengths_table(outcome: SuiteResult) -> TextTable:
    """Return the table of differences from the reference at two strengths of a world.

    The last column states whether the intervals overlap.
    """
    header = ["world", "metric", "config", "minus", "weaker", "stronger", "intervals"]
    rows = []
    for weaker, stronger in outcome.strength_pairs():
        for metric in stronger.metrics:
            for config in stronger.configs:
                pair = [
                    result.paired_difference(config.name, outcome.reference, metric) for result in (weaker, stronger)
                ]
                first, second = pair
                if first is not None and second is not None:
                    rows.append(_strength_row(weaker, stronger, first, second))
    return TextTable(header, rows, 4)


def _strength_row(
    weaker: EvalDatasetResult, stronger: EvalDatasetResult, first: PairedDifference, second: PairedDifference
) -> list[str]:
    is_clear = first.seed_interval.is_disjoint_from(second.seed_interval)
    return [
        f"{weaker.eval_dataset.name} and {stronger.eval_dataset.name}",
        first.metric.name,
        first.first,
        first.second,
        f"{format_difference(first.seed_interval.mean)} {format_bounds(first.seed_interval)}",
        f"{format_difference(second.seed_interval.mean)} {format_bounds(second.seed_interval)}",
        "disjoint" if is_clear else "overlap",
    ]


def format_bounds(interval: ConfidenceInterval | None) -> str:
    """Format the bounds of an interval, for example [-0.00123, +0.00045]. Unknown bounds become `NO_VALUE`."""
    if interval is None or not math.isfinite(interval.low):
        return NO_VALUE
    return f"[{_format_bound(interval.low)}, {_format_bound(interval.high)}]"


def _format_bound(value: float) -> str:
    return "0" if value == 0 else f"{value:+.{DECIMALS}f}"


def settings_table(outcome: EvalDatasetResult) -> TextTable:
    """Return the table of the settings that the trials selected for each config."""
    rows = [[config.name, ", ".join(f"{key}={value}" for key, value in config.chosen_settings.items())]
            for config in outcome.configs if config.chosen_settings]  # fmt: skip
    return TextTable(["config", "selected settings"], rows, 2)


def intro(outcome: SuiteResult) -> str:
    """Return a paragraph that explains how configs were trained and compared."""
    trials = (
        f"The settings of each config were selected from {format_quantity(outcome.num_trials, 'trial')} on the "
        "validation split, with a seed that is not used again" if outcome.num_trials else "No config was tuned"
    )  # fmt: skip
    return (
        f"{trials}. Each config was then trained with {format_quantity(outcome.num_seeds, 'fresh seed')}, and each run "
        "read the test split once. Differences are paired by seed. Their intervals are Student's t-intervals over "
        "seeds, each with a confidence of 95%. A config is called better if the difference remains significant after "
        "Holm's adjustment over all "
        f"{format_quantity(outcome.num_comparisons, 'comparison')} of this suite: each pair of configs, each metric, "
        "and each world or dataset. The probability of any false positive is at most 5%. Operations are those of the "
        "dense part for one sample of a training step."
    )


def to_markdown(outcome: SuiteResult) -> str:
    """Return the result of a suite as Markdown, for quality.md and the terminal."""
    parts = [f"# Quality: {outcome.name}", intro(outcome)]
    for one in outcome.eval_datasets:
        parts += [
            f"## {one.eval_dataset.name}",
            f"{one.eval_dataset.facts}.",
            markdown_table(configs_table(one, outcome.reference)),
        ]
        parts += [markdown_table(table) for table in (pairs_table(one), settings_table(one)) if table.rows]
    strengths = strengths_table(outcome)
    if strengths.rows:
        parts += ["## Strengths", markdown_table(strengths)]
    if outcome.problems:
        parts += ["## Failed runs", "\n".join(f"- {problem}" for problem in outcome.problems)]
    return "\n\n".join(parts) + "\n"


def markdown_table(table: TextTable) -> str:
    """Return a Markdown table with padded columns. Names are aligned to the left, and numbers to the right."""
    # A vertical bar inside a cell would end it.
    header, rows = table.header, [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
    widths = [max(len(row[place]) for row in [header, *rows]) for place in range(len(header))]

    def line(cells: Sequence[str], fill: str = " ") -> str:
        placed = [cell.ljust(width, fill) if place < table.num_name_columns else cell.rjust(width, fill)
                  for place, (cell, width) in enumerate(zip(cells, widths, strict=True))]  # fmt: skip
        return f"| {' | '.join(placed)} |"

    rule = ["---" if place < table.num_name_columns else "--:" for place in range(len(header))]
    return "\n".join([line(header), line(rule, "-"), *map(line, rows)])


def format_metric(value: float | None, decimals: int = DECIMALS) -> str:
    """Format a metric. Very large values use exponents."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    return f"{value:.{decimals}f}" if abs(value) < 1e6 else f"{value:.{decimals}g}"


def format_difference(value: float) -> str:
    """Format a difference with its sign. One that rounds to zero has an exponent."""
    text = f"{value:+.{DECIMALS}f}"
    return "=" if value == 0 else text if any(digit in text for digit in "123456789") else f"{value:+.0e}"


def format_count(value: float | None) -> str:
    """Format a number without decimals, such as 1,234,567."""
    return NO_VALUE if value is None else f"{value:,.0f}"


def format_si(value: float) -> str:
    """Format three significant digits with an SI prefix, such as 1.23M."""
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor * 0.9995:
            return f"{value / factor:.3g}{suffix}" if value < factor * 999.5 else f"{value / factor:,.0f}{suffix}"
    return f"{value:.3g}"


def format_quantity(amount: int, noun: str) -> str:
    """Format a count with its noun, such as 1 trial or 2 trials."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"
