"""The predictions of one interval, collected until they are asked for figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meseta.spec import MesetaError
from meseta.train.metrics.binary_metrics import Metrics, compute_all_metrics
from meseta.train.metrics.samples import WeightedSamples, as_samples, concatenate


class MetricWindow:
    """Collects predictions until they are asked for figures: one per logging interval, one per evaluation.

    Holds 5 bytes a sample (9 for float64 logits), because an exact AUC needs every prediction; weights add 4 (or 8)
    and groups 8.
    """

    def __init__(self) -> None:
        self._batches: list[WeightedSamples] = []

    @property
    def num_samples(self) -> int:
        """Samples added, those of weight 0 included."""
        return sum(len(part) for part in self._batches)

    def add(
        self,
        logits: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None = None,
        groups: ArrayLike | None = None,
    ) -> None:
        """Add a batch of [B] logits and [B] labels, with [B] weights (1 where not given) and [B] keys of groups.

        All are copied. Raises MesetaError where the shapes differ, for keys that are not whole numbers, and where some
        batches have groups and others have none. Values are checked in `compute`, so that a bad one on one rank cannot
        leave the others waiting.
        """
        batch = as_samples(logits, labels, weights, groups)
        if not len(batch):
            return
        if self._batches and (self._batches[0].groups is None) != (batch.groups is None):
            raise MesetaError("metrics: some batches of a window have groups and others have none; give groups to all")
        self._batches.append(
            WeightedSamples(
                logits=batch.logits.copy(),
                labels=batch.labels,
                weights=None if batch.weights is None else batch.weights.copy(),
                groups=batch.groups,
            )
        )

    def compute(self, ndcg_k: int | None = None) -> Metrics:
        """Figures over all samples added; those by group where samples have groups, with NDCG of the first `ndcg_k`
        ranks or of all.

        Raises MesetaError for a logit that is not finite, a label not 0 or 1, a weight that is neither 0 nor between
        1e-9 and 1e9, and `ndcg_k` below 1.
        """
        return compute_all_metrics(as_samples(**self.get_state()), ndcg_k)

    def reset(self) -> None:
        """Forget all samples."""
        self._batches = []

    def get_state(self) -> dict[str, NDArray[Any]]:
        """{"logits": [n] float32 or float64, "labels": [n] uint8}, in the order of adding; with "weights" [n] float32
        or float64 where any were given, and "groups" [n] int64 where samples have them."""
        parts = self._batches
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
        """Replace all samples by those of `get_state`; lists, as JSON gives them, are read as float64."""
        self.reset()
        self.add(**{name: np.asarray(column) for name, column in state.items()})

    @staticmethod
    def merge(states: Sequence[Mapping[str, ArrayLike]]) -> MetricWindow:
        """One window with the samples of several, such as the states of all ranks."""
        merged = MetricWindow()
        for state in states:
            merged.add(**{name: np.asarray(column) for name, column in state.items()})
        return merged
