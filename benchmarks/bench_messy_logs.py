"""Compare one command on a messy log with LightGBM and with tuning.

    python benchmarks/bench_messy_logs.py [--logs noise,drift] [--seeds 3] [--again command] [--stored]

Twelve planted laws (common/messy_logs.py), three seeds each. The training rows are two weeks, the test rows the day
after, and the validation rows the last tenth of the training rows. The table has the test AUC of
- `meseta train --data train.csv --test-files test.csv`, with one thread on one core;
- LightGBM with its defaults;
- the best of 20 trials of LightGBM: 15 to 255 leaves, rate 0.02 to 0.2, at least 5 to 200 rows in a leaf, shares of
  features and rows, smoothing of categories, early stopping after 50 and at most 1,000 trees;
- the best of 20 random settings of Meseta, half of them with buckets of numbers;
- the true probabilities.

All have the hour, the weekday and the age of the time. LightGBM and the random settings have correct roles of columns,
and leave out texts that are no categories. The best trials have the largest validation AUC. The reference is the one of
the three with the largest validation AUC.

Results are stored in benchmarks/stored_results/messy_logs.json, and the same command continues with missing ones.
`--again command` measures the command again if another commit measured it, and keeps the others. `--stored` only prints
stored results.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from common.command import make_parser
from common.lightgbm_trials import NUM_TRIALS, draw_parameters, run_trial, save_rows
from common.measure_command import measure_command
from common.messy_logs import LOGS, MessyLog
from common.paired import interval
from common.planted_logs import WrittenLog
from common.processes import MESETA
from common.result_store import ResultStore
from common.tables import format_table
from common.tuned_runs import Tuned, draw_settings
from record import ROOT
from scipy import stats

from meseta.config.load import get_value
from meseta.data import Dataset
from meseta.train.search.candidates import SEARCHED_KEYS

NUM_SETTINGS, NUM_SEEDS = 20, 3
MEAN_LIMIT, LIMIT = 0.003, 0.010
"""Maximum difference to the reference, on average and for each log."""
MAX_TRIALS_RATIO, MIN_LIMIT_S, MAX_TRAINING_RATIO = 5, 60, 6
"""Maximum time of the command, as a multiple of all trials of LightGBM or in seconds, and as a multiple of one training
with the settings that it found."""
COMMAND, TRAINING = "command", "training"
DEFAULT, TRIALS, SWEEP = "LightGBM", "LightGBM, 20 trials", "20 settings"
REFERENCES = {DEFAULT: ("lightgbm", 1), TRIALS: ("lightgbm-trial", NUM_TRIALS), SWEEP: ("sweep", NUM_SETTINGS)}
"""Prefix and number of the results of each reference."""
Result = Mapping[str, Any]


def run_command(written: WrittenLog, run_dir: Path, *settings: str) -> dict[str, Any]:
    """Run the command. Return its metrics, times, peak memory, decisions, and columns."""
    shutil.rmtree(run_dir, ignore_errors=True)
    files = ("--data", written.train, "--test-files", written.test)
    measured = measure_command([*MESETA, "train", *files, f"run_dir={run_dir}", *settings])
    summary = json.loads((run_dir / "summary.json").read_text())
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    dataset = Dataset.load(run_dir / "data")
    shutil.rmtree(run_dir)
    return {
        **{split: summary[split]["auc"] for split in ("valid", "test")},
        **measured.numbers(),
        "steps": summary["num_steps"],
        "columns": [column.name for column in (*dataset.dense, *dataset.sparse)],
        "without": config["data"].get("without") or [],
        "settings": {key: get_value(config, key) for key in SEARCHED_KEYS if get_value(config, key) is not None},
        "decisions": [line for line in measured.output.splitlines() if line.startswith("search:")],
    }


@dataclass(frozen=True)
class Cells:
    """Results of one log and seed."""

    log: MessyLog
    seed: int
    store: ResultStore
    folder: Path

    @cached_property
    def written(self) -> WrittenLog:
        return self.log.write(self.folder, self.seed)

    @cached_property
    def rows(self) -> Path:
        """File of the rows for LightGBM."""
        path = self.folder / "rows.npz"
        train, test = (self.log.read(file) for file in (self.written.train, self.written.test))
        save_rows(path, train, test, self.log.sparse, self.log.times.name)
        return path

    def find(self, name: str) -> Result | None:
        return self.store.find(f"{self.log.name}/{self.seed}/{name}")

    def measure_first(self) -> None:
        """Measure the command and LightGBM with its defaults."""
        self._measure("true", lambda: {"test": self.written.best_auc})
        command = self._measure(COMMAND, lambda: run_command(self.written, self.folder / "run"))
        if self.seed == 0:
            settings = [f"{key}={json.dumps(value)}" for key, value in command["settings"].items()]
            self._measure(
                TRAINING, lambda: run_command(self.written, self.folder / "run", *settings, "train.search_budget=0")
            )
        self._measure("lightgbm-0", lambda: run_trial(self.rows, {}, 0.0))

    def measure_trials(self) -> None:
        """Measure the trials of LightGBM. Only those that are the best so far predict the test rows."""
        best = 0.0
        for number in range(NUM_TRIALS):
            trial = self._measure(
                f"lightgbm-trial-{number}",
                lambda n=number, limit=best: run_trial(self.rows, draw_parameters(n), limit),  # type: ignore[misc]
            )
            best = max(best, trial["valid"])

    def measure_sweep(self) -> None:
        for number in range(NUM_SETTINGS):
            run = lambda n=number: self._tuned.run(*draw_settings(n), has_buckets=n % 2 == 1)  # noqa: E731
            self._measure(f"sweep-{number}", run)

    @cached_property
    def _tuned(self) -> Tuned:
        log = self.log
        options = {"ignore": log.texts, "time": [log.times.name], "valid_by_time": True}
        numbers = [column.name for column in log.numbers]
        return Tuned(self.written, self.folder, self.seed, sparse=log.sparse, dense=numbers, options=options)

    def _measure(self, name: str, make: Callable[[], Result]) -> Result:
        return self.store.get_and_print(f"{self.log.name}/{self.seed}/{name}", make)

    def references(self) -> dict[str, Result]:
        """Return the result with the best validation AUC of each complete reference."""
        best: dict[str, Result] = {}
        for what, (prefix, number) in REFERENCES.items():
            runs = [run for place in range(number) if (run := self.find(f"{prefix}-{place}")) is not None]
            if len(runs) == number:
                best[what] = max(runs, key=lambda run: run["valid"])
        return best

    def gap(self) -> float | None:
        """Return the test AUC of the command less that of the reference, or `None` if one of them is incomplete."""
        command, references = self.find(COMMAND), self.references()
        if command is None or len(references) < len(REFERENCES):
            return None
        return float(command["test"] - max(references.values(), key=lambda run: run["valid"])["test"])

    def trials_s(self) -> float | None:
        """Return the processor time of all trials of LightGBM, or `None` if one is missing."""
        trials = [self.find(f"lightgbm-trial-{number}") for number in range(NUM_TRIALS)]
        return None if None in trials else sum(trial["processor_s"] for trial in trials if trial is not None)


def _mean(values: Sequence[float | None], form: str = ".4f") -> str:
    """Format the mean of the values that are not `None`."""
    numbers = [value for value in values if value is not None]
    return f"{statistics.mean(numbers):{form}}" if numbers else "-"


def auc_table(cells: Sequence[Cells]) -> str:
    """Format the test AUC of each log, as means over the seeds."""
    head = ["log", "rows", COMMAND, *REFERENCES, "true", "command - reference", "worst seed"]
    rows = []
    for log, of_log in _by_log(cells):
        runs = [[cell.find(COMMAND) for cell in of_log]]
        runs += [[cell.references().get(what) for cell in of_log] for what in REFERENCES]
        runs += [[cell.find("true") for cell in of_log]]
        means = [_mean([run["test"] for run in of_column if run is not None]) for of_column in runs]
        gaps = [gap for cell in of_log if (gap := cell.gap()) is not None]
        ends = [_format_interval(gaps), f"{min(gaps):+.4f}"] if gaps else ["-", "-"]
        rows.append([log.name, f"{log.num_rows:,}", *means, *ends])
    return format_table(head, rows)


def _format_interval(values: Sequence[float]) -> str:
    mean, low, high = interval(values)
    return f"{mean:+.4f} ({low:+.4f} to {high:+.4f})"


def _by_log(cells: Sequence[Cells]) -> Iterator[tuple[MessyLog, list[Cells]]]:
    for log in LOGS:
        of_log = [cell for cell in cells if cell.log is log and cell.find(COMMAND) is not None]
        if of_log:
            yield log, of_log


def gap_lines(cells: Sequence[Cells]) -> Iterator[str]:
    means = {}
    for log, of_log in _by_log(cells):
        gaps = [gap for cell in of_log if (gap := cell.gap()) is not None]
        if gaps:
            means[log.name] = statistics.mean(gaps)
    if not means:
        return
    worst = min(means, key=lambda name: means[name])
    yield f"mean of command - reference over {len(means)} logs: {_format_interval([*means.values()])}"
    yield f"asked: -{MEAN_LIMIT}; worst log: {worst} {means[worst]:+.4f}, asked: -{LIMIT:.3f}"


def cost_table(cells: Sequence[Cells]) -> str:
    """Format processor times and peak memory, as means over the seeds."""
    head = [
        "log",
        "command, s",
        "20 trials, s",
        "ratio",
        "one training, s",
        "ratio",
        "memory, MB",
        "LightGBM, MB",
        "met",
    ]
    rows = []
    for log, of_log in _by_log(cells):
        commands = [cell.find(COMMAND) or {} for cell in of_log]
        trials = [cell.trials_s() for cell in of_log]
        trainings = [training["processor_s"] if (training := cell.find(TRAINING)) else None for cell in of_log]
        pairs = [(run["processor_s"], other) for run, other in zip(commands, trials, strict=True) if other]
        of_one = [run["processor_s"] / one for run, one in zip(commands, trainings, strict=True) if one]
        is_met = all(time_s <= max(MAX_TRIALS_RATIO * other, MIN_LIMIT_S) for time_s, other in pairs)
        is_met &= all(ratio <= MAX_TRAINING_RATIO for ratio in of_one)
        default = [cell.find("lightgbm-0") for cell in of_log]
        rows.append([
            log.name, _mean([run["processor_s"] for run in commands], ".1f"), _mean(trials, ".1f"),
            _mean([time_s / other for time_s, other in pairs], ".2f"), _mean(trainings, ".1f"), _mean(of_one, ".2f"),
            _mean([run["peak_bytes"] / 1e6 for run in commands], ".0f"),
            _mean([run["peak_bytes"] / 1e6 for run in default if run], ".0f"), "yes" if is_met else "no",
        ])  # fmt: skip
    return format_table(head, rows)


def column_lines(cells: Sequence[Cells]) -> Iterator[str]:
    """Yield the shares of noise columns that the command left out, and of useful columns that it kept."""
    counts = {"noise columns left out": [0, 0], "useful columns kept": [0, 0]}
    for cell in cells:
        if (command := cell.find(COMMAND)) is None:
            continue
        # A column is used if its numbers or their buckets are.
        used = {name.removesuffix(".bucket") for name in {*command["columns"]} - {*command["without"]}}
        right = {
            "noise columns left out": (cell.log.noise, {*cell.log.noise} - used),
            "useful columns kept": (cell.log.useful, {*cell.log.useful} & used),
        }
        for name, (columns, are_right) in right.items():
            counts[name][0] += len(are_right)
            counts[name][1] += len(columns)
            if wrong := [column for column in columns if column not in are_right]:
                yield f"{cell.log.name} {cell.seed}, not among {name}: {', '.join(wrong)}"
    for name, (count, total) in counts.items():
        if total:
            ends = stats.binomtest(count, total).proportion_ci(method="wilson")
            yield f"{name}: {count} of {total}, {count / total:.3f} ({ends.low:.3f} to {ends.high:.3f})"


def print_results(cells: Sequence[Cells]) -> None:
    num_complete = sum(cell.gap() is not None for cell in cells)
    print(f"complete: {num_complete} of {len(cells)} logs and seeds\n\n{auc_table(cells)}")
    print("\n".join(gap_lines(cells)), f"\n{cost_table(cells)}", "\n".join(column_lines(cells)), sep="\n")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--logs", default=",".join(log.name for log in LOGS))
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--again", choices=[COMMAND], help="measure these results again")
    parser.add_argument("--stored", action="store_true", help="print stored results only")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "messy-logs")
    options = parser.parse_args()
    store = ResultStore(ResultStore.FOLDER / "messy_logs.json")
    logs = [log for log in LOGS if log.name in options.logs.split(",")]
    if options.again:
        store.discard_of_other_commits(f"/{COMMAND}", f"/{TRAINING}")
    cells = [
        Cells(log, seed, store, options.folder / f"{log.name}-{seed}") for seed in range(options.seeds) for log in logs
    ]
    for seed in range(0 if options.stored else options.seeds):
        # Small logs first, so that an early end leaves many results.
        of_seed = sorted((cell for cell in cells if cell.seed == seed), key=lambda cell: cell.log.num_rows)
        for step in (Cells.measure_first, Cells.measure_trials, Cells.measure_sweep):
            for cell in of_seed:
                step(cell)
        for cell in of_seed:
            shutil.rmtree(cell.folder, ignore_errors=True)
    print_results(cells)


if __name__ == "__main__":
    main()
