"""Metrics of a whole run in constant memory, from sums and a histogram of the predictions."""
# All sums are integers. Batches can therefore be added in any order and on any rank, with bitwise identical results.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meseta.spec import MesetaError
from meseta.train.metrics.binary_metrics import (
    NUM_RELIABILITY_BINS,
    Metrics,
    ReliabilityBin,
    base_rate_entropy,
    compute_all_metrics,
)
from meseta.train.metrics.samples import WeightedSamples, as_samples, concatenate, losses_and_predictions

NUM_BINS = 1 << 14
LOGIT_RANGE = 16.0
"""Range of the histogram: logits from -16 to 16, which are probabilities from 1e-7 to 1 - 1e-7. The outermost bins
include all logits beyond it."""

# A weight is a fixed-point number with four digits to base 2**24, in units of 2**-64. Each digit is summed separately.
# An int64 can hold the sum of 2**39 digits. numpy sums by bin in float64, which holds the 2**29 digits of a batch.
_DIGIT_BITS = 24
_NUM_DIGITS = 4
_UNIT_BITS = 64
# Digit (index, value) of a weight of 1. All its other digits are 0.
_DIGIT_OF_ONE = (1, 1 << 16)

# Losses have no upper bound, so their sum is a Python integer in units of 2**-1200, which all float64 are multiples of.
_LOSS_BITS = 1200
_LOSS_BYTES = 320


@dataclass(frozen=True, kw_only=True)
class BinnedAuc:
    """AUC computed from a histogram."""

    value: float
    """AUC if all predictions of a bin are treated as ties. nan if a class is missing."""
    error_bound: float
    """Maximum difference between the exact AUC and `value`: half the share of pairs within one bin."""


@dataclass(frozen=True, kw_only=True)
class LifetimeMetrics:
    """Metrics, as defined by `Metrics`, of a `LifetimeWindow`. Means are weighted, and undefined metrics are nan."""

    num_samples: int
    num_positives: int
    weight: float
    logloss: float
    ne: float
    auc: BinnedAuc
    """Binned AUC with a bound on its error."""
    calibration: float
    reliability: tuple[ReliabilityBin, ...]
    """At most 20 bins with about equal numbers of samples, in ascending order of predictions. Empty if there are no
    samples."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON. nan becomes `None`. The AUC has the key `auc_binned`, and its bound
        `auc_error_bound`."""
        values = {
            "logloss": self.logloss,
            "ne": self.ne,
            "auc_binned": self.auc.value,
            "auc_error_bound": self.auc.error_bound,
            "calibration": self.calibration,
        }
        return {
            "num_samples": self.num_samples,
            "num_positives": self.num_positives,
            "weight": self.weight,
            **{name: None if math.isnan(value) else value for name, value in values.items()},
            "reliability": [b.to_dict() for b in self.reliability],
        }


