"""Measure runs with hundreds to thousands of features by phase.

    python benchmarks/bench_wide.py [--features N,N] [--models A,B] [--ranks N,N]

Datasets have 4,000 rows of N sparse columns, runs one epoch. The limit of everything except training is 15 s for 2,000
features. A DLRM of 5,000 features must be refused by the memory check within 20 s.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from record import record

ROOT = Path(__file__).resolve().parent.parent
TEST = "tests/train/test_wide.py"
NUM_ROWS = 4000
LIMIT_S = {"2000": 15.0}
TOO_WIDE, REFUSED_S = 5000, 20.0
MESETA = [sys.executable, "-m", "meseta.cli.main"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", default="500,1000,2000,4000")
    parser.add_argument("--models", default="logistic_regression,deepfm")
    parser.add_argument("--ranks", default="1,2")
    options = parser.parse_args()
    subprocess.run([sys.executable, "-m", "pytest", "-q", TEST], check=True, cwd=ROOT)
    beyond: dict[str, dict[int, float]] = {}
    for num_features in map(int, options.features.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            prepare_s = prepared(Path(folder), num_features)
            tell(f"{num_features} features", "prepare", prepare_s, prepare_s)
            for model in options.models.split(","):
                for ranks in map(int, options.ranks.split(",")):
                    phases = trained(Path(folder), model, ranks)
                    case = f"{model}, {ranks} rank{'s' * (ranks > 1)}"
                    rest = sum(seconds for phase, seconds in phases.items() if phase != "training")
                    beyond.setdefault(case, {})[num_features] = rest
                    for phase, seconds in {**phases, "all but training": rest}.items():
                        tell(f"{num_features} features, {case}", phase, seconds, phases["training"])
    with tempfile.TemporaryDirectory() as folder:
        prepared(Path(folder), TOO_WIDE)
        for ranks in map(int, options.ranks.split(",")):
            seconds, case = refused(Path(folder), ranks), f"{TOO_WIDE} features, dlrm, {ranks} rank{'s' * (ranks > 1)}"
            record("wide", case, "until refused", seconds, "s", peer="the limit", peer_value=REFUSED_S)
    for case, by_width in beyond.items():
        print(f"{case}: all but training by features: " + ", ".join(f"{n}: {s:.1f} s" for n, s in by_width.items()))


def prepared(folder: Path, num_features: int) -> float:
    """Write and prepare a dataset. Returns the seconds of `meseta prepare`."""
    draw = np.random.default_rng(num_features)
    ids = draw.integers(0, 50, (NUM_ROWS, num_features))
    dense = draw.random((NUM_ROWS, 2))
    with (folder / "wide.csv").open("w") as file:
        file.write(",".join(["label", "d0", "d1", *(f"c{f}" for f in range(num_features))]) + "\n")
        for label, (first, second), row in zip(draw.random(NUM_ROWS) < 0.3, dense, ids, strict=True):
            file.write(f"{int(label)},{first:.4f},{second:.4f}," + ",".join(f"v{value}" for value in row) + "\n")
    start_s = time.perf_counter()
    command = [*MESETA, "prepare", str(folder / "wide.csv"), "--out", str(folder / "data"), "--hash-rows", "1000"]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start_s


def train_command(folder: Path, model: str, ranks: int) -> list[str]:
    run_dir = folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    settings = [f"run_dir={run_dir}", f"data.dir={folder / 'data'}", f"model.name={model}", "train.batch_size=512"]
    return [*MESETA, "train", *settings, "--nproc", str(ranks)]


def refused(folder: Path, ranks: int) -> float:
    """Return the seconds until the memory check refuses a model that does not fit."""
    start_s = time.perf_counter()
    done = subprocess.run(train_command(folder, "dlrm", ranks), capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start_s
    if done.returncode != 1 or "activations" not in done.stderr:
        raise SystemExit(f"dlrm of {TOO_WIDE} features ended with {done.returncode}, not with the table: {done.stderr}")
    return seconds


def trained(folder: Path, model: str, ranks: int) -> dict[str, float]:
    """Return the seconds of a run by phase."""
    run_dir = folder / "run"
    start_s, start = time.perf_counter(), time.time()
    subprocess.run(train_command(folder, model, ranks), check=True, capture_output=True)
    wall_s = time.perf_counter() - start_s
    ready, shown = ((run_dir / name).stat().st_mtime - start for name in ("config.yaml", "summary.json"))
    train_s = json.loads((run_dir / "summary.json").read_text())["train_s"]
    return {
        "setting up": ready,
        "training": train_s,
        "evaluation and checkpoint": shown - ready - train_s,
        "report and end": wall_s - shown,
    }


def tell(case: str, metric: str, seconds: float, training_s: float) -> None:
    limit = LIMIT_S.get(case.partition(" ")[0]) if metric == "all but training" else None
    peer, value = ("training", training_s) if limit is None else ("the limit", limit)
    record("wide", case, metric, seconds, "s", peer=peer, peer_value=value)


if __name__ == "__main__":
    main()
