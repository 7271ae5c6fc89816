"""Samples sorted by score within each class, from which AUC, average precision and reliability bins are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meseta.train.metrics.samples import WeightedSamples, losses_and_predictions

MIN_PROBABILITY = 1e-7
"""Bound of the clamped log loss on the probability of a sample's label. One minus it is the other bound."""
_CLAMPED_LOSSES = -math.log1p(-MIN_PROBABILITY), -math.log(MIN_PROBABILITY)
_CHUNK_SAMPLES = 1 << 15  # The float64 temporaries of a chunk fit into the cache of a core.


@dataclass(frozen=True, kw_only=True)
class BinSums:
    """Sums over the samples of one bin. Weights are integers if all samples have the same weight."""

    loss: float
    clamped_loss: float
    """Sum of losses with probabilities clipped to `MIN_PROBABILITY`."""
    prediction: float
    positive_weight: int | float
    weight: int | float
    num_samples: int


@dataclass(frozen=True)
class _ClassSamples:
    scores: NDArray[np.floating]
    """Scores [n], ascending."""
    # This order makes sums of weights independent of the order of the samples.
    weights: NDArray[np.float64] | None
    """Weights [n], ascending among equal scores. `None` if all weights are 1."""

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def weight(self) -> int | float:
        """Total weight, an integer if all weights are 1."""
        return len(self) if self.weights is None else float(self._prefix[-1])

    def weight_of_first(self, counts: NDArray[np.intp]) -> NDArray[Any]:
        """Return the weight of the first `count` samples for each count."""
        return counts if self.weights is None else self._prefix[counts]

    def weight_after(self, counts: NDArray[np.intp]) -> NDArray[Any]:
        """Return the weight of all except the first `count` samples for each count."""
        # A sum from the end has no cancellation, unlike the total minus a prefix.
        return len(self) - counts if self.weights is None else self._suffix[counts]

    @cached_property
    def _prefix(self) -> NDArray[np.float64]:
        assert self.weights is not None
        return np.concatenate([[0.0], np.cumsum(self.weights)])

    @cached_property
    def _suffix(self) -> NDArray[np.float64]:
        assert self.weights is not None
        return np.concatenate([np.cumsum(self.weights[::-1])[::-1], [0.0]])

    def split(self, edges: NDArray[np.floating]) -> list[_ClassSamples]:
        """Split the samples at `edges`. A sample that equals an edge belongs to the part above the edge."""
        places = [0, *np.searchsorted(self.scores, edges, "left"), len(self)]
        weights = self.weights
        return [_ClassSamples(self.scores[a:b], None if weights is None else weights[a:b]) for a, b in pairwise(places)]


class Ranking:
    """Samples of each class, sorted by score."""

    def __init__(self, samples: WeightedSamples) -> None:
        # Two plain sorts are three times faster than one argsort of all scores.
        self.positives = _class_samples(samples, 1)
        self.negatives = _class_samples(samples, 0)
        self.num_samples = len(samples)

    @cached_property
    def _rarer_and_other(self) -> tuple[_ClassSamples, _ClassSamples]:
        pair = (self.positives, self.negatives)
        return pair if len(self.positives) <= len(self.negatives) else pair[::-1]

    @cached_property
    def _num_below(self) -> NDArray[np.intp]:
        """For each score of the rarer class, the number of samples of the other class with a lower score."""
        few, many = self._rarer_and_other
        return np.searchsorted(many.scores, few.scores, "left")

    def auc(self) -> float:
        """Return the weighted share of (positive, negative) pairs in the right order. nan if a class is missing.

        A pair counts the product of its weights, and half of it if the scores are equal.
        """
        few, many = self._rarer_and_other
        if not len(few):
            return math.nan
        num_not_above = np.searchsorted(many.scores, few.scores, "right")
        below, not_above = many.weight_of_first(self._num_below), many.weight_of_first(num_not_above)
        twice_won: int | float
        if few.weights is None:
            twice_won = int(below.sum()) + int(not_above.sum())
        else:
            twice_won = float((few.weights * (below + not_above)).sum())
        twice_pairs = 2 * few.weight * many.weight
        if few is self.negatives:
            twice_won = twice_pairs - twice_won
        return min(max(twice_won / twice_pairs, 0.0), 1.0)  # Rounded weights may exceed the range by one ulp.

    def average_precision(self) -> float:
        """Return the weighted mean over positives of the precision at their score. nan if there are no positives."""
        positives, negatives = self.positives, self.negatives
        if not len(positives):
            return math.nan
        few, _ = self._rarer_and_other
        below = self._num_below if few is positives else np.searchsorted(negatives.scores, positives.scores, "left")
        true_above = positives.weight_after(np.searchsorted(positives.scores, positives.scores, "left"))
        precision = true_above / (true_above + negatives.weight_after(below))
        if positives.weights is None:
            return float(precision.sum()) / len(positives)
        return min(float((positives.weights * precision).sum()) / positives.weight, 1.0)

    def bins(self, num_bins: int) -> list[BinSums]:
        """Split the samples into nonempty bins of about equal size, ascending in score. Equal scores share a bin."""
        if not self.num_samples:
            return []
        edges = self._values_at([k * self.num_samples // num_bins for k in range(1, num_bins)])
        parts = zip(self.positives.split(edges), self.negatives.split(edges), strict=True)
        return [_bin_sums(positives, negatives) for positives, negatives in parts if len(positives) + len(negatives)]

    def _values_at(self, ranks: Sequence[int]) -> NDArray[np.floating]:
        """Return the distinct scores at `ranks` of the sorted union of both classes, without building the union."""
        few, many = self._rarer_and_other
        places = np.arange(len(few)) + self._num_below
        values = []
        for rank in ranks:
            num_few = int(np.searchsorted(places, rank))
            is_few = num_few < len(few) and places[num_few] == rank
            values.append(few.scores[num_few] if is_few else many.scores[rank - num_few])
        return np.unique(np.asarray(values, dtype=many.scores.dtype))


def _class_samples(samples: WeightedSamples, label: int) -> _ClassSamples:
    chosen = samples.labels == label
    scores = samples.logits[chosen]
    if samples.weights is None:
        return _ClassSamples(np.sort(scores), None)
    # numpy sorts complex numbers by (real, imaginary), four times faster than a lexsort of two columns.
    pairs = np.empty(len(scores), np.complex128)
    pairs.real, pairs.imag = scores, samples.weights[chosen]
    pairs.sort()
    return _ClassSamples(pairs.real.astype(scores.dtype), pairs.imag.copy())


def _bin_sums(positives: _ClassSamples, negatives: _ClassSamples) -> BinSums:
    loss, clamped_loss, prediction = 0.0, 0.0, 0.0
    for part, sign in ((positives, -1.0), (negatives, 1.0)):
        # The order of samples is fixed by sorting, and so is the sum in float64.
        for start in range(0, len(part), _CHUNK_SAMPLES):
            chunk = slice(start, start + _CHUNK_SAMPLES)
            losses, predictions = losses_and_predictions(part.scores[chunk], sign)
            clamped = np.clip(losses, *_CLAMPED_LOSSES)
            if part.weights is not None:
                losses *= part.weights[chunk]
                clamped *= part.weights[chunk]
                predictions *= part.weights[chunk]
            loss += float(losses.sum())
            clamped_loss += float(clamped.sum())
            prediction += float(predictions.sum())
    return BinSums(
        loss=loss,
        clamped_loss=clamped_loss,
        prediction=prediction,
        positive_weight=positives.weight,
        weight=positives.weight + negatives.weight,
        num_samples=len(positives) + len(negatives),
    )
