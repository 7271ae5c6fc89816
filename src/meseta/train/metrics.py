"""How good the predictions are: exact AUC, logloss, normalised entropy, calibration and a reliability curve.

Everything takes logits, computes in float64 and depends on the set of (logit, label) pairs alone, never on their order:
sums run over the sorted logits of each class, so one rank and many ranks give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meseta.spec import MesetaError

NUM_RELIABILITY_BINS = 20
_CHUNK = 1 << 15  # samples whose float64 temporaries stay in a core's cache
_BAD_LABEL = 2


@dataclass(frozen=True, kw_only=True)
class ReliabilityBin:
    """Samples with neighbouring predictions."""

    mean_prediction: float
    """Mean predicted probability."""
    mean_label: float
    """Observed rate of label 1."""
    num_samples: int
    """Samples in the bin, at least 1."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Figures over one set of samples; a figure that the set does not define is nan."""

    num_samples: int
    """Samples seen."""
    num_positives: int
    """Samples with label 1."""
    logloss: float
    """Mean binary cross-entropy in nats; nan without samples."""
    ne: float
    """logloss / entropy of the base rate; below 1 beats a constant prediction; nan where only one class is present."""
    auc: float
    """Share of (positive, negative) pairs in the right order, ties counting half; nan where one class is missing."""
    calibration: float
    """Mean prediction / mean label; nan without positives."""
    reliability: tuple[ReliabilityBin, ...]
    """Bins of about equal count, by rising prediction; empty without samples."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; nan becomes None, because JSON has no nan."""
        figures = {name: getattr(self, name) for name in ("logloss", "ne", "auc", "calibration")}
        return {
            "num_samples": self.num_samples,
            "num_positives": self.num_positives,
            **{name: None if math.isnan(value) else value for name, value in figures.items()},
            "reliability": [
                {"mean_prediction": b.mean_prediction, "mean_label": b.mean_label, "num_samples": b.num_samples}
                for b in self.reliability
            ],
        }


class MetricWindow:
    """Collects predictions until they are asked for figures: one per logging interval, one per evaluation.

    Holds 5 bytes a sample (9 for float64 logits), because an exact AUC needs every prediction.
    """

    def __init__(self) -> None:
        self._logits: list[NDArray[Any]] = []
        self._labels: list[NDArray[np.uint8]] = []

    @property
    def num_samples(self) -> int:
        return sum(len(part) for part in self._logits)

    def add(self, logits: ArrayLike, labels: ArrayLike) -> None:
        """Add a batch of [B] logits and [B] labels; both are copied. Raises MesetaError where the shapes differ.

        Values are checked in `compute`, so that a bad one on one rank cannot leave the others waiting.
        """
        batch_logits, batch_labels = _as_pair(logits, labels)
        self._logits.append(batch_logits.copy())
        self._labels.append(batch_labels)

    def compute(self) -> Metrics:
        """Figures over all samples added; raises MesetaError for a logit that is not finite or a label not 0 or 1."""
        state = self.get_state()
        return compute_metrics(state["logits"], state["labels"])

    def reset(self) -> None:
        """Forget all samples."""
        self._logits, self._labels = [], []

    def get_state(self) -> dict[str, NDArray[Any]]:
        """{"logits": [n] float32 or float64, "labels": [n] uint8}, in the order of adding."""
        return {
            "logits": np.concatenate([np.empty(0, np.float32), *self._logits]),
            "labels": np.concatenate([np.empty(0, np.uint8), *self._labels]),
        }

    def set_state(self, state: Mapping[str, ArrayLike]) -> None:
        """Replace all samples by those of `get_state`; lists, as JSON gives them, are read as float64."""
        self.reset()
        self.add(np.asarray(state["logits"]), np.asarray(state["labels"]))

    @staticmethod
    def merge(states: Sequence[Mapping[str, ArrayLike]]) -> MetricWindow:
        """One window with the samples of several, such as the states of all ranks."""
        merged = MetricWindow()
        for state in states:
            merged.add(np.asarray(state["logits"]), np.asarray(state["labels"]))
        return merged


