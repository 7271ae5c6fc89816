"""Metrics of one set of samples: AUC, average precision, log loss, normalized entropy, calibration, reliability."""
# Sums run over the sorted logits of each class, so they do not depend on the order of the samples.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from meseta.spec import MesetaError
from meseta.train.metrics.grouped import GroupedMetric, auc_by_group, ndcg_by_group
from meseta.train.metrics.ranking import BinSums, Ranking
from meseta.train.metrics.samples import WeightedSamples, as_samples

NUM_RELIABILITY_BINS = 20


@dataclass(frozen=True, kw_only=True)
class ReliabilityBin:
    """Summary of the samples in one range of predictions."""

    mean_prediction: float
    """Weighted mean of the predicted probabilities."""
    mean_label: float
    """Weighted share of samples with label 1."""
    num_samples: int

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Metrics of one set of samples. Undefined metrics are nan. Means are weighted if the samples have weights."""

    num_samples: int
    """Number of samples, without those of weight 0."""
    num_positives: int
    """Number of samples with label 1, without those of weight 0."""
    weight: float
    """Sum of the weights. Equals `num_samples` for unweighted samples."""
    logloss: float
    """Mean binary cross-entropy in nats. nan if there are no samples."""
    logloss_clamped: float
    """Log loss with probabilities clipped to `MIN_PROBABILITY`, as in many published results."""
    ne: float
    """Log loss divided by the entropy of the base rate. Below 1 is better than a constant prediction. nan if only one
    class is present."""
    auc: float
    """Share of (positive, negative) pairs in the right order. A tie counts half. nan if a class is missing."""
    pr_auc: float
    """Average precision. nan if there are no positives."""
    calibration: float
    """Mean prediction divided by the mean label. nan if there are no positives."""
    reliability: tuple[ReliabilityBin, ...]
    """Bins with about equal numbers of samples, in ascending order of predictions. Empty if there are no samples."""
    gauc: GroupedMetric | None = None
    """AUC within groups. `None` if the samples have no groups."""
    ndcg: GroupedMetric | None = None
    """Normalized discounted cumulative gain within groups. `None` if the samples have no groups."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON. nan becomes `None`, because JSON has no nan. Metrics of groups are omitted if
        they are `None`."""
        values = {
            name: getattr(self, name) for name in ("logloss", "logloss_clamped", "ne", "auc", "pr_auc", "calibration")
        }
        grouped = {"gauc": self.gauc, "ndcg": self.ndcg}
        return {
            "num_samples": self.num_samples,
            "num_positives": self.num_positives,
            "weight": self.weight,
            **{name: None if math.isnan(value) else value for name, value in values.items()},
            **{name: metric.to_dict() for name, metric in grouped.items() if metric is not None},
            "reliability": [b.to_dict() for b in self.reliability],
        }


def compute_metrics(
    logits: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    ndcg_k: int | None = None,
) -> Metrics:
    """Compute all metrics of [n] logits and [n] labels in one pass.

    `groups` [n] adds GAUC and NDCG, the latter of the first `ndcg_k` ranks.
    Raises MesetaError under the conditions of `MetricWindow.add` and `MetricWindow.compute`.
    """
    return compute_all_metrics(as_samples(logits, labels, weights, groups), ndcg_k)


def compute_all_metrics(unchecked: WeightedSamples, ndcg_k: int | None = None) -> Metrics:
    """Validate `unchecked` and compute all of its metrics."""
    samples = unchecked.validate()
    ranking = Ranking(samples)
    bins = ranking.bins(NUM_RELIABILITY_BINS)
    weight, positive_weight = math.fsum(b.weight for b in bins), math.fsum(b.positive_weight for b in bins)
    mean_loss = math.fsum(b.loss for b in bins) / weight if bins else math.nan
    entropy = base_rate_entropy(positive_weight, weight)
    gauc, ndcg = None, None
    if samples.groups is not None:
        gauc = auc_by_group(samples)
        weights = np.ones(len(samples)) if samples.weights is None else samples.weights
        ndcg = ndcg_by_group(samples.logits, samples.labels.astype(np.float64), samples.groups, weights, ndcg_k)
    return Metrics(
        num_samples=len(samples),
        num_positives=len(ranking.positives),
        weight=weight * samples.scale,
        logloss=mean_loss,
        logloss_clamped=math.fsum(b.clamped_loss for b in bins) / weight if bins else math.nan,
        ne=mean_loss / entropy if entropy > 0.0 else math.nan,
        auc=ranking.auc(),
        pr_auc=ranking.average_precision(),
        calibration=math.fsum(b.prediction for b in bins) / positive_weight if positive_weight else math.nan,
        reliability=tuple(_reliability_bin(b) for b in bins),
        gauc=gauc,
        ndcg=ndcg,
    )


def auc(scores: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Return the exact area under the ROC curve of [n] scores, which are logits or probabilities.

    This is the Mann-Whitney statistic (Hanley and McNeil 1982), in which a tie counts half. With `weights` [n] a pair
    counts the product of its weights. The result is nan if a class is missing.
    Raises MesetaError under the conditions of `MetricWindow.compute`.
    """
    return Ranking(as_samples(scores, labels, weights).validate()).auc()


