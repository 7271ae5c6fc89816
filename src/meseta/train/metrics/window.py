"""Exact metrics of collected predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meseta.spec import MesetaError
from meseta.train.metrics.binary_metrics import Metrics, compute_all_metrics
from meseta.train.metrics.samples import WeightedSamples, as_samples, concatenate


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
