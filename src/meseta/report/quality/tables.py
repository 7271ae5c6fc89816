"""The tables of a suite as cells, which the page and the text show alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meseta.report.quality.outcome import (
    QUALITY,
    REGRET,
    ConfigScores,
    GroundOutcome,
    PairedDifference,
    QualityOutcome,
)
from meseta.report.quality.statistics import Interval
from meseta.telemetry.shown import ABSENT, count, fixed, plural, short, signed

DECIMALS = 5
"""Of figures and their differences: those between published models lie in the fourth."""
TRUTH = "the truth itself"


@dataclass(frozen=True)
class CellTable:
    """Cells as text."""

    header: list[str]
    rows: list[list[str]]
    num_names: int
    """Columns at the left that are names; all others are numbers."""


def configs_table(outcome: GroundOutcome, reference: str) -> CellTable:
    """Each config's figures, the best by the first metric first."""
    metrics = outcome.metrics
    has_ratio = REGRET in metrics
    beside = next((config for config in outcome.configs if config.name == reference), None)
    base = beside.mean(REGRET) if beside is not None and has_ratio else None
    ratio_of = [f"regret / that of {reference}"] if has_ratio else []
    header = ["config", *(metric.name for metric in metrics), *ratio_of, "seeds",
              "parameters", "in tables", "operations", "samples/s"]  # fmt: skip
    rows = []
    for config in ranked(outcome):
        score, regret = config.any_score, config.mean(REGRET)
        ratio = [fixed(regret / base, 3) if base and regret is not None else ABSENT] if has_ratio else []
        rows.append([
            config.name,
            *(fixed(config.mean(metric), DECIMALS) for metric in metrics),
            *ratio,
            str(len(config.scores)),
            *([ABSENT] * 3 if score is None else [
                count(score.num_dense_parameters), count(score.num_table_parameters), short(score.flops_per_sample),
            ]),
            count(config.samples_per_s),
        ])  # fmt: skip
    best = outcome.ground.best_reachable
    if best:
        rows.append([TRUTH, *(fixed(best.get(metric.key), DECIMALS) for metric in metrics), *[""] * (5 + has_ratio)])
    return CellTable(header, rows, 1)


def ranked(outcome: GroundOutcome) -> list[ConfigScores]:
    """The best mean of the first metric first; those without one last."""
    metric = next(iter(outcome.metrics), QUALITY[0])

    def key(config: ConfigScores) -> tuple[bool, float]:
        mean = config.mean(metric)
        return mean is None, 0.0 if mean is None else metric.loss(mean)

    return sorted(outcome.configs, key=key)


def pairs_table(outcome: GroundOutcome) -> CellTable:
    """Every comparison, as it was made."""
    has_rows = any(one.over_rows is not None for one in outcome.differences)
    header = ["figure", "config", "less", "difference", "95 % over seeds", *(["95 % over rows"] if has_rows else []),
              "p, adjusted", "better"]  # fmt: skip
    rows = []
    for one in outcome.differences:
        shown = [
            one.metric.name, one.first, one.second, signed(one.over_seeds.mean, DECIMALS), bounds(one.over_seeds),
            *([bounds(one.over_rows)] if has_rows else []), f"{one.p_holm:.2g}", one.better or "not shown",
        ]  # fmt: skip
        rows.append(shown)
    return CellTable(header, rows, 3)


def strengths_table(outcome: QualityOutcome) -> CellTable:
    """Of worlds of several strengths: what the reference loses or gains at each, and whether the intervals are clear of
    each other."""
    header = ["world", "figure", "config", "less", "weaker", "stronger", "intervals"]
    rows = []
    for weaker, stronger in outcome.by_strength():
        for metric in stronger.metrics:
            for config in stronger.configs:
                pair = [ground.beside(config.name, outcome.reference, metric) for ground in (weaker, stronger)]
                first, second = pair
                if first is not None and second is not None:
                    rows.append(_strength_row(weaker, stronger, first, second))
    return CellTable(header, rows, 4)


def _strength_row(
    weaker: GroundOutcome, stronger: GroundOutcome, first: PairedDifference, second: PairedDifference
) -> list[str]:
    is_clear = first.over_seeds.is_clear_of(second.over_seeds)
    return [
        f"{weaker.ground.name} and {stronger.ground.name}",
        first.metric.name,
        first.first,
        first.second,
        f"{signed(first.over_seeds.mean, DECIMALS)} {bounds(first.over_seeds)}",
        f"{signed(second.over_seeds.mean, DECIMALS)} {bounds(second.over_seeds)}",
        "clear of each other" if is_clear else "overlap",
    ]


def bounds(interval: Interval | None) -> str:
    """[-0.00123, +0.00045]"""
    if interval is None or not math.isfinite(interval.low):
        return ABSENT
    return f"[{_bound(interval.low)}, {_bound(interval.high)}]"


def _bound(value: float) -> str:
    return "0" if value == 0 else f"{value:+.{DECIMALS}f}"


def chosen_table(outcome: GroundOutcome) -> CellTable:
    """What the trials of each config have chosen."""
    rows = [[config.name, ", ".join(f"{key}={value}" for key, value in config.chosen.items())]
            for config in outcome.configs if config.chosen]  # fmt: skip
    return CellTable(["config", "settings chosen"], rows, 2)


def intro(outcome: QualityOutcome) -> str:
    """What the figures are and what 'better' means here, in a paragraph."""
    trials = (
        f"Each config's settings were chosen among {plural(outcome.num_trials, 'trial')}, by the valid split of a seed "
        "that is not used again" if outcome.num_trials else "No config was tuned"
    )  # fmt: skip
    return (
        f"{trials}; then it was trained on {plural(outcome.num_seeds, 'fresh seed')}, and read the test split once. "
        "Differences are paired by seed; their intervals are Student's over seeds, each of 95 % alone. A config is "
        "called better where the difference stands after Holm's correction over all "
        f"{plural(outcome.num_comparisons, 'comparison')} of this suite, which are every pair of configs, by every "
        "figure, on every world or dataset, at a chance of 5 % of any false one. Operations are those of a training "
        "step's dense part for one sample."
    )


def as_text(outcome: QualityOutcome) -> str:
    """All of it in Markdown, which a terminal shows as well."""
    parts = [f"# Quality: {outcome.name}", intro(outcome)]
    for one in outcome.grounds:
        parts += [f"## {one.ground.name}", f"{one.ground.facts}.", markdown(configs_table(one, outcome.reference))]
        parts += [markdown(table) for table in (pairs_table(one), chosen_table(one)) if table.rows]
    strengths = strengths_table(outcome)
    if strengths.rows:
        parts += ["## Strengths", markdown(strengths)]
    if outcome.problems:
        parts += ["## What has failed", "\n".join(f"- {problem}" for problem in outcome.problems)]
    return "\n\n".join(parts) + "\n"


def markdown(table: CellTable) -> str:
    """Columns in line with each other."""
    header, rows = table.header, [[cell.replace("|", "\\|") for cell in row] for row in table.rows]
    widths = [max(len(row[place]) for row in [header, *rows]) for place in range(len(header))]

    def line(cells: Sequence[str], fill: str = " ") -> str:
        placed = [cell.ljust(width, fill) if place < table.num_names else cell.rjust(width, fill)
                  for place, (cell, width) in enumerate(zip(cells, widths, strict=True))]  # fmt: skip
        return f"| {' | '.join(placed)} |"

    rule = ["---" if place < table.num_names else "--:" for place in range(len(header))]
    return "\n".join([line(header), line(rule, "-"), *map(line, rows)])
