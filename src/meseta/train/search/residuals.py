"""Association of columns with the residuals of a model that does not use them.

For each column, the statistic is the sum of products of the residuals of all pairs of rows that share an id. It is the
score test of a random effect per id (Lin, Biometrika 84, 1997), so it also finds weak effects of many rare ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch import Batch
from meseta.pipeline.losses import Model
from meseta.train.importance import RowScorer
from meseta.train.sampled_rows import first_column, first_label_weights, gather_rows, join_bags
from meseta.train.setup.build import make_reader

MAX_ROWS = 300_000
"""Number of training rows that are tested at most."""
# Few buckets find weak effects that are smooth, and many find those of narrow ranges.
_NUM_BUCKETS = (5, 20)


def pair_statistic(ids: NDArray[np.int64], rows: NDArray[np.int64], residuals: NDArray[np.float64]) -> float:
    """Return the sum of residual products over pairs of rows that share an id, in standard deviations.

    Without association it is about standard normal. It is 0 if no two rows share an id.

    Args:
        ids: Ids [m] of all rows.
        rows: Row [m] of each id.
        residuals: Residuals [n] of the rows.
    """
    _, groups = np.unique(ids, return_inverse=True)
    values = residuals[rows]
    squares = values**2
    pairs = np.bincount(groups, values) ** 2 - np.bincount(groups, squares)
    variances = 2 * (np.bincount(groups, squares) ** 2 - np.bincount(groups, squares**2))
    variance = max(float(variances.sum()), 0.0)
    return float(pairs.sum()) / variance**0.5 if variance > 0 else 0.0


def centered_residuals(
    labels: NDArray[np.float64], losses: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the weighted differences [n] between labels and probabilities, minus their mean.

    `labels` are 0 or 1, and `losses` are log losses.
    """
    # A model whose probabilities are too high or too low would otherwise be associated with every column.
    likelihoods = np.exp(-losses)
    residuals = np.where(labels > 0.5, 1 - likelihoods, likelihoods - 1)
    return (residuals - np.average(residuals, weights=weights)) * weights


def measure_association(
    model: Model, config: RunConfig, dataset: Dataset, names: Sequence[str], world: World
) -> tuple[dict[str, float], int]:
    """Return `pair_statistic` of the features `names`, which `model` does not use, and the number of training rows that
    were read. Collective.

    Dense features are cut into few and into many buckets, and the larger statistic counts. Labels must be 0 or 1.
    """
    reader = make_reader(config, dataset, "train", world, in_order=True)
    rows = gather_rows(reader, min(MAX_ROWS, reader.num_rows), world)
    labels = first_column(rows.label).double().numpy()
    scorer = RowScorer(model, _without(rows, dataset, names), reader.options.batch_size, world, 0.0)
    residuals = centered_residuals(labels, scorer.gather_losses()[0], first_label_weights(rows))
    statistics = {
        name: max(pair_statistic(*ids, residuals) for ids in groupings)
        for name, groupings in _groupings(rows, dataset, names).items()
    }
    return statistics, labels.size


def _without(rows: Batch, dataset: Dataset, names: Sequence[str]) -> Batch:
    dense = [place for place, feature in enumerate(dataset.dense) if feature.name not in names]
    keys = [key for key in rows.sparse.keys if key not in names]
    sparse = join_bags(keys, [rows.sparse[key] for key in keys])
    return replace(rows, dense=rows.dense[:, dense].contiguous(), sparse=sparse)


_Ids = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Ids [m], and the row [m] of each."""


def _groupings(rows: Batch, dataset: Dataset, names: Sequence[str]) -> Mapping[str, Sequence[_Ids]]:
    groupings: dict[str, Sequence[_Ids]] = {}
    for place, feature in enumerate(dataset.dense):
        if feature.name in names:
            values = rows.dense[:, place].double().numpy()
            groupings[feature.name] = [(cut(values, number), np.arange(values.size)) for number in _NUM_BUCKETS]
    for key in rows.sparse.keys:
        if key in names:
            bags = rows.sparse[key]
            places = torch.arange(rows.batch_size).repeat_interleave(bags.lengths)
            groupings[key] = [(bags.values.numpy(), places.numpy())]
    return groupings


def cut(values: NDArray[np.float64], num_buckets: int) -> NDArray[np.int64]:
    """Return the buckets [n] of values [n], which have about equal numbers of values."""
    edges = np.unique(np.quantile(values, np.arange(1, num_buckets) / num_buckets))
    return np.searchsorted(edges, values, "left").astype(np.int64)
