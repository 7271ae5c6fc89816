"""Learning rates of a run that starts from another one, and initial values of its new rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common.tables import table

from daily.runs import FIRST_DAY, Chain, DailyRuns
from daily.sizes import Sizes

LOW_FACTOR, WARMUP_SHARE = 0.3, 0.1
SECTIONS = ("embedding", "dense")
BASE, LOW, LAST, UNKNOWN = "base", "low", "last", "unknown"
WARM = "-warmup"
TITLES = {
    BASE: "base rate",
    BASE + WARM: "base rate, warm-up",
    LOW: f"{LOW_FACTOR} of base rate",
    LOW + WARM: f"{LOW_FACTOR} of base rate, warm-up",
    LAST: "last rate",
    LAST + WARM: "last rate, warm-up",
}


def measure_rates(runs: DailyRuns, sizes: Sizes) -> None:
    """Measure a chain for each learning rate on the log of one seed, and one for `embedding.new_rows`."""
    chains = _chains(runs.measure_first(), runs.log.rows_per_day)
    for day in range(FIRST_DAY + 1, sizes.num_days + 1):
        for chain in chains:
            runs.measure_chain(chain, day)


def _chains(first: Mapping[str, Any], num_rows: int) -> list[Chain]:
    """Return the chains. That of the last rate is left out if the schedule of the first day did not lower it."""
    rates = {
        name: {section: factor * first[f"{section}_rate"] for section in SECTIONS}
        for name, factor in ((BASE, 1.0), (LOW, LOW_FACTOR))
    }
    last = {section: first[f"{section}_last_rate"] for section in SECTIONS}
    if any(last[section] < rates[BASE][section] for section in SECTIONS):
        rates[LAST] = last
    steps = math.ceil(WARMUP_SHARE * num_rows / first["batch_size"])
    chains = []
    for name, by_section in rates.items():
        options = tuple(f"{section}.optimizer.lr={rate}" for section, rate in by_section.items())
        chains += [
            Chain(name=name, options=options),
            Chain(name=name + WARM, options=(*options, f"schedule.warmup_steps={steps}")),
        ]
    return [*chains, Chain(name=UNKNOWN, options=("embedding.new_rows=unknown",))]


def print_rates(runs: Sequence[DailyRuns], sizes: Sizes) -> bool:
    """Print the tables. Return whether the base rate, which is the default, is the best one."""
    means = {title: _mean_by_seed(runs, name, sizes) for name, title in TITLES.items()}
    best = _print_means("NE on the next day by learning rate", "rate", means, runs)
    print(f"lowest: {best}, default: {TITLES[BASE]}")
    rows = {"initial": means[TITLES[BASE]], "unknown": _mean_by_seed(runs, UNKNOWN, sizes)}
    best_rows = _print_means("NE on the next day by embedding.new_rows", "new rows", rows, runs)
    print(f"lowest: {best_rows}, default: initial")
    return best == TITLES[BASE]


def _mean_by_seed(runs: Sequence[DailyRuns], name: str, sizes: Sizes) -> dict[int, float]:
    days, means = range(FIRST_DAY + 1, sizes.num_days + 1), {}
    for one in runs:
        results = [result for day in days if (result := one.find(name, day)) is not None]
        if len(results) == len(days):
            means[one.log.seed] = statistics.mean(result["ne"] for result in results)
    return means


def _print_means(title: str, kind: str, means: dict[str, dict[int, float]], runs: Sequence[DailyRuns]) -> str | None:
    """Print NE by seed. Return the entry with the lowest mean among those with the most seeds."""
    seeds = [one.log.seed for one in runs]
    rows, averages = [], {}
    for name, by_seed in means.items():
        if by_seed:
            averages[name] = (-len(by_seed), statistics.mean(by_seed.values()))
            cells = [f"{by_seed[seed]:.4f}" if seed in by_seed else "-" for seed in seeds]
            rows.append([name, *cells, f"{averages[name][1]:.4f}"])
    table(title, [kind, *(f"seed {seed}" for seed in seeds), "mean"], rows)
    return min(averages, key=lambda name: averages[name]) if averages else None
