"""Example weights and average precision against scikit-learn, literal values and the meaning of a weight."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from meseta.spec import MesetaError
from meseta.train.metrics import (
    Metrics,
    MetricWindow,
    auc,
    calibration,
    compute_metrics,
    logloss,
    normalized_entropy,
    pr_auc,
    reliability_curve,
)

# (logit, label, weight): few distinct values make ties and zeros common.
SAMPLES = st.lists(
    st.tuples(st.integers(-3, 3), st.integers(0, 1), st.sampled_from([0.0, 0.1, 1.0, 2.5, 7.0])), max_size=40
)


def weighted_log(num_samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logits with many ties, labels, and weights of which a tenth are 0."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(num_samples) < 0.25).astype(np.float32)
    logits = np.round(rng.normal(size=num_samples) + labels - 1.5, 1).astype(np.float32)
    weights = rng.exponential(size=num_samples) * (rng.random(num_samples) < 0.9)
    return logits, labels, weights


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weighted_metrics_agree_with_scikit_learn(dtype: type) -> None:
    logits, labels, weights = weighted_log(20_000)
    weights = weights.astype(dtype)
    metrics = compute_metrics(logits, labels, weights)
    exact = weights.astype(np.float64)
    base = np.full(len(labels), np.average(labels, weights=exact))
    loss = log_loss(labels, sigmoid(logits), sample_weight=exact)
    assert metrics.num_samples == (weights > 0).sum()
    assert metrics.num_positives == ((weights > 0) & (labels == 1)).sum()
    assert metrics.weight == pytest.approx(exact.sum(), rel=1e-13)
    assert metrics.auc == pytest.approx(roc_auc_score(labels, logits, sample_weight=exact), abs=1e-12)
    assert metrics.pr_auc == pytest.approx(average_precision_score(labels, logits, sample_weight=exact), abs=1e-12)
    assert metrics.logloss == pytest.approx(loss, rel=1e-12)
    assert metrics.ne == pytest.approx(loss / log_loss(labels, base, sample_weight=exact), rel=1e-12)
    expected = np.average(sigmoid(logits), weights=exact) / base[0]
    assert metrics.calibration == pytest.approx(expected, rel=1e-12)


@given(SAMPLES)
def test_small_sets_agree_with_scikit_learn(samples: list[tuple[int, int, float]]) -> None:
    logits, labels, weights = (
        (np.array(column, dtype=float) for column in zip(*samples, strict=True))
        if samples
        else (np.empty(0) for _ in range(3))
    )
    metrics = compute_metrics(logits, labels, weights)
    classes = set(labels[weights > 0])
    assert math.isnan(metrics.auc) == math.isnan(metrics.ne) == (classes != {0.0, 1.0})
    assert math.isnan(metrics.pr_auc) == math.isnan(metrics.calibration) == (1.0 not in classes)
    assert math.isnan(metrics.logloss) == (not classes)
    if classes == {0.0, 1.0}:
        assert metrics.auc == pytest.approx(roc_auc_score(labels, logits, sample_weight=weights), abs=1e-12)
        expected = average_precision_score(labels, logits, sample_weight=weights)
        assert metrics.pr_auc == pytest.approx(expected, abs=1e-12)


def test_average_precision_agrees_with_scikit_learn() -> None:
    for rate in (0.02, 0.9):
        rng = np.random.default_rng(1)
        labels = rng.random(5_000) < rate
        scores = rng.normal(size=5_000) + labels
        for s in (scores, np.round(scores, 1)):
            assert pr_auc(s, labels) == pytest.approx(average_precision_score(labels, s), abs=1e-13)


def test_literal_values() -> None:
    # From the top: positive, negative, positive, negative: (1/1 + 2/3) / 2.
    assert pr_auc([4.0, 3.0, 2.0, 1.0], [1, 0, 1, 0]) == (1.0 + 2.0 / 3.0) / 2.0
    assert pr_auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]) == pytest.approx(0.8333333333333333, abs=1e-16)
    assert pr_auc([1.0, 1.0, 1.0, 1.0], [1, 0, 0, 0]) == 0.25  # one threshold for all
    assert pr_auc([1.0, 2.0], [1, 1]) == 1.0
    # Weighted pairs: 3 * 1 in order and 3 * 2 reversed, of 9.
    assert auc([1.0, 0.0, 2.0], [1, 0, 0], [3.0, 1.0, 2.0]) == pytest.approx(1.0 / 3.0, abs=1e-16)
    assert auc([1.0, 1.0, 0.0], [1, 0, 0], [1.0, 1.0, 3.0]) == (0.5 * 1 + 3) / 4
    # A positive of weight 1 and a negative of weight 3, at even odds.
    assert logloss([0.0, 0.0], [1, 0], [1.0, 3.0]) == pytest.approx(math.log(2.0), rel=1e-15)
    assert normalized_entropy([0.0, 0.0], [1, 0], [1.0, 3.0]) == pytest.approx(
        0.6931471805599453 / 0.5623351446188083, rel=1e-14
    )
    assert calibration([0.0, 0.0], [1, 0], [1.0, 3.0]) == 2.0


def test_weighted_reliability() -> None:
    (only,) = reliability_curve([0.0, 0.0, 0.0], [1, 0, 0], weights=[1.0, 3.0, 0.0])
    assert (only.mean_prediction, only.mean_label, only.num_samples) == (0.5, 0.25, 2)
    logits, labels, weights = weighted_log(3_000)
    curve = reliability_curve(logits, labels, 10, weights)
    kept = weights > 0
    assert sum(b.num_samples for b in curve) == kept.sum()
    order = np.argsort(logits[kept], kind="stable")
    ends = np.cumsum([b.num_samples for b in curve])
    for b, part in zip(curve, np.split(order, ends[:-1]), strict=True):
        w = weights[kept][part]
        assert b.mean_label == pytest.approx(np.average(labels[kept][part], weights=w), rel=1e-12)
        assert b.mean_prediction == pytest.approx(np.average(sigmoid(logits[kept][part]), weights=w), rel=1e-12)


def test_reliability_agrees_with_scikit_learn() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=2_000)
    labels = rng.random(2_000) < sigmoid(logits)
    observed, predicted = calibration_curve(labels, sigmoid(logits), n_bins=20, strategy="quantile")
    curve = reliability_curve(logits, labels)
    # Its edges are interpolated quantiles, ours are samples. Without ties both delimit the same samples.
    assert [b.mean_label for b in curve] == pytest.approx(observed, abs=1e-12)
    assert [b.mean_prediction for b in curve] == pytest.approx(predicted, abs=1e-12)


def test_a_whole_weight_repeats_a_sample() -> None:
    logits, labels, _ = weighted_log(500)
    times = np.random.default_rng(2).integers(0, 4, 500)
    weighted = compute_metrics(logits, labels, times)
    repeated = compute_metrics(np.repeat(logits, times), np.repeat(labels, times))
    for name in ("weight", "logloss", "ne", "auc", "pr_auc", "calibration"):
        assert getattr(weighted, name) == pytest.approx(getattr(repeated, name), rel=1e-13)
    assert weighted.num_samples == np.count_nonzero(times)


@pytest.mark.parametrize("weight", [1.0, 0.1, 1e-9, 1e9])
def test_equal_weights_change_no_bit(weight: float) -> None:
    logits, labels, _ = weighted_log(1_000)
    weighted, plain = compute_metrics(logits, labels, np.full(1_000, weight)), compute_metrics(logits, labels)
    assert weighted.weight == pytest.approx(1_000 * weight, rel=1e-15)
    assert {**weighted.to_dict(), "weight": 1_000.0} == plain.to_dict()


def test_zero_weights_count_for_nothing() -> None:
    """Padding may hold any value, so no metric may depend on it."""
    logits, labels, weights = weighted_log(300)
    kept = weights > 0
    logits[~kept], labels[~kept] = math.nan, 0.5
    assert compute_metrics(logits, labels, weights) == compute_metrics(logits[kept], labels[kept], weights[kept])
    nothing = compute_metrics([1.0, math.nan], [0, 1], [0.0, 0.0])
    assert (nothing.num_samples, nothing.weight, nothing.reliability) == (0, 0.0, ())
    assert all(math.isnan(v) for v in (nothing.auc, nothing.pr_auc, nothing.logloss, nothing.ne, nothing.calibration))
    json.dumps(nothing.to_dict(), allow_nan=False)


@settings(max_examples=50, deadline=None)
@given(SAMPLES, st.randoms(use_true_random=False), st.integers(1, 4))
def test_order_and_ranks_change_no_bit(samples: list[tuple[int, int, float]], rng: object, num_ranks: int) -> None:
    # Scaled, so that sums are rounded.
    rows = [(logit * 0.37, label, weight * 0.3) for logit, label, weight in samples]
    shuffled = list(rows)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    ranks = [MetricWindow() for _ in range(num_ranks)]
    for i, (logit, label, weight) in enumerate(shuffled):
        ranks[i % num_ranks].add([logit], [label], [weight])
    merged = MetricWindow.merge([window.get_state() for window in ranks])
    whole = MetricWindow()
    whole.add(*([[row[i] for row in rows] for i in range(3)]))
    assert_same_bits(merged.compute(), whole.compute())


def assert_same_bits(left: Metrics, right: Metrics) -> None:
    """Compare as text, in which nan equals nan and every bit of a float is visible."""
    assert json.dumps(left.to_dict()) == json.dumps(right.to_dict())


def test_large_windows_in_another_order_have_the_same_bits() -> None:
    logits, labels, weights = weighted_log(50_000)
    order = np.random.default_rng(5).permutation(50_000)
    assert_same_bits(
        compute_metrics(logits, labels, weights), compute_metrics(logits[order], labels[order], weights[order])
    )


def test_batches_without_weights_weigh_one() -> None:
    window = MetricWindow()
    window.add([1.0, 2.0], [0, 1])
    window.add([1.5], [1], [2.0])
    expected = compute_metrics([1.0, 2.0, 1.5], [0, 1, 1], [1.0, 1.0, 2.0])
    assert window.compute() == expected
    restored = MetricWindow()
    restored.set_state({k: v.tolist() for k, v in window.get_state().items()})
    assert restored.compute() == expected
    assert MetricWindow.merge([MetricWindow().get_state(), window.get_state()]).compute() == expected


def test_added_weights_are_copies() -> None:
    window, weights = MetricWindow(), np.ones(2, np.float32)
    window.add([0.0, 1.0], [0, 1], weights)
    weights[:] = -1.0
    assert window.compute().weight == 2.0


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, 1e-10, 2e9])
def test_bad_weights_are_named_by_compute(weight: float) -> None:
    window = MetricWindow()
    window.add([0.0, 1.0], [0, 1], [1.0, weight])
    with pytest.raises(MesetaError, match=r"weight of sample 1 must be 0 or in 1e-09..1e\+09, got"):
        window.compute()


def test_weights_of_another_shape_or_type_are_refused() -> None:
    with pytest.raises(MesetaError, match="weights must be numbers, got dtype <U1"):
        MetricWindow().add([0.0], [0], ["a"])
    with pytest.raises(MesetaError, match=r"weights must have one entry for each of 2 samples, got shape \[1\]"):
        MetricWindow().add([0.0, 1.0], [0, 1], [1.0])
