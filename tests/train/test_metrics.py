"""Metrics against scikit-learn, literal values and high-precision arithmetic."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from meseta.spec import MesetaError
from meseta.train.metrics import (
    MetricWindow,
    auc,
    base_rate_entropy,
    calibration,
    compute_metrics,
    logloss,
    normalized_entropy,
    reliability_curve,
)


def click_log(num_samples: int, seed: int = 0, rate: float = 0.25) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = (rng.random(num_samples) < rate).astype(np.float32)
    logits = (rng.normal(size=num_samples) + labels - 1.5).astype(np.float32)
    return logits, labels


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))


@pytest.mark.parametrize("rate", [0.03, 0.5, 0.9])
def test_agrees_with_scikit_learn(rate: float) -> None:
    logits, labels = click_log(20_000, rate=rate)
    metrics = compute_metrics(logits, labels)
    assert metrics.num_samples == 20_000
    assert metrics.num_positives == int(labels.sum())
    assert metrics.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-13)
    assert metrics.logloss == pytest.approx(log_loss(labels, sigmoid(logits)), rel=1e-13)
    base = np.full(20_000, labels.mean(dtype=np.float64))
    assert metrics.ne == pytest.approx(log_loss(labels, sigmoid(logits)) / log_loss(labels, base), rel=1e-12)
    assert metrics.calibration == pytest.approx(sigmoid(logits).mean() / labels.mean(dtype=np.float64), rel=1e-12)


@pytest.mark.parametrize("scale", [1.0, 12.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_clamped_log_loss_clips_probabilities(scale: float, weighted: bool) -> None:
    logits, labels = click_log(5_000)
    logits *= np.float32(scale)
    weights = np.random.default_rng(1).uniform(0.5, 2, 5_000) if weighted else None
    clipped = np.clip(sigmoid(logits), 1e-7, 1 - 1e-7)
    metrics = compute_metrics(logits, labels, weights)
    assert metrics.logloss_clamped == pytest.approx(log_loss(labels, clipped, sample_weight=weights), rel=1e-9)
    assert (metrics.logloss_clamped < metrics.logloss) == (scale > 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
def test_auc_with_ties_counts_pairs(pairs: list[tuple[int, bool]]) -> None:
    scores = np.array([score for score, _ in pairs], dtype=np.float32)
    labels = np.array([label for _, label in pairs])
    won = [(p > n) + 0.5 * (p == n) for p in scores[labels] for n in scores[~labels]]
    if won:
        assert auc(scores, labels) == sum(won) / len(won)
        assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    else:
        assert math.isnan(auc(scores, labels))


def test_literal_values() -> None:
    assert auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == 0.75
    assert auc([2.0, 2.0, 2.0], [0, 1, 1]) == 0.5
    assert auc([0.0, -0.0], [0, 1]) == 0.5
    assert logloss([0.0, 0.0], [0, 1]) == pytest.approx(math.log(2.0), rel=1e-15)
    assert base_rate_entropy(1, 4) == pytest.approx(0.5623351446188083, rel=1e-15)
    constant = math.log(0.25 / 0.75)
    assert normalized_entropy([constant] * 4, [0, 0, 1, 0]) == pytest.approx(1.0, rel=1e-15)
    assert calibration([constant] * 4, [0, 1, 1, 0]) == pytest.approx(0.5, rel=1e-15)


def test_extreme_logits_keep_their_loss() -> None:
    """The loss of a confident error is its logit. A clamped probability would give 34.5 or 16.1."""
    assert logloss([50.0], [0]) == pytest.approx(50.0, rel=1e-15)
    assert logloss([-50.0], [1]) == pytest.approx(50.0, rel=1e-15)
    assert logloss([50.0], [1]) == pytest.approx(math.exp(-50.0), rel=1e-12)
    assert logloss([-50.0], [0]) == pytest.approx(math.exp(-50.0), rel=1e-12)
    assert logloss(np.array([3e38], dtype=np.float32), [0]) == pytest.approx(3e38, rel=1e-6)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_has_no_auc_and_no_ne(label: int) -> None:
    metrics = compute_metrics([0.3, -0.2, 0.1], [label] * 3)
    assert math.isnan(metrics.auc) and math.isnan(metrics.ne)
    assert math.isfinite(metrics.logloss)
    assert math.isnan(metrics.calibration) == (label == 0)
    assert metrics.to_dict()["auc"] is None


def test_empty() -> None:
    metrics = MetricWindow().compute()
    assert (metrics.num_samples, metrics.num_positives, metrics.reliability) == (0, 0, ())
    assert all(math.isnan(v) for v in (metrics.logloss, metrics.ne, metrics.auc, metrics.calibration))
    json.dumps(metrics.to_dict(), allow_nan=False)


def test_reliability_has_equal_counts() -> None:
    logits, labels = click_log(10_007)
    curve = reliability_curve(logits, labels)
    assert len(curve) == 20
    assert sum(b.num_samples for b in curve) == 10_007
    assert {b.num_samples for b in curve} <= {500, 501}
    order = np.argsort(logits, kind="stable")
    edges = [k * 10_007 // 20 for k in range(21)]
    for b, start, end in zip(curve, edges[:-1], edges[1:], strict=True):
        assert b.mean_prediction == pytest.approx(sigmoid(logits[order[start:end]]).mean(), rel=1e-12)
        assert b.mean_label == pytest.approx(labels[order[start:end]].mean(), rel=1e-6)


def test_reliability_keeps_equal_predictions_together() -> None:
    labels = np.tile([0, 0, 0, 1], 100)
    (only,) = reliability_curve(np.zeros(400), labels)
    assert (only.mean_prediction, only.mean_label, only.num_samples) == (0.5, 0.25, 400)
    low, high = reliability_curve(np.repeat([-1.0, 1.0], 200), labels)
    assert low.num_samples == high.num_samples == 200
    assert low.mean_label == high.mean_label == 0.25


def test_reliability_of_fewer_samples_than_bins() -> None:
    curve = reliability_curve([1.0, -1.0, 0.0], [1, 0, 1])
    assert [b.num_samples for b in curve] == [1, 1, 1]
    assert [b.mean_label for b in curve] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_merged_ranks_give_the_same_bits(num_ranks: int) -> None:
    logits, labels = click_log(4_000)
    whole = MetricWindow()
    ranks = [MetricWindow() for _ in range(num_ranks)]
    for start in range(0, 4_000, 400):
        batch = slice(start, start + 400)
        whole.add(logits[batch], labels[batch])
        for rank, window in enumerate(ranks):
            window.add(logits[batch][rank::num_ranks], labels[batch][rank::num_ranks])
    merged = MetricWindow.merge([window.get_state() for window in ranks])
    assert merged.num_samples == 4_000
    assert merged.compute() == whole.compute()


def test_merge_with_an_empty_rank_keeps_the_type() -> None:
    window = MetricWindow()
    window.add(np.zeros(3, np.float32), np.ones(3, np.float32))
    merged = MetricWindow.merge([MetricWindow().get_state(), window.get_state()]).get_state()
    assert merged["logits"].dtype == np.float32 and merged["labels"].dtype == np.uint8


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_state_restores_every_bit(dtype: type) -> None:
    logits, labels = click_log(1_000)
    window = MetricWindow()
    window.add(logits.astype(dtype), labels)
    restored = MetricWindow()
    restored.add([9.0], [1])
    restored.set_state(window.get_state())
    assert restored.get_state()["logits"].dtype == dtype
    assert restored.get_state()["logits"].tobytes() == window.get_state()["logits"].tobytes()
    as_json = json.loads(json.dumps({k: v.tolist() for k, v in window.get_state().items()}))
    restored.set_state(as_json)
    assert restored.compute() == window.compute()
    window.reset()
    assert window.num_samples == 0


def test_added_batches_are_copies() -> None:
    logits, labels = click_log(10)
    window = MetricWindow()
    window.add(logits, labels)
    kept = window.compute()
    logits[:], labels[:] = 0.0, 0.0
    assert window.compute() == kept


def test_bad_values_are_named_by_compute() -> None:
    window = MetricWindow()
    window.add([0.0, math.nan], [0, 1])
    with pytest.raises(MesetaError, match=r"logit 1 must be finite and at most .*, got nan"):
        window.compute()
    window.reset()
    window.add([0.0, 1.0, 2.0], [0, 1, 0.5])
    with pytest.raises(MesetaError, match="label of sample 2 must be 0 or 1"):
        window.compute()
    with pytest.raises(MesetaError, match=r"same length, got shapes \[2\] and \[3\]"):
        window.add([0.0, 1.0], [0, 1, 0])
    with pytest.raises(MesetaError, match="must be vectors"):
        window.add([[0.0, 1.0]], [[0, 1]])
