"""Measure whether the decisions of `meseta train --data` about columns and times are right.

    python benchmarks/bench_decisions.py [columns|time] [--seeds 30] [--first-seed 0] [--store FILE]

- columns: shares of planted noise columns that the search leaves out, and of planted useful columns that it keeps, in
  30 logs (common/planted_columns.py). Intervals are those of Clopper and Pearson.
- time: change of the test AUC by the hour, weekday and age of a time column, in 20 pairs of runs with and without
  `--time-features none`. A log has no time effect, or a daily cycle. Test rows are the day after the training rows.

Each run is the whole command with the default budget on one thread. A seed always gives the same decisions. Results are
stored in benchmarks/stored_results/decisions.json, and the same command continues with missing ones. It takes 45
minutes on one core. It fails unless 90 % of the noise is left out, 98 % of the useful columns are kept, and the time
features cost at most 0.001 at the upper end of the 95 % interval.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common.command import make_parser, run_parts
from common.paired import interval
from common.planted_columns import KINDS, PlantedColumn, draw_log
from common.processes import run_meseta
from common.result_store import ResultStore
from scipy import stats

from meseta.config import read_config_document

NUM_LOGS, NUM_PAIRS, NUM_CYCLE_PAIRS = 30, 20, 3
MIN_REMOVED_SHARE, MIN_KEPT_SHARE, MAX_AUC_LOSS = 0.9, 0.98, 0.001
GAIN_EDGES = (0.001, 0.002, 0.005, 0.021)
"""Limits of the groups in which useful columns are reported, in nats."""
NUM_TRAIN_ROWS, NUM_TEST_ROWS, NUM_DAYS, DAY_S = 28_500, 100_000, 30, 86_400
FIRST_SECOND = 1_767_225_600
"""2026-01-01 UTC."""
LOGS = {"no effect": 0.0, "daily cycle": 0.8}
"""Amplitude of the daily cycle in the logit, by log."""
VARIANTS: Mapping[str, Sequence[str]] = {"with": [], "without": ["--time-features", "none"]}


def train(run_dir: Path, seed: int, *options: str) -> dict[str, Any]:
    """Run the command and return the columns that it leaves out, and its time."""
    start_s = time.perf_counter()
    settings = [f"run_dir={run_dir}", f"seed={seed}", "num_threads=1", "report.importance=false"]
    run_meseta("train", *options, *settings, "--quiet")
    elapsed_s = time.perf_counter() - start_s
    return {
        "without": read_config_document(run_dir / "config.yaml", is_stored=True)["data"]["without"],
        "seconds": round(elapsed_s, 1),
    }


def decide_columns(seed: int) -> dict[str, Any]:
    """Train on the log of a seed. Return its columns and the result of `train`."""
    with tempfile.TemporaryDirectory() as folder:
        columns = draw_log(Path(folder) / "log.parquet", seed)
        result = train(Path(folder) / "run", seed, "--data", f"{folder}/log.parquet")
    return {"columns": [asdict(column) for column in columns], **result}


def measure_columns(options: argparse.Namespace) -> bool:
    """Print the shares of noise left out and of useful columns kept. Return whether they are large enough."""
    store, columns, left_out = ResultStore(options.store), [], []
    for seed in list_seeds(options, NUM_LOGS):
        result = store.get(f"columns/{seed}", lambda seed=seed: decide_columns(seed))
        of_log = [PlantedColumn(**column) for column in result["columns"]]
        columns += of_log
        left_out += [column.name in result["without"] for column in of_log]
        print(f"log {seed}: {describe_mistakes(of_log, result['without'])}, {result['seconds']:.0f} s", flush=True)
    pairs = list(zip(columns, left_out, strict=True))
    print("\n| columns | noise left out | useful kept |\n| --- | --- | --- |")
    for kind in (*KINDS, None):
        of_kind = [(column, is_out) for column, is_out in pairs if kind in (None, column.kind)]
        noise = [is_out for column, is_out in of_kind if not column.gain]
        useful = [not is_out for column, is_out in of_kind if column.gain]
        print(f"| {kind or 'all'} | {describe_share(noise)} | {describe_share(useful)} |")
    for low, high in itertools.pairwise(GAIN_EDGES):
        useful = [not is_out for column, is_out in pairs if low <= column.gain < high]
        print(f"| gain of {low:g} to {high:g} nats | | {describe_share(useful)} |")
    noise_out = [is_out for column, is_out in pairs if not column.gain]
    useful_out = [is_out for column, is_out in pairs if column.gain]
    return bool(np.mean(noise_out) >= MIN_REMOVED_SHARE and 1 - np.mean(useful_out) >= MIN_KEPT_SHARE)


def describe_mistakes(columns: Sequence[PlantedColumn], without: Sequence[str]) -> str:
    kept = [column.kind for column in columns if not column.gain and column.name not in without]
    lost = [f"{column.kind} ({column.gain:.4f})" for column in columns if column.gain and column.name in without]
    return f"noise kept: {', '.join(kept) or 'none'}; useful left out: {', '.join(lost) or 'none'}"


def describe_share(outcomes: Sequence[bool]) -> str:
    """Describe the share of true outcomes, with the exact binomial interval."""
    if not outcomes:
        return "-"
    test = stats.binomtest(sum(outcomes), len(outcomes))
    ends = test.proportion_ci(0.95, method="exact")
    share, low, high = (100 * number for number in (test.statistic, ends.low, ends.high))
    return f"{sum(outcomes)} of {len(outcomes)}: {share:.1f} % ({low:.1f} to {high:.1f})"


def write_rows(path: Path, times: np.ndarray, amplitude: float, draw: np.random.Generator, world: int) -> None:
    """Write rows whose label depends on a user, an item, a price and, with an amplitude, on the hour."""
    effects = np.random.default_rng(world)
    of_user, of_item = effects.normal(0, 0.7, 2000), effects.normal(0, 0.7, 500)
    users = np.minimum(draw.zipf(1.3, times.size), 2000) - 1
    items = np.minimum(draw.zipf(1.2, times.size), 500) - 1
    prices = draw.lognormal(3, 1, times.size)
    cycle = amplitude * np.sin(2 * np.pi * (times % DAY_S) / DAY_S)
    logit = -1 + of_user[users] + of_item[items] - 0.4 * (np.log(prices) - 3) + cycle
    columns = {
        "clicked": (draw.random(times.size) < 1 / (1 + np.exp(-logit))).astype(np.int64),
        "user_id": users,
        "item_id": items,
        "price": prices,
        "timestamp": times,
    }
    pq.write_table(pa.table(columns), path)


def compare_variants(seed: int, amplitude: float) -> dict[str, Any]:
    """Return the test AUC and the result of `train` of each variant on the log of a seed."""
    draw = np.random.default_rng([seed, int(amplitude * 10)])
    train_until = FIRST_SECOND + NUM_DAYS * DAY_S
    parts = {"train": (FIRST_SECOND, train_until, NUM_TRAIN_ROWS)}
    parts["test"] = (train_until, train_until + DAY_S, NUM_TEST_ROWS)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (first, end, num_rows) in parts.items():
            write_rows(Path(folder) / f"{name}.parquet", draw.integers(first, end, num_rows), amplitude, draw, seed)
        files = ["--data", f"{folder}/train.parquet", "--test-files", f"{folder}/test.parquet"]
        for variant, options in VARIANTS.items():
            run_dir = Path(folder) / variant
            details = train(run_dir, seed, *files, *options)
            summary = json.loads((run_dir / "summary.json").read_text())
            result[variant] = {"auc": summary["test"]["auc"], **details}
    return result


def measure_time(options: argparse.Namespace) -> bool:
    """Print the change of the test AUC by time features. Return whether it is small enough without a time effect."""
    store, good = ResultStore(options.store), True
    for log, amplitude in LOGS.items():
        differences = []
        for seed in list_seeds(options, NUM_CYCLE_PAIRS if amplitude else NUM_PAIRS):
            make = lambda seed=seed, amplitude=amplitude: compare_variants(seed, amplitude)  # noqa: E731
            result = store.get(f"time/{log}/{seed}", make)
            auc = {variant: result[variant]["auc"] for variant in VARIANTS}
            differences.append(auc["with"] - auc["without"])
            print(f"{log}, seed {seed}: {auc['with']:.4f} with, {auc['without']:.4f} without, "
                  f"left out: {', '.join(result['with']['without']) or 'none'}", flush=True)  # fmt: skip
        mean, low, high = interval(differences)
        print(f"{log}: test AUC {mean:+.5f} ({low:+.5f} to {high:+.5f}) with time features", flush=True)
        good &= bool(amplitude) or low >= -MAX_AUC_LOSS
    return good


def list_seeds(options: argparse.Namespace, default: int) -> Iterator[int]:
    yield from range(options.first_seed, options.first_seed + (options.seeds or default))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, help="number of seeds of each part")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--store", type=Path, default=ResultStore.FOLDER / "decisions.json")
    run_parts(parser, {"columns": measure_columns, "time": measure_time})


if __name__ == "__main__":
    main()
