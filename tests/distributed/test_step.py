"""Steps of a whole model on several ranks against one process: sample weights, tasks, ranks without samples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from meseta.comm import World
from meseta.data.read.batch import Batch, split_batch
from meseta.embedding import EmbeddingBagCollection, ShardedEmbeddingBagCollection, shard
from meseta.pipeline import Pipeline
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, OptimizerSpec, Plan, TableSpec
from sampling import diagonal

from .pool import RankPool
from .scenario import IS_SOAK, Scenario, batch_slice, local_slice, per_sample, random_ids

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


def global_batch(number: int, size: int, weighted: bool, masked: bool = False) -> Batch:
    """Return a global batch. With `masked` some labels are missing: all of the second task in one batch, and all in
    another."""
    draw = np.random.default_rng(number)
    ids, lengths = random_ids(draw, ROWS, size)
    known = np.random.default_rng(100 + number).random((size, 2)) < [0.7, 0.2] if masked else None
    if known is not None and number in (1, 2):
        known[:, number == 1 :] = False
    whole = Batch(
        dense=torch.from_numpy(draw.normal(size=(size, 2)).astype(np.float32)),
        sparse=KeyedJaggedTensor(
            keys=tuple(ROWS),
            values=ids,
            lengths=lengths,
            weights=torch.from_numpy(draw.normal(size=ids.numel()).astype(np.float32)),
        ),
        label=torch.from_numpy(draw.integers(0, 2, (size, 2)).astype(np.float32)),
        weight=torch.from_numpy((draw.random(size) * (draw.random(size) < 0.7)).astype(np.float32))
        if weighted
        else None,
    )
    if known is None:
        return whole
    mask = torch.from_numpy(known)
    return replace(whole, label=whole.label * mask, label_mask=mask)


def state_of(model: Any) -> dict[str, Any]:
    """Return the dense parameters, and the shards of this rank."""
    shards = [(s.shard, s.weight.clone(), {k: v.clone() for k, v in s.state.items()}) for s in model.embeddings.shards]
    return {"dense": [p.detach().clone() for p in model.parameters()], "shards": shards}


ADAM, SGD = OptimizerSpec(name="adam", lr=0.05), OptimizerSpec(name="sgd", lr=0.5)


def run_steps(
    sizes: list[int],
    weighted: bool,
    accumulate_steps: int = 1,
    spec: OptimizerSpec = ADAM,
    masked: bool = False,
) -> dict[str, Any]:
    """Train a step for each size of a global batch. Runs on every rank."""
    world = World.current()
    model = make(spec, "float64")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    step = Pipeline(model, optimizer, world, task_weights=[0.5, 2.0], accumulate_steps=accumulate_steps)
    step.num_masked_tasks = 2 if masked else 0
    results = [step(batch_slice(global_batch(n, size, weighted, masked), world)) for n, size in enumerate(sizes)]
    return {**state_of(model), "losses": [r.loss for r in results], "counts": [r.num_samples for r in results]}


def assert_same(got: dict[str, Any], alone: dict[str, Any], atol: float) -> None:
    """Compare dense parameters and all shards with those of one process."""
    for value, expected in zip(got["dense"], alone["dense"], strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=atol)
    whole = {place.table: (weight, state) for place, weight, state in alone["shards"]}
    for place, weight, state in got["shards"]:
        part = (slice(*place.rows), slice(*place.columns))
        torch.testing.assert_close(weight, whole[place.table][0][part], rtol=0, atol=atol)
        for name, value in state.items():
            expected = whole[place.table][1][name]
            torch.testing.assert_close(value, expected[part[: expected.dim()]], rtol=0, atol=atol)


@pytest.mark.parametrize("case", diagonal(size=[2, 4], weighted=[False, True]))
def test_the_weighted_loss_on_several_ranks_is_that_of_one(ranks: Ranks, case: dict[str, Any]) -> None:
    size, weighted = case.values()
    sizes = [13, 8, 1, 24]  # uneven slices, and ranks without a sample
    alone = run_steps(sizes, weighted)
    for got in ranks(size).run(run_steps, sizes, weighted):
        assert got["counts"] == sizes
        np.testing.assert_allclose(got["losses"], alone["losses"], rtol=1e-12)
        assert_same(got, alone, 1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_micro_batches_equal_the_whole_batch(ranks: Ranks, weighted: bool) -> None:
    sizes = [13, 8, 1, 24]
    alone = run_steps(sizes, weighted)
    for number in (2, 3, 5) if IS_SOAK else ((2, 5) if weighted else (3,)):
        results = [run_steps(sizes, weighted, number), *ranks(2).run(run_steps, sizes, weighted, number)]
        for got in results:
            assert got["counts"] == sizes
            np.testing.assert_allclose(got["losses"], alone["losses"], rtol=1e-12)
            assert_same(got, alone, 1e-12)


def masked_loop(sizes: list[int], weighted: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses of plain torch with one table for each feature, and the dense parameters and tables."""
    model = make(SGD, "float64")
    tables = {s.spec.name: s.weight.clone().requires_grad_() for s in model.embeddings.shards}
    dense, rows, losses = list(model.parameters()), list(tables.values()), []
    optimizer = torch.optim.Adam(dense, lr=0.02)
    row_optimizer = torch.optim.SGD(rows, lr=0.5)
    for number, size in enumerate(sizes):
        batch = global_batch(number, size, weighted, masked=True)
        parts = []
        for name, table in tables.items():
            bags = batch.sparse[name]
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), bags.lengths.cumsum(0)])
            options = {"mode": "mean"} if name == "a" else {"mode": "sum"}
            if name == "b":
                options["per_sample_weights"] = bags.weights.double()
            parts.append(
                functional.embedding_bag(bags.values, table, offsets, sparse=True, include_last_offset=True, **options)
            )
        logits = model.score(batch.dense, torch.cat(parts, dim=1))
        weight = torch.ones(size).double() if batch.weight is None else batch.weight.double()
        loss, is_step = torch.zeros(()).double(), False
        for task, factor in enumerate([0.5, 2.0]):
            known = torch.nonzero(batch.label_mask[:, task])[:, 0]
            if weight[known].sum() > 0:
                each = functional.binary_cross_entropy_with_logits(
                    logits[known, task], batch.label[known, task].double(), reduction="none"
                )
                loss, is_step = loss + factor * (weight[known] * each).sum() / weight[known].sum(), True
        losses.append(float(loss.detach()))
        if is_step:
            optimizer.zero_grad()
            row_optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            row_optimizer.step()
    return losses, [*(p.detach() for p in dense), *(row.detach() for row in rows)]


