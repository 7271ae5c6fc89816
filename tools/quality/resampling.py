"""Bootstrap over test rows: the part of a difference that is due to the choice of rows."""

# Used for data with labels only. If the true probabilities are known, regret has no noise from labels.

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meseta.train.metrics import base_rate_entropy
from tools.quality.comparison import RowIntervals
from tools.quality.intervals import normal_interval
from tools.quality.study import SuiteRun
from tools.quality.worlds import read_arrays

METRICS = ("ne", "auc")


@dataclass(frozen=True)
class SortedPredictions:
    """Predictions of one model on n test rows, sorted so that metrics of a resample are fast."""

    order: NDArray[np.int64]
    """Row indices [n] by ascending logit."""
    starts: NDArray[np.int64]
    """Index [k] into `order` at which each of the k distinct logits starts."""
    is_positive: NDArray[np.bool_]
    """Whether the label of each row [n] is 1."""
    losses: NDArray[np.float64]
    """Cross-entropy [n] of each row in nats."""
    weights: NDArray[np.float64]

    @classmethod
    def from_logits(
        cls, logits: NDArray[np.floating], labels: NDArray[np.floating], weights: NDArray[np.floating]
    ) -> SortedPredictions:
        """Sort [n] logits and labels. `weights` are [n], or [1] if they are equal."""
        order = np.argsort(logits, kind="stable")
        starts = np.flatnonzero(np.diff(logits[order], prepend=np.nan) != 0)
        positive = labels > 0.5
        z = logits.astype(np.float64)
        losses = np.where(positive, np.logaddexp(0.0, -z), np.logaddexp(0.0, z))
        return cls(order, starts, positive, losses, np.broadcast_to(weights.astype(np.float64), z.shape))

    def compute_metrics(self, times: NDArray[np.int64]) -> dict[str, float]:
        """Return NE and AUC of a resample in which row i occurs times[i] times. They are nan if only one class occurs.

        The definitions are those of meseta.train.metrics.
        """
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
    """Return a confidence interval of each paired difference of configs, over resampled test rows.

    The intervals are normal, with the standard error of the bootstrap (Efron and Tibshirani, 1993, section 6). The
    difference of a resample is its mean over seeds. Each resample draws the same rows for all configs and seeds.

    Args:
        ground: Name of the dataset.
        runs: Scored runs by config and seed.
        num_resamples: Number of resamples.
        seed: Seed of the resampling.
    """
    rows = {name: {number: _read_predictions(run) for number, run in of_one.items()} for name, of_one in runs.items()}
    first = next((one for of_one in rows.values() for one in of_one.values()), None)
    if first is None:
        return {}
    num_rows = len(first.order)
    generator = np.random.default_rng(seed)
    pairs = {
        (one, other): sorted(rows[one].keys() & rows[other].keys()) for one, other in itertools.combinations(rows, 2)
    }
    drawn: dict[tuple[str, str, str], list[float]] = {}
    for number in range(num_resamples + 1):  # Number 0 has every row once and gives the estimate.
        picked = generator.integers(num_rows, size=num_rows) if number else np.arange(num_rows)
        times = np.bincount(picked, minlength=num_rows)
        metrics = {
            (name, at): one.compute_metrics(times) for name, of_one in rows.items() for at, one in of_one.items()
        }
        for (one, other), seeds in pairs.items():
            for metric in METRICS if seeds else ():
                mean = statistics.fmean(metrics[one, at][metric] - metrics[other, at][metric] for at in seeds)
                drawn.setdefault((one, other, metric), []).append(mean)
    return {(ground, *key): normal_interval(means[0], _standard_error(means[1:])) for key, means in drawn.items()}


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard deviation of the finite values, or inf if there are fewer than two."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.stdev(finite) if len(finite) > 1 else float("inf")


def _read_predictions(run: SuiteRun) -> SortedPredictions:
    arrays = read_arrays(
        run.logits_file, f"delete {str(run.score_file)!r} and the run next to it, and start the suite again"
    )
    return SortedPredictions.from_logits(arrays["logits"], arrays["labels"], arrays["weights"])
