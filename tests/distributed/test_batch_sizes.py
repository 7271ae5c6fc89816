"""Features of several batch sizes: ranks against one process, which is compared with batches padded by empty bags."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from meseta.comm import World
from meseta.embedding import EmbeddingBagCollection, ShardedEmbeddingBagCollection
from meseta.sparse import JaggedTensor, KeyedJaggedTensor
from meseta.spec import FeatureSpec, MesetaError, OptimizerSpec, Plan, TableSpec
from sampling import product, sample

from .exactness import Ranks
from .scenario import Scenario, whole_tables

READS = {"a": "small", "b": "shared", "c": "shared", "d": "wide", "e": "wide", "f": "shared"}
BATCHES = {"c": "users", "d": "users", "e": "queries", "f": "queries"}
SIZES = {"": [24, 300, 5], "users": [7, 40, 1], "queries": [11, 600, 0]}
"""Samples of the global batch in each step."""


def features(pooling: str, *, apart: bool = True) -> list[FeatureSpec]:
    """Return features of three batches. With "mixed" the last one of each batch is not pooled."""
    kinds = {name: "none" if pooling == "mixed" and name in "bdf" else "sum" for name in READS}
    if pooling == "mean":
        kinds |= dict.fromkeys("ace", "mean")
    return [
        FeatureSpec(
            name=name,
            table=table,
            pooling=kinds[name],
            weighted=kinds[name] != "none" and name in "acd",
            batch=BATCHES.get(name, "") if apart else "",
        )
        for name, table in READS.items()
    ]


def bags(step: int, feature: FeatureSpec, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids, lengths and weights of a feature's global batch."""
    random = np.random.default_rng([step, ord(feature.name)])
    lengths = random.integers(0, 4, SIZES[BATCHES.get(feature.name, "")][step])
    ids = random.integers(0, rows, lengths.sum())
    return ids, lengths, random.normal(size=ids.size)


def gradients(step: int, name: str, num_rows: int) -> Tensor:
    """Return upstream gradients of each sample or id of the global batch."""
    generator = torch.Generator().manual_seed(1000 * step + ord(name))
    return torch.randn(num_rows, 48, generator=generator)


