"""Averages of rows over steps, against averages of copies of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meseta.embedding import EmbeddingBagCollection
from meseta.planner.cost.memory import row_and_state_bytes
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, MesetaError, OptimizerSpec, TableSpec
from meseta.spec.average import AverageSpec

ROWS, DIM, STEPS = 7, 5, 240
AVERAGES = {
    "swa": AverageSpec(kind="swa"),
    "swa later": AverageSpec(kind="swa", start_step=100),
    "ema": AverageSpec(kind="ema", decay=0.97),
    "ema of short eras": AverageSpec(kind="ema", decay=0.4, start_step=20),
}
OPTIMIZERS = {
    "sgd": OptimizerSpec(name="sgd", lr=0.1),
    "adagrad": OptimizerSpec(name="adagrad", lr=0.1),
    "adam of all rows": OptimizerSpec(name="adam", lr=0.01, weight_decay=0.1, stepped_rows="all"),
}


def make(optimizer: OptimizerSpec, average: AverageSpec | None, dtype: str = "float32") -> EmbeddingBagCollection:
    tables = [
        TableSpec(name="item", num_embeddings=ROWS, embedding_dim=DIM, dtype=dtype, optimizer=optimizer,
                  average=average),
        TableSpec(name="kept", num_embeddings=ROWS, embedding_dim=DIM, dtype=dtype, average=average,
                  optimizer=OptimizerSpec(name="frozen")),
    ]  # fmt: skip
    features = [
        FeatureSpec(name="bag", table="item", pooling="mean"),
        FeatureSpec(name="single", table="item", pooling="none"),
        FeatureSpec(name="fixed", table="kept"),
    ]
    return EmbeddingBagCollection(tables, features)


def batch(rng: np.random.Generator, num_rows: int = ROWS) -> KeyedJaggedTensor:
    draw = lambda: [rng.integers(0, num_rows, n).tolist() for n in rng.integers(0, 4, 3)]  # noqa: E731
    return KeyedJaggedTensor.from_lists({"bag": draw(), "single": draw(), "fixed": draw()})


def look_up(embeddings: EmbeddingBagCollection, ids: KeyedJaggedTensor) -> list[Tensor]:
    with torch.no_grad():
        out = embeddings(ids)
    return [out.pooled.values, out["single"].values]


def rows_of(embeddings: EmbeddingBagCollection) -> Tensor:
    return embeddings.shards[0].read(0, ROWS)["row"].clone()


def train(embeddings: EmbeddingBagCollection, num_steps: int = STEPS) -> list[Tensor]:
    """Return the rows after each step. Most rows change in few steps, and the last row only at the beginning."""
    rng, history = np.random.default_rng(0), []
    for step in range(num_steps):
        out = embeddings(batch(rng, ROWS if step < 50 else 1 + step % (ROWS - 1)))
        loss = (out.pooled.values.sin() * 2).sum() + out["single"].values.square().sum()
        loss.backward()
        history.append(rows_of(embeddings))
    return history


def expected_average(average: AverageSpec, history: list[Tensor], dtype: Any) -> Tensor:
    weights = np.stack([rows.numpy().astype(np.float64) for rows in history])[average.start_step :]
    if average.kind == "swa":
        return torch.from_numpy(weights.mean(axis=0)).to(dtype)
    mean = weights[0]
    for one in weights[1:]:
        mean = average.decay * mean + (1 - average.decay) * one
    return torch.from_numpy(mean).to(dtype)


@pytest.mark.soak
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lookups_of_averages_equal_those_of_averaged_copies(optimizer: str, average: str) -> None:
    trained = make(OPTIMIZERS[optimizer], AVERAGES[average])
    expected = expected_average(AVERAGES[average], train(trained), torch.float32)
    ids, raw = batch(np.random.default_rng(1)), rows_of(trained)
    before = look_up(trained, ids)
    with trained.averaged():
        averaged = look_up(trained, ids)
    for one, other in zip(before, look_up(trained, ids), strict=True):
        assert torch.equal(one, other)
    trained.shards[0].write(0, {"row": expected.numpy()})
    for actual, reference in zip(averaged, look_up(trained, ids), strict=True):
        torch.testing.assert_close(actual, reference, rtol=0, atol=2e-6)
    assert not torch.allclose(expected, raw, atol=1e-3)


def test_a_lag_of_an_earlier_era_is_scaled() -> None:
    average = AverageSpec(kind="ema", decay=2.0**-25)
    history = train(trained := make(OPTIMIZERS["sgd"], average), 6)
    assert [average.era(step) for step in range(1, 7)] == [0, 0, 0, 1, 1, 2]
    with trained.averaged():
        averaged = trained._averages.gather(trained.shards[0].acquire(), torch.arange(ROWS))
    torch.testing.assert_close(averaged, expected_average(average, history, torch.float32), rtol=0, atol=1e-6)


@pytest.mark.parametrize("average", ["swa", "ema"])
def test_predicted_bytes_are_those_of_the_tables(average: str) -> None:
    for shard in make(OPTIMIZERS["adagrad"], AVERAGES[average]).shards:
        assert sum(row_and_state_bytes(shard.spec, shard.shard)) == shard.num_bytes()


def test_refused_specs() -> None:
    with pytest.raises(MesetaError, match="table 'item': average cannot be combined with dtype bfloat16"):
        make(OPTIMIZERS["sgd"], AVERAGES["swa"], "bfloat16")
    with pytest.raises(MesetaError, match="decay must be between 0 and 1"):
        AverageSpec(kind="ema", decay=1.0)
