"""The lifetime window against scikit-learn and exact arithmetic: the same bits in any order, bounded error and size."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from meseta.spec import MesetaError
from meseta.train.metrics import LifetimeWindow, binned_auc, calibration, logloss, reliability_curve

SAMPLES = st.lists(
    st.tuples(st.floats(-40, 40, width=32), st.integers(0, 1), st.sampled_from([0.0, 1e-9, 0.1, 1.0, 1 / 3, 7.0, 1e9])),
    max_size=30,
)


def click_log(num_samples: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = (rng.random(num_samples) < 0.25).astype(np.float32)
    logits = (rng.normal(size=num_samples) + labels - 1.5).astype(np.float32)
    return logits, labels, rng.exponential(size=num_samples) * (rng.random(num_samples) < 0.9)


def filled(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> LifetimeWindow:
    window = LifetimeWindow()
    window.add(logits, labels, weights)
    return window


def text(window: LifetimeWindow) -> str:
    """Return the metrics with every bit."""
    return json.dumps(window.compute().to_dict())


@pytest.mark.parametrize("weighted", [False, True])
def test_agrees_with_scikit_learn(weighted: bool) -> None:
    logits, labels, weights = click_log(20_000)
    weights = weights if weighted else np.ones(20_000)
    metrics = filled(logits, labels, weights if weighted else None).compute()
    predictions = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
    base = np.full(20_000, np.average(labels, weights=weights))
    loss = log_loss(labels, predictions, sample_weight=weights)
    exact = roc_auc_score(labels, logits, sample_weight=weights)
    assert metrics.num_samples == (weights > 0).sum()
    assert metrics.num_positives == ((weights > 0) & (labels == 1)).sum()
    assert metrics.weight == pytest.approx(weights.sum(), rel=1e-13)
    assert metrics.logloss == pytest.approx(loss, rel=1e-13)
    assert metrics.ne == pytest.approx(loss / log_loss(labels, base, sample_weight=weights), rel=1e-12)
    assert metrics.calibration == pytest.approx(np.average(predictions, weights=weights) / base[0], rel=1e-12)
    assert abs(metrics.auc.value - exact) < 1e-5 < metrics.auc.error_bound < 1e-3


def test_reliability_is_exact_if_bins_do_not_divide_equal_logits() -> None:
    logits = np.round(np.random.default_rng(2).normal(size=4_000), 1)
    labels = np.random.default_rng(3).random(4_000) < 0.3
    weights = np.random.default_rng(4).exponential(size=4_000)
    for w in (None, weights):
        ours, exact = filled(logits, labels, w).compute().reliability, reliability_curve(logits, labels, weights=w)
        assert [b.num_samples for b in ours] == [b.num_samples for b in exact]
        assert [b.mean_label for b in ours] == pytest.approx([b.mean_label for b in exact], rel=1e-13)
        assert [b.mean_prediction for b in ours] == pytest.approx([b.mean_prediction for b in exact], rel=1e-13)


@settings(max_examples=50, deadline=None)
@given(SAMPLES)
def test_the_exact_auc_is_within_the_bound(samples: list[tuple[float, int, float]]) -> None:
    window = LifetimeWindow()
    pairs, won = Fraction(0), Fraction(0)
    for logit, label, weight in samples:
        window.add([logit], [label], [weight])
        for other, other_label, other_weight in samples:
            if label > other_label:
                product = Fraction(weight) * Fraction(other_weight)
                pairs += product
                won += product * (Fraction(1, 2) if logit == other else int(logit > other))
    binned = window.compute().auc
    if pairs:
        # Weights are truncated below 2**-64, which is 1e-10 of the smallest one.
        assert abs(binned.value - float(won / pairs)) <= binned.error_bound + 1e-9
    else:
        assert math.isnan(binned.value) and math.isnan(binned.error_bound)


def test_literal_values() -> None:
    # Bins are 1/512 wide: the first two scores share one, the third does not.
    binned = binned_auc([0.0, 0.001, 0.002], [1, 0, 0])
    assert (binned.value, binned.error_bound) == (0.25, 0.25)
    assert binned_auc([100.0, 20.0], [0, 1]).error_bound == 0.5  # the outermost bin contains all values beyond it
    metrics = filled([50.0, -50.0], [0, 1], [1.0, 3.0]).compute()
    assert metrics.logloss == 50.0 and metrics.weight == 4.0
    assert filled([1e100, 0.0], [0, 1], [1e9, 1e-9]).compute().logloss == pytest.approx(1e100)
    assert filled([3e38, 3e38], [0, 0]).compute().logloss == pytest.approx(3e38)
    # A very rare class: the entropy of its rate q is q (1 - log q).
    rare = filled([0.0, 0.0], [0, 1], [1e-9, 1e9]).compute()
    assert rare.ne == pytest.approx(math.log(2.0) / (1e-18 * (1.0 - math.log(1e-18))), rel=1e-9)
    assert filled([0.0] * 4, [1, 0, 0, 0]).compute().ne == pytest.approx(0.6931471805599453 / 0.5623351446188083)


@settings(max_examples=40, deadline=None)
@given(SAMPLES, st.randoms(use_true_random=False), st.integers(1, 4))
def test_order_ranks_and_batches_change_no_bit(samples: list[tuple], rng: object, num_ranks: int) -> None:
    whole = filled(*(np.array([s[i] for s in samples], np.float64) for i in range(3)))
    shuffled = list(samples)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    ranks = [LifetimeWindow() for _ in range(num_ranks)]
    for i, (logit, label, weight) in enumerate(shuffled):
        ranks[i % num_ranks].add([logit], [label], [weight])
    merged = LifetimeWindow.merge([window.get_state() for window in ranks])
    assert text(merged) == text(whole)
    states = zip(merged.get_state().values(), whole.get_state().values(), strict=True)
    assert all(np.array_equal(a, b) for a, b in states)


def test_large_batches_in_another_order_have_the_same_bits() -> None:
    logits, labels, weights = click_log(30_011)
    order = np.random.default_rng(1).permutation(30_011)
    split = LifetimeWindow()
    for part in np.array_split(order, 13):
        split.add(logits[part], labels[part], weights[part])
    assert text(split) == text(filled(logits, labels, weights))


def test_sums_are_exact() -> None:
    """Sums in float64, in any order, would lose the small losses next to a large one."""
    window = filled(np.array([1e17]), np.array([0]))
    window.add(np.zeros(100_000), np.zeros(100_000))
    exact = (Fraction(1e17) + 100_000 * Fraction(logloss([0.0], [0]))) / 100_001
    assert window.compute().logloss == float(exact)


def test_agrees_with_the_exact_window_on_a_short_run() -> None:
    logits, labels, weights = click_log(2_000, seed=5)
    metrics = filled(logits, labels, weights).compute()
    assert metrics.logloss == pytest.approx(logloss(logits, labels, weights), rel=1e-14)
    assert metrics.calibration == pytest.approx(calibration(logits, labels, weights), rel=1e-14)


def test_state_is_of_fixed_size_and_restores_every_bit() -> None:
    logits, labels, weights = click_log(5_000)
    window, empty = filled(logits, labels, weights), LifetimeWindow()
    assert [v.shape for v in window.get_state().values()] == [v.shape for v in empty.get_state().values()]
    assert sum(v.nbytes for v in window.get_state().values()) < 2e6
    restored = filled(logits[:7], labels[:7])
    restored.set_state(json.loads(json.dumps({k: v.tolist() for k, v in window.get_state().items()})))
    assert text(restored) == text(window)
    kept = window.get_state()
    window.add([1.0], [1])
    assert restored.num_samples == int(kept["counts"].sum()) == window.num_samples - 1
    window.reset()
    assert text(window) == text(empty)


def test_nothing_and_one_class_only() -> None:
    empty = LifetimeWindow().compute()
    assert (empty.num_samples, empty.weight, empty.reliability) == (0, 0.0, ())
    padding = filled([math.nan], [0.5], [0.0]).compute()
    for metrics in (empty, padding):
        assert all(math.isnan(v) for v in (metrics.logloss, metrics.ne, metrics.auc.value, metrics.calibration))
        json.dumps(metrics.to_dict(), allow_nan=False)
    negatives = filled([0.0, 1.0], [0, 0]).compute()
    assert math.isnan(negatives.auc.value) and math.isnan(negatives.ne) and math.isnan(negatives.calibration)
    assert math.isfinite(negatives.logloss)


def test_bad_values_are_raised_on_all_ranks() -> None:
    """`add` does not raise on the rank with the bad value. `compute` after a merge raises on all ranks."""
    good, bad = filled([1.0], [1]), filled([0.0, math.nan], [0, 1])
    bad.add([0.0], [0.5])
    merged = LifetimeWindow.merge([good.get_state(), bad.get_state()])
    with pytest.raises(MesetaError, match=r"logit 1 must be finite and at most .*, got nan"):
        merged.compute()
    with pytest.raises(MesetaError, match=r"logit 0 must be finite and at most 1e\+100, got 1e\+101"):
        filled(np.array([1e101]), [1]).compute()
    merged.reset()
    merged.add([0.0], [0], [-1.0])
    with pytest.raises(MesetaError, match=r"the weight of sample 0 must be .*, got -1"):
        merged.compute()
    with pytest.raises(MesetaError, match=r"same length, got shapes \[1\] and \[2\]"):
        merged.add([0.0], [0, 1])
    with pytest.raises(MesetaError, match="'counts' of a lifetime window must have shape"):
        merged.set_state({**good.get_state(), "counts": np.zeros((2, 7))})
