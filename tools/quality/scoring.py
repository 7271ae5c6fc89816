"""Work in child processes: a check of configs before training, and the score on the test split."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meseta.config import load_config
from meseta.data import Dataset
from meseta.spec import MesetaError
from meseta.system import write_atomic
from meseta.train import open_trained, run_workload
from meseta.train.metrics import compute_metrics, regret
from tools.quality.comparison import SeedScore
from tools.quality.study import Study, SuiteRun
from tools.quality.worlds import read_true_probabilities

MIN_TRUE_PROBABILITY = 1e-12
"""True probabilities are clipped to this distance from 0 and 1, because the regret would be unbounded."""


def check_configs(study: Study, world_rows: Path) -> None:
    """Check the first run of each config with the columns of each dataset, and of the rows of a world."""
    for dataset in study.suite.datasets:
        check_configs_fit(study.first_runs(dataset), dataset.dir)
    for world in study.suite.worlds:
        check_configs_fit(study.first_runs(world), world_rows)


def check_configs_fit(runs: Sequence[SuiteRun], data: Path) -> None:
    """Raise MesetaError for the first config that does not fit `data`, with the names of config and dataset.

    Nothing is trained, and no memory is allocated for tables.
    """
    for run in runs:
        config = load_config(run.config, [*run.overrides, f"data.dir={json.dumps(str(data))}"])
        try:
            labels = Dataset.load(data).with_labels(config.data.labels).labels
            if len(labels) > 1:
                raise MesetaError(
                    f"a suite compares a single label, but the data has {', '.join(map(repr, labels))}; set "
                    "data.labels to one of them"
                )
            run_workload(config)
        except MesetaError as error:
            raise MesetaError(f"quality: config {run.name!r} does not fit {run.eval_dataset.name!r}: {error}") from None


def score_run(run: SuiteRun) -> None:
    """Predict the test split with the final model of a run, write the score, and delete the checkpoints of the run.

    Raises MesetaError if the test rows are not those whose true probabilities are known.
    """
    with open_trained(run.run_dir, "test") as trained:
        parts = [
            (logits, batch.label.numpy(), None if batch.weight is None else batch.weight.numpy())
            for logits, batch in trained.predict()
        ]
        logits, labels = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
        weights = np.concatenate([part[2] for part in parts]) if parts[0][2] is not None else None
        metrics = compute_metrics(logits, labels, weights)
        tables = trained.model.embeddings.tables
        score = SeedScore(
            auc=_none_if_nan(metrics.auc),
            ne=_none_if_nan(metrics.ne),
            regret=None if run.truth is None else _regret(run, logits, labels),
            num_dense_parameters=sum(parameter.numel() for parameter in trained.model.parameters()),
            num_table_parameters=sum(table.num_embeddings * table.embedding_dim for table in tables),
            flops_per_sample=run_workload(trained.config).dense.flops_per_sample,
            samples_per_s=(run.read_summary() or {}).get("samples_per_s"),
        )
    # The logits are needed to resample the test rows, which is done if true probabilities are unknown.
    if run.truth is None:
        np.savez(run.logits_file, logits=logits, labels=labels, weights=np.ones(1) if weights is None else weights)
    write_atomic(run.score_file, json.dumps(score.to_dict(), indent=1) + "\n")
    run.delete_checkpoints()


def _regret(run: SuiteRun, logits: NDArray[np.floating], labels: NDArray[np.floating]) -> float:
    assert run.truth is not None
    true_labels, probabilities = read_true_probabilities(run.truth)
    if not np.array_equal(true_labels, labels):
        raise MesetaError(
            f"quality: the labels of the test rows of {str(run.data)!r} differ from those of the true probabilities; "
            f"delete {str(run.truth)!r}, and start the suite again"
        )
    return regret(logits, np.clip(probabilities, MIN_TRUE_PROBABILITY, 1 - MIN_TRUE_PROBABILITY))


def _none_if_nan(value: float) -> float | None:  # JSON has no nan.
    return None if math.isnan(value) else value
