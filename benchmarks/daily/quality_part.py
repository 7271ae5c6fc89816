"""NE on the next day of chains and of other ways to train a model every day."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.paired import interval
from common.tables import table

from daily.lightgbm_days import measure_day
from daily.runs import FIRST_DAY, Chain, DailyRuns
from daily.sizes import Sizes

CHAIN, NO_GROW, HASHED, STALE, ALONE, SCRATCH = "chain", "no-grow", "hashed", "stale", "alone", "scratch"
LIGHTGBM, CONTINUED, TRUE = "lightgbm", "lightgbm-continued", "true"
METHODS = {
    CHAIN: "chain",
    STALE: "model of day 1",
    ALONE: "last day alone",
    NO_GROW: "chain, --no-grow",
    HASHED: "chain, hashed ids",
    SCRATCH: "all days so far, from scratch",
    LIGHTGBM: "LightGBM, last day alone",
    CONTINUED: "LightGBM, init_model",
    TRUE: "true probabilities",
}
WORSE = (STALE, ALONE, NO_GROW)
"""Methods that the chain must surpass."""
MAX_DIFFERENCE, MAX_TIME_RATIO = 0.003, 0.25
"""Limits on NE and processor time of the chain, relative to training from scratch."""


def measure_quality(runs: DailyRuns, sizes: Sizes) -> None:
    """Measure all methods on the log of one seed."""
    chains = [
        Chain(name=CHAIN),
        Chain(name=NO_GROW, options=("--no-grow",)),
        Chain(name=HASHED, hash_rows=sizes.hash_rows),
    ]
    runs.measure_first()
    for day in range(FIRST_DAY + 1, sizes.num_days + 1):
        runs.measure_best(day)
        for chain in chains:
            runs.measure_chain(chain, day)
        runs.measure_stale(day)
        runs.measure_alone(ALONE, day)
        for name in (LIGHTGBM, CONTINUED):
            runs.store(name, day, lambda n=name, d=day: _fit_lightgbm(runs, n, d))  # type: ignore[misc]
    for day in sizes.scratch_days if runs.log.seed in sizes.scratch_seeds else ():
        runs.measure_alone(SCRATCH, day, day)


def _fit_lightgbm(runs: DailyRuns, name: str, day: int) -> dict[str, float]:
    before = None
    if name == CONTINUED and day > FIRST_DAY:
        before = _model_file(runs, name, day - 1)
        if not before.exists():
            _fit_lightgbm(runs, name, day - 1)
    return measure_day(runs.log.file(day), runs.log.file(day + 1), _model_file(runs, name, day), before)


def _model_file(runs: DailyRuns, name: str, day: int) -> Path:
    return runs.folder / f"{name}-{day}.txt"


class QualityTables:
    """Tables of the results of several seeds."""

    def __init__(self, runs: Sequence[DailyRuns], sizes: Sizes) -> None:
        self._runs, self._sizes = runs, sizes

    def print(self) -> bool:
        """Print the tables. Return whether the chain meets all requirements."""
        self._print_methods()
        self._print_days()
        are_worse = [self._check_worse(name) for name in WORSE]
        return all([*are_worse, self._check_scratch()])

    def _days(self, name: str) -> Sequence[int]:
        return self._sizes.scratch_days if name == SCRATCH else range(FIRST_DAY + 1, self._sizes.num_days + 1)

    def _values(self, name: str, key: str, days: Sequence[int]) -> Mapping[int, float]:
        """Return the mean of a value over days, by seed. Seeds without results of all days are left out."""
        means = {}
        for runs in self._runs:
            results = [runs.find(name, day) for day in days]
            values = [result[key] for result in results if result is not None and key in result]
            if len(values) == len(days):
                means[runs.log.seed] = statistics.mean(values)
        return means

    def _differences(self, name: str) -> list[float]:
        """Return NE of the method less that of the chain on the same days, by seed."""
        method, chain = (self._values(one, "ne", self._days(name)) for one in (name, CHAIN))
        return [method[seed] - chain[seed] for seed in method if seed in chain]

    def _print_methods(self) -> None:
        rows = []
        for name, title in METHODS.items():
            entropies, differences = self._values(name, "ne", self._days(name)), self._differences(name)
            if not entropies:
                continue
            difference = _format_interval(differences) if name != CHAIN and differences else "-"
            cells = [title, len(self._days(name)), len(entropies), f"{statistics.mean(entropies.values()):.4f}"]
            measured = [self._values(name, key, self._days(name)) for key in ("processor_s", "peak_bytes")]
            sizes = [
                f"{statistics.mean(values.values()) / unit:.1f}" if values else "-"
                for values, unit in zip(measured, (1, 1e6), strict=True)
            ]
            rows.append([*cells, difference, *sizes])
        head = ["method", "days", "seeds", "NE", "less that of the chain (95 %)", "processor s per day", "peak MB"]
        table("NE on the next day", head, rows)

    def _print_days(self) -> None:
        days, rows = range(FIRST_DAY + 1, self._sizes.num_days + 1), []
        for name, title in METHODS.items():
            by_day = [self._values(name, "ne", [day]) for day in days]
            if any(by_day):
                rows.append([title, *(f"{statistics.mean(of.values()):.4f}" if of else "-" for of in by_day)])
        table("NE on the day after each day", ["method", *(f"day {day}" for day in days)], rows)

    def _check_worse(self, name: str) -> bool:
        differences = self._differences(name)
        is_met = bool(differences) and interval(differences)[1] > 0
        print(f"{METHODS[name]} - chain: {'excludes' if is_met else 'does not exclude'} 0, asked: above 0")
        return is_met

    def _check_scratch(self) -> bool:
        differences, days = self._differences(SCRATCH), self._days(SCRATCH)
        if not differences:
            print("from scratch: no results")
            return False
        chain, scratch = (self._values(name, "processor_s", days) for name in (CHAIN, SCRATCH))
        common = chain.keys() & scratch.keys()
        ratio = sum(chain[seed] for seed in common) / sum(scratch[seed] for seed in common)
        difference = -statistics.mean(differences)
        print(f"chain - from scratch: NE {difference:+.4f}, target: at most {MAX_DIFFERENCE}; processor time of the "
              f"same days {ratio:.2f}, target: at most {MAX_TIME_RATIO}")  # fmt: skip
        return difference <= MAX_DIFFERENCE and ratio <= MAX_TIME_RATIO


def _format_interval(values: Sequence[float]) -> str:
    mean, low, high = interval(values)
    return f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"
