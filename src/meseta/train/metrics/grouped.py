"""Metrics within groups, such as the impressions of a user or the candidates of a request, and their mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meseta.spec import MesetaError
from meseta.train.metrics.samples import (
    WeightedSamples,
    as_floats,
    as_keys,
    as_samples,
    as_scores,
    as_weights,
    validate_weights,
)


@dataclass(frozen=True, kw_only=True)
class GroupedMetric:
    """Weighted mean of a metric over groups."""

    value: float
    """Mean of the metric. nan if it is undefined for all groups."""
    num_groups: int
    """Number of groups in the mean."""
    num_skipped_groups: int
    """Number of groups for which the metric is undefined. Groups whose samples all have weight 0 are not counted."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON. nan becomes `None`."""
        value = None if math.isnan(self.value) else self.value
        return {"value": value, "num_groups": self.num_groups, "num_skipped_groups": self.num_skipped_groups}


def grouped_auc(
    scores: ArrayLike, labels: ArrayLike, groups: ArrayLike, weights: ArrayLike | None = None
) -> GroupedMetric:
    """Return the mean AUC of the groups, each weighted by its number of samples or their total weight.

    This is GAUC of Zhu et al. 2017, "Optimized Cost per Click in Taobao Display Advertising". With users as groups it
    is the metric of Zhou et al. 2018, "Deep Interest Network", section 6.3. Groups with one class are skipped.
    Raises MesetaError under the conditions of `MetricWindow.add` and `MetricWindow.compute`.

    Args:
        scores: Logits or probabilities [n].
        labels: 0 or 1 [n].
        groups: Integer keys [n].
        weights: Weights [n]. `None` means 1.
    """
    return auc_by_group(as_samples(scores, labels, weights, groups).validate())


def auc_by_group(samples: WeightedSamples) -> GroupedMetric:
    """Return the `grouped_auc` of validated samples, which must have groups."""
    assert samples.groups is not None
    if not len(samples):
        return GroupedMetric(value=math.nan, num_groups=0, num_skipped_groups=0)
    # Without weights, the counts are integers, so the AUC of each group is exact.
    weights = () if samples.weights is None else (samples.weights,)
    order = np.lexsort((*weights, samples.labels, samples.logits, samples.groups))
    sums = sum_sorted_groups(
        samples.groups[order],
        samples.logits[order],
        samples.labels[order] == 1,
        None if samples.weights is None else samples.weights[order],
    )
    both = (sums.positive > 0) & (sums.negative > 0)
    return _weighted_mean(sums.aucs()[both], (sums.positive + sums.negative)[both], len(both))


class GroupSums(NamedTuple):
    """Weights of the samples of each group [k], in ascending order of the keys."""

    positive: NDArray[Any]
    negative: NDArray[Any]
    twice_won: NDArray[Any]
    """Twice the weight of the pairs in the right order. A tie counts half."""

    def aucs(self) -> NDArray[np.float64]:
        """Return the AUC of each group [k]. nan if a class is missing."""
        pairs = np.multiply(self.positive, self.negative, dtype=np.float64)
        with np.errstate(invalid="ignore"):
            # Rounded weights may exceed the range by one ulp.
            return np.minimum(self.twice_won / (2 * pairs), 1.0)


def sum_sorted_groups(
    keys: NDArray[Any], scores: NDArray[np.floating], is_positive: NDArray[np.bool_], weights: NDArray[Any] | None
) -> GroupSums:
    """Sum the samples [n], sorted by (key, score), of each group. There must be at least one sample.

    `weights` of `None` means 1. Integer weights give exact sums.
    """
    new_group = _starts_new_value(keys)
    ties = np.flatnonzero(new_group | _starts_new_value(scores))
    positive: NDArray[Any]
    if weights is None:
        edges = np.append(ties, len(keys))
        positive = np.diff(np.concatenate([[0], np.cumsum(is_positive)])[edges])
        negative = np.diff(edges) - positive
    else:
        positive = np.add.reduceat(weights * is_positive, ties)
        negative = np.add.reduceat(weights * ~is_positive, ties)
    first_tie = np.flatnonzero(new_group[ties])
    below = np.cumsum(negative) - negative
    below -= np.repeat(below[first_tie], np.diff(first_tie, append=len(ties)))
    twice_won = np.add.reduceat(positive * (2 * below + negative), first_tie)
    return GroupSums(np.add.reduceat(positive, first_tie), np.add.reduceat(negative, first_tie), twice_won)


