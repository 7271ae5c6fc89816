"""Permutation importance of features, see Fisher, Rudin and Dominici (JMLR 20, 2019), measured at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
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
from meseta.sparse import JaggedTensor, KeyedJaggedTensor
from meseta.system.waits import track_activity
from meseta.telemetry.summary import FeatureImportance, FeatureKind, ImportanceSummary
from meseta.train.evaluate import evaluation_mode, score_batch
from meseta.train.metrics import base_rate_entropy

MAX_ROWS, MIN_ROWS = 100_000, 1_000
"""Limits of the number of rows. There are fewer than `MIN_ROWS` only if the split has fewer."""
MAX_SCORED_ROWS = 250_000
"""Number of predictions that determines the number of rows, unless that is less than `MIN_ROWS`."""
MAX_PERMUTATIONS = 4
# 97.5th percentile of the standard normal distribution.
_NORMAL_QUANTILE = 1.959964


def measure_importance(
    model: Model, reader: BatchReader, world: World, *, seed: int, logit_shift: float = 0.0
) -> ImportanceSummary | None:
    """Measure the permutation importance of all features for the first label. Collective.

    The importance of a feature is the increase of the log loss if its column is permuted between rows. Its interval is
    the normal approximation over the differences of rows. Rows are consecutive parts of the split, evenly spaced. The
    result depends on `seed`, and not on the number of ranks. The model is not updated.

    Args:
        model: Trained model.
        reader: Reader of the split, whose position changes.
        world: Ranks of the run.
        seed: Seed of the permutations.
        logit_shift: Value added to the logits, see `meseta.train.evaluate.logit_shift`.

    Returns:
        Importances, or `None` if no row has a weight, or there are no features.
    """
    dataset = reader.dataset
    columns: list[tuple[str, FeatureKind, int]]
    columns = [(feature.name, "dense", place) for place, feature in enumerate(dataset.dense)]
    columns += [(feature.name, "sparse", place) for place, feature in enumerate(dataset.sparse)]
    num_rows = min(max(min(MAX_ROWS, MAX_SCORED_ROWS // max(len(columns), 1)), MIN_ROWS), reader.num_rows)
    if not columns or not num_rows:
        return None
    with track_activity("measuring the importance of features"):
        rows = _gather_rows(reader, num_rows, world)
        weights = _first_label_weights(rows)
        if not weights.sum() > 0:
            return None
        num_permutations = min(max(MAX_SCORED_ROWS // (len(columns) * num_rows), 1), MAX_PERMUTATIONS)
        scorer = _Scorer(model, rows, reader.options.batch_size, world, logit_shift)
        for place, (_, kind, column) in enumerate(columns):
            for repeat in range(num_permutations):
                # Every column has its own permutations, independent of other columns.
                order = np.random.default_rng([seed, place, repeat]).permutation(num_rows)
                scorer.score(kind, column, torch.from_numpy(order))
        losses = scorer.gather_losses()
    labels = _first_column(rows.label).double().numpy()
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
        constant_logloss=base_rate_entropy(float(labels @ weights), total),
        features=features,
    )


def _summarize_differences(
    name: str, kind: FeatureKind, differences: NDArray[np.float64], weights: NDArray[np.float64]
) -> FeatureImportance:
    total, num_used = weights.sum(), np.count_nonzero(weights)
    mean = float(differences @ weights / total)
    variance = float((weights**2) @ (differences - mean) ** 2) / total**2
    half = _NORMAL_QUANTILE * (variance * num_used / max(num_used - 1, 1)) ** 0.5
    return FeatureImportance(name=name, kind=kind, logloss=mean, low=mean - half, high=mean + half)


@dataclass
class _Scorer:
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
        self._losses = [[self._compute_losses([batch])[0] for _, batch in self._slices]]

    def score(self, kind: FeatureKind, column: int, order: Tensor) -> None:
        """Compute the losses with a permuted column. Row i gets the value of row `order[i]`."""
        self._losses.append(self._compute_losses(self._permuted_slices(kind, column, order)))

    def _permuted_slices(self, kind: FeatureKind, column: int, order: Tensor) -> Iterator[Batch]:
        for place, batch in self._slices:
            if kind == "dense":
                dense = batch.dense.clone()
                dense[:, column] = self.rows.dense[order[place], column]
                yield replace(batch, dense=dense)
            else:
                ids = self.rows.sparse
                bags = [batch.sparse[key] for key in ids.keys]
                bags[column] = _take_bags(ids[ids.keys[column]], order[place])
                yield replace(batch, sparse=_join_bags(ids.keys, bags))

    def _compute_losses(self, batches: Sequence[Batch] | Iterator[Batch]) -> list[NDArray[np.float64]]:
        losses = []
        with torch.no_grad(), evaluation_mode(self.model):
            for batch in batches:
                with self._threads:
                    logits = score_batch(self.model, batch, self.world, self._outside)
                first = logits.reshape(len(logits), -1)[:, 0].astype(np.float64) + self.logit_shift
                losses.append(np.logaddexp(0.0, first) - _first_column(batch.label).double().numpy() * first)
        return losses

    def gather_losses(self) -> NDArray[np.float64]:
        """Return the losses of all rows, [1 + number of `score` calls, number of rows]. Collective."""
        # One array per slice, [calls, rows of this rank].
        local = [np.stack(of_slice) for of_slice in zip(*self._losses, strict=True)]
        by_rank = self.world.all_gather_object(local)
        return np.concatenate([part for of_ranks in zip(*by_rank, strict=True) for part in of_ranks], axis=1)


def _gather_rows(reader: BatchReader, num_rows: int, world: World) -> Batch:
    """Return the first `num_rows` rows of evenly spaced global batches, on all ranks. Collective."""
    size = reader.options.batch_size
    num_read = -(-num_rows // size)
    # The last batch may be shorter, so it is read only if all others are.
    spacing = max((reader.num_batches - 1) // num_read, 1)
    local: list[Batch] = []
    for place in range(num_read):
        reader.set_state({**reader.get_state(), "row": place * spacing * size})
        with closing(reader.epoch()) as batches:
            local.append(next(batches))
    by_rank = world.all_gather_object(local)
    rows = join_batches([batch for of_ranks in zip(*by_rank, strict=True) for batch in of_ranks])
    return take_rows(rows, torch.arange(num_rows))


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Concatenate the rows of batches of one dataset. Groups and positions are left out."""

    def join(tensors: Sequence[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    keys = batches[0].sparse.keys
    bags = []
    for key in keys:
        parts = [batch.sparse[key] for batch in batches]
        bags.append(
            JaggedTensor(
                values=torch.cat([part.values for part in parts]),
                lengths=torch.cat([part.lengths for part in parts]),
                weights=join([part.weights for part in parts]),
            )
        )
    return Batch(
        dense=torch.cat([batch.dense for batch in batches]),
        sparse=_join_bags(keys, bags),
        label=torch.cat([batch.label for batch in batches]),
        weight=join([batch.weight for batch in batches]),
        label_mask=join([batch.label_mask for batch in batches]),
    )


def take_rows(batch: Batch, rows: Tensor) -> Batch:
    """Return the rows with indices `rows` [n] of a batch in CPU memory. Groups and the position are left out."""
    ids = batch.sparse
    return Batch(
        dense=batch.dense[rows],
        sparse=_join_bags(ids.keys, [_take_bags(ids[key], rows) for key in ids.keys]),
        label=batch.label[rows],
        weight=None if batch.weight is None else batch.weight[rows],
        label_mask=None if batch.label_mask is None else batch.label_mask[rows],
    )


def _take_bags(bags: JaggedTensor, rows: Tensor) -> JaggedTensor:
    lengths = bags.lengths[rows]
    ends = lengths.cumsum(0)
    # Each id of the result is at its place in its bag, after the start of the bag it comes from.
    shifts = bags.offsets[rows] - (ends - lengths)
    places = torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)
    return JaggedTensor(
        values=bags.values[places],
        lengths=lengths,
        weights=None if bags.weights is None else bags.weights[places],
    )


def _join_bags(keys: Sequence[str], bags: Sequence[JaggedTensor]) -> KeyedJaggedTensor:
    if not keys:
        return KeyedJaggedTensor(
            keys=(), values=torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64)
        )
    weights: list[Any] = [of_key.weights for of_key in bags]
    return KeyedJaggedTensor(
        keys=tuple(keys),
        values=torch.cat([of_key.values for of_key in bags]),
        lengths=torch.cat([of_key.lengths for of_key in bags]),
        weights=None if weights[0] is None else torch.cat(weights),
        batch_sizes=tuple(of_key.lengths.numel() for of_key in bags),
    )


def _first_label_weights(rows: Batch) -> NDArray[np.float64]:
    weights = np.ones(rows.batch_size) if rows.weight is None else rows.weight.double().numpy()
    return weights if rows.label_mask is None else weights * _first_column(rows.label_mask).numpy()


def _first_column(labels: Tensor) -> Tensor:
    return labels if labels.dim() == 1 else labels[:, 0]
