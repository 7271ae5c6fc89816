"""Importances of trained models on logs with planted effects, against the true click probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.stats import spearmanr

from meseta.data.prepare import PrepareOptions, prepare
from small_run import settings, train

EFFECTS = {"x0": 0.9, "c0": 0.65, "x1": 0.47, "bag0": 0.34, "c1": 0.24, "x2": 0.17, "c2": 0.125, "x3": 0.09}
"""Standard deviation of the part of the logit that each planted column adds."""
NOISE = [*(f"x{i}" for i in range(4, 9)), *(f"c{i}" for i in range(3, 9)), "bag1"]
NUM_IDS = 12


@dataclass(frozen=True)
class Measured:
    """Importances of one run, in units of NE, and the true ones."""

    planted: dict[str, tuple[float, float, float]]
    noise: dict[str, tuple[float, float, float]]
    true_gain: dict[str, float]
    """Increase of the NE of the true probabilities if the column is permuted."""

    @property
    def rank_correlation(self) -> float:
        names = list(self.true_gain)
        return float(spearmanr([self.true_gain[n] for n in names], [self.planted[n][0] for n in names]).statistic)


def standardized(values: np.ndarray) -> np.ndarray:
    return np.asarray((values - values.mean()) / values.std())


def measure(folder: Path, seed: int, num_rows: int, num_valid: int) -> Measured:
    """Train on a log of `num_rows` rows, the last `num_valid` of which are the split test."""
    draw = np.random.default_rng(seed)
    columns, parts = {}, {}
    for name in [*EFFECTS, *NOISE]:
        if name.startswith("x"):
            columns[name] = draw.normal(size=num_rows).astype(np.float32)
            parts[name] = standardized(columns[name])
            continue
        effects = draw.normal(size=NUM_IDS)
        if name.startswith("c"):
            ids = draw.integers(0, NUM_IDS, num_rows)
            columns[name], parts[name] = [f"v{i}" for i in ids], standardized(effects[ids])
        else:
            bags = [draw.integers(0, NUM_IDS, size) for size in draw.integers(0, 4, num_rows)]
            columns[name] = pa.array([bag.tolist() for bag in bags], pa.list_(pa.int64()))
            parts[name] = standardized(np.array([effects[bag].sum() for bag in bags]))
    logit = -1.0 + sum(size * parts[name] for name, size in EFFECTS.items())
    columns["label"] = draw.random(num_rows) < 1 / (1 + np.exp(-logit))
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", slice(0, num_rows - num_valid)), ("test", slice(num_rows - num_valid, num_rows))):
        pq.write_table(pa.table(columns)[rows], folder / f"{name}.parquet")
    sparse = [name for name in columns if name[0] in "cb"]
    paths = [str(folder / f"{name}.parquet") for name in ("train", "test")]
    prepare(PrepareOptions(sources=paths, out=folder / "data", test_files=paths[1:], sparse=sparse, hash_rows=50))
    chosen = {"train__batch_size": 256, "train__epochs": 2, "train__eval_batch_size": 4096, "report__importance": True}
    chosen |= {
        "model__name": "deepfm",
        "model__deep_mlp": [16],
        "dense__optimizer__lr": 0.003,
        "train__log_every_steps": 100,
    }
    chosen |= {"embedding__init__scale": 0.01, "embedding__optimizer__lr": 0.02, "seed": seed}
    summary = train(settings(folder / "data", folder / "run", **chosen))["importance"]
    unit = summary["constant_logloss"]
    bounds = {f["name"]: tuple(f[key] / unit for key in ("logloss", "low", "high")) for f in summary["features"]}
    return Measured(
        planted={name: bounds[name] for name in EFFECTS},
        noise={name: bounds[name] for name in NOISE},
        true_gain={name: true_gain(logit, size * parts[name], unit, draw) for name, size in EFFECTS.items()},
    )


def true_gain(logit: np.ndarray, part: np.ndarray, unit: float, draw: np.random.Generator) -> float:
    p, permuted = 1 / (1 + np.exp(-logit)), logit - part + draw.permutation(part)
    return float(np.mean(np.logaddexp(0, permuted) - p * permuted - np.logaddexp(0, logit) + p * logit) / unit)


def test_strong_features_come_first(tmp_path: Path) -> None:
    measured = measure(tmp_path, 0, 12_000, 4_000)
    assert measured.rank_correlation >= 0.8
    assert all(measured.planted[name][1] > 0 for name in list(EFFECTS)[:4])
    assert sum(low <= 0 <= high for _, low, high in measured.noise.values()) >= 10


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_order_and_coverage_over_ten_seeds(tmp_path: Path) -> None:
    runs = [measure(tmp_path / str(seed), seed, 54_000, 14_000) for seed in range(10)]
    noise = [low <= 0 <= high for run in runs for _, low, high in run.noise.values()]
    detected = [run.planted[name][1] > 0 for run in runs for name, gain in run.true_gain.items() if gain > 0.001]
    correlation = np.mean([run.rank_correlation for run in runs])
    print(f"rank correlation {correlation:.3f}, noise {np.mean(noise):.3f} of {len(noise)}, "
          f"detected {np.mean(detected):.3f} of {len(detected)}")  # fmt: skip
    assert correlation >= 0.9
    assert len(noise) >= 100 and np.mean(noise) >= 0.9
    assert np.mean(detected) >= 0.9