def grouped_ndcg(
    scores: ArrayLike,
    gains: ArrayLike,
    groups: ArrayLike,
    weights: ArrayLike | None = None,
    k: int | None = None,
) -> GroupedMetric:
    """Return the mean normalized discounted cumulative gain of the groups.

    The gain is that of Järvelin and Kekäläinen 2002 with discount log2(1 + rank). Equal scores share the mean of their
    gains (McSherry and Najork 2008). Groups without any gain are skipped. A group counts by the mean weight of its
    samples, and samples of weight 0 are ignored.
    Raises MesetaError if an argument has an invalid type, shape or value, or `k` is below 1.

    Args:
        scores: Logits or probabilities [n].
        gains: Labels or grades [n], finite and not negative.
        groups: Integer keys [n].
        weights: Weights [n]. `None` means 1.
        k: Number of ranks that count. `None` means all.
    """
    values, raw_gains = as_scores(scores, gains)
    keys = as_keys(groups, len(values))
    checked = validate_weights(as_weights(weights, len(values)), len(values))
    kept = checked > 0.0
    relevance = as_floats("gains", raw_gains).astype(np.float64)
    _check_values(kept & ~np.isfinite(values), "score", values, "finite")
    _check_values(kept & ~(np.isfinite(relevance) & (relevance >= 0.0)), "gain", relevance, "finite and not negative")
    assert keys is not None
    return ndcg_by_group(values[kept], relevance[kept], keys[kept], checked[kept], k)


def ndcg_by_group(
    scores: NDArray[np.floating],
    gains: NDArray[np.float64],
    groups: NDArray[np.int64],
    weights: NDArray[np.float64],
    k: int | None,
) -> GroupedMetric:
    """Return the `grouped_ndcg` of validated columns without samples of weight 0."""
    if k is not None and k < 1:
        raise MesetaError(f"metrics: NDCG k must be at least 1, got {k}; use None to rank all samples")
    if not len(scores):
        return GroupedMetric(value=math.nan, num_groups=0, num_skipped_groups=0)
    order = np.lexsort((weights, gains, -scores, groups))
    keys, ranked = groups[order], gains[order]
    new_group = _starts_new_value(keys)
    start = np.flatnonzero(new_group)
    size = np.diff(start, append=len(keys))
    rank = np.arange(len(keys)) - np.repeat(start, size)
    discount = 1.0 / np.log2(rank + 2.0)
    if k is not None:
        discount[rank >= k] = 0.0
    ties = np.flatnonzero(new_group | _starts_new_value(scores[order]))
    shared = np.add.reduceat(ranked, ties) / np.diff(ties, append=len(keys))
    cumulated = np.add.reduceat(shared * np.add.reduceat(discount, ties), np.flatnonzero(new_group[ties]))
    best = np.add.reduceat(gains[np.lexsort((-gains, groups))] * discount, start)
    defined = best > 0.0
    mean_weight = np.add.reduceat(weights[order], start) / size
    return _weighted_mean(cumulated[defined] / best[defined], mean_weight[defined], len(defined))


def _check_values(wrong: NDArray[np.bool_], name: str, column: NDArray[np.floating], rule: str) -> None:
    if wrong.any():
        bad = int(wrong.argmax())
        raise MesetaError(f"metrics: the {name} of sample {bad} must be {rule}, got {column[bad]}")


def _starts_new_value(rising: NDArray[np.generic]) -> NDArray[np.bool_]:
    return np.concatenate([[True], rising[1:] != rising[:-1]])


def _weighted_mean(values: NDArray[np.float64], weights: NDArray[Any], num_groups: int) -> GroupedMetric:
    value = math.fsum(values * weights) / math.fsum(weights) if len(values) else math.nan
    return GroupedMetric(value=value, num_groups=len(values), num_skipped_groups=num_groups - len(values))
