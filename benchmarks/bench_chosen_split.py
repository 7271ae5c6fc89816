"""A figure that chose is flattered: the same small runs choose their best weights on valid, and on test.

    python benchmarks/bench_chosen_split.py [num_seeds]

A planted overfit: a weak law of two columns, and a column of rare ids that a high rate learns by heart, so that
evaluations of a few hundred rows go up and down by chance. Each seed makes its own rows and trains twice, equally but
for the split that chooses among some forty evaluations (train.finish=best, by the AUC). The test figure of the weights
so chosen is held against theirs on 20,000 rows of the same law that nothing has looked at. With a split valid the mean
difference should be 0, and its 95% interval (Student's t over the seeds) should hold 0; without one it should not.
Everything runs in this process, on one thread, in a temporary folder; a seed gives the same figures each time.
"""

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from scipy import stats

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.prepare import PrepareOptions, prepare
from meseta.telemetry.metrics import TEST, VALID
from meseta.train.evaluate import evaluate
from meseta.train.trained_model import load_trained
from meseta.train.trainer import Trainer

NUM_SEEDS = 20
NUM_ROWS = {"train": 1500, "valid": 300, "test": 300, "untouched": 20_000}
CHOOSERS = (VALID, TEST)
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Chosen:
    """The AUC of the best weights of one run."""

    step: int
    test: float
    untouched: float

    @property
    def flattery(self) -> float:
        """By how much the test figure is above that of rows that nothing has looked at."""
        return self.test - self.untouched


def write_rows(path: Path, num_rows: int, draw: np.random.Generator) -> None:
    """A log of a weak law: two columns of eight values say a little, a column of 400 ids says nothing."""
    first, second = draw.integers(0, 8, num_rows), draw.integers(0, 8, num_rows)
    logit = 0.25 * ((first - 3.5) / 2.3 + (second - 3.5) / 2.3)
    columns = {
        "label": (draw.random(num_rows) < 1 / (1 + np.exp(-logit))).astype(np.int64),
        "price": draw.random(num_rows),
        "first": [f"a{value}" for value in first],
        "second": [f"b{value}" for value in second],
        "rare": [f"r{value}" for value in draw.integers(0, 400, num_rows)],
    }
    pq.write_table(pa.table(columns), path)


def prepare_rows(folder: Path, seed: int) -> dict[str, Path]:
    """The same prepared rows twice, by the split that chooses: with the split valid, and without it. Both have a split
    'untouched' too, which no run knows of."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for name, num_rows in NUM_ROWS.items():
        write_rows(folder / f"{name}.parquet", num_rows, draw)
    with_valid, without = folder / VALID, folder / TEST
    prepare(
        PrepareOptions(
            sources=[str(folder / "train.parquet")],
            valid_files=[str(folder / "valid.parquet")],
            test_files=[str(folder / "test.parquet"), str(folder / "untouched.parquet")],
            out=with_valid,
            sparse=["first", "second", "rare"],
            hash_rows=500,
        )
    )
    document = json.loads((with_valid / "dataset.json").read_text())
    rows = pa.concat_tables(pq.read_table(with_valid / file["path"]) for file in document["splits"][TEST]["files"])
    for name, part in ((TEST, rows.slice(0, NUM_ROWS[TEST])), ("untouched", rows.slice(NUM_ROWS[TEST]))):
        path = f"{name}.parquet"
        pq.write_table(part, with_valid / path)
        document["splits"][name] = {"num_rows": len(part), "files": [{"path": path, "num_rows": len(part)}]}
        document["splits"][name]["num_positives"] = float(np.sum(part["label"].to_numpy()))
    (with_valid / "dataset.json").write_text(json.dumps(document))
    shutil.copytree(with_valid, without)
    del document["splits"][VALID]
    (without / "dataset.json").write_text(json.dumps(document))
    return {VALID: with_valid, TEST: without}


def settings(data: Path, run_dir: Path, seed: int) -> RunConfig:
    """Some forty evaluations of a model that learns by heart."""
    document: dict[str, Any] = {
        "run_dir": str(run_dir),
        "seed": seed,
        "num_threads": 1,
        "device": "cpu",
        "data": {"dir": str(data)},
        "model": {"embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16]},
        "embedding": {"optimizer": {"lr": 0.3}},
        "dense": {"optimizer": {"lr": 0.03}},
        "train": {
            "batch_size": 100,
            "epochs": 8,
            "log_every_steps": 1000,
            "eval_every_epochs": 0.2,
            "finish": "best",
            "early_stopping": {"metric": "auc"},
        },
    }
    return RunConfig.model_validate(document)


def choose(data: Path, run_dir: Path, seed: int) -> Chosen:
    """Train, end with the best weights, and look at the rows that nothing has looked at."""
    test = Trainer(settings(data, run_dir, seed), World.single()).run()[TEST]
    trained = load_trained(run_dir, "untouched", World.single())
    assert trained.step == test["step"]
    untouched = evaluate(trained.model, trained.reader, trained.world).to_dict()
    return Chosen(step=test["step"], test=test["auc"], untouched=untouched["auc"])


def trial(folder: Path, seed: int) -> dict[str, Chosen]:
    """One seed, by the split that chose; its files are gone afterwards."""
    place = folder / f"seed-{seed}"
    data = prepare_rows(place, seed)
    chosen = {split: choose(data[split], place / f"run-{split}", seed) for split in CHOOSERS}
    shutil.rmtree(place)
    return chosen


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of independent values, and the ends of its 95% interval by Student's t."""
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    reach = float(stats.t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1)) * error
    return mean, mean - reach, mean + reach


def lines(trials: Sequence[dict[str, Chosen]]) -> list[str]:
    """A table, one row per way to choose."""
    table = [
        "| chosen on | test AUC | AUC of 20,000 untouched rows | test - untouched | 95% interval | holds 0 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for split in CHOOSERS:
        runs = [chosen[split] for chosen in trials]
        mean, low, high = interval([run.flattery for run in runs])
        aucs = [float(np.mean([getattr(run, name) for run in runs])) for name in ("test", "untouched")]
        holds = "yes" if low <= 0 <= high else "no"
        table.append(f"| {split} | {aucs[0]:.4f} | {aucs[1]:.4f} | {mean:+.4f} | {low:+.4f} .. {high:+.4f} | {holds} |")
    return table


def main() -> None:
    num_seeds = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_SEEDS
    torch.set_num_threads(1)
    trials = []
    with tempfile.TemporaryDirectory(prefix="meseta-chosen-") as folder:
        for seed in range(num_seeds):
            trials.append(trial(Path(folder), seed))
            told = ", ".join(f"on {split} {run.flattery:+.4f}" for split, run in trials[-1].items())
            print(f"seed {seed}: test less untouched, chosen {told}", file=sys.stderr, flush=True)
    print("\n".join(lines(trials)))


if __name__ == "__main__":
    main()
