"""Compare a model that is trained every day with other ways to train one, and measure many days.

    python benchmarks/bench_daily.py [quality|rates|thirty_days] [--seeds 0,1] [--quick] [--stored]

Logs are those of `meseta data synth` with 5 % of the ids replaced and effects rotated by 0.1 each day.
- `rates`: learning rates of a run that starts from another one, and initial values of its new rows, on two seeds of
  which no other result is reported. Ten days of 200,000 rows.
- `thirty_days`: tables, times and memory of thirty days of 20,000 rows, with retired rows and without. Charts are
  written to FOLDER/thirty_days.html.
- `quality`: NE on the next day of a chain (`meseta train --start-from`), five seeds, ten days of 200,000 rows. The
  others are the model of day 1, the last day alone, `--no-grow`, hashed ids, all days so far from scratch (days 2, 5
  and 10, three seeds), LightGBM with its defaults, LightGBM with `init_model`, and the true probabilities. Runs that
  are not part of a chain have the settings that the search of day 1 found. Intervals are paired over seeds.

Results are stored in benchmarks/stored_results/daily.json, and the same command continues with missing ones.
`--stored` only prints stored results. `--quick` runs all parts on tiny logs in three minutes, and stores nothing. Exits
with code 1 if a requirement is missed.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from common.command import make_parser, run_parts
from common.result_store import ResultStore
from daily.logs import DailyLog
from daily.many_days_part import ManyDays
from daily.quality_part import QualityTables, measure_quality
from daily.rates_part import measure_rates, print_rates
from daily.runs import DailyRuns
from daily.sizes import FULL, QUICK, Sizes
from record import ROOT

FEW_EPOCHS = ("train.search_budget=0", "train.epochs=1")
"""Settings of the first of many days, whose metrics are not reported."""


class Benchmark:
    """Parts of the benchmark, of the sizes that the command line names."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options: argparse.Namespace = options
        self._sizes: Sizes = QUICK if options.quick else FULL
        self._folder: Path = options.folder / ("quick" if options.quick else "full")
        if options.quick:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._store = ResultStore((self._folder if options.quick else ResultStore.FOLDER) / "daily.json")

    def quality(self) -> bool:
        all_runs = self._measure("quality", self._sizes.seeds, measure_quality)
        return QualityTables(all_runs, self._sizes).print()

    def rates(self) -> bool:
        return print_rates(self._measure("rates", self._sizes.rate_seeds, measure_rates), self._sizes)

    def thirty_days(self) -> bool:
        sizes, folder = self._sizes, self._folder / "thirty_days"
        log = DailyLog(
            folder=folder / "log", seed=0, num_days=sizes.many_days, rows_per_day=sizes.rows_per_many, scale=sizes.scale
        )
        days = ManyDays(log, self._store, folder, (*FEW_EPOCHS, *sizes.settings))
        if not self._options.stored:
            days.measure()
            shutil.rmtree(folder, ignore_errors=True)
        return days.print(self._folder / "thirty_days.html")

    def _measure(
        self, part: str, seeds: Sequence[int], measure: Callable[[DailyRuns, Sizes], None]
    ) -> Sequence[DailyRuns]:
        """Measure the seeds that the command line names. Return the runs of all seeds."""
        all_runs = []
        for seed in seeds:
            folder, sizes = self._folder / f"{part}-{seed}", self._sizes
            log = DailyLog(
                folder=folder / "log", seed=seed, num_days=sizes.num_days + 1, rows_per_day=sizes.rows_per_day,
                scale=sizes.scale,
            )  # fmt: skip
            runs = DailyRuns(log, self._store, folder, f"{part}/{seed}", sizes.settings)
            all_runs.append(runs)
            named = self._options.seeds
            if not self._options.stored and (named is None or str(seed) in named.split(",")):
                measure(runs, sizes)
                shutil.rmtree(folder, ignore_errors=True)
        return all_runs


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", help="seeds to measure, of the named part, such as 0,1 (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny logs, whose results are not stored")
    parser.add_argument("--stored", action="store_true", help="print stored results only")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "daily", help="folder of logs and runs")
    benchmarks: list[Benchmark] = []

    def run(part: Callable[[Benchmark], bool], options: argparse.Namespace) -> bool:
        benchmarks[:] = benchmarks or [Benchmark(options)]
        return part(benchmarks[0])

    parts = (Benchmark.rates, Benchmark.thirty_days, Benchmark.quality)
    run_parts(parser, {part.__name__: lambda options, p=part: run(p, options) for part in parts})


if __name__ == "__main__":
    main()
