"""LightGBM with its default parameters on the rows of a run, as a baseline of the run's model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meseta.comm import World
from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.records import SparseFeature
from meseta.data.read.batch import Batch
from meseta.data.read.batch_reader import BatchReader
from meseta.system.environment import package_version
from meseta.telemetry.metrics_file import EvalMetrics
from meseta.telemetry.summary import BaselineSummary
from meseta.train.evaluate import logit_shift
from meseta.train.metrics import MetricWindow, task_metrics
from meseta.train.sampled_rows import first_column, first_label_weights, gather_rows
from meseta.train.setup.baseline_sample import count_sample_rows
from meseta.train.setup.build import make_reader

MAX_CATEGORY = 2**31 - 1
"""Number of categories that LightGBM can represent. Larger ids are reduced modulo this number."""


def measure_lightgbm(config: RunConfig, dataset: Dataset, splits: Sequence[str]) -> BaselineSummary | None:
    """Fit LightGBM to training rows for the first label, and evaluate it on all rows of `splits`. Only for one rank.

    Inputs are the dense inputs of the run's model, one category for each single-valued feature, and the number of ids
    of each multi-valued one. Missing numbers have the fill values of the dataset, which does not mark them. The rows
    are evenly spaced parts of the training split, see `count_sample_rows`.
    Parameters are the defaults, except seed and threads. No random state of torch or numpy is used.

    Returns:
        Metrics by split, or `None` if no training row has a weight, or there are no inputs.
    """
    import lightgbm

    world = World.single()
    reader = make_reader(config, dataset, "train", world, in_order=True)
    num_rows = count_sample_rows(dataset, reader.num_rows)
    if not num_rows:
        return None
    sample = gather_rows(reader, num_rows, world)
    weights = first_label_weights(sample)
    if not weights.sum() > 0:
        return None
    categories = [len(dataset.dense) + i for i, feature in enumerate(dataset.sparse) if not feature.multi_valued]
    training = lightgbm.Dataset(
        _inputs(sample, dataset.sparse), first_column(sample.label).numpy(), weight=weights, free_raw_data=True,
        categorical_feature=categories, params={"verbosity": -1},
    )  # fmt: skip
    parameters = {
        "objective": "binary",
        "verbosity": -1,
        "deterministic": True,
        "force_row_wise": True,  # Otherwise a measurement of time chooses between two orders of additions.
        "seed": config.seed % MAX_CATEGORY,
        "num_threads": torch.get_num_threads(),
    }
    booster = lightgbm.train(parameters, training)
    shift = logit_shift(config)
    readers = {split: make_reader(config, dataset, split, world) for split in splits}
    return BaselineSummary(
        name="lightgbm",
        version=package_version("lightgbm"),
        num_rows=num_rows,
        splits={split: _evaluate(booster, of_split, shift) for split, of_split in readers.items()},
    )


def _evaluate(booster: Any, reader: BatchReader, shift: float) -> EvalMetrics:
    window = MetricWindow()
    with closing(reader.epoch()) as batches:
        for batch in batches:
            logits = booster.predict(_inputs(batch, reader.dataset.sparse), raw_score=True) + shift
            window.add(logits, first_column(batch.label).numpy(), first_label_weights(batch))
    return EvalMetrics.model_validate(task_metrics({"": window.compute()}, ("reliability",)))


def _inputs(batch: Batch, features: Sequence[SparseFeature]) -> NDArray[np.float64]:
    """Return the inputs [B, number of dense inputs and features] of a batch."""
    columns = [batch.dense.double().numpy()]
    for feature in features:
        bags = batch.sparse[feature.name]
        column = bags.lengths if feature.multi_valued else bags.values % MAX_CATEGORY
        columns.append(column.double().numpy()[:, None])
    return np.concatenate(columns, axis=1)
