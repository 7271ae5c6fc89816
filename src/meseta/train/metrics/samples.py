"""Validation of logits, labels, weights and group keys, which all metrics share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meseta.data.schema.layout import MAX_WEIGHT, MIN_WEIGHT, is_weight
from meseta.spec import MesetaError

MAX_LOGIT = 1e100
"""Largest absolute logit. It keeps weighted losses from overflowing, and every float32 is below it."""
_INVALID_LABEL = 2


@dataclass(frozen=True, kw_only=True)
class WeightedSamples:
    """Columns of n samples. `validate` checks them and removes samples of weight 0."""

    logits: NDArray[np.floating]
    """Logits [n], float32 or float64."""
    labels: NDArray[np.uint8]
    """Labels [n]: 0, 1, or 2 for an invalid label."""
    weights: NDArray[Any] | None = None
    """Weights [n], float32 or float64. `None` if all samples have the same weight."""
    groups: NDArray[np.int64] | None = None
    """Group keys [n], or `None` if the samples have no groups."""
    scale: float = 1.0
    """Weight of each sample if `weights` is `None`."""

    def __len__(self) -> int:
        return len(self.logits)

    def select(self, places: NDArray[np.bool_]) -> WeightedSamples:
        """Return the samples for which `places` [n] is true."""
        return WeightedSamples(
            logits=self.logits[places],
            labels=self.labels[places],
            weights=None if self.weights is None else self.weights[places],
            groups=None if self.groups is None else self.groups[places],
        )

    def validate(self) -> WeightedSamples:
        """Return the samples with a nonzero weight, with float64 weights, or with none if all weights are equal.

        Raises MesetaError if a weight is neither 0 nor in 1e-9..1e9, a logit is not finite or beyond 1e100, or a label
        is neither 0 nor 1. A sample of weight 0 is padding, so its logit and label may be anything.
        """
        if self.weights is not None:
            _check_weights(self.weights)
        weights = None if self.weights is None else self.weights.astype(np.float64)
        counts = np.ones(len(self), np.bool_) if weights is None else weights > 0.0
        self._check_values(counts)
        kept = self if counts.all() else self.select(counts)
        if weights is None:
            return kept
        weights = weights[counts]
        if len(weights) and weights.min() < weights.max():
            return WeightedSamples(logits=kept.logits, labels=kept.labels, weights=weights, groups=kept.groups)
        scale = float(weights[0]) if len(weights) else 1.0
        return WeightedSamples(logits=kept.logits, labels=kept.labels, groups=kept.groups, scale=scale)

    def _check_values(self, counts: NDArray[np.bool_]) -> None:
        is_short = self.logits.dtype == np.float32
        fits = np.isfinite(self.logits) if is_short else np.abs(self.logits) <= MAX_LOGIT  # False for nan.
        wrong = counts & ~fits
        if wrong.any():
            bad = int(wrong.argmax())
            raise MesetaError(
                f"metrics: logit {bad} must be finite and at most {MAX_LOGIT:g}, got {self.logits[bad]}; "
                "lower the learning rate, or look for invalid values in the dense features"
            )
        unknown = counts & (self.labels == _INVALID_LABEL)
        if unknown.any():
            bad = int(unknown.argmax())
            raise MesetaError(f"metrics: the label of sample {bad} must be 0 or 1; fix the label column")


def as_samples(
    logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None, groups: ArrayLike | None = None
) -> WeightedSamples:
    """Convert array-like columns [n]. float16 becomes float32, other numbers float64, and keys int64.

    Raises MesetaError if shapes differ, a column is not numeric, or keys are not integers. Values are checked later, by
    `WeightedSamples.validate`.
    """
    values, truth = as_scores(logits, labels)
    return WeightedSamples(
        logits=values,
        labels=_as_labels(truth),
        weights=as_weights(weights, len(values)),
        groups=as_keys(groups, len(values)),
    )


def as_scores(scores: ArrayLike, truth: ArrayLike) -> tuple[NDArray[np.floating], NDArray[np.generic]]:
    """Return (scores, truth) [n] with scores in float32 or float64. Raises MesetaError unless numeric and equally
    long."""
    values, labels = np.asarray(scores), np.asarray(truth)
    if values.ndim != 1 or values.shape != labels.shape:
        raise MesetaError(
            "metrics: logits and labels must be vectors of the same length, got shapes "
            f"{list(values.shape)} and {list(labels.shape)}"
        )
    return as_floats("logits", values), labels


def _as_labels(truth: NDArray[np.generic]) -> NDArray[np.uint8]:
    # This is several times faster than np.where.
    is_one, is_zero = (np.asarray(truth == label).astype(np.uint8) for label in (1, 0))
    return np.uint8(_INVALID_LABEL) - is_one - 2 * is_zero


def as_floats(name: str, values: NDArray[np.generic]) -> NDArray[np.floating]:
    """Convert float16 and float32 to float32, other numbers to float64. Raises MesetaError for other `values`."""
    if values.dtype.kind not in "biuf":
        raise MesetaError(f"metrics: {name} must be numbers, got dtype {values.dtype}")
    is_short = values.dtype in (np.float16, np.float32)
    return values.astype(np.float32 if is_short else np.float64, copy=False)


def as_weights(weights: ArrayLike | None, num_samples: int) -> NDArray[np.floating] | None:
    """Convert weights [n] to float32 or float64. Raises MesetaError if the shape differs or they are not numeric."""
    return None if weights is None else as_floats("weights", _column("weights", weights, num_samples))


def as_keys(groups: ArrayLike | None, num_samples: int) -> NDArray[np.int64] | None:
    """Convert keys [n] to int64. Raises MesetaError if the shape differs or they are not integers."""
    if groups is None:
        return None
    keys = _column("groups", groups, num_samples)
    if num_samples and keys.dtype.kind not in "iu":
        raise MesetaError(
            f"metrics: groups must be integers, got dtype {keys.dtype}; number the groups, or hash their names"
        )
    return keys.astype(np.int64)


def validate_weights(weights: NDArray[np.floating] | None, num_samples: int) -> NDArray[np.float64]:
    """Return weights [n] in float64, `None` as ones. Raises MesetaError if one is neither 0 nor in 1e-9..1e9."""
    if weights is None:
        return np.ones(num_samples)
    _check_weights(weights)
    return weights.astype(np.float64)


def losses_and_predictions(
    logits: NDArray[np.floating], sign: float | NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (losses, probabilities) [n]: exact log(1 + exp(sign * z)). `sign` is -1 for positives, 1 for negatives."""
    values = logits.astype(np.float64)
    decay = np.exp(-np.abs(values))  # It cannot overflow.
    return np.maximum(sign * values, 0.0) + np.log1p(decay), _logistic(values, decay)


def logistic(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 / (1 + exp(-z)), without overflow for any finite logit."""
    return _logistic(logits, np.exp(-np.abs(logits)))


def _logistic(logits: NDArray[np.float64], decay: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(logits >= 0.0, 1.0, decay) / (1.0 + decay)


def concatenate(columns: Sequence[NDArray[np.generic]], empty: type[np.generic]) -> NDArray[np.generic]:
    """Concatenate columns. The result has dtype `empty` if there are none."""
    return np.concatenate([np.empty(0, empty), *columns])


def _check_weights(weights: NDArray[np.floating]) -> None:
    fits = is_weight(weights)
    if not fits.all():
        bad = int(fits.argmin())
        raise MesetaError(
            f"metrics: the weight of sample {bad} must be 0 or in {MIN_WEIGHT:g}..{MAX_WEIGHT:g}, got {weights[bad]}; "
            "fix the weight column, or divide it by a constant, which changes no metric"
        )


def _column(name: str, values: ArrayLike, num_samples: int) -> NDArray[np.generic]:
    column = np.asarray(values)
    if column.shape != (num_samples,):
        raise MesetaError(
            f"metrics: {name} must have one entry for each of {num_samples} samples, got shape {list(column.shape)}"
        )
    return column