def pr_auc(scores: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Return the average precision of [n] scores, which are logits or probabilities.

    The definition is that of scikit-learn's `average_precision_score`: a step function without interpolation, with one
    threshold per distinct score. The result is nan without positives, and 1 without negatives.
    Raises MesetaError under the conditions of `MetricWindow.compute`.
    """
    return Ranking(as_samples(scores, labels, weights).validate()).average_precision()


def logloss(logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Return the mean binary cross-entropy in nats. It is exact for any finite logit."""
    return compute_metrics(logits, labels, weights).logloss


def normalized_entropy(logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Return the log loss divided by the entropy of the base rate. nan if only one class is present.

    Defined in section 3 of He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook".
    """
    return compute_metrics(logits, labels, weights).ne


def calibration(logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Return the mean prediction divided by the mean label. nan if there are no positives."""
    return compute_metrics(logits, labels, weights).calibration


def reliability_curve(
    logits: ArrayLike, labels: ArrayLike, num_bins: int = NUM_RELIABILITY_BINS, weights: ArrayLike | None = None
) -> tuple[ReliabilityBin, ...]:
    """Return at most `num_bins` bins with about equal numbers of samples, in ascending order of predictions.

    Equal predictions share a bin, so there may be fewer bins. The means of a bin are weighted.
    """
    # If ties were split, the content of a bin would depend on the order of the samples.
    return tuple(_reliability_bin(b) for b in Ranking(as_samples(logits, labels, weights).validate()).bins(num_bins))


def base_rate_entropy(num_positives: int | float, num_samples: int | float) -> float:
    """Return the entropy in nats of the constant prediction that equals the observed rate.

    The arguments are counts or weights. The result is 0 if fewer than two classes are present.
    """
    rarer = min(num_positives, num_samples - num_positives)
    if rarer <= 0:
        return 0.0
    rate = rarer / num_samples  # The rate of the frequent class could be rounded to 1.
    return -(rate * math.log(rate) + (1.0 - rate) * math.log1p(-rate))


def _reliability_bin(sums: BinSums) -> ReliabilityBin:
    return ReliabilityBin(
        mean_prediction=sums.prediction / sums.weight,
        mean_label=sums.positive_weight / sums.weight,
        num_samples=sums.num_samples,
    )


def regret(logits: ArrayLike, probabilities: ArrayLike) -> float:
    """Return the mean KL divergence in nats from the true probabilities [n] to the predictions of [n] logits.

    This is the expected excess of the log loss over that of the true probabilities. Gneiting and Raftery (JASA 102,
    2007) call it the divergence of the logarithmic score. It is 0 for perfect predictions, and nan without samples. The
    sum is exact, so it does not depend on the order.
    Raises MesetaError if the lengths differ, a probability is not strictly between 0 and 1, or a logit is not finite.
    """
    z, p = np.asarray(logits, np.float64).ravel(), np.asarray(probabilities, np.float64).ravel()
    if len(z) != len(p):
        raise MesetaError(f"regret: got {len(z)} logits and {len(p)} probabilities; pass one probability per logit")
    if not len(z):
        return math.nan
    if not ((p > 0) & (p < 1)).all():
        raise MesetaError("regret: true probabilities must be strictly between 0 and 1; clip them first")
    if not np.isfinite(z).all():
        raise MesetaError("regret: logits must be finite; look for invalid values in the dense features")
    of_ones = p * (np.log(p) + np.logaddexp(0.0, -z))
    of_zeros = (1 - p) * (np.log1p(-p) + np.logaddexp(0.0, z))
    return max(math.fsum(of_ones + of_zeros) / len(z), 0.0)
