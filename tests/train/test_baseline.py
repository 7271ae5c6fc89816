"""Logistic regression as a baseline, against scikit-learn's, and the rows that it reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor

from meseta.comm import World
from meseta.config import validate_document
from meseta.data.dataset.dataset import Dataset
from meseta.data.dataset.records import SparseFeature
from meseta.data.read.batch import Batch
from meseta.sparse import KeyedJaggedTensor
from meseta.train import baseline
from meseta.train.baseline import score_logistic_regression
from meseta.train.sampled_rows import gather_rows, join_batches
from meseta.train.setup.build import make_reader
from small_run import settings, tiny_with_valid, train

NUM_IDS = 40


def draw_rows(seed: int, num_rows: int) -> Batch:
    """Draw rows with three dense inputs, a single id and bags of weighted ids, all of which have effects."""
    draw, effects = np.random.default_rng(seed), np.random.default_rng(99).normal(size=(2, NUM_IDS))
    dense = draw.normal(size=(num_rows, 3)).astype(np.float32)
    single, lengths = draw.integers(0, NUM_IDS, num_rows), draw.integers(0, 4, num_rows)
    bags, weights = draw.integers(0, NUM_IDS, lengths.sum()), draw.uniform(0.5, 1.5, lengths.sum())
    logit = -1 + dense @ [0.8, -0.3, 0.0] + 0.7 * effects[0, single]
    np.add.at(logit, np.repeat(np.arange(num_rows), lengths), 0.4 * effects[1, bags] * weights)
    return Batch(
        dense=torch.from_numpy(dense),
        sparse=KeyedJaggedTensor(
            keys=("one", "bag"),
            values=torch.from_numpy(np.concatenate([single, bags])),
            lengths=torch.from_numpy(np.concatenate([np.ones(num_rows, np.int64), lengths])),
            weights=torch.from_numpy(np.concatenate([np.ones(num_rows), weights])).float(),
        ),
        label=torch.from_numpy(draw.random(num_rows) < 1 / (1 + np.exp(-logit))).float(),
    )


def score(training: Batch, rows: Batch, num_ids: int = NUM_IDS) -> np.ndarray:
    features = [
        SparseFeature.model_construct(name=name, num_embeddings=num_ids, weighted=True) for name in rows.sparse.keys
    ]
    return np.asarray(score_logistic_regression(training, rows, features, seed=1))


def columns(rows: Batch) -> Any:
    """Return the inputs of scikit-learn: dense inputs, then a column for each id of each feature."""
    parts = [scipy.sparse.csr_matrix(rows.dense.double().numpy())]
    for key in rows.sparse.keys:
        bags = rows.sparse[key]
        assert bags.weights is not None
        at = (np.repeat(np.arange(rows.batch_size), bags.lengths.numpy()), bags.values.numpy())
        parts.append(scipy.sparse.csr_matrix((bags.weights.numpy(), at), shape=(rows.batch_size, NUM_IDS)))
    return scipy.sparse.hstack(parts).tocsr()


def mean_loss(labels: Tensor, logits: np.ndarray) -> float:
    return float(log_loss(labels.numpy(), 1 / (1 + np.exp(-logits))))


@pytest.mark.parametrize("num_rows", [pytest.param(3_000, marks=pytest.mark.soak), 50_000])
def test_held_out_loss_is_near_that_of_a_converged_fit(num_rows: int) -> None:
    training, rows = draw_rows(0, num_rows), draw_rows(1, 10_000)
    converged = LogisticRegression(max_iter=300).fit(columns(training), training.label.numpy())
    best = mean_loss(rows.label, converged.decision_function(columns(rows)))
    rate = float(training.label.mean())
    constant = mean_loss(rows.label, np.full(rows.batch_size, np.log(rate / (1 - rate))))
    logits = score(training, rows)
    loss = mean_loss(rows.label, logits)
    assert best < loss + 0.005 and loss - best < 0.08 * (constant - best)
    assert np.corrcoef(logits, converged.decision_function(columns(rows)))[0, 1] > 0.95


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "MAX_EPOCHS", 1)
    monkeypatch.setattr(baseline, "MIN_STEPS", 8)


@pytest.mark.usefixtures("short")
def test_rows_without_the_label_and_without_weight_do_not_count() -> None:
    training, rows = draw_rows(0, 600), draw_rows(1, 200)
    is_known = torch.rand(600) < 0.5
    masked = replace(training, label_mask=is_known)
    other = replace(training, label_mask=is_known, label=torch.where(is_known, training.label, 1 - training.label))
    weighted = replace(other, label_mask=None, weight=is_known.float())
    logits = score(masked, rows)
    assert np.array_equal(score(other, rows), logits) and np.array_equal(score(weighted, rows), logits)
    assert not np.array_equal(score(training, rows), logits)
    assert not score(replace(training, weight=torch.zeros(600)), rows).any()


@pytest.mark.usefixtures("short")
def test_result_does_not_depend_on_threads_and_leaves_random_state() -> None:
    training, rows = draw_rows(0, 2_000), draw_rows(1, 2_000)
    before, num_threads = torch.get_rng_state(), torch.get_num_threads()
    logits = score(training, rows)
    torch.set_num_threads(2)
    try:
        assert np.array_equal(score(training, rows), logits)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(torch.get_rng_state(), before)


def test_ids_above_the_limit_share_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    training, rows = draw_rows(0, 2_000), draw_rows(1, 2_000)
    exact = mean_loss(rows.label, score(training, rows, NUM_IDS))
    monkeypatch.setattr(baseline, "MAX_WEIGHTS", 8)
    assert exact + 0.01 < mean_loss(rows.label, score(training, rows)) < 0.69


@pytest.mark.usefixtures("short")
def test_no_dense_feature_is_needed() -> None:
    training, rows = (replace(drawn, dense=drawn.dense[:, :0]) for drawn in (draw_rows(0, 2_000), draw_rows(1, 2_000)))
    assert mean_loss(rows.label, score(training, rows)) < mean_loss(rows.label, np.zeros(2_000))


def test_a_run_records_the_loss_on_its_validation_rows(tiny: Path, tmp_path: Path) -> None:
    document = settings(tiny_with_valid(tiny), tmp_path, report__importance=True, data__negative_keep=0.5)
    summary, config = train(document), validate_document(document)
    recorded = summary["importance"]
    dataset = Dataset.load(config.data.dir)
    readers = [make_reader(config, dataset, split, World.single(), in_order=True) for split in ("train", "valid")]
    training, rows = (join_batches(list(reader.epoch())) for reader in readers)
    assert recorded["num_logistic_rows"] == training.batch_size < dataset.splits["train"].num_rows
    logits = score_logistic_regression(training, rows, dataset.sparse, seed=config.seed) + np.log(0.5)
    assert recorded["logistic_logloss"] == pytest.approx(mean_loss(rows.label, logits), rel=1e-5)
    assert recorded["logistic_auc"] == pytest.approx(roc_auc_score(rows.label, logits), abs=1e-9)
    assert recorded["auc"] == pytest.approx(summary["valid"]["auc"], abs=1e-9)


def test_few_parts_of_a_split_are_read(tiny: Path, tmp_path: Path) -> None:
    """Six of the batches are read, in four parts of one, two, one and two batches, without the short last one."""
    config = validate_document(settings(tiny, tmp_path, train__eval_batch_size=75))
    reader = make_reader(config, Dataset.load(tiny), "train", World.single(), in_order=True)
    batches = list(reader.epoch())
    assert len(batches) == 17 and batches[-1].batch_size < 75
    reader.set_state({**reader.get_state(), "epoch": 0, "row": 0})
    rows = gather_rows(reader, 440, World.single())
    expected = join_batches([batches[place] for place in (0, 4, 5, 9, 14, 15)])
    assert torch.equal(rows.dense, expected.dense[:440]) and torch.equal(rows.label, expected.label[:440])
    assert torch.equal(rows.sparse["tags"].values, expected.sparse["tags"].values[: rows.sparse["tags"].values.numel()])
