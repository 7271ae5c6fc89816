"""Figures within groups, such as the impressions of one user or the candidates of one request, and their mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
    """The mean of a figure over the groups that define it."""

    value: float
    """The mean; nan where no group defines the figure."""
    num_groups: int
    """Groups in the mean."""
    num_skipped_groups: int
    """Groups that do not define the figure; those all of whose samples weigh 0 are not counted at all."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; nan becomes None."""
        value = None if math.isnan(self.value) else self.value
        return {"value": value, "num_groups": self.num_groups, "num_skipped_groups": self.num_skipped_groups}


def grouped_auc(
    scores: ArrayLike, labels: ArrayLike, groups: ArrayLike, weights: ArrayLike | None = None
) -> GroupedMetric:
    """Mean of the AUC within each group, by the group's impressions (its samples, or their weight).

    GAUC of Zhu et al. 2017, "Optimized Cost per Click in Taobao Display Advertising"; over users, the metric of
    Zhou et al. 2018, "Deep Interest Network", section 6.3. Groups of one class have no AUC and are left out.
    `scores` [n] are logits or probabilities, `labels` [n] 0 or 1, `groups` [n] whole numbers, `weights` [n].
    Raises MesetaError as `MetricWindow.add` and `MetricWindow.compute` do.
    """
    return auc_by_group(as_samples(scores, labels, weights, groups).validate())


def auc_by_group(samples: WeightedSamples) -> GroupedMetric:
    """`grouped_auc` of samples with groups that have been checked."""
    assert samples.groups is not None
    if not len(samples):
        return GroupedMetric(value=math.nan, num_groups=0, num_skipped_groups=0)
    # Whole numbers where nothing is weighted: every group's AUC is then exact.
    unsorted = np.ones(len(samples), np.int64) if samples.weights is None else samples.weights
    order = np.lexsort((unsorted, samples.labels, samples.logits, samples.groups))
    keys, scores, labels = samples.groups[order], samples.logits[order], samples.labels[order]
    weights: NDArray[Any] = unsorted[order]
    new_group = _starts_new_value(keys)
    ties = np.flatnonzero(new_group | _starts_new_value(scores))
    positive = np.add.reduceat(weights * (labels == 1), ties)
    negative = np.add.reduceat(weights * (labels == 0), ties)
    first_tie = np.flatnonzero(new_group[ties])
    below = np.cumsum(negative) - negative
    below -= np.repeat(below[first_tie], np.diff(first_tie, append=len(ties)))
    twice_won = np.add.reduceat(positive * (2 * below + negative), first_tie)
    all_positive, all_negative = (np.add.reduceat(w, first_tie) for w in (positive, negative))
    both = (all_positive > 0) & (all_negative > 0)
    aucs = twice_won[both] / (2 * all_positive[both] * all_negative[both])
    return _weighted_mean(aucs, (all_positive + all_negative)[both], len(both))


def grouped_ndcg(
    scores: ArrayLike,
    gains: ArrayLike,
    groups: ArrayLike,
    weights: ArrayLike | None = None,
    k: int | None = None,
) -> GroupedMetric:
    """Mean over groups of the normalised discounted cumulative gain of their first `k` ranks, or of all.

    Järvelin and Kekäläinen 2002, with discount log2(1 + rank); equal scores share the mean of their gains (McSherry
    and Najork 2008). Groups without any gain have no NDCG and are left out. A group counts by the mean weight
    of its samples: so a weight of the group is one that all its samples have, and a sample of weight 0 takes no rank.
    `scores` [n], `gains` [n] finite and not negative (labels, or grades), `groups` [n] whole numbers, `weights` [n].
    Raises MesetaError where they are anything else, and for `k` below 1.
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
    """`grouped_ndcg` of columns that have been checked, without samples of weight 0."""
    if k is not None and k < 1:
        raise MesetaError(f"metrics: NDCG of the first {k} ranks; k must be at least 1, or None for all")
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
        raise MesetaError(f"metrics: the {name} of sample {bad} is {column[bad]}, and must be {rule}")


def _starts_new_value(rising: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Whether each value differs from the one before it; true for the first."""
    return np.concatenate([[True], rising[1:] != rising[:-1]])


def _weighted_mean(figures: NDArray[np.float64], weights: NDArray[Any], num_groups: int) -> GroupedMetric:
    """Weighted mean of one figure per group, in the order of keys."""
    value = math.fsum(figures * weights) / math.fsum(weights) if len(figures) else math.nan
    return GroupedMetric(value=value, num_groups=len(figures), num_skipped_groups=num_groups - len(figures))
