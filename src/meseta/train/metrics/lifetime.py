"""Figures over a whole run in memory that does not grow: sums and a histogram of the predictions.

All sums are of whole numbers, so that batches can be added in any order, on any rank, and give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meseta.spec import MesetaError
from meseta.train.metrics.binary_metrics import NUM_RELIABILITY_BINS, ReliabilityBin, base_rate_entropy
from meseta.train.metrics.samples import as_samples, losses_and_predictions

NUM_BINS = 1 << 14
LOGIT_RANGE = 16.0
"""Bins divide the logits from -16 to 16 (probabilities from 1e-7 to 1 - 1e-7) evenly; the outer two take the rest."""

# A weight is four digits to base 2**24, of which the last counts units of 2**-64. Digits are summed on their own: an
# int64 holds 2**39 of them, and a float64, in which numpy sums by bin, the 2**29 of one batch.
_DIGIT_BITS = 24
_NUM_DIGITS = 4
_UNIT_BITS = 64
_DIGIT_OF_ONE = (1, 1 << 16)
"""The digit, and its value, that is 1."""

# Losses have no bound, so their sum is one whole number of 2**-1200: every float64 is a multiple of that.
_LOSS_BITS = 1200
_LOSS_BYTES = 320


@dataclass(frozen=True, kw_only=True)
class BinnedAuc:
    """An AUC read from a histogram."""

    value: float
    """AUC with all predictions of a bin taken as equal; nan where one class is missing."""
    error_bound: float
    """The exact AUC is at most this far from `value`: half the share of pairs that share a bin."""


@dataclass(frozen=True, kw_only=True)
class LifetimeMetrics:
    """Figures over everything added; a figure that is not defined is nan. Every mean is by weight."""

    num_samples: int
    """Samples seen, apart from those of weight 0."""
    num_positives: int
    """Those of them with label 1."""
    weight: float
    """Sum of the weights."""
    logloss: float
    """Mean binary cross-entropy in nats; nan without samples."""
    ne: float
    """logloss / entropy of the base rate; nan where only one class is present."""
    auc: BinnedAuc
    """AUC within a known bound."""
    calibration: float
    """Mean prediction / mean label; nan without positives."""
    reliability: tuple[ReliabilityBin, ...]
    """At most 20 bins of about equal count, by rising prediction; empty without samples."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; nan becomes None. The AUC is `auc_binned`, its bound `auc_error_bound`."""
        figures = {
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
            **{name: None if math.isnan(value) else value for name, value in figures.items()},
            "reliability": [b.to_dict() for b in self.reliability],
        }


class LifetimeWindow:
    """Figures over any number of samples in 1.8 MB: what `MetricWindow` gives for an interval, for the run so far.

    Logloss, NE and calibration are as exact as there; the AUC is binned and comes with the bound of its error.
    """

    def __init__(self) -> None:
        self._problem = ""
        self.reset()

    @property
    def num_samples(self) -> int:
        """Samples added, apart from those of weight 0."""
        return int(self._counts.sum())

    def add(self, logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> None:
        """Add a batch of [B] logits and [B] labels, with [B] weights (1 where not given).

        Raises MesetaError where the shapes differ. A bad value is raised by `compute`, on all ranks.
        """
        batch = as_samples(logits, labels, weights)
        try:
            samples = batch.validate()
        except MesetaError as error:
            self._problem = self._problem or str(error)
            return
        if not len(samples):
            return
        scaled = samples.logits.astype(np.float64) * (NUM_BINS / (2.0 * LOGIT_RANGE)) + NUM_BINS / 2
        bins = np.clip(np.floor(scaled), 0, NUM_BINS - 1).astype(np.intp)
        by_class = bins + NUM_BINS * (samples.labels == 1)
        new_counts = np.bincount(by_class, minlength=2 * NUM_BINS).reshape(2, NUM_BINS)
        self._counts += new_counts
        given = samples.weights
        if given is None and samples.scale != 1.0:
            given = np.full(len(samples), samples.scale)
        losses, predictions = losses_and_predictions(samples.logits, np.where(samples.labels == 1, -1.0, 1.0))
        if given is None:
            digit, value = _DIGIT_OF_ONE
            self._weights[digit] += value * new_counts
        else:
            losses *= given
            predictions *= given
            self._weights += _digits_by_bin(given, by_class, 2 * NUM_BINS).reshape(-1, 2, NUM_BINS)
        self._predictions += _digits_by_bin(predictions, bins, NUM_BINS)
        self._loss += _exact_sum(losses)

    def compute(self) -> LifetimeMetrics:
        """Figures over everything added; raises MesetaError for a bad value, as `MetricWindow.compute` does."""
        if self._problem:
            raise MesetaError(self._problem)
        used = self._counts.any(0)  # most bins are empty, and Python's numbers are slow
        negative, positive = _combine_digits(self._weights[:, :, used])
        predictions = _combine_digits(self._predictions[:, used])
        weight, positive_weight = int((negative + positive).sum()), int(positive.sum())
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
            auc=_auc(positive, negative),
            calibration=int(predictions.sum()) / positive_weight if positive_weight else math.nan,
            reliability=_reliability_bins(self._counts[:, used].sum(0), positive, negative + positive, predictions),
        )

    def reset(self) -> None:
        """Forget everything."""
        self._counts = np.zeros((2, NUM_BINS), np.int64)
        self._weights = np.zeros((_NUM_DIGITS, 2, NUM_BINS), np.int64)
        self._predictions = np.zeros((_NUM_DIGITS, NUM_BINS), np.int64)
        self._loss = 0
        self._problem = ""

    def get_state(self) -> dict[str, NDArray[Any]]:
        """Arrays of fixed size, whatever was added: "counts" [2, bins], "weights" [4, 2, bins] and "predictions"
        [4, bins] int64, "loss" [320] uint8; and "problem" [m] uint8, the text of the first bad value."""
        return {
            "counts": self._counts.copy(),
            "weights": self._weights.copy(),
            "predictions": self._predictions.copy(),
            "loss": np.frombuffer(self._loss.to_bytes(_LOSS_BYTES, "little"), np.uint8),
            "problem": np.frombuffer(self._problem.encode(), np.uint8),
        }

    def set_state(self, state: Mapping[str, ArrayLike]) -> None:
        """Replace everything by what `get_state` gave; lists, as JSON gives them, will do."""
        self.reset()
        self._add_state(state)

    @staticmethod
    def merge(states: Sequence[Mapping[str, ArrayLike]]) -> LifetimeWindow:
        """One window of several, such as the states of all ranks."""
        merged = LifetimeWindow()
        for state in states:
            merged._add_state(state)
        return merged

    def _add_state(self, state: Mapping[str, ArrayLike]) -> None:
        for name, total in (("counts", self._counts), ("weights", self._weights), ("predictions", self._predictions)):
            added = np.asarray(state[name])
            if added.shape != total.shape:
                raise MesetaError(
                    f"metrics: {name!r} of a lifetime window has shape {list(added.shape)}, and must have "
                    f"{list(total.shape)}; it was saved by another version"
                )
            np.add(total, added, out=total)
        self._loss += int.from_bytes(np.asarray(state["loss"], np.uint8).tobytes(), "little")
        self._problem = self._problem or np.asarray(state["problem"], np.uint8).tobytes().decode()