def compute_metrics(logits: ArrayLike, labels: ArrayLike) -> Metrics:
    """All figures of [n] logits and [n] labels in one pass; raises MesetaError as `MetricWindow.compute` does."""
    ranking = _Ranking(logits, labels)
    bins = ranking.bins(NUM_RELIABILITY_BINS)
    num_samples, num_positives = ranking.num_samples, len(ranking.positives)
    mean_loss = math.fsum(b.loss for b in bins) / num_samples if num_samples else math.nan
    entropy = base_rate_entropy(num_positives, num_samples)
    return Metrics(
        num_samples=num_samples,
        num_positives=num_positives,
        logloss=mean_loss,
        ne=mean_loss / entropy if entropy > 0.0 else math.nan,
        auc=ranking.auc(),
        calibration=math.fsum(b.prediction for b in bins) / num_positives if num_positives else math.nan,
        reliability=tuple(b.to_reliability() for b in bins),
    )


def auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Exact area under the ROC curve of [n] scores (logits or probabilities), ties counting half; nan for one class.

    The Mann-Whitney statistic in whole numbers (Hanley and McNeil 1982), divided once at the end.
    Raises MesetaError as `MetricWindow.compute` does.
    """
    return _Ranking(scores, labels).auc()


def logloss(logits: ArrayLike, labels: ArrayLike) -> float:
    """Mean binary cross-entropy in nats, log(1 + exp(-z)) or log(1 + exp(z)), exact for any finite logit."""
    return compute_metrics(logits, labels).logloss


def normalized_entropy(logits: ArrayLike, labels: ArrayLike) -> float:
    """logloss / entropy of the base rate (He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at
    Facebook", section 3); nan where only one class is present."""
    return compute_metrics(logits, labels).ne


def calibration(logits: ArrayLike, labels: ArrayLike) -> float:
    """Mean prediction / mean label; nan without positives."""
    return compute_metrics(logits, labels).calibration


def reliability_curve(
    logits: ArrayLike, labels: ArrayLike, num_bins: int = NUM_RELIABILITY_BINS
) -> tuple[ReliabilityBin, ...]:
    """At most `num_bins` bins of about equal count, by rising prediction.

    Equal predictions stay in one bin (split ties would make the bin a matter of order), so fewer distinct
    predictions than bins give fewer bins.
    """
    return tuple(b.to_reliability() for b in _Ranking(logits, labels).bins(num_bins))


def base_rate_entropy(num_positives: int, num_samples: int) -> float:
    """Entropy in nats of always predicting the observed rate; 0 where only one class is present or nothing is."""
    if num_positives in (0, num_samples):
        return 0.0
    rate = num_positives / num_samples
    return -(rate * math.log(rate) + (1.0 - rate) * math.log1p(-rate))


@dataclass(frozen=True, kw_only=True)
class _BinSums:
    """Sums over the samples of one reliability bin."""

    loss: float
    prediction: float
    num_positives: int
    num_samples: int

    def to_reliability(self) -> ReliabilityBin:
        return ReliabilityBin(
            mean_prediction=self.prediction / self.num_samples,
            mean_label=self.num_positives / self.num_samples,
            num_samples=self.num_samples,
        )


class _Ranking:
    """Sorted scores of each class. Two plain sorts are three times faster than one argsort of all scores."""

    def __init__(self, scores: ArrayLike, labels: ArrayLike) -> None:
        values, classes = _as_pair(scores, labels)
        if not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values))[0])
            raise MesetaError(
                f"metrics: prediction {bad} is {values[bad]}, and must be finite; "
                "lower the learning rate, or look for broken values in the dense features"
            )
        if (classes == _BAD_LABEL).any():
            bad = int(np.flatnonzero(classes == _BAD_LABEL)[0])
            raise MesetaError(f"metrics: the label of sample {bad} is neither 0 nor 1; fix the label column")
        self.positives = np.sort(values[classes == 1])
        self.negatives = np.sort(values[classes == 0])
        self.num_samples = len(values)

    @cached_property
    def _few_and_many(self) -> tuple[NDArray[Any], NDArray[Any]]:
        pair = (self.positives, self.negatives)
        return pair if len(self.positives) <= len(self.negatives) else pair[::-1]

    @cached_property
    def _num_below(self) -> NDArray[np.intp]:
        """For each score of the rarer class, how many of the other class lie below it."""
        few, many = self._few_and_many
        return np.searchsorted(many, few, "left")

    def auc(self) -> float:
        few, many = self._few_and_many
        if not len(few):
            return math.nan
        num_not_above = np.searchsorted(many, few, "right")
        twice_won = int(self._num_below.sum()) + int(num_not_above.sum())
        twice_pairs = 2 * len(few) * len(many)
        if few is self.negatives:
            twice_won = twice_pairs - twice_won
        return twice_won / twice_pairs

    def bins(self, num_bins: int) -> list[_BinSums]:
        """Sums by bin of rising score, about equal in count; equal scores share a bin, and no bin is empty."""
        if not self.num_samples:
            return []
        edges = self._values_at([k * self.num_samples // num_bins for k in range(1, num_bins)])
        cuts = [[0, *np.searchsorted(part, edges, "left"), len(part)] for part in (self.positives, self.negatives)]
        bounds = zip(pairwise(cuts[0]), pairwise(cuts[1]), strict=True)
        sums = [_sums(self.positives[a:b], self.negatives[c:d]) for (a, b), (c, d) in bounds]
        return [s for s in sums if s.num_samples]

    def _values_at(self, ranks: Sequence[int]) -> NDArray[Any]:
        """Distinct scores at `ranks` of the sorted union of both classes, without building the union."""
        few, many = self._few_and_many
        places = np.arange(len(few)) + self._num_below
        found = []
        for rank in ranks:
            num_few = int(np.searchsorted(places, rank))
            is_few = num_few < len(few) and places[num_few] == rank
            found.append(few[num_few] if is_few else many[rank - num_few])
        return np.unique(np.asarray(found, dtype=many.dtype))


def _sums(positives: NDArray[Any], negatives: NDArray[Any]) -> _BinSums:
    """Loss and prediction summed over one bin, in float64 and in the order given."""
    loss, prediction = 0.0, 0.0
    for part, sign in ((positives, -1.0), (negatives, 1.0)):
        for start in range(0, len(part), _CHUNK):
            logits = part[start : start + _CHUNK].astype(np.float64)
            decay = np.exp(-np.abs(logits))  # never overflows
            loss += float((np.maximum(sign * logits, 0.0) + np.log1p(decay)).sum())
            prediction += float((np.where(logits >= 0.0, 1.0, decay) / (1.0 + decay)).sum())
    num_samples = len(positives) + len(negatives)
    return _BinSums(loss=loss, prediction=prediction, num_positives=len(positives), num_samples=num_samples)


def _as_pair(logits: ArrayLike, labels: ArrayLike) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Logits [n] as float32 or float64, labels [n] as uint8 (0, 1, or 2 for anything else)."""
    values, truth = np.asarray(logits), np.asarray(labels)
    if values.ndim != 1 or values.shape != truth.shape:
        raise MesetaError(
            f"metrics: logits of shape {list(values.shape)} and labels of shape {list(truth.shape)}; "
            "both must be vectors of the same length"
        )
    if values.dtype != np.float32:
        values = values.astype(np.float32 if values.dtype == np.float16 else np.float64)
    classes = np.where(truth == 1, np.uint8(1), np.where(truth == 0, np.uint8(0), np.uint8(_BAD_LABEL)))
    return values, classes
