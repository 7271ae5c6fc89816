"""Measure what the hour, weekday and age of a time column change in the test AUC of `meseta train --data`.

    python benchmarks/bench_time_features.py [num_seeds] [--log LOG]

Each seed draws a log without a time effect and a log with a daily cycle, over 30 days. It trains on each with the
features and without them, with the same validation rows. The test rows are the following day. The learning rate of the
tables is fixed, which leaves out the trials of the command. Training takes three epochs. A seed always gives the
same result.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common.command import make_parser
from common.paired import interval
from common.processes import run_meseta

NUM_SEEDS = 20
NUM_TRAIN_ROWS, NUM_TEST_ROWS = 50_000, 50_000
NUM_DAYS, DAY_S = 30, 86_400
FIRST_SECOND = 1_767_225_600
"""2026-01-01 UTC."""
LOGS = {"no effect": 0.0, "daily cycle": 0.8}
"""Amplitude of the daily cycle in the logit, by log."""
VARIANTS = {"with": [], "without": ["--time-features", "none"]}
SETTINGS = ["train.batch_size=256", "train.epochs=3", "embedding.optimizer.lr=0.05"]


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


def measure(folder: Path, seed: int, amplitude: float) -> dict[str, float]:
    """Return the test AUC of each variant on the log of a seed."""
    draw = np.random.default_rng([seed, int(amplitude * 10)])
    train_until = FIRST_SECOND + NUM_DAYS * DAY_S
    folder.mkdir(parents=True)
    parts = {"train": (FIRST_SECOND, train_until, NUM_TRAIN_ROWS)}
    parts["test"] = (train_until, train_until + DAY_S, NUM_TEST_ROWS)
    for name, (first, end, num_rows) in parts.items():
        write_rows(folder / f"{name}.parquet", draw.integers(first, end, num_rows), amplitude, draw, seed)
    result = {}
    for variant, options in VARIANTS.items():
        run_dir = folder / variant
        files = ["--data", str(folder / "train.parquet"), "--test-files", str(folder / "test.parquet")]
        run_meseta("train", *files, *options, f"run_dir={run_dir}", f"seed={seed}", *SETTINGS, "--quiet")
        summary = json.loads((run_dir / "summary.json").read_text())
        result[variant] = float(summary["test"]["auc"])
    return result


def main() -> None:
    """Print the results of each seed, and the mean difference of each log with its 95% interval."""
    parser = make_parser(__doc__)
    parser.add_argument("num_seeds", nargs="?", type=int, default=NUM_SEEDS)
    parser.add_argument("--log", choices=LOGS, help="measure this log alone")
    arguments = parser.parse_args()
    for name, amplitude in LOGS.items():
        if arguments.log not in (None, name):
            continue
        differences = []
        for seed in range(arguments.num_seeds):
            with tempfile.TemporaryDirectory() as folder:
                auc = measure(Path(folder) / "log", seed, amplitude)
            differences.append(auc["with"] - auc["without"])
            print(f"{name}, seed {seed}: {auc['with']:.4f} with, {auc['without']:.4f} without", flush=True)
        mean, low, high = interval(differences)
        print(f"{name}: difference {mean:+.5f} ({low:+.5f} to {high:+.5f})", flush=True)


if __name__ == "__main__":
    main()
