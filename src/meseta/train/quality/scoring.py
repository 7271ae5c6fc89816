"""Final metrics of a trained config on the test split, which is read once."""

from __future__ import annotations

import json
import math

import numpy as np
from numpy.typing import NDArray

from meseta.config import RunConfig
from meseta.data.dataset.dataset import Dataset
from meseta.embedding import EmbeddingBagCollection
from meseta.report.quality.suite_result import SeedScore
from meseta.spec import MesetaError
from meseta.system.files import write_atomic
from meseta.telemetry.metrics import TEST
from meseta.train.evaluate import predict
from meseta.train.metrics import compute_metrics, regret
from meseta.train.quality.study import SuiteRun
from meseta.train.quality.worlds import read_true_probabilities
from meseta.train.setup.meta_model import make_meta_model
from meseta.train.setup.specs import dense_load, make_specs
from meseta.train.trained_model import open_trained

MIN_TRUE_PROBABILITY = 1e-12
"""True probabilities are clipped to this distance from 0 and 1, because the regret would be unbounded."""


def score_run(run: SuiteRun) -> None:
    """Predict the test split with the final model of a run, write the score, and delete the checkpoints of the run.

    Raises MesetaError if the test rows are not those whose true probabilities are known.
    """
    summary = run.trial.summary()
    with open_trained(run.trial.run_dir, TEST) as trained:
        parts = [
            (logits, batch.label.numpy(), None if batch.weight is None else batch.weight.numpy())
            for logits, batch in predict(trained.model, trained.reader, trained.world, trained.logit_shift)
        ]
        logits, labels = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
        weights = np.concatenate([part[2] for part in parts]) if parts[0][2] is not None else None
        if logits.ndim > 1:
            raise MesetaError(
                f"config {run.name!r} predicts {logits.shape[1]} labels, but a suite compares a single one; set "
                "data.labels to one of them"
            )
        metrics = compute_metrics(logits, labels, weights)
        tables = trained.model.embeddings.tables
        score = SeedScore(
            auc=_none_if_nan(metrics.auc),
            ne=_none_if_nan(metrics.ne),
            regret=None if run.truth is None else _regret(run, logits, labels),
            num_dense_parameters=sum(parameter.numel() for parameter in trained.model.parameters()),
            num_table_parameters=sum(table.num_embeddings * table.embedding_dim for table in tables),
            flops_per_sample=_flops_per_sample(trained.config, trained.reader.dataset),
            samples_per_s=None if summary is None else summary.samples_per_s,
        )
    # The logits are needed to resample the test rows, which is done if true probabilities are unknown.
    if run.truth is None:
        np.savez(run.logits_file, logits=logits, labels=labels, weights=np.ones(1) if weights is None else weights)
    write_atomic(run.score_file, json.dumps(score.to_dict(), indent=1) + "\n")
    run.delete_checkpoints()


def _regret(run: SuiteRun, logits: NDArray[np.floating], labels: NDArray[np.floating]) -> float:
    assert run.truth is not None
    truth = read_true_probabilities(run.truth)
    if not np.array_equal(truth.labels, labels):
        raise MesetaError(
            f"quality: the labels of the test rows of {str(run.data)!r} differ from those of the true probabilities; "
            f"delete {str(run.truth)!r}, and start the suite again"
        )
    return regret(logits, np.clip(truth.probabilities, MIN_TRUE_PROBABILITY, 1 - MIN_TRUE_PROBABILITY))


def _flops_per_sample(config: RunConfig, dataset: Dataset) -> float:
    # Operations of the dense part in training, as the planner counts them.
    tables, features = make_specs(config, dataset)
    collection = EmbeddingBagCollection(tables, features, seed=config.seed, device="cpu")
    return dense_load(config, make_meta_model(config, dataset, collection), len(dataset.dense)).flops_per_sample


def _none_if_nan(value: float) -> float | None:  # JSON has no nan.
    return None if math.isnan(value) else value
