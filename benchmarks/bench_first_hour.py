"""Compare one command on an unprepared log with tuning.

    python benchmarks/bench_first_hour.py [--logs few_rows,pairs] [--seeds 3] [--again command]

Eight planted laws (common/planted_logs.py), three seeds each, 100,000 test rows. The table has the test AUC of
- `meseta train --data train.csv --test-files test.csv`;
- the best of a grid of hashed logistic regressions, selected on the validation split;
- the best of 20 random settings with a correct schema, selected on the validation split;
- the true probabilities.

Results are stored in benchmarks/stored_results/first_hour.json, and the same command continues with missing ones. It
takes four hours on two cores. `--again command` measures the command again if another commit measured it.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.command import make_parser
from common.planted_logs import LOGS, PlantedLog, WrittenLog, write_log
from common.processes import run_meseta
from common.result_store import ResultStore
from common.tuned_runs import Settings, Tuned, draw_settings
from record import ROOT

NUM_SETTINGS, NUM_SEEDS = 20, 3
LIMIT, MEAN_LIMIT = 0.0055, 0.0005
"""Maximum difference to the best setting of the sweep, for each log and on average."""


def linear(number: int) -> Settings:
    rate, penalty = [(rate, penalty) for rate in (0.02, 0.1, 0.5) for penalty in (0.0, 1e-5)][number]
    return {"model.name": "logistic_regression", "embedding.optimizer.lr": rate, "embedding.regularization.l2": penalty}


NUM_LINEAR = 6


def one_command(log: WrittenLog, folder: Path) -> dict[str, Any]:
    """Run the command and return its test AUC."""
    start_s = time.perf_counter()
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_meseta("train", "--data", log.train, "--test-files", log.test, f"run_dir={run_dir}")
    summary = json.loads((run_dir / "summary.json").read_text())
    shutil.rmtree(run_dir)
    return {"test": summary["test"]["auc"], "seconds": time.perf_counter() - start_s, "steps": summary["num_steps"]}


def measure(
    log: PlantedLog, seed: int, store: ResultStore, folder: Path, num_rows: int | None = None
) -> dict[str, float]:
    place = folder / f"{log.name}-{seed}"
    lines: list[WrittenLog] = []

    def written() -> WrittenLog:
        lines[:] = lines or [write_log(log, place, seed, num_rows)]
        return lines[0]

    def cell(what: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        return store.get_and_print(f"{log.name}/{seed}/{what}", make)

    def tuned(what: str, number: int, choose: Callable[[int], tuple[Settings, int | None]]) -> Mapping[str, Any]:
        run = lambda: Tuned(written(), place, seed, sparse=log.sparse).run(*choose(number))  # noqa: E731
        return cell(f"{what}-{number}", run)

    result = {
        "best": cell("true", lambda: {"test": written().best_auc})["test"],
        "one command": cell("command", lambda: one_command(written(), place))["test"],
    }
    grid = [tuned("linear", number, lambda n: (linear(n), None)) for number in range(NUM_LINEAR)]
    sweep = [tuned("sweep", number, draw_settings) for number in range(NUM_SETTINGS)]
    for name, runs in (("logistic regression", grid), ("sweep", sweep)):
        result[name] = max(runs, key=lambda run: run["valid"])["test"]
    shutil.rmtree(place, ignore_errors=True)
    return result


def table(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[str]:
    names = ("logistic regression", "one command", "sweep", "best")
    yield "| log | rows | " + " | ".join(names) + " | command - sweep, worst seed |"
    yield "| --- | --- | " + " | ".join("---" for _ in names) + " | --- |"
    gaps = []
    by_name = {log.name: log for log in LOGS}
    for name, seeds in rows.items():
        means = " | ".join(f"{statistics.mean(seed[what] for seed in seeds):.4f}" for what in names)
        differences = [seed["one command"] - seed["sweep"] for seed in seeds]
        gaps += differences
        gap = f"{statistics.mean(differences):+.4f}, {min(differences):+.4f}"
        yield f"| {name} | {by_name[name].num_rows:,} | {means} | {gap} |"
    yield ""
    mean_gap = f"mean of command - sweep: {statistics.mean(gaps):+.4f} (asked: -{MEAN_LIMIT})"
    yield f"{mean_gap}; worst {min(gaps):+.4f} (-{LIMIT})"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--logs", default=",".join(log.name for log in LOGS))
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--again", choices=["command"], help="measure these results again")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "first-hour")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    store = ResultStore(ResultStore.FOLDER / "first_hour.json")
    if options.again:
        store.discard_of_other_commits("/command")
    rows: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seeds):
        for log in (log for log in LOGS if log.name in options.logs.split(",")):
            rows.setdefault(log.name, []).append(measure(log, seed, store, options.folder))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
