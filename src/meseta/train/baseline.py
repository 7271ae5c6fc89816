"""Logistic regression on a sample of the training rows, as a baseline of a run's model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim.lr_scheduler import LinearLR

from meseta.comm import World
from meseta.data.dataset.records import SparseFeature
from meseta.data.read.batch import Batch, split_batch
from meseta.data.read.batch_reader import BatchReader
from meseta.embedding import EmbeddingBagCollection
from meseta.measure.threads import use_num_threads
from meseta.models.ranking.linear import LogisticRegression
from meseta.spec import FeatureSpec, InitSpec, OptimizerSpec, TableSpec
from meseta.train.sampled_rows import first_column, first_label_weights, gather_rows, take_rows

MAX_ROWS = 50_000
MAX_VALUES = 2_000_000
"""Approximate maximum number of dense inputs and ids of all rows together."""
MAX_WEIGHTS = 1 << 16
"""Maximum number of weights of a feature. Larger ids are hashed."""
LEARNING_RATE = 0.1
MAX_BATCH_SIZE = 512
MIN_STEPS, MAX_EPOCHS = 32, 4
"""Limits for a small sample: the least number of steps of an epoch, and the largest number of epochs."""


def sample_training_rows(reader: BatchReader, world: World) -> Batch:
    """Return at most `MAX_ROWS` rows of the training split, evenly spaced parts of it, on all ranks. Collective."""
    dataset = reader.dataset
    values_per_row = len(dataset.dense) + sum(feature.statistics.mean_pooling_factor for feature in dataset.sparse)
    limit = max(int(MAX_VALUES / max(values_per_row, 1.0)), 1)
    with use_num_threads(1):
        return gather_rows(reader, min(limit, MAX_ROWS, reader.num_rows), world)


def score_logistic_regression(
    training: Batch, rows: Batch, features: Sequence[SparseFeature], *, seed: int
) -> NDArray[np.float64]:
    """Return logits [B] for the first label of `rows`, by logistic regression on the rows `training`.

    The inputs are the dense inputs of the run's model, and one weight for each id of a feature. The fit is mini-batch
    Adagrad from zero without regularization, in an order drawn from `seed`, whose learning rate falls linearly to 0. It
    does not converge completely, and a fit to all training rows may be better. No random state of torch is used.
    """
    # The operators are so small that a second thread would cost more than it saves.
    with use_num_threads(1):
        model = _fit_logistic_regression(training, features, seed)
        with torch.no_grad():
            scores: NDArray[np.float64] = model(rows.dense, rows.sparse).double().numpy()
    return scores


def _fit_logistic_regression(training: Batch, features: Sequence[SparseFeature], seed: int) -> LogisticRegression:
    num_rows, embeddings = training.batch_size, _make_weights(features)
    model = LogisticRegression(embeddings, num_dense=training.dense.shape[1])
    order = torch.from_numpy(np.random.default_rng(seed).permutation(num_rows))
    batch_size = min(max(num_rows // MIN_STEPS, 1), MAX_BATCH_SIZE)
    batches = split_batch(take_rows(training, order), -(-num_rows // batch_size))
    num_epochs = min(max(MAX_ROWS // num_rows, 1), MAX_EPOCHS)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE)
    decay = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=num_epochs * len(batches))
    for _ in range(num_epochs):
        for batch in batches:
            weights = torch.from_numpy(first_label_weights(batch)).float()
            logits, labels = model(batch.dense, batch.sparse), first_column(batch.label)
            loss = binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
            embeddings.lr_factor = optimizer.param_groups[0]["lr"] / LEARNING_RATE
            optimizer.zero_grad()
            (loss / weights.sum().clamp(min=1e-9)).backward()  # Also updates the weights of ids.
            optimizer.step()
            decay.step()
    return model


def _make_weights(features: Sequence[SparseFeature]) -> EmbeddingBagCollection:
    tables = [
        TableSpec(
            name=feature.name,
            num_embeddings=min(feature.num_embeddings, MAX_WEIGHTS),
            embedding_dim=1,
            init=InitSpec(kind="constant", scale=0.0),
            # A row is one weight, so row-wise Adagrad is Adagrad.
            optimizer=OptimizerSpec(name="rowwise_adagrad", lr=LEARNING_RATE),
        )
        for feature in features
    ]
    specs = [
        FeatureSpec(name=feature.name, table=feature.name, weighted=feature.weighted, id_policy="hash")
        for feature in features
    ]
    return EmbeddingBagCollection(tables, specs)
