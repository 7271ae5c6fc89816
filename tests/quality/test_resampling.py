"""Bootstrap over test rows, compared with scikit-learn on the resampled rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from meseta.spec import MesetaError
from tools.quality.comparison import EvalDataset
from tools.quality.resampling import SortedPredictions, bootstrap_rows
from tools.quality.study import SuiteRun

NUM_ROWS = 300


def predictions(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits with ties, labels and weights."""
    draw = np.random.default_rng(seed)
    labels = (np.random.default_rng(0).random(NUM_ROWS) < 0.3).astype(np.float32)
    logits = np.round(draw.normal(size=NUM_ROWS) + labels - 1, 1).astype(np.float32)
    return logits, labels, np.random.default_rng(1).uniform(0.5, 2, NUM_ROWS)


def expected_metrics(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    rate = np.average(labels, weights=weights)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    loss = log_loss(labels, 1 / (1 + np.exp(-logits.astype(np.float64))), sample_weight=weights)
    return {"ne": loss / entropy, "auc": roc_auc_score(labels, logits, sample_weight=weights)}


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_of_a_resample_match_those_of_its_rows(weighted: bool) -> None:
    logits, labels, weights = predictions(3)
    rows = SortedPredictions.from_logits(logits, labels, weights if weighted else np.ones(1))
    draw = np.random.default_rng(5)
    for picked in (np.arange(NUM_ROWS), draw.integers(NUM_ROWS, size=NUM_ROWS), draw.integers(NUM_ROWS, size=NUM_ROWS)):
        metrics = rows.compute_metrics(np.bincount(picked, minlength=NUM_ROWS))
        expected = expected_metrics(
            logits[picked], labels[picked], (weights if weighted else np.ones(NUM_ROWS))[picked]
        )
        assert metrics == pytest.approx(expected, rel=1e-9)


def test_metrics_of_a_single_class_are_nan() -> None:
    metrics = SortedPredictions.from_logits(np.array([0.1, 0.2]), np.array([1.0, 1.0]), np.ones(1)).compute_metrics(
        np.array([1, 1])
    )
    assert np.isnan(metrics["auc"]) and np.isnan(metrics["ne"])


def runs(folder: Path, names: dict[str, list[int]]) -> dict[str, dict[int, SuiteRun]]:
    """Return scored runs by config and seed. `names` has the seed of the predictions of each run."""
    runs_by_name: dict[str, dict[int, SuiteRun]] = {}
    for name, numbers in names.items():
        for seed, number in enumerate(numbers):
            run = SuiteRun(
                eval_dataset=EvalDataset(name="g"), name=name, config=folder / "c.yaml", seed=seed, data=folder,
                truth=None,
                number=seed, settings={}, run_dir=folder / name / f"seed-{seed}", reads_test=True,
            )  # fmt: skip
            run.logits_file.parent.mkdir(exist_ok=True)
            logits, labels, _ = predictions(number)
            np.savez(run.logits_file, logits=logits, labels=labels, weights=np.ones(1))
            runs_by_name.setdefault(name, {})[seed] = run
    return runs_by_name


def test_each_resample_has_the_same_rows_for_all_configs(tmp_path: Path) -> None:
    intervals = bootstrap_rows("g", runs(tmp_path, {"a": [1, 2], "b": [3, 4], "a again": [1, 2]}), 100, seed=9)
    copy = intervals["g", "a", "a again", "auc"]
    assert (copy.mean, copy.low, copy.high, copy.p) == (0.0, 0.0, 0.0, 1.0)
    draw, ones = np.random.default_rng(2), np.ones(NUM_ROWS)
    means = []
    for _ in range(100):
        picked = draw.integers(NUM_ROWS, size=NUM_ROWS)
        auc = [expected_metrics(*(column[picked] for column in predictions(n)[:2]), ones)["auc"] for n in (1, 2, 3, 4)]
        means.append((auc[0] + auc[1] - auc[2] - auc[3]) / 2)
    one = intervals["g", "a", "b", "auc"]
    auc = [expected_metrics(*predictions(n)[:2], ones)["auc"] for n in (1, 2, 3, 4)]
    assert one.mean == pytest.approx((auc[0] + auc[1] - auc[2] - auc[3]) / 2, rel=1e-9)
    # Two estimates of a standard error from 100 resamples differ by about 1 / sqrt(100). Allow three times as much.
    assert (one.high - one.mean) / 1.959964 == pytest.approx(np.std(means, ddof=1), rel=0.3)


def test_damaged_predictions_are_reported(tmp_path: Path) -> None:
    scored = runs(tmp_path, {"a": [1], "b": [2]})
    scored["b"][0].logits_file.write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(MesetaError, match="cannot be read"):
        bootstrap_rows("g", scored, 3, seed=0)
