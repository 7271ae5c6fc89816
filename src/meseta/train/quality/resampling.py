"""Test rows drawn anew: what of a difference is chance in the rows, where labels are all that is known of them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meseta.report.quality.statistics import normal_interval
from meseta.report.quality.suite_result import RowIntervals
from meseta.train.metrics import base_rate_entropy
from meseta.train.quality.study import SuiteRun
from meseta.train.quality.worlds import read_arrays

METRICS = ("ne", "auc")


@dataclass(frozen=True)
class SortedPredictions:
    """Predictions of one training on the n test rows, ready to be weighed over and over."""

    order: NDArray[np.int64]
    """[n] rows by rising logit."""
    starts: NDArray[np.int64]
    """[k] where each of the k distinct logits begins in `order`."""
    is_positive: NDArray[np.bool_]
    """[n]"""
    losses: NDArray[np.float64]
    """[n] cross-entropy of each row in nats."""
    weights: NDArray[np.float64]
    """[n]"""

    @classmethod
    def from_logits(
        cls, logits: NDArray[np.floating], labels: NDArray[np.floating], weights: NDArray[np.floating]
    ) -> SortedPredictions:
        """Of [n] logits and labels; `weights` [n], or [1] where all weigh the same."""
        order = np.argsort(logits, kind="stable")
        starts = np.flatnonzero(np.diff(logits[order], prepend=np.nan) != 0)
        positive = labels > 0.5
        z = logits.astype(np.float64)
        losses = np.where(positive, np.logaddexp(0.0, -z), np.logaddexp(0.0, z))
        return cls(order, starts, positive, losses, np.broadcast_to(weights.astype(np.float64), z.shape))

    def compute_metrics(self, times: NDArray[np.int64]) -> dict[str, float]:
        """NE and AUC, as meseta.train.metrics defines them, where row i is there times[i] times; nan where one class is
        not."""
        weights = self.weights * times
        positives = np.where(self.is_positive, weights, 0.0)
        total, positive = float(weights.sum()), float(positives.sum())
        entropy = base_rate_entropy(positive, total)
        if entropy == 0.0:
            return dict.fromkeys(METRICS, np.nan)
        ones = np.add.reduceat(positives[self.order], self.starts)
        zeros = np.add.reduceat((weights - positives)[self.order], self.starts)
        below = np.cumsum(zeros) - zeros
        auc = float(ones @ (below + zeros / 2)) / (positive * (total - positive))
        return {"ne": float(weights @ self.losses) / total / entropy, "auc": auc}


def bootstrap_rows(
    ground: str, runs: Mapping[str, Mapping[int, SuiteRun]], num_resamples: int, seed: int
) -> RowIntervals:
    """How the mean over seeds of each paired difference varies when the test rows are drawn anew.

    A normal interval with the standard error of the bootstrap (Efron and Tibshirani, 1993, section 6). Every resample
    draws the same rows for all configs and seeds.

    Args:
        ground: name of the dataset.
        runs: those that were scored, by config and seed.
        num_resamples: times that rows are drawn.
        seed: of the draws.
    """
    rows = {name: {number: _read_predictions(run) for number, run in of_one.items()} for name, of_one in runs.items()}
    first = next((one for of_one in rows.values() for one in of_one.values()), None)
    if first is None:
        return {}
    num_rows = len(first.order)
    source = np.random.default_rng(seed)
    pairs = {
        (one, other): sorted(rows[one].keys() & rows[other].keys()) for one, other in itertools.combinations(rows, 2)
    }
    drawn: dict[tuple[str, str, str], list[float]] = {}
    for number in range(num_resamples + 1):  # the first one has every row once
        picked = source.integers(num_rows, size=num_rows) if number else np.arange(num_rows)
        times = np.bincount(picked, minlength=num_rows)
        found = {(name, at): one.compute_metrics(times) for name, of_one in rows.items() for at, one in of_one.items()}
        for (one, other), seeds in pairs.items():
            for metric in METRICS if seeds else ():
                mean = statistics.fmean(found[one, at][metric] - found[other, at][metric] for at in seeds)
                drawn.setdefault((one, other, metric), []).append(mean)
    return {(ground, *key): normal_interval(means[0], _standard_error(means[1:])) for key, means in drawn.items()}


def _standard_error(values: Sequence[float]) -> float:
    """Of those that are defined; without bound where fewer than two are."""
    known = [value for value in values if math.isfinite(value)]
    return statistics.stdev(known) if len(known) > 1 else float("inf")


def _read_predictions(run: SuiteRun) -> SortedPredictions:
    """Raises MesetaError where its predictions cannot be read."""
    found = read_arrays(
        run.logits_file, f"delete {str(run.score_file)!r} and the run beside it, which is trained again"
    )
    return SortedPredictions.from_logits(found["logits"], found["labels"], found["weights"])