def _reliability_bins(
    counts: NDArray[np.int64],
    positive: NDArray[np.object_],
    weight: NDArray[np.object_],
    predictions: NDArray[np.object_],
) -> tuple[ReliabilityBin, ...]:
    """From bins that all have samples, by rising prediction."""
    if not len(counts):
        return ()
    up_to = np.cumsum(counts)
    ranks = [k * int(up_to[-1]) // NUM_RELIABILITY_BINS for k in range(NUM_RELIABILITY_BINS)]
    starts = np.unique(np.searchsorted(up_to, ranks, "right"))
    sums = [np.add.reduceat(column, starts) for column in (predictions, positive, weight, counts)]
    return tuple(
        ReliabilityBin(mean_prediction=p / w, mean_label=y / w, num_samples=int(n))
        for p, y, w, n in zip(*sums, strict=True)
    )


def binned_auc(logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> BinnedAuc:
    """AUC of [n] logits from a histogram of 16,384 bins, each 1/512 wide, with the bound of its error.

    Raises MesetaError as `MetricWindow.compute` does.
    """
    window = LifetimeWindow()
    window.add(logits, labels, weights)
    return window.compute().auc


def _auc(positive: NDArray[np.object_], negative: NDArray[np.object_]) -> BinnedAuc:
    """From whole weights by bin, divided once at the end."""
    pairs = int(positive.sum()) * int(negative.sum())
    if not pairs:
        return BinnedAuc(value=math.nan, error_bound=math.nan)
    below = np.cumsum(negative) - negative
    tied = int((positive * negative).sum())
    won_twice = 2 * int((positive * below).sum()) + tied
    return BinnedAuc(value=won_twice / (2 * pairs), error_bound=tied / (2 * pairs))


def _digits_by_bin(values: NDArray[np.float64], bins: NDArray[np.intp], num_bins: int) -> NDArray[np.int64]:
    """Sums [4, num_bins] of the digits of values from 0 to 2**32, cut below 2**-64."""
    sums = np.empty((_NUM_DIGITS, num_bins), np.int64)
    rest = np.ldexp(values, _UNIT_BITS - _DIGIT_BITS * (_NUM_DIGITS - 1))
    for digit in range(_NUM_DIGITS):
        whole = np.floor(rest)
        sums[digit] = np.bincount(bins, weights=whole, minlength=num_bins)
        rest = np.ldexp(rest - whole, _DIGIT_BITS)  # exact: a difference with the floor, and a power of two
    return sums


def _combine_digits(digits: NDArray[np.int64]) -> NDArray[np.object_]:
    """Sums of digits [4, ...] as Python's whole numbers of 2**-64 [...], which cannot overflow."""
    total = np.zeros(digits.shape[1:], object)
    for digit in digits.astype(object):
        total = total * (1 << _DIGIT_BITS) + digit
    return total


def _exact_sum(values: NDArray[np.float64]) -> int:
    """The sum of finite values that are not negative, without rounding, in units of 2**-1200."""
    mantissas, exponents = np.frexp(values)
    whole = np.ldexp(mantissas, 53).astype(np.int64)
    total = 0
    lowest = int(exponents.min(initial=0))
    # In halves, whose float64 sums are exact for 2**26 values.
    halves = [np.bincount(exponents - lowest, weights=half) for half in (whole >> 27, whole & ((1 << 27) - 1))]
    for place in np.flatnonzero(halves[0] + halves[1]).tolist():
        high, low = (int(half[place]) for half in halves)
        total += ((high << 27) + low) << (place + lowest - 53 + _LOSS_BITS)
    return total
