"""Measure the bias of a metric by which weights were selected, on the validation and on the test split.

    python benchmarks/bench_chosen_split.py [num_seeds]

The model overfits a column of rare ids, so that evaluations of a few hundred rows vary by chance. Each seed trains
twice, selecting among forty evaluations by the AUC on `valid` or on `test`. The test AUC of these weights is compared
with their AUC on 20,000 untouched rows. A seed always gives the same result.
"""

import json
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
from common.command import make_parser
from common.paired import interval

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


@dataclass(frozen=True)
class Chosen:
    """AUC of the best weights of one run."""

    step: int
    test: float
    untouched: float

    @property
    def flattery(self) -> float:
        """Difference between the test AUC and the AUC of untouched rows."""
        return self.test - self.untouched


def write_rows(path: Path, num_rows: int, draw: np.random.Generator) -> None:
    """Write rows in which two columns have a weak effect, and a column of 400 ids has none."""
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
    """Prepare the rows with a split 'valid' and without it. Both datasets also have a split 'untouched'."""
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
    """Return the config of a model that overfits, with about forty evaluations."""
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
    """Train, and evaluate the best weights on untouched rows."""
    test = Trainer(settings(data, run_dir, seed), World.single()).run()[TEST]
    trained = load_trained(run_dir, "untouched", World.single())
    assert trained.step == test["step"]
    untouched = evaluate(trained.model, trained.reader, trained.world).to_dict()
    return Chosen(step=test["step"], test=test["auc"], untouched=untouched["auc"])


def trial(folder: Path, seed: int) -> dict[str, Chosen]:
    place = folder / f"seed-{seed}"
    data = prepare_rows(place, seed)
    chosen = {split: choose(data[split], place / f"run-{split}", seed) for split in CHOOSERS}
    shutil.rmtree(place)
    return chosen


def lines(trials: Sequence[dict[str, Chosen]]) -> list[str]:
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
    parser = make_parser(__doc__)
    parser.add_argument("num_seeds", type=int, nargs="?", default=NUM_SEEDS)
    num_seeds = parser.parse_args().num_seeds
    torch.set_num_threads(1)
    trials = []
    with tempfile.TemporaryDirectory(prefix="meseta-chosen-") as folder:
        for seed in range(num_seeds):
            trials.append(trial(Path(folder), seed))
            summary = ", ".join(f"on {split} {run.flattery:+.4f}" for split, run in trials[-1].items())
            print(f"seed {seed}: test less untouched, chosen {summary}", file=sys.stderr, flush=True)
    print("\n".join(lines(trials)))


if __name__ == "__main__":
    main()
