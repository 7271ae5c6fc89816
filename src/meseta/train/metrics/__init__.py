"""Metrics of binary predictions: over a set of samples, within groups, and over a whole run in bounded memory.

All metrics take logits and are computed in float64. They depend on the set of samples and not on its order, so any
number of ranks gives bitwise identical results on the same kind of processor.
"""

from meseta.train.metrics.binary_metrics import (
    NUM_RELIABILITY_BINS,
    Metrics,
    ReliabilityBin,
    auc,
    base_rate_entropy,
    calibration,
    compute_metrics,
    logloss,
    normalized_entropy,
    pr_auc,
    reliability_curve,
)
from meseta.train.metrics.grouped import GroupedMetric, grouped_auc, grouped_ndcg
from meseta.train.metrics.lifetime import BinnedAuc, LifetimeMetrics, LifetimeWindow, MetricWindow, binned_auc
from meseta.train.metrics.regret import regret
from meseta.train.metrics.tasks import Segment, TaskWindows, segment_metrics, task_metrics

__all__ = [
    "NUM_RELIABILITY_BINS",
    "BinnedAuc",
    "GroupedMetric",
    "LifetimeMetrics",
    "LifetimeWindow",
    "MetricWindow",
    "Metrics",
    "ReliabilityBin",
    "Segment",
    "TaskWindows",
    "auc",
    "base_rate_entropy",
    "binned_auc",
    "calibration",
    "compute_metrics",
    "grouped_auc",
    "grouped_ndcg",
    "logloss",
    "normalized_entropy",
    "pr_auc",
    "regret",
    "reliability_curve",
    "segment_metrics",
    "task_metrics",
]