class LifetimeWindow:
    """Metrics of any number of samples in 1.8 MB of memory. Log loss, NE and calibration are as exact as those of
    `MetricWindow`. The AUC is binned, with an error bound."""

    def __init__(self, num_bins: int = NUM_BINS) -> None:
        """Create an empty window. Fewer bins need less memory, and increase the error bound of the AUC."""
        self._num_bins = num_bins
        self._problem = ""
        self.reset()

    @property
    def num_samples(self) -> int:
        """Number of samples added, without those of weight 0."""
        return int(self._counts.sum())

    def add(self, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Add a batch of [B] logits, [B] labels and optional [B] weights. Raises MesetaError if the shapes differ.
        `compute` raises errors of values."""
        batch = as_samples(logits, labels, weights)
        try:
            samples = batch.validate()
        except MesetaError as error:
            # An error on one rank would leave the other ranks waiting. The stored text is merged, so `compute` raises
            # on all ranks.
            self._problem = self._problem or str(error)
            return
        if not len(samples):
            return
        num_bins = self._num_bins
        scaled = samples.logits.astype(np.float64) * (num_bins / (2.0 * LOGIT_RANGE)) + num_bins / 2
        bins = np.clip(np.floor(scaled), 0, num_bins - 1).astype(np.intp)
        by_class = bins + num_bins * (samples.labels == 1)
        new_counts = np.bincount(by_class, minlength=2 * num_bins).reshape(2, num_bins)
        self._counts += new_counts
        sample_weights = samples.weights
        if sample_weights is None and samples.scale != 1.0:
            sample_weights = np.full(len(samples), samples.scale)
        losses, predictions = losses_and_predictions(samples.logits, np.where(samples.labels == 1, -1.0, 1.0))
        if sample_weights is None:
            digit, value = _DIGIT_OF_ONE
            self._weights[digit] += value * new_counts
        else:
            losses *= sample_weights
            predictions *= sample_weights
            self._weights += _digits_by_bin(sample_weights, by_class, 2 * num_bins).reshape(-1, 2, num_bins)
        self._predictions += _digits_by_bin(predictions, bins, num_bins)
        self._loss += _exact_sum(losses)

    def compute(self) -> LifetimeMetrics:
        """Compute the metrics of all samples. Raises MesetaError if an added value was invalid."""
        if self._problem:
            raise MesetaError(self._problem)
        used = self._counts.any(0)  # Most bins may be empty.
        weights, predictions = self._weights[:, :, used], self._predictions[:, used]
        negative_weight, positive_weight = _combine_digits(weights.sum(2)).tolist()
        weight = negative_weight + positive_weight
        mean_loss = math.nan
        if weight:
            mean_loss = (self._loss << _UNIT_BITS) / (weight << _LOSS_BITS)
        entropy = base_rate_entropy(positive_weight, weight)
        return LifetimeMetrics(
            num_samples=self.num_samples,
            num_positives=int(self._counts[1].sum()),
            weight=weight / (1 << _UNIT_BITS),
            logloss=mean_loss,
            ne=mean_loss / entropy if entropy > 0.0 else math.nan,
            auc=_auc(weights[:, 1], weights[:, 0], positive_weight * negative_weight),
            calibration=int(_combine_digits(predictions.sum(1))) / positive_weight if positive_weight else math.nan,
            reliability=_reliability_bins(self._counts[:, used].sum(0), weights, predictions),
        )

    def reset(self) -> None:
        """Remove all samples."""
        self._counts = np.zeros((2, self._num_bins), np.int64)
        self._weights = np.zeros((_NUM_DIGITS, 2, self._num_bins), np.int64)
        self._predictions = np.zeros((_NUM_DIGITS, self._num_bins), np.int64)
        self._loss = 0
        self._problem = ""

    def get_state(self) -> dict[str, NDArray[Any]]:
        """Return the state as arrays, whose sizes do not depend on the number of samples."""
        return {
            # counts [2, bins], weights [4, 2, bins] and predictions [4, bins] are int64. loss [320] and problem [m] are
            # uint8.
            "counts": self._counts.copy(),
            "weights": self._weights.copy(),
            "predictions": self._predictions.copy(),
            "loss": np.frombuffer(self._loss.to_bytes(_LOSS_BYTES, "little"), np.uint8),
            "problem": np.frombuffer(self._problem.encode(), np.uint8),
        }

    def set_state(self, state: Mapping[str, ArrayLike]) -> None:
        """Replace all samples by a state of `get_state`. Lists from JSON are accepted."""
        self.reset()
        self.add_state(state)

    @staticmethod
    def merge(states: Sequence[Mapping[str, ArrayLike]], num_bins: int = NUM_BINS) -> LifetimeWindow:
        """Return one window with the samples of several states, such as those of all ranks."""
        merged = LifetimeWindow(num_bins)
        for state in states:
            merged.add_state(state)
        return merged

    def add_state(self, state: Mapping[str, ArrayLike]) -> None:
        """Add the samples of a state of `get_state`, which must have the same number of bins."""
        for name, total in (("counts", self._counts), ("weights", self._weights), ("predictions", self._predictions)):
            added = np.asarray(state[name])
            if added.shape != total.shape:
                raise MesetaError(
                    f"metrics: state {name!r} of a lifetime window must have shape {list(total.shape)}, got "
                    f"{list(added.shape)}; load it with the version that saved it"
                )
            np.add(total, added, out=total)
        self._loss += int.from_bytes(np.asarray(state["loss"], np.uint8).tobytes(), "little")
        self._problem = self._problem or np.asarray(state["problem"], np.uint8).tobytes().decode()


def _reliability_bins(
    counts: NDArray[np.int64], weights: NDArray[np.int64], predictions: NDArray[np.int64]
) -> tuple[ReliabilityBin, ...]:
    """Merge n nonempty histogram bins, in ascending order of predictions, into `NUM_RELIABILITY_BINS` bins at most.

    `counts` [n] are numbers of samples. `weights` [4, 2, n] and `predictions` [4, n] are digits.
    """
    if not len(counts):
        return ()
    up_to = np.cumsum(counts)
    ranks = [k * int(up_to[-1]) // NUM_RELIABILITY_BINS for k in range(NUM_RELIABILITY_BINS)]
    starts = np.unique(np.searchsorted(up_to, ranks, "right"))
    digits = (predictions, weights[:, 1], weights.sum(1))
    sums = [_combine_digits(np.add.reduceat(column, starts, axis=1)) for column in digits]
    return tuple(
        ReliabilityBin(mean_prediction=p / w, mean_label=y / w, num_samples=int(n))
        for p, y, w, n in zip(*sums, np.add.reduceat(counts, starts), strict=True)
    )


def binned_auc(logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> BinnedAuc:
    """Return the AUC of [n] logits from a histogram of 16,384 bins of width 1/512, and a bound on its error. Raises
    MesetaError as `MetricWindow.compute` does."""
    window = LifetimeWindow()
    window.add(logits, labels, weights)
    return window.compute().auc


def _auc(positive: NDArray[np.int64], negative: NDArray[np.int64], pairs: int) -> BinnedAuc:
    """Return the AUC, given the digits [4, n] of the weights by class and bin, and the product of their totals."""
    if not pairs:
        return BinnedAuc(value=math.nan, error_bound=math.nan)
    # Integer sums, divided once, give the same bits for any order of the samples.
    ones, zeros = _carry(positive), _carry(negative)
    below = _carry(np.cumsum(zeros, axis=1) - zeros)
    tied = _dot(ones, zeros)
    won_twice = 2 * _dot(ones, below) + tied
    return BinnedAuc(value=won_twice / (2 * pairs), error_bound=tied / (2 * pairs))


# Arithmetic on arrays of Python integers is slow, and stops all other threads of the process meanwhile.
def _carry(digits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return numbers with digits [m, n] of any size as [m + 2, n] digits below 2**24."""
    carried, rest = [], np.zeros(digits.shape[1], np.int64)
    for digit in (*digits[::-1], 0, 0):
        rest = rest + digit
        carried.append(rest & ((1 << _DIGIT_BITS) - 1))
        rest >>= _DIGIT_BITS
    return np.stack(carried[::-1])


def _dot(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Return the exact dot product of numbers with digits below 2**24, [m, n] and [k, n], for n up to 2**15."""
    total = 0
    products = one @ other.T  # The sum of 2**15 products of two digits fits into an int64.
    for place in range(sum(products.shape) - 1):
        # Digits whose places in both numbers add up to `place` have the same power of the base.
        total = (total << _DIGIT_BITS) + sum(np.fliplr(products).diagonal(products.shape[1] - 1 - place).tolist())
    return total


def _digits_by_bin(values: NDArray[np.float64], bins: NDArray[np.intp], num_bins: int) -> NDArray[np.int64]:
    """Sum the digits of values in [0, 2**32) by bin, as [4, num_bins]. Fractions below 2**-64 are truncated."""
    sums = np.empty((_NUM_DIGITS, num_bins), np.int64)
    rest = np.ldexp(values, _UNIT_BITS - _DIGIT_BITS * (_NUM_DIGITS - 1))
    for digit in range(_NUM_DIGITS):
        whole = np.floor(rest)
        sums[digit] = np.bincount(bins, weights=whole, minlength=num_bins)
        rest = np.ldexp(rest - whole, _DIGIT_BITS)  # Both operations are exact.
    return sums


def _combine_digits(digits: NDArray[np.int64]) -> NDArray[np.object_]:
    """Combine digits [4, ...] into Python integers [...] in units of 2**-64, which cannot overflow."""
    total = np.zeros(digits.shape[1:], object)
    for digit in digits.astype(object):
        total = total * (1 << _DIGIT_BITS) + digit
    return np.asarray(total, object)  # Of one number, numpy returns an int.


def _exact_sum(values: NDArray[np.float64]) -> int:
    """Return the exact sum of finite, nonnegative values as an integer in units of 2**-1200."""
    mantissas, exponents = np.frexp(values)
    whole = np.ldexp(mantissas, 53).astype(np.int64)
    total = 0
    lowest = int(exponents.min(initial=0))
    # Each mantissa is split into halves, because bincount sums in float64. The sum of 2**26 halves is exact.
    halves = [np.bincount(exponents - lowest, weights=half) for half in (whole >> 27, whole & ((1 << 27) - 1))]
    for place in np.flatnonzero(halves[0] + halves[1]).tolist():
        high, low = (int(half[place]) for half in halves)
        total += ((high << 27) + low) << (place + lowest - 53 + _LOSS_BITS)
    return total


class MetricWindow:
    """Collects the predictions of a logging interval or an evaluation, and computes their metrics.

    Needs 5 bytes per sample (9 for float64 logits). Weights add 4 (or 8) bytes, and groups 8.
    """

    def __init__(self) -> None:
        # An exact AUC needs every prediction.
        self._batches: list[WeightedSamples] = []

    @property
    def num_samples(self) -> int:
        """Number of samples added, including those of weight 0."""
        return sum(len(part) for part in self._batches)

    def add(
        self,
        logits: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> None:
        """Add a copy of a batch of [B] logits and labels, with optional [B] weights and group keys.

        Values are checked in `compute`.
        Raises MesetaError if shapes differ, keys are not integers, or only some of the batches have groups.
        """
        # Raising for a bad value on one rank, before the windows are gathered, would leave the other ranks waiting.
        batch = as_samples(logits, labels, weights, groups)
        if not len(batch):
            return
        if self._batches and (self._batches[0].groups is None) != (batch.groups is None):
            raise MesetaError("metrics: all batches of a window must have groups, or none; pass groups with each batch")
        self._batches.append(
            WeightedSamples(
                logits=batch.logits.copy(),
                labels=batch.labels,
                weights=None if batch.weights is None else batch.weights.copy(),
                groups=batch.groups,
            )
        )

    def compute(self, ndcg_k: int | None = None) -> Metrics:
        """Compute the metrics of all samples. Samples with groups add GAUC and NDCG of the first `ndcg_k` ranks.

        Raises MesetaError if a logit is not finite or beyond 1e100, a label is not 0 or 1, a weight is neither 0 nor in
        1e-9..1e9, or `ndcg_k` is below 1.
        """
        return compute_all_metrics(as_samples(**self.get_state()), ndcg_k)

    def reset(self) -> None:
        """Remove all samples."""
        self._batches = []

    def get_state(self) -> dict[str, NDArray[Any]]:
        """Return the columns [n] of all samples, in the order in which they were added."""
        parts = self._batches
        # logits and weights are float32 or float64, labels uint8, and groups int64.
        state: dict[str, NDArray[Any]] = {
            "logits": concatenate([part.logits for part in parts], np.float32),
            "labels": concatenate([part.labels for part in parts], np.uint8),
        }
        if any(part.weights is not None for part in parts):
            ones = (np.ones(len(part), np.float32) if part.weights is None else part.weights for part in parts)
            state["weights"] = concatenate(list(ones), np.float32)
        keys = [part.groups for part in parts if part.groups is not None]
        if keys:
            state["groups"] = concatenate(keys, np.int64)
        return state

    def set_state(self, state: Mapping[str, ArrayLike]) -> None:
        """Replace all samples by a state of `get_state`. Lists from JSON become float64."""
        self.reset()
        self.add(**{name: np.asarray(column) for name, column in state.items()})

    @staticmethod
    def merge(states: Sequence[Mapping[str, ArrayLike]]) -> MetricWindow:
        """Return one window with the samples of several states, such as those of all ranks."""
        merged = MetricWindow()
        for state in states:
            merged.add(**{name: np.asarray(column) for name, column in state.items()})
        return merged
