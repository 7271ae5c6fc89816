"""Permutation importance of features, see Fisher, Rudin and Dominici (JMLR 20, 2019), measured at the end of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.data.read.batch_reader import BatchReader
from meseta.embedding.batch_context import OutOfRangeIds
from meseta.measure.threads import StepThreads
from meseta.pipeline.losses import Model
from meseta.system.waits import track_activity
from meseta.telemetry.summary import FeatureImportance, FeatureKind, ImportanceSummary
from meseta.train.baseline import sample_training_rows, score_logistic_regression
from meseta.train.evaluate import evaluation_mode, score_batch
from meseta.train.metrics import auc, base_rate_entropy
from meseta.train.sampled_rows import (
    first_column,
    first_label_weights,
    gather_rows,
    join_bags,
    take_bags,
    take_rows,
)

MAX_ROWS, MIN_ROWS = 100_000, 1_000
"""Limits of the number of rows. There are fewer than `MIN_ROWS` only if the split has fewer."""
MAX_PREDICTIONS = 175_000
"""Number of predictions that determines the number of rows, unless that is less than `MIN_ROWS`."""
MAX_PERMUTATIONS = 4
# 97.5th percentile of the standard normal distribution.
_NORMAL_QUANTILE = 1.959964


def measure_importance(
    model: Model,
    reader: BatchReader,
    world: World,
    *,
    seed: int,
    logit_shift: float = 0.0,
    training_reader: BatchReader | None = None,
    max_predictions: int = MAX_PREDICTIONS,
) -> ImportanceSummary | None:
    """Measure the permutation importance of all features for the first label. Collective.

    The importance of a feature is the increase of the log loss if its column is permuted between rows. Its interval is
    the normal approximation over the differences of rows. Rows are consecutive parts of the split, evenly spaced. The
    result depends on `seed`, and not on the number of ranks. The model is not updated. The baselines are the rate of
    positives, and `meseta.train.baseline` for `training_reader`.

    Args:
        model: Trained model.
        reader: Reader of the split, whose position changes.
        world: Ranks of the run.
        seed: Seed of the permutations, and of the order in which logistic regression reads its rows.
        logit_shift: Value added to the logits, see `meseta.train.evaluate.logit_shift`.
        training_reader: Reader of the rows for logistic regression, whose position changes. `None` fits none.
        max_predictions: Limit of the number of predictions, unless there are fewer than `MIN_ROWS` for each feature.

    Returns:
        Importances, or `None` if no row has a weight, or there are no features.
    """
    dataset = reader.dataset
    columns: list[tuple[str, FeatureKind, int]]
    columns = [(feature.name, "dense", place) for place, feature in enumerate(dataset.dense)]
    columns += [(feature.name, "sparse", place) for place, feature in enumerate(dataset.sparse)]
    num_rows = min(max(min(MAX_ROWS, max_predictions // max(len(columns), 1)), MIN_ROWS), reader.num_rows)
    if not columns or not num_rows:
        return None
    with track_activity("measuring the importance of features"):
        rows = gather_rows(reader, num_rows, world)
        weights = first_label_weights(rows)
        if not weights.sum() > 0:
            return None
        num_permutations = min(max(max_predictions // (len(columns) * num_rows), 1), MAX_PERMUTATIONS)
        scorer = RowScorer(model, rows, reader.options.batch_size, world, logit_shift)
        for place, (_, kind, column) in enumerate(columns):
            for repeat in range(num_permutations):
                # Every column has its own permutations, independent of other columns.
                order = np.random.default_rng([seed, place, repeat]).permutation(num_rows)
                scorer.score(kind, column, torch.from_numpy(order))
        losses, labels = scorer.gather_losses(), first_column(rows.label).double().numpy()
        logistic: dict[str, Any] = {}
        if training_reader is not None and training_reader.num_rows:
            sample = sample_training_rows(training_reader, world)
            logits = score_logistic_regression(sample, rows, dataset.sparse, seed=seed) + logit_shift
            logistic["logistic_logloss"] = float(log_losses(logits, rows) @ weights / weights.sum())
            logistic["logistic_auc"] = auc(logits, labels, weights)
            logistic["num_logistic_rows"] = sample.batch_size
    total = float(weights.sum())
    permuted = losses[1:].reshape(len(columns), num_permutations, num_rows).mean(axis=1)
    features = [
        _summarize_differences(name, kind, of_rows - losses[0], weights)
        for (name, kind, _), of_rows in zip(columns, permuted, strict=True)
    ]
    return ImportanceSummary(
        split=reader.split,
        label=dataset.labels[0],
        num_rows=num_rows,
        num_permutations=num_permutations,
        logloss=float(losses[0] @ weights) / total,
        auc=auc(scorer.gather_logits(), labels, weights),
        constant_logloss=base_rate_entropy(float(labels @ weights), total),
        **logistic,
        features=features,
    )


def log_losses(logits: NDArray[np.float64], rows: Batch) -> NDArray[np.float64]:
    """Return the log losses [B] of logits [B] for the first label."""
    return np.logaddexp(0.0, logits) - first_column(rows.label).double().numpy() * logits


@dataclass(frozen=True)
class PairedDifference:
    """Mean difference of two losses on the same rows, with its 95% interval."""

    mean: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """Convert to plain data, which are the arguments of the constructor."""
        return dict(vars(self))

    def __str__(self) -> str:
        return f"{self.mean:+.5f} (95 % interval {self.low:+.5f} to {self.high:+.5f})"


def paired_difference(differences: NDArray[np.float64], weights: NDArray[np.float64]) -> PairedDifference:
    """Return the weighted mean of differences [n] of rows, with its normal interval."""
    total, num_used = weights.sum(), np.count_nonzero(weights)
    mean = float(differences @ weights / total)
    variance = float((weights**2) @ (differences - mean) ** 2) / total**2
    half = _NORMAL_QUANTILE * (variance * num_used / max(num_used - 1, 1)) ** 0.5
    return PairedDifference(mean, mean - half, mean + half)


def _summarize_differences(
    name: str, kind: FeatureKind, differences: NDArray[np.float64], weights: NDArray[np.float64]
) -> FeatureImportance:
    paired = paired_difference(differences, weights)
    return FeatureImportance(name=name, kind=kind, logloss=paired.mean, low=paired.low, high=paired.high)


@dataclass
class RowScorer:
    """Losses of this rank's slices of the rows, first unchanged and then with one permuted column each."""

    model: Model
    rows: Batch
    batch_size: int
    """Number of rows of a global batch. Evaluations need the memory of such batches too."""
    world: World
    logit_shift: float

    def __post_init__(self) -> None:
        starts = range(self.batch_size, self.rows.batch_size, self.batch_size)
        parts = np.split(np.arange(self.rows.batch_size), list(starts))
        slices = [torch.from_numpy(np.array_split(part, self.world.size)[self.world.rank]) for part in parts]
        self._slices = [(place, take_rows(self.rows, place)) for place in slices]
        self._threads, self._outside = StepThreads(), OutOfRangeIds()
        scored = list(self._score_batches(batch for _, batch in self._slices))
        self._logits = [logits for logits, _ in scored]
        self._losses = [[losses for _, losses in scored]]

    def score(self, kind: FeatureKind, column: int, order: Tensor) -> None:
        """Compute the losses with a permuted column. Row i gets the value of row `order[i]`."""
        scored = self._score_batches(self._permuted_slices(kind, column, order))
        self._losses.append([losses for _, losses in scored])

    def _permuted_slices(self, kind: FeatureKind, column: int, order: Tensor) -> Iterator[Batch]:
        for place, batch in self._slices:
            if kind == "dense":
                dense = batch.dense.clone()
                dense[:, column] = self.rows.dense[order[place], column]
                yield replace(batch, dense=dense)
            else:
                ids = self.rows.sparse
                bags = [batch.sparse[key] for key in ids.keys]
                bags[column] = take_bags(ids[ids.keys[column]], order[place])
                yield replace(batch, sparse=join_bags(ids.keys, bags))

    def _score_batches(self, batches: Iterable[Batch]) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Yield (logits, losses) of batches."""
        with torch.no_grad(), evaluation_mode(self.model):
            for batch in batches:
                with self._threads:
                    logits = score_batch(self.model, batch, self.world, self._outside)
                first = logits.reshape(len(logits), -1)[:, 0].astype(np.float64) + self.logit_shift
                yield first, log_losses(first, batch)

    def gather_losses(self) -> NDArray[np.float64]:
        """Return the losses of all rows, [1 + number of `score` calls, number of rows]. Collective."""
        # One array per slice, [calls, rows of this rank].
        local = [np.stack(of_slice) for of_slice in zip(*self._losses, strict=True)]
        return self._gather(local)

    def gather_logits(self) -> NDArray[np.float64]:
        """Return the logits of the unchanged rows, with the shift. Collective."""
        return self._gather(self._logits)

    def _gather(self, local: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
        by_rank = self.world.all_gather_object(local)
        return np.concatenate([part for of_ranks in zip(*by_rank, strict=True) for part in of_ranks], axis=-1)