def run(scenario: Scenario, pooling: str, apart: bool = True) -> dict[str, Any]:
    """Return outputs of this rank's samples by feature, and its shards. Without `apart` all batches are padded."""
    world = World.current()
    specs = features(pooling, apart=apart)
    collection: Any = EmbeddingBagCollection(scenario.tables(), specs, seed=1)
    if world.size > 1:
        collection = ShardedEmbeddingBagCollection(collection, scenario.plan(world.size), world)
    rows = {table.name: table.num_embeddings for table in scenario.tables()}
    outputs: list[dict[str, Tensor]] = []
    for step in range(3):
        longest = max(sizes[step] for sizes in SIZES.values())
        parts, shares, slices = [], [], {}
        for spec in specs:
            ids, lengths, weights = bags(step, spec, rows[spec.table])
            if not apart:
                lengths = np.pad(lengths, (0, longest - lengths.size))
            bounds = [lengths.size * r // world.size for r in range(world.size + 1)]
            first, stop = bounds[world.rank], bounds[world.rank + 1]
            ends = np.concatenate([[0], lengths.cumsum()])
            positions = slice(ends[first], ends[stop])
            parts.append((ids[positions], lengths[first:stop], weights[positions]))
            slices[spec.name] = slice(first, stop), positions
            shares.append((stop - first) / max(lengths.size, 1))
        batch = KeyedJaggedTensor(
            keys=tuple(READS),
            values=torch.from_numpy(np.concatenate([ids for ids, _, _ in parts])),
            lengths=torch.from_numpy(np.concatenate([lengths for _, lengths, _ in parts])),
            weights=torch.from_numpy(np.concatenate([weights for _, _, weights in parts])).float(),
            batch_sizes=tuple(lengths.size for _, lengths, _ in parts),
        )
        out = collection(batch)
        total, values = torch.zeros(()), {}
        for spec in specs:
            value = out[spec.name]
            samples, positions = slices[spec.name]
            if isinstance(value, JaggedTensor):
                value, place = value.values, positions
            else:
                place = samples
            size = SIZES[BATCHES.get(spec.name, "")][step]
            upstream = gradients(step, spec.name, 4 * max(longest, size))[place]
            total = total + (value * upstream).sum() / max(shares[0], 1e-9)
            values[spec.name] = value.detach()
        total.backward()
        outputs.append(values)
    return {"outputs": outputs, "shards": [(s.shard, s.weight, s.state) for s in collection.shards]}


def scenario(sharding: str, optimizer: str) -> Scenario:
    return Scenario(sharding=sharding, pooling="sum", weighted=False, optimizer=optimizer)


@pytest.mark.parametrize("pooling", ["sum", "mean", "mixed"])
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_one_process_equals_padded_batches(pooling: str, optimizer: str) -> None:
    base = scenario("table_wise", optimizer)
    got, expected = run(base, pooling), run(base, pooling, apart=False)
    for step, (ours, others) in enumerate(zip(got["outputs"], expected["outputs"], strict=True)):
        for name, value in ours.items():
            assert torch.equal(value, others[name][: value.shape[0]])
            kind = {f.name: f.pooling for f in features(pooling)}[name]
            assert kind == "none" or value.shape[0] == SIZES[BATCHES.get(name, "")][step]
    for (_, weight, state), (_, other, other_state) in zip(got["shards"], expected["shards"], strict=True):
        assert torch.equal(weight, other)
        assert all(torch.equal(value, other_state[key]) for key, value in state.items())


ON_RANKS = product(
    sharding=["mixed", "mixed of hosts", "column_wise", "hot_replicated"],
    learning=[("adam", "mixed"), ("rowwise_adagrad", "mean")],
)


@pytest.mark.parametrize("case", sample(ON_RANKS, 4, seed=1))
def test_ranks_equal_one_process(ranks: Ranks, case: dict[str, Any]) -> None:
    optimizer, pooling = case["learning"]
    base = scenario(case["sharding"], optimizer)
    alone, results = run(base, pooling), ranks(4).run(run, base, pooling)
    for step, expected in enumerate(alone["outputs"]):
        for name, value in expected.items():
            got = torch.cat([result["outputs"][step][name] for result in results])
            torch.testing.assert_close(got, value, rtol=0, atol=1e-5)
    whole, one = whole_tables(results, base), whole_tables([alone], base)
    read = set(READS.values())
    for table in sorted(read):
        for key, value in one[table].items():
            torch.testing.assert_close(whole[table][key], value, rtol=0, atol=1e-5)


def parts_of_a_batch(scenario: Scenario, num_parts: int) -> list[Any]:
    """Return the shards after one step with `num_parts` micro-batches."""
    world = World.current()
    collection: Any = EmbeddingBagCollection(scenario.tables(), features("sum"), seed=1)
    if world.size > 1:
        collection = ShardedEmbeddingBagCollection(collection, scenario.plan(world.size), world)
    rows = {table.name: table.num_embeddings for table in scenario.tables()}
    for part in range(num_parts):
        ids, sizes = [], []
        for spec in features("sum"):
            random = np.random.default_rng(ord(spec.name))
            local_ids = random.integers(0, rows[spec.table], 12 if spec.batch == "users" else 24).reshape(2, -1)[
                world.rank
            ]
            ids.append(np.split(local_ids, num_parts)[part])
            sizes.append(len(ids[-1]))
        values = torch.from_numpy(np.concatenate(ids))
        batch = KeyedJaggedTensor(
            keys=tuple(READS),
            values=values,
            lengths=torch.ones_like(values),
            weights=torch.ones(values.numel()),
            batch_sizes=tuple(sizes),
        )
        with collection.accumulate_gradients() if part + 1 < num_parts else nullcontext():
            out = collection(batch)
            torch.cat([out[name].flatten() for name in READS]).sum().backward()
    return [(s.shard, s.weight) for s in collection.shards]


@pytest.mark.parametrize("sharding", ["mixed", "mixed of hosts"])
def test_parts_of_a_batch_equal_the_whole(ranks: Ranks, sharding: str) -> None:
    base = scenario(sharding, "adam")
    whole, parts = (ranks(2).run(parts_of_a_batch, base, number) for number in (1, 3))
    for expected, got in zip(whole, parts, strict=True):
        for (_, weight), (_, other) in zip(expected, got, strict=True):
            torch.testing.assert_close(weight, other, rtol=0, atol=1e-6)


def test_features_without_a_default_batch() -> None:
    table = TableSpec(name="t", num_embeddings=5, embedding_dim=16, optimizer=OptimizerSpec(name="sgd", lr=0.1))
    spec = FeatureSpec(name="a", table="t", batch="users")
    with pytest.raises(MesetaError, match="leave `batch` out for at least one feature"):
        EmbeddingBagCollection([table], [spec])
    collection = EmbeddingBagCollection([table], [spec, replace(spec, name="b", batch="")])
    out = collection(KeyedJaggedTensor.from_lists({"a": [[1]], "b": [[1], [2, 3], []]}))
    assert out.pooled.values.shape == (3, 16) and out.pooled_by_batch["users"].values.shape == (1, 16)
    with pytest.raises(MesetaError, match="no feature 'c'"):
        out["c"]
    plan = Plan.from_dict({"tables": {"t": "table_wise"}}, [table], 1)
    sharded = ShardedEmbeddingBagCollection(collection, plan, World.single())
    assert sharded(KeyedJaggedTensor.from_lists({"a": [[1]], "b": [[1], [2, 3], []]}))["a"].shape == (1, 16)
