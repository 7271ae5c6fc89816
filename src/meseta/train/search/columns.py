"""Evidence that columns do not help a model, on the rows of the validation split."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.read.batch_reader import BatchReader
from meseta.data.read.selection import RowFilter
from meseta.data.schema.layout import NO_CATEGORY
from meseta.telemetry.metrics import VALID
from meseta.train.importance import log_losses, measure_importance, paired_difference
from meseta.train.sampled_rows import first_label_weights
from meseta.train.search.residuals import measure_association
from meseta.train.trained_model import TrainedModel, load_trained

Evidence = tuple[Any, int]
"""Plain data, and the number of predictions from which it was computed."""


def find_unhelpful_columns(
    run_dir: Path, config: RunConfig, dataset: Dataset, world: World, max_predictions: int
) -> Evidence:
    """Return the importances of features that do not help. Collective.

    Their permutation does not increase the validation log loss beyond noise: the lower end of the interval is at most
    0. Features that the config uses elsewhere, and at least one sparse feature, are never returned.
    """
    trained = _load(run_dir, config, world)
    measured = measure_importance(
        trained.model,
        trained.reader,
        world,
        seed=config.seed,
        logit_shift=trained.logit_shift,
        max_predictions=max_predictions,
    )
    if measured is None:
        return [], 0
    used, features = _columns_used_elsewhere(config, dataset), measured.features
    unhelpful = [feature for feature in features if feature.low <= 0 and feature.name not in used]
    names = {feature.name for feature in unhelpful}
    if dataset.sparse and all(column.name in names for column in dataset.sparse):
        best = max((f for f in unhelpful if f.kind == "sparse"), key=lambda feature: feature.logloss)
        unhelpful = [feature for feature in unhelpful if feature is not best]
    num_predictions = measured.num_rows * (1 + measured.num_permutations * len(features))
    return [feature.to_dict() for feature in unhelpful], num_predictions


def _load(run_dir: Path, config: RunConfig, world: World) -> TrainedModel[BatchReader]:
    return load_trained(run_dir, VALID, world, best=config.keeps_best)


def _columns_used_elsewhere(config: RunConfig, dataset: Dataset) -> Collection[str]:
    condition = config.data.filter
    filtered = () if condition is None else RowFilter(condition, dataset).columns
    return {*config.metrics.segments, *config.embedding.tables, *filtered, NO_CATEGORY.name}


def associate_columns(
    without: Path, config: RunConfig, dataset: Dataset, names: Sequence[str], world: World
) -> Evidence:
    """Return the association of left out columns with the residuals of the run `without`, see
    `meseta.train.search.residuals`. Collective."""
    return measure_association(_load(without, config, world).model, config, dataset, names, world)


def compare_runs(with_columns: Path, without: Path, config: RunConfig, world: World) -> Evidence:
    """Return how much the validation log loss of the first label increases without columns. Collective."""
    losses, weights = _row_losses(with_columns, config, world)
    losses_without, _ = _row_losses(without, config, world)
    return paired_difference(losses_without - losses, weights).to_dict(), 2 * losses.size


def _row_losses(run_dir: Path, config: RunConfig, world: World) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (log losses [n] of the first label, weights [n]) of the validation rows, on all ranks."""
    trained = _load(run_dir, config, world)
    losses, weights = [np.empty(0)], [np.empty(0)]
    for logits, batch in trained.predict():
        losses.append(log_losses(logits.reshape(len(logits), -1)[:, 0].astype(np.float64), batch))
        weights.append(first_label_weights(batch))
    by_rank = world.all_gather_object((np.concatenate(losses), np.concatenate(weights)))
    # The order of the rows is equal for all runs of these ranks.
    return np.concatenate([part for part, _ in by_rank]), np.concatenate([part for _, part in by_rank])
