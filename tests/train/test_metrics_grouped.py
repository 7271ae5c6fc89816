"""Metrics by group against scikit-learn, group by group, and literal values."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score, roc_auc_score

from meseta.spec import MesetaError
from meseta.train.metrics import GroupedMetric, MetricWindow, compute_metrics, grouped_auc, grouped_ndcg

# (score, label, group, weight)
SAMPLES = st.lists(
    st.tuples(
        st.integers(-2, 2), st.integers(0, 1), st.sampled_from([-7, 0, 2**40]), st.sampled_from([0.0, 0.3, 1.0, 2.0])
    ),
    min_size=1,
    max_size=40,
)


def columns(samples: list[tuple]) -> list[np.ndarray]:
    return [np.array(column) for column in zip(*samples, strict=True)]


def auc_one_by_one(scores: np.ndarray, labels: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> GroupedMetric:
    aucs, impressions, left_out = [], [], 0
    for key in np.unique(groups[weights > 0]):
        members = (groups == key) & (weights > 0)
        if len(set(labels[members])) == 2:
            aucs.append(roc_auc_score(labels[members], scores[members], sample_weight=weights[members]))
            impressions.append(weights[members].sum())
        else:
            left_out += 1
    value = float(np.average(aucs, weights=impressions)) if aucs else math.nan
    return GroupedMetric(value=value, num_groups=len(aucs), num_skipped_groups=left_out)


def ndcg_one_by_one(
    scores: np.ndarray, gains: np.ndarray, groups: np.ndarray, weights: np.ndarray, k: int | None
) -> GroupedMetric:
    values, shares, left_out = [], [], 0
    for key in np.unique(groups[weights > 0]):
        members = (groups == key) & (weights > 0)
        if not gains[members].any():
            left_out += 1
            continue
        # scikit-learn refuses a ranking of one, which is perfect.
        values.append(ndcg_score([gains[members]], [scores[members]], k=k) if members.sum() > 1 else 1.0)
        shares.append(weights[members].mean())
    value = float(np.average(values, weights=shares)) if values else math.nan
    return GroupedMetric(value=value, num_groups=len(values), num_skipped_groups=left_out)


def check(ours: GroupedMetric, expected: GroupedMetric) -> None:
    assert (ours.num_groups, ours.num_skipped_groups) == (expected.num_groups, expected.num_skipped_groups)
    assert ours.value == pytest.approx(expected.value, abs=1e-12, nan_ok=True)


@given(SAMPLES)
def test_grouped_auc_agrees_with_scikit_learn(samples: list[tuple]) -> None:
    scores, labels, groups, weights = columns(samples)
    check(grouped_auc(scores, labels, groups, weights), auc_one_by_one(scores, labels, groups, weights))
    ones = np.ones(len(scores))
    check(grouped_auc(scores, labels, groups), auc_one_by_one(scores, labels, groups, ones))


@given(SAMPLES, st.sampled_from([None, 1, 2, 5, 100]))
def test_ndcg_agrees_with_scikit_learn(samples: list[tuple], k: int | None) -> None:
    scores, labels, groups, weights = columns(samples)
    gains = labels * np.arange(1, len(labels) + 1) % 5  # grades 0 to 4
    check(grouped_ndcg(scores, gains, groups, weights, k), ndcg_one_by_one(scores, gains, groups, weights, k))
    ones = np.ones(len(scores))
    check(grouped_ndcg(scores, gains, groups, k=k), ndcg_one_by_one(scores, gains, groups, ones, k))


def test_many_groups() -> None:
    rng = np.random.default_rng(0)
    groups, labels = rng.integers(0, 150, 2_000), (rng.random(2_000) < 0.1).astype(float)
    scores, weights = np.round(rng.normal(size=2_000) + labels, 1), rng.exponential(size=2_000)
    check(grouped_auc(scores, labels, groups, weights), auc_one_by_one(scores, labels, groups, weights))
    check(grouped_ndcg(scores, labels, groups, weights, 5), ndcg_one_by_one(scores, labels, groups, weights, 5))


def test_ndcg_of_rankings_of_one_length() -> None:
    """A row of scikit-learn is a group here. It weights rows, and counts rows without gain as 0."""
    rng = np.random.default_rng(1)
    gains, scores = rng.integers(0, 2, (50, 4)), rng.integers(0, 4, (50, 4)).astype(float)
    row_weights = rng.exponential(size=50)
    ours = grouped_ndcg(scores.ravel(), gains.ravel(), np.repeat(np.arange(50), 4), np.repeat(row_weights, 4))
    some = gains.any(axis=1)
    assert 0 < ours.num_skipped_groups == (~some).sum()
    expected = ndcg_score(gains[some], scores[some], sample_weight=row_weights[some])
    assert ours.value == pytest.approx(expected, abs=1e-13)


def test_literal_values() -> None:
    # Group 1 is in order (4 impressions), group 2 reversed (2 impressions), and group 3 has no negative.
    figure = grouped_auc([4, 3, 2, 1, 1, 2, 0], [1, 1, 0, 0, 1, 0, 1], [1, 1, 1, 1, 2, 2, 3])
    assert figure == GroupedMetric(value=4 / 6, num_groups=2, num_skipped_groups=1)
    # Scores of different groups are not compared.
    assert grouped_auc([9, 8, 2, 1], [1, 0, 1, 0], [1, 1, 2, 2]).value == 1.0
    # The example of scikit-learn's documentation, and its ties at rank 1: (10 / 10 + 5 / 10) / 2.
    gains = [10, 0, 0, 1, 5]
    assert grouped_ndcg([0.1, 0.2, 0.3, 4, 70], gains, [0] * 5).value == pytest.approx(0.6957, abs=5e-5)
    assert grouped_ndcg([0.05, 1.1, 1.0, 0.5, 0.0], gains, [0] * 5, k=4).value == pytest.approx(0.3520, abs=5e-5)
    assert grouped_ndcg([1, 0, 0, 0, 1], gains, [0] * 5, k=1).value == 0.75
    # One click at rank 2 of 2: 1 / log2(3).
    assert grouped_ndcg([2.0, 1.0], [0, 1], [5, 5]).value == pytest.approx(0.6309297535714574, rel=1e-15)


def test_the_textbook_example() -> None:
    """Gains 3 2 3 0 1 2 in that order: DCG 6.861, ideal 7.141 (Wikipedia, "Discounted cumulative gain")."""
    figure = grouped_ndcg([6, 5, 4, 3, 2, 1], [3, 2, 3, 0, 1, 2], [1] * 6)
    assert figure.value == pytest.approx(0.961, abs=5e-4)


def test_nothing_and_one_class_only() -> None:
    nothing = GroupedMetric(value=math.nan, num_groups=0, num_skipped_groups=0)
    for figure in (grouped_auc([], [], []), grouped_ndcg([], [], []), grouped_auc([1.0], [1], [3], [0.0])):
        check(figure, nothing)
    check(grouped_auc([1.0, 2.0], [0, 0], [1, 2]), GroupedMetric(value=math.nan, num_groups=0, num_skipped_groups=2))
    check(grouped_ndcg([1.0, 2.0], [0, 0], [1, 2]), GroupedMetric(value=math.nan, num_groups=0, num_skipped_groups=2))
    assert grouped_auc([1.0], [1], [3]).to_dict() == {"value": None, "num_groups": 0, "num_skipped_groups": 1}


@settings(max_examples=50, deadline=None)
@given(SAMPLES, st.randoms(use_true_random=False), st.integers(1, 4))
def test_order_and_ranks_change_no_bit(samples: list[tuple], rng: object, num_ranks: int) -> None:
    shuffled = list(samples)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    ranks = [MetricWindow() for _ in range(num_ranks)]
    for i, (score, label, group, weight) in enumerate(shuffled):
        ranks[i % num_ranks].add([score * 0.37], [label], [weight], [group])
    merged = MetricWindow.merge([window.get_state() for window in ranks]).compute(ndcg_k=3)
    scores, labels, groups, weights = columns(samples)
    whole = compute_metrics(scores * 0.37, labels, weights, groups, ndcg_k=3)
    assert json.dumps(merged.to_dict()) == json.dumps(whole.to_dict())


def test_a_window_with_groups_has_metrics_by_group() -> None:
    window = MetricWindow()
    assert window.compute().gauc is None and "gauc" not in window.compute().to_dict()
    window.add([2.0, 1.0, 3.0], [1, 0, 0], groups=np.array([4, 4, 9], np.uint32))
    metrics = window.compute()
    assert metrics.gauc == grouped_auc([2.0, 1.0, 3.0], [1, 0, 0], [4, 4, 9])
    assert metrics.ndcg == grouped_ndcg([2.0, 1.0, 3.0], [1, 0, 0], [4, 4, 9])
    restored = MetricWindow()
    restored.set_state({k: v.tolist() for k, v in window.get_state().items()})
    assert restored.compute().to_dict() == metrics.to_dict()
    assert metrics.to_dict()["gauc"] == {"value": 1.0, "num_groups": 1, "num_skipped_groups": 1}


def test_invalid_inputs_are_refused() -> None:
    with pytest.raises(MesetaError, match="groups must be integers, got dtype <U1"):
        grouped_auc([1.0], [1], ["a"])
    with pytest.raises(MesetaError, match=r"groups must have one entry for each of 1 samples, got shape \[2\]"):
        grouped_ndcg([1.0], [1], [1, 2])
    with pytest.raises(MesetaError, match="gains must be numbers, got dtype <U1"):
        grouped_ndcg([1.0], ["a"], [1])
    with pytest.raises(MesetaError, match="k must be at least 1"):
        grouped_ndcg([1.0], [1], [1], k=0)
    with pytest.raises(MesetaError, match="gain of sample 1 must be finite and not negative, got -1"):
        grouped_ndcg([1.0, 2.0], [1, -1], [1, 1])
    with pytest.raises(MesetaError, match="score of sample 0 must be finite, got nan"):
        grouped_ndcg([math.nan, 2.0], [1, 1], [1, 1])
    with pytest.raises(MesetaError, match=r"the weight of sample 0 must be .*, got -1"):
        grouped_ndcg([1.0, 2.0], [1, 1], [1, 1], [-1.0, 1.0])
    window = MetricWindow()
    window.add([1.0], [1], groups=[1])
    with pytest.raises(MesetaError, match="all batches of a window must have groups, or none"):
        window.add([1.0], [1])
