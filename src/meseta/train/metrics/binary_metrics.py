"""Figures over one set of samples: exact AUC, average precision, logloss, normalised entropy, calibration, reliability.

Sums run over the sorted logits of each class, so they depend on the set of samples alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from meseta.train.metrics.grouped import GroupedMetric, auc_by_group, ndcg_by_group
from meseta.train.metrics.ranking import BinSums, Ranking
from meseta.train.metrics.samples import WeightedSamples, as_samples

NUM_RELIABILITY_BINS = 20


@dataclass(frozen=True, kw_only=True)
class ReliabilityBin:
    """Samples with neighbouring predictions."""

    mean_prediction: float
    """Mean predicted probability, by weight."""
    mean_label: float
    """Observed rate of label 1, by weight."""
    num_samples: int
    """Samples in the bin, at least 1."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Figures over one set of samples; a figure that the set does not define is nan.

    Every mean is by weight where samples have weights.
    """

    num_samples: int
    """Samples seen, apart from those of weight 0."""
    num_positives: int
    """Those of them with label 1."""
    weight: float
    """Sum of the weights; the number of samples where none are given."""
    logloss: float
    """Mean binary cross-entropy in nats; nan without samples."""
    ne: float
    """logloss / entropy of the base rate; below 1 beats a constant prediction; nan where only one class is present."""
    auc: float
    """Share of (positive, negative) pairs in the right order, ties counting half; nan where one class is missing."""
    pr_auc: float
    """Average precision; nan without positives."""
    calibration: float
    """Mean prediction / mean label; nan without positives."""
    reliability: tuple[ReliabilityBin, ...]
    """Bins of about equal count, by rising prediction; empty without samples."""
    gauc: GroupedMetric | None = None
    """AUC within groups; None where samples have no groups."""
    ndcg: GroupedMetric | None = None
    """Normalised discounted cumulative gain within groups; None where samples have no groups."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; nan becomes None, because JSON has no nan. Figures by group only where there are any."""
        figures = {name: getattr(self, name) for name in ("logloss", "ne", "auc", "pr_auc", "calibration")}
        grouped = {"gauc": self.gauc, "ndcg": self.ndcg}
        return {
            "num_samples": self.num_samples,
            "num_positives": self.num_positives,
            "weight": self.weight,
            **{name: None if math.isnan(value) else value for name, value in figures.items()},
            **{name: figure.to_dict() for name, figure in grouped.items() if figure is not None},
            "reliability": [b.to_dict() for b in self.reliability],
        }


def compute_metrics(
    logits: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    ndcg_k: int | None = None,
) -> Metrics:
    """All figures of [n] logits and [n] labels in one pass, those by group where `groups` [n] are given.

    Raises MesetaError as `MetricWindow.add` and `MetricWindow.compute` do.
    """
    return compute_all_metrics(as_samples(logits, labels, weights, groups), ndcg_k)


def compute_all_metrics(given: WeightedSamples, ndcg_k: int | None = None) -> Metrics:
    """All figures of samples that have not been checked yet."""
    samples = given.validate()
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
        ne=mean_loss / entropy if entropy > 0.0 else math.nan,
        auc=ranking.auc(),
        pr_auc=ranking.average_precision(),
        calibration=math.fsum(b.prediction for b in bins) / positive_weight if positive_weight else math.nan,
        reliability=tuple(_reliability_bin(b) for b in bins),
        gauc=gauc,
        ndcg=ndcg,
    )


def auc(scores: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Exact area under the ROC curve of [n] scores (logits or probabilities), ties counting half; nan for one class.

    The Mann-Whitney statistic (Hanley and McNeil 1982), in whole numbers divided once at the end where nothing is
    weighted; with `weights` [n] a pair weighs their product. Raises MesetaError as `MetricWindow.compute` does.
    """
    return Ranking(as_samples(scores, labels, weights).validate()).auc()


def pr_auc(scores: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Average precision of [n] scores (logits or probabilities), the area under the precision-recall curve as
    scikit-learn's `average_precision_score` has it: steps, no interpolation, equal scores at one threshold.

    nan without positives, 1 without negatives. Raises MesetaError as `MetricWindow.compute` does.
    """
    return Ranking(as_samples(scores, labels, weights).validate()).average_precision()


def logloss(logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Mean binary cross-entropy in nats, log(1 + exp(-z)) or log(1 + exp(z)), exact for any finite logit."""
    return compute_metrics(logits, labels, weights).logloss


def normalized_entropy(logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """logloss / entropy of the base rate (He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at
    Facebook", section 3); nan where only one class is present."""
    return compute_metrics(logits, labels, weights).ne


def calibration(logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Mean prediction / mean label; nan without positives."""
    return compute_metrics(logits, labels, weights).calibration


def reliability_curve(
    logits: ArrayLike, labels: ArrayLike, num_bins: int = NUM_RELIABILITY_BINS, weights: ArrayLike | None = None
) -> tuple[ReliabilityBin, ...]:
    """At most `num_bins` bins of about equal count, by rising prediction; their means are by weight.

    Equal predictions stay in one bin (split ties would make the bin a matter of order), so fewer distinct
    predictions than bins give fewer bins.
    """
    return tuple(_reliability_bin(b) for b in Ranking(as_samples(logits, labels, weights).validate()).bins(num_bins))


def base_rate_entropy(num_positives: int | float, num_samples: int | float) -> float:
    """Entropy in nats of always predicting the observed rate, of counts or weights; 0 where only one class is present
    or nothing is."""
    rarer = min(num_positives, num_samples - num_positives)
    if rarer <= 0:
        return 0.0
    rate = rarer / num_samples  # of the rarer class, since a rate next to 1 may round to it
    return -(rate * math.log(rate) + (1.0 - rate) * math.log1p(-rate))


def _reliability_bin(sums: BinSums) -> ReliabilityBin:
    return ReliabilityBin(
        mean_prediction=sums.prediction / sums.weight,
        mean_label=sums.positive_weight / sums.weight,
        num_samples=sums.num_samples,
    )
