"""Steps of a whole model on several ranks against one process: weights of samples, tasks, ranks without samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meseta.comm import World
from meseta.data.batch import Batch
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.jagged import KeyedJaggedTensor
from meseta.pipeline import TrainStep
from meseta.spec import FeatureSpec, OptimizerSpec, Plan, TableSpec

from .pool import RankPool
from .scenario import local_slice

Ranks = Callable[[int], RankPool]
ROWS = {"a": 6, "b": 30, "c": 11, "d": 4}
DIM = 32


class Model(nn.Module):
    """One layer and a nonlinearity over pooled embeddings and dense inputs, for two tasks."""

    def __init__(self, optimizer: OptimizerSpec, dtype: str) -> None:
        super().__init__()
        tables = [
            TableSpec(name=name, num_embeddings=rows, embedding_dim=DIM, dtype=dtype, optimizer=optimizer)
            for name, rows in ROWS.items()
        ]
        poolings = {"a": "mean"}
        features = [FeatureSpec(name=n, table=n, pooling=poolings.get(n, "sum"), weighted=n == "b") for n in ROWS]
        self.embeddings = EmbeddingBagCollection(tables, features, seed=3)
        torch.manual_seed(0)
        self.hidden = nn.Linear(2 + DIM * len(ROWS), 5)
        self.head = nn.Linear(5, 2)
        self.to(getattr(torch, dtype))

    def score(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.hidden(torch.cat([dense.to(pooled.dtype), pooled], dim=1))))
        return logits


def make(optimizer: OptimizerSpec, dtype: str) -> Any:
    names = ["data_parallel", "table_wise", "column_wise", "row_wise"]
    world, model = World.current(), Model(optimizer, dtype)
    if world.size == 1:
        return model
    plan = Plan.from_dict({"tables": dict(zip(ROWS, names, strict=True))}, model.embeddings.tables, world.size)
    return shard(model, plan, world=world)


def global_batch(number: int, size: int, weighted: bool) -> Batch:
    draw = np.random.default_rng(number)
    lengths = {name: draw.integers(0, 4, size) for name in ROWS}
    ids = np.concatenate([draw.integers(0, ROWS[name], own.sum()) for name, own in lengths.items()])
    return Batch(
        dense=torch.from_numpy(draw.normal(size=(size, 2)).astype(np.float32)),
        sparse=KeyedJaggedTensor(
            keys=tuple(ROWS),
            values=torch.from_numpy(ids),
            lengths=torch.from_numpy(np.concatenate(list(lengths.values()))),
            weights=torch.from_numpy(draw.normal(size=ids.size).astype(np.float32)),
        ),
        label=torch.from_numpy(draw.integers(0, 2, (size, 2)).astype(np.float32)),
        weight=torch.from_numpy((draw.random(size) * (draw.random(size) < 0.7)).astype(np.float32))
        if weighted
        else None,
    )


def slice_of(batch: Batch, world: World) -> Batch:
    sparse, mine = local_slice(batch.sparse, world.rank, world.size)
    weight = None if batch.weight is None else batch.weight[mine]
    return Batch(dense=batch.dense[mine], sparse=sparse, label=batch.label[mine], weight=weight)


def state_of(model: Any) -> dict[str, Any]:
    """The dense parameters, and the shards of this rank."""
    shards = [(s.shard, s.weight.clone(), {k: v.clone() for k, v in s.state.items()}) for s in model.embeddings.shards]
    return {"dense": [p.detach().clone() for p in model.parameters()], "shards": shards}


def run_steps(sizes: list[int], weighted: bool) -> dict[str, Any]:
    """A step per size of a global batch; run on every rank."""
    world = World.current()
    model = make(OptimizerSpec(name="adam", lr=0.05), "float64")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    step = TrainStep(model, optimizer, world, task_weights=[0.5, 2.0])
    results = [step(slice_of(global_batch(n, size, weighted), world)) for n, size in enumerate(sizes)]
    return {**state_of(model), "losses": [r.loss for r in results], "counts": [r.num_samples for r in results]}


def assert_same(got: dict[str, Any], alone: dict[str, Any], atol: float) -> None:
    """Dense parameters and all shards, against those of one process."""
    for value, expected in zip(got["dense"], alone["dense"], strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=atol)
    whole = {place.table: (weight, state) for place, weight, state in alone["shards"]}
    for place, weight, state in got["shards"]:
        part = (slice(*place.rows), slice(*place.columns))
        torch.testing.assert_close(weight, whole[place.table][0][part], rtol=0, atol=atol)
        for name, value in state.items():
            expected = whole[place.table][1][name]
            torch.testing.assert_close(value, expected[part[: expected.dim()]], rtol=0, atol=atol)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_the_weighted_loss_on_several_ranks_is_that_of_one(ranks: Ranks, size: int, weighted: bool) -> None:
    sizes = [13, 8, 1, 24]  # uneven slices, and ranks without a sample
    alone = run_steps(sizes, weighted)
    for got in ranks(size).run(run_steps, sizes, weighted):
        assert got["counts"] == sizes
        np.testing.assert_allclose(got["losses"], alone["losses"], rtol=1e-12)
        assert_same(got, alone, 1e-12)
