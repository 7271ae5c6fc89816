"""Test rows drawn anew, beside scikit-learn on the rows that were drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from meseta.report.quality.suite_result import EvalDataset
from meseta.spec import MesetaError
from meseta.train.quality.resampling import SortedPredictions, bootstrap_rows
from meseta.train.quality.study import SuiteRun
from meseta.train.sweep import Trial

NUM_ROWS = 300


def predictions(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, with ties among them, labels and weights."""
    draw = np.random.default_rng(seed)
    labels = (np.random.default_rng(0).random(NUM_ROWS) < 0.3).astype(np.float32)
    logits = np.round(draw.normal(size=NUM_ROWS) + labels - 1, 1).astype(np.float32)
    return logits, labels, np.random.default_rng(1).uniform(0.5, 2, NUM_ROWS)


def figures(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    rate = np.average(labels, weights=weights)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    loss = log_loss(labels, 1 / (1 + np.exp(-logits.astype(np.float64))), sample_weight=weights)
    return {"ne": loss / entropy, "auc": roc_auc_score(labels, logits, sample_weight=weights)}


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_that_come_more_than_once_count_as_often(weighted: bool) -> None:
    logits, labels, weights = predictions(3)
    rows = SortedPredictions.from_logits(logits, labels, weights if weighted else np.ones(1))
    draw = np.random.default_rng(5)
    for picked in (np.arange(NUM_ROWS), draw.integers(NUM_ROWS, size=NUM_ROWS), draw.integers(NUM_ROWS, size=NUM_ROWS)):
        found = rows.compute_metrics(np.bincount(picked, minlength=NUM_ROWS))
        oracle = figures(logits[picked], labels[picked], (weights if weighted else np.ones(NUM_ROWS))[picked])
        assert found == pytest.approx(oracle, rel=1e-9)


def test_one_class_alone_has_no_figures() -> None:
    found = SortedPredictions.from_logits(np.array([0.1, 0.2]), np.array([1.0, 1.0]), np.ones(1)).compute_metrics(
        np.array([1, 1])
    )
    assert np.isnan(found["auc"]) and np.isnan(found["ne"])


def runs(folder: Path, names: dict[str, list[int]]) -> dict[str, dict[int, SuiteRun]]:
    """Scored runs of configs, each on two seeds whose predictions are drawn by these numbers."""
    found: dict[str, dict[int, SuiteRun]] = {}
    for name, numbers in names.items():
        for seed, number in enumerate(numbers):
            run = SuiteRun(
                eval_dataset=EvalDataset(name="g"), name=name, config=folder / "c.yaml", seed=seed, data=folder,
                truth=None,
                trial=Trial(seed, {}, folder / name / f"seed-{seed}"), reads_test=True,
            )  # fmt: skip
            run.logits_file.parent.mkdir(exist_ok=True)
            logits, labels, _ = predictions(number)
            np.savez(run.logits_file, logits=logits, labels=labels, weights=np.ones(1))
            found.setdefault(name, {})[seed] = run
    return found


def test_both_configs_of_a_pair_see_the_same_rows(tmp_path: Path) -> None:
    found = bootstrap_rows("g", runs(tmp_path, {"a": [1, 2], "b": [3, 4], "a again": [1, 2]}), 200, seed=9)
    twin = found["g", "a", "a again", "auc"]
    assert (twin.mean, twin.low, twin.high, twin.p) == (0.0, 0.0, 0.0, 1.0)
    draw, ones = np.random.default_rng(2), np.ones(NUM_ROWS)
    means = []
    for _ in range(200):
        picked = draw.integers(NUM_ROWS, size=NUM_ROWS)
        auc = [figures(*(column[picked] for column in predictions(n)[:2]), ones)["auc"] for n in (1, 2, 3, 4)]
        means.append((auc[0] + auc[1] - auc[2] - auc[3]) / 2)
    one = found["g", "a", "b", "auc"]
    auc = [figures(*predictions(n)[:2], ones)["auc"] for n in (1, 2, 3, 4)]
    assert one.mean == pytest.approx((auc[0] + auc[1] - auc[2] - auc[3]) / 2, rel=1e-9)
    # Two estimates of one standard error from 200 draws each: 1 / sqrt(200) apart, and thrice that is allowed.
    assert (one.high - one.mean) / 1.959964 == pytest.approx(np.std(means, ddof=1), rel=0.21)


def test_predictions_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    found = runs(tmp_path, {"a": [1], "b": [2]})
    found["b"][0].logits_file.write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(MesetaError, match="cannot be read"):
        bootstrap_rows("g", found, 3, seed=0)
