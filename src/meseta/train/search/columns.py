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
from meseta.data.read.selection import RowFilter
from meseta.data.schema.layout import NO_CATEGORY
from meseta.telemetry.metrics import VALID
from meseta.train.importance import PairedDifference, log_losses, measure_importance, paired_difference
from meseta.train.sampled_rows import first_label_weights
from meseta.train.search.residuals import measure_association
from meseta.train.trained_model import load_trained


def find_unhelpful_columns(run_dir: Path, config: RunConfig, dataset: Dataset, world: World) -> list[dict[str, Any]]:
    """Return the importances, as plain data, of features that do not help. Collective.

    Their permutation does not increase the validation log loss beyond noise: the lower end of the interval is at most
    0. Features that the config uses elsewhere, and at least one sparse feature, are never returned.
    """
    trained = load_trained(run_dir, VALID, world, best=config.keeps_best)
    measured = measure_importance(
        trained.model, trained.reader, world, seed=config.seed, logit_shift=trained.logit_shift
    )
    used = _columns_used_elsewhere(config, dataset)
    features = [] if measured is None else measured.features
    unhelpful = [feature for feature in features if feature.low <= 0 and feature.name not in used]
    names = {feature.name for feature in unhelpful}
    if dataset.sparse and all(column.name in names for column in dataset.sparse):
        best = max((f for f in unhelpful if f.kind == "sparse"), key=lambda feature: feature.logloss)
        unhelpful = [feature for feature in unhelpful if feature is not best]
    return [feature.to_dict() for feature in unhelpful]


def _columns_used_elsewhere(config: RunConfig, dataset: Dataset) -> Collection[str]:
    condition = config.data.filter
    filtered = () if condition is None else RowFilter(condition, dataset).columns
    return {*config.metrics.segments, *config.embedding.tables, *filtered, NO_CATEGORY.name}


def associate_columns(
    without: Path, config: RunConfig, dataset: Dataset, names: Sequence[str], world: World
) -> dict[str, float]:
    """Return the association of left out columns with the residuals of the run `without`, see
    `meseta.train.search.residuals`. Collective."""
    trained = load_trained(without, VALID, world, best=config.keeps_best)
    return measure_association(trained.model, config, dataset, names, world)


def compare_runs(with_columns: Path, without: Path, config: RunConfig, world: World) -> PairedDifference:
    """Return how much the validation log loss of the first label increases without columns. Collective."""
    losses, weights = _row_losses(with_columns, config, world)
    losses_without, _ = _row_losses(without, config, world)
    return paired_difference(losses_without - losses, weights)


def _row_losses(run_dir: Path, config: RunConfig, world: World) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (log losses [n] of the first label, weights [n]) of the validation rows, on all ranks."""
    trained = load_trained(run_dir, VALID, world, best=config.keeps_best)
    losses, weights = [np.empty(0)], [np.empty(0)]
    for logits, batch in trained.predict():
        losses.append(log_losses(logits.reshape(len(logits), -1)[:, 0].astype(np.float64), batch))
        weights.append(first_label_weights(batch))
    by_rank = world.all_gather_object((np.concatenate(losses), np.concatenate(weights)))
    # The order of the rows is equal for all runs of these ranks.
    return np.concatenate([part for part, _ in by_rank]), np.concatenate([part for _, part in by_rank])