@pytest.mark.parametrize("weighted", [False, True])
def test_missing_labels_do_not_count_on_any_number_of_ranks(ranks: Ranks, weighted: bool) -> None:
    sizes = [13, 8, 5, 24, 1]
    alone = run_steps(sizes, weighted, 1, SGD, masked=True)
    losses, expected = masked_loop(sizes, weighted)
    np.testing.assert_allclose(alone["losses"], losses, rtol=1e-10)
    assert losses[2] == 0  # no label of the third batch is known
    values = [*alone["dense"], *(weight for _, weight, _ in alone["shards"])]
    for value, want in zip(values, expected, strict=True):
        torch.testing.assert_close(value, want, rtol=0, atol=1e-10)
    for size, parts in ((2, 1), (4, 1), (2, 3)) if IS_SOAK else ((4, 1) if weighted else (2, 3),):
        for got in ranks(size).run(run_steps, sizes, weighted, parts, SGD, True):
            np.testing.assert_allclose(got["losses"], alone["losses"], rtol=1e-12)
            assert_same(got, alone, 1e-12)


def full_mask(weighted: bool) -> list[Any]:
    """Return the states after two steps, without a mask and with a mask of known labels. Runs on every rank."""
    world, states = World.current(), []
    for masked in (False, True):
        model = make(ADAM, "float32")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        step = Pipeline(model, optimizer, world, task_weights=[0.5, 2.0])
        step.num_masked_tasks = 2 * masked
        for number in range(2):
            batch = global_batch(number, 9, weighted)
            mask = torch.ones_like(batch.label, dtype=torch.bool) if masked else None
            step(batch_slice(replace(batch, label_mask=mask), world))
        states.append(state_of(model))
    return states


