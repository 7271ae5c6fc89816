"""Samples to be measured: what is accepted, what counts, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meseta.data.weights import MAX_WEIGHT, MIN_WEIGHT, is_weight
from meseta.spec import MesetaError

MAX_LOGIT = 1e100
"""Logits are no larger in size, so that no weighted loss overflows; that of a float32 never is."""
_INVALID_LABEL = 2


@dataclass(frozen=True, kw_only=True)
class WeightedSamples:
    """Columns of n samples, as they were given or, after `counted`, checked and without those of weight 0."""

    logits: NDArray[np.floating]
    """[n] float32 or float64."""
    labels: NDArray[np.uint8]
    """[n]; 0, 1, or 2 for anything else."""
    weights: NDArray[Any] | None = None
    """[n] float32 or float64; None where all samples weigh the same."""
    groups: NDArray[np.int64] | None = None
    """[n] keys; None where samples are not grouped."""
    scale: float = 1.0
    """Weight of each sample where `weights` is None."""

    def __len__(self) -> int:
        return len(self.logits)

    def select(self, places: NDArray[np.bool_]) -> WeightedSamples:
        """The samples at which `places` [n] is true."""
        return WeightedSamples(
            logits=self.logits[places],
            labels=self.labels[places],
            weights=None if self.weights is None else self.weights[places],
            groups=None if self.groups is None else self.groups[places],
        )

    def validate(self) -> WeightedSamples:
        """What figures are made of: float64 weights, none of them 0, and none at all where they are equal.

        A sample of weight 0 is padding and may hold anything. Raises MesetaError for a weight that is neither 0 nor
        between 1e-9 and 1e9, a logit that is not finite or beyond 1e100 and a label that is neither 0 nor 1.
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
        fits = np.isfinite(self.logits) if is_short else np.abs(self.logits) <= MAX_LOGIT  # false for nan
        wrong = counts & ~fits
        if wrong.any():
            bad = int(wrong.argmax())
            raise MesetaError(
                f"metrics: prediction {bad} is {self.logits[bad]}, and must be finite, at most {MAX_LOGIT:g}; "
                "lower the learning rate, or look for broken values in the dense features"
            )
        unknown = counts & (self.labels == _INVALID_LABEL)
        if unknown.any():
            bad = int(unknown.argmax())
            raise MesetaError(f"metrics: the label of sample {bad} is neither 0 nor 1; fix the label column")


def as_samples(
    logits: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None, groups: ArrayLike | None = None
) -> WeightedSamples:
    """Columns [n] of anything array-like; float16 becomes float32, other numbers float64, keys int64.

    Raises MesetaError where shapes differ, a column holds no numbers, or keys are not whole ones. Values are checked by
    `Samples.counted`.
    """
    values, truth = as_scores(logits, labels)
    return WeightedSamples(
        logits=values,
        labels=np.where(truth == 1, np.uint8(1), np.where(truth == 0, np.uint8(0), np.uint8(_INVALID_LABEL))),
        weights=as_weights(weights, len(values)),
        groups=as_keys(groups, len(values)),
    )


def as_scores(scores: ArrayLike, truth: ArrayLike) -> tuple[NDArray[np.floating], NDArray[np.generic]]:
    """Scores [n] as float32 or float64, and what is known of them; raises MesetaError where shapes differ."""
    values, known = np.asarray(scores), np.asarray(truth)
    if values.ndim != 1 or values.shape != known.shape:
        raise MesetaError(
            f"metrics: logits of shape {list(values.shape)} and labels of shape {list(known.shape)}; "
            "both must be vectors of the same length"
        )
    return as_floats("logits", values), known


def as_floats(name: str, values: NDArray[np.generic]) -> NDArray[np.floating]:
    """float16 as float32, other numbers as float64; raises MesetaError for what is no number."""
    if values.dtype.kind not in "biuf":
        raise MesetaError(f"metrics: {name} of type {values.dtype}; they must be numbers")
    is_short = values.dtype in (np.float16, np.float32)
    return values.astype(np.float32 if is_short else np.float64, copy=False)


def as_weights(weights: ArrayLike | None, num_samples: int) -> NDArray[np.floating] | None:
    """Weights [n] as float32 or float64; raises MesetaError for another shape."""
    return None if weights is None else as_floats("weights", _column("weights", weights, num_samples))


def as_keys(groups: ArrayLike | None, num_samples: int) -> NDArray[np.int64] | None:
    """Keys [n] as int64; raises MesetaError for another shape and for keys that are not whole numbers."""
    if groups is None:
        return None
    keys = _column("groups", groups, num_samples)
    if num_samples and keys.dtype.kind not in "iu":
        raise MesetaError(
            f"metrics: groups of type {keys.dtype}; they must be whole numbers; number the groups, or hash their names"
        )
    return keys.astype(np.int64)


def validate_weights(weights: NDArray[np.floating] | None, num_samples: int) -> NDArray[np.float64]:
    """Weights [n] in float64, ones where there are none; raises MesetaError as `Samples.counted` does."""
    if weights is None:
        return np.ones(num_samples)
    _check_weights(weights)
    return weights.astype(np.float64)


def losses_and_predictions(
    logits: NDArray[np.floating], sign: float | NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """log(1 + exp(sign * z)), which is the loss of a positive for sign -1 and of a negative for 1, and the
    probability, both [n]; exact for any finite logit."""
    values = logits.astype(np.float64)
    losses = np.maximum(sign * values, 0.0) + np.log1p(np.exp(-np.abs(values)))  # never overflows
    return losses, logistic(values)


def logistic(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 / (1 + exp(-z)), without overflow for any finite logit."""
    decay = np.exp(-np.abs(logits))
    return np.where(logits >= 0.0, 1.0, decay) / (1.0 + decay)


def concatenate(columns: Sequence[NDArray[np.generic]], empty: type[np.generic]) -> NDArray[np.generic]:
    """Batches put together; of type `empty` where there are none."""
    return np.concatenate([np.empty(0, empty), *columns])


def _check_weights(weights: NDArray[np.floating]) -> None:
    fits = is_weight(weights)
    if not fits.all():
        bad = int(fits.argmin())
        raise MesetaError(
            f"metrics: the weight of sample {bad} is {weights[bad]}, and must be 0 or between {MIN_WEIGHT:g} and "
            f"{MAX_WEIGHT:g}; fix the weight column, or divide it by a constant, which changes no figure"
        )


def _column(name: str, values: ArrayLike, num_samples: int) -> NDArray[np.generic]:
    column = np.asarray(values)
    if column.shape != (num_samples,):
        raise MesetaError(
            f"metrics: {name} of shape {list(column.shape)} for {num_samples} samples; give one for each sample"
        )
    return column