@pytest.mark.parametrize("weighted", [False, True])
def test_a_mask_of_known_labels_changes_no_bit(ranks: Ranks, weighted: bool) -> None:
    for plain, masked in [full_mask(weighted), *ranks(2).run(full_mask, weighted)]:
        for (_, weight, state), (_, expected, other) in zip(masked["shards"], plain["shards"], strict=True):
            assert torch.equal(weight, expected) and all(torch.equal(state[name], other[name]) for name in state)
        assert all(torch.equal(a, b) for a, b in zip(masked["dense"], plain["dense"], strict=True))


def embed(scenario: Scenario, num_parts: int) -> list[Any]:
    """Return the shards of this rank after steps of micro-batches with fixed upstream gradients. Runs on every rank."""
    world, generator = World.current(), torch.Generator().manual_seed(0)
    collection: Any = EmbeddingBagCollection(scenario.tables(), scenario.features(), seed=scenario.seed)
    if world.size > 1:
        collection = ShardedEmbeddingBagCollection(collection, scenario.plan(world.size), world)
    width = sum(table.embedding_dim for table in scenario.tables()) + scenario.tables()[0].embedding_dim
    for step in range(scenario.num_steps):
        upstream = torch.randn(scenario.batch_size, width, generator=generator)
        ids, local = local_slice(scenario.batch(step), world.rank, world.size)
        data = Batch(dense=upstream[local], sparse=ids, label=upstream[local, 0])
        for index, part in enumerate(split_batch(data, num_parts)):
            with collection.accumulate_gradients() if index + 1 < num_parts else nullcontext():
                x = per_sample(collection(part.sparse), scenario.features())
                (x * part.dense * world.size).sum().backward()
    return [(s.shard, s.weight.clone(), {k: v.clone() for k, v in s.state.items()}) for s in collection.shards]


@pytest.mark.parametrize(
    "case",
    diagonal(sharding=["mixed", "mixed of hosts"], pooling=["sum", "none"], optimizer=["adam", "rowwise_adagrad"]),
)
def test_micro_batches_of_the_embedding_have_the_bits_of_the_whole_batch(ranks: Ranks, case: dict[str, str]) -> None:
    scenario = Scenario(**case, weighted=case["pooling"] == "sum", batch_size=600, num_steps=2)
    whole, parts = ranks(2).run(embed, scenario, 1), ranks(2).run(embed, scenario, 3)
    for expected, got in zip(whole, parts, strict=True):
        for (_, weight, state), (_, other, other_state) in zip(expected, got, strict=True):
            assert torch.equal(weight, other)
            assert all(torch.equal(state[name], other_state[name]) for name in state)


@pytest.mark.parametrize("name", ["rowwise_adagrad", "sgd"])
def test_the_penalty_of_each_lookup_on_several_ranks_is_that_of_one(ranks: Ranks, name: str) -> None:
    """The penalty applies to lookups of the global batch under every scheme, also with micro-batches."""
    spec = OptimizerSpec(name=name, lr=0.05, weight_decay=0.1, l1=0.01, stepped_rows="looked_up")
    alone = run_steps([7, 2, 1, 5], True, 1, spec)
    once = run_steps([7, 2, 1, 5], True, 1, replace(spec, stepped_rows="touched"))
    assert any(not torch.equal(a[1], b[1]) for a, b in zip(alone["shards"], once["shards"], strict=True))
    for got in [run_steps([7, 2, 1, 5], True, 3, spec), *ranks(2).run(run_steps, [7, 2, 1, 5], True, 2, spec)]:
        assert_same(got, alone, 1e-12)
    for got in ranks(4).run(run_steps, [7, 2, 1, 5], True, 1, spec) if IS_SOAK or name == "rowwise_adagrad" else ():
        assert_same(got, alone, 1e-12)


@pytest.mark.parametrize("name", ["adam", "rowwise_adagrad", "sgd"])
def test_the_decay_of_whole_tables_on_two_ranks_is_that_of_one(ranks: Ranks, name: str) -> None:
    spec = OptimizerSpec(name=name, lr=0.05, weight_decay=0.1, l1=0.01, stepped_rows="all")
    alone = run_steps([7, 2, 5], True, 1, spec)
    for got in ranks(2).run(run_steps, [7, 2, 5], True, 2, spec):
        assert_same(got, alone, 1e-12)
