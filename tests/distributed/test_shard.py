"""meseta.shard on a user's model and loop, and plans written by hand: two ranks equal one process."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from meseta.comm import DenseGradients, World
from meseta.comm.dense import full_tensor as put_together
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, OptimizerSpec, TableSpec
from sampling import product, sample

from .exactness import Ranks, bit_difference
from .scenario import IS_SOAK, Passes, Scenario, local_slice, whole_tables
from .test_sharded import differences

TABLES = [
    TableSpec(name="user", num_embeddings=30, embedding_dim=48, dtype="float64"),
    TableSpec(
        name="item",
        num_embeddings=50,
        embedding_dim=48,
        dtype="float64",
        optimizer=OptimizerSpec(name="adam", lr=0.05),
    ),
]
FEATURES = [
    FeatureSpec(name="who", table="user"),
    FeatureSpec(name="what", table="item", pooling="mean"),
    FeatureSpec(name="seen", table="item"),
]
NUM_STEPS = 20 if IS_SOAK else 4


class UserModel(nn.Module):
    """Model with other modules around a nested collection, and an unused head."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Module()
        self.tower.embeddings = EmbeddingBagCollection(TABLES, FEATURES, seed=1)
        self.layers = nn.Sequential(nn.Linear(3 * 48 + 2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.unused = nn.Linear(3, 3).double()
        self.frozen = nn.Linear(1, 1).double().requires_grad_(False)
        self.every_second_step = nn.Parameter(torch.randn(4, 3, dtype=torch.float64).t())  # not contiguous
        self.register_buffer("scale", torch.rand(1, dtype=torch.float64))

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor, step: int) -> Tensor:
        x = torch.cat([self.tower.embeddings(sparse).pooled.values, dense], dim=1)
        logits = self.layers(x).squeeze(1) * self.scale
        return logits + self.every_second_step.square().mean() if step % 2 else logits


def user_loop(plan: Any, batch_size: int, dense_sharding: Any = "replicated") -> dict[str, Any]:
    """Return losses, tables and dense weights after a loop with Adam. Dense weights differ between ranks before
    `shard`."""
    world = World.current()
    torch.manual_seed(world.rank)
    model = shard(UserModel(), plan, dense=dense_sharding)
    embeddings = model.tower.embeddings
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scenario = Scenario(sharding="", pooling="sum", weighted=False, optimizer="sgd", batch_size=batch_size)
    losses = []
    for step in range(NUM_STEPS):
        whole = scenario.batch(step)
        ids = KeyedJaggedTensor(
            keys=("who", "what", "seen"),
            values=torch.cat([whole[k].values for k in "cde"]) % 30,
            lengths=torch.cat([whole[k].lengths for k in "cde"]),
        )
        sparse, local = local_slice(ids, world.rank, world.size)
        generator = torch.Generator().manual_seed(step)
        dense = torch.randn(batch_size, 2, generator=generator, dtype=torch.float64)
        label = (torch.rand(batch_size, generator=generator) < 0.3).double()
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense[local], sparse, step), label[local])
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is None for p in (*model.unused.parameters(), *model.frozen.parameters()))
        assert (model.every_second_step.grad is None) == (step % 2 == 0)
        optimizer.step()
        losses.append(float(loss.detach()) * embeddings.local_share)
    return {
        "losses": losses,
        "shards": [(s.shard, s.weight, s.state) for s in embeddings.shards],
        "dense": [put_together(t.detach()).clone() for t in (*model.parameters(), *model.buffers())],
    }


BY_HAND = {"tables": {"user": "column_wise", "item": "row_wise"}}


class Sizes(Scenario):
    """Scenario for `whole_tables`."""

    def tables(self) -> list[TableSpec]:
        return TABLES


@pytest.mark.parametrize(
    ("plan", "batch_size"),
    [
        pytest.param(None, 7, id="balanced-7"),
        pytest.param(BY_HAND, 24, id="by hand-24"),
        pytest.param(None, 24, id="balanced-24", marks=pytest.mark.soak),
        pytest.param(BY_HAND, 7, id="by hand-7", marks=pytest.mark.soak),
    ],
)
def test_a_users_loop_on_two_ranks_equals_one_process(ranks: Ranks, plan: Any, batch_size: int) -> None:
    alone = user_loop(None, batch_size)
    results = ranks(2).run(user_loop, plan, batch_size)
    losses = torch.tensor([r["losses"] for r in results], dtype=torch.float64).sum(0)
    torch.testing.assert_close(losses, torch.tensor(alone["losses"], dtype=torch.float64), rtol=0.0, atol=1e-10)
    for first, second, expected in zip(results[0]["dense"], results[1]["dense"], alone["dense"], strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, rtol=0.0, atol=1e-10)
    sizes = Sizes(sharding="", pooling="sum", weighted=False, optimizer="sgd")
    got = whole_tables(results, sizes)
    for table, parts in whole_tables([alone], sizes).items():
        for name, value in parts.items():
            torch.testing.assert_close(got[table][name], value, rtol=0.0, atol=1e-10)


def accumulated() -> list[Tensor]:
    """Return the gradients of two backward passes without zero_grad between them."""
    world = World.current()
    layer = nn.Linear(3, 2).double()
    nn.init.constant_(layer.weight, 0.5)
    nn.init.constant_(layer.bias, 0.5)
    kept = DenseGradients(list(layer.parameters()), world, Passes(1 / world.size))
    for step in range(2):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        local = x.chunk(world.size)[world.rank]
        layer(local).square().mean().backward()
    assert kept.parameters
    return [p.grad for p in layer.parameters() if p.grad is not None]


def test_gradients_accumulate_over_backward_passes(ranks: Ranks) -> None:
    alone = accumulated()
    for result in ranks(2).run(accumulated):
        for got, expected in zip(result, alone, strict=True):
            torch.testing.assert_close(got, expected, rtol=0.0, atol=1e-12)


def surviving_parts() -> list[str]:
    """Return the parts of a model that are still alive after its user has dropped it."""
    world = World.current()
    model = shard(UserModel(), {"tables": {"user": "data_parallel", "item": "row_wise"}})
    whole = Scenario(sharding="", pooling="sum", weighted=False, optimizer="sgd", batch_size=8).batch(0)
    ids = KeyedJaggedTensor(
        keys=("who", "what", "seen"),
        values=torch.cat([whole[k].values for k in "cde"]) % 30,
        lengths=torch.cat([whole[k].lengths for k in "cde"]),
    )
    sparse, local = local_slice(ids, world.rank, world.size)
    model(torch.ones(8, 2, dtype=torch.float64)[local], sparse, 1).sum().backward()
    collection, gradients = model.tower.embeddings, cast(Any, model.dense_gradients)
    held = {"tables": collection.shards[0].weight, "collection": collection, "dense gradients": gradients}
    left = {name: weakref.ref(one) for name, one in held.items()}
    del model, collection, gradients, held
    gc.collect()
    return [name for name, one in left.items() if one() is not None]


def test_a_dropped_model_frees_its_tables(ranks: Ranks) -> None:
    assert ranks(2).run(surviving_parts) == [[], []]


class MixedPooling(Scenario):
    """Scenario with pooled, weighted and unpooled features of the same tables.

    Pooled features come first in the routes, and d + a + b is not a + b + d in floating point.
    """

    def features(self) -> list[FeatureSpec]:
        return [
            FeatureSpec(name="a", table="shared", pooling="none"),
            FeatureSpec(name="b", table="shared", pooling="none"),
            FeatureSpec(name="c", table="wide", pooling="mean"),
            FeatureSpec(name="d", table="shared", pooling="sum", weighted=True),
            FeatureSpec(name="e", table="wide", pooling="none"),
        ]


POOLED_IN_SEVERAL_WAYS = product(
    sharding=["table_wise", "row_wise", "column_wise", "mixed"], optimizer=["rowwise_adagrad", "adam"]
)


@pytest.mark.parametrize("case", sample(POOLED_IN_SEVERAL_WAYS, 2, seed=1))
def test_features_of_one_table_with_several_poolings(ranks: Ranks, case: dict[str, str]) -> None:
    sharding, optimizer = case["sharding"], case["optimizer"]
    scenario = MixedPooling(sharding=sharding, pooling="", weighted=True, optimizer=optimizer)
    differences(ranks, 2, scenario)
    if sharding != "mixed":
        exact = scenario.but(max_ids=1) if sharding == "row_wise" else scenario
        assert bit_difference(ranks, 2, exact) == 0


class ByHand(Scenario):
    """Scenario whose plan lists its shards. Several shards are on one rank, and some are cut by rows and columns."""

    def plan(self, num_ranks: int) -> Any:
        from meseta.spec import Plan

        def pieces(rows: int, row_cuts: list[int], column_cuts: list[int], owners: list[int]) -> dict[str, Any]:
            spans = [
                (r, c)
                for r in zip([0, *row_cuts], [*row_cuts, rows], strict=True)
                for c in zip([0, *column_cuts], [*column_cuts, 48], strict=True)
            ]
            shards = [{"rows": r, "columns": c, "ranks": [o]} for (r, c), o in zip(spans, owners, strict=True)]
            return {"sharding": "row_wise" if row_cuts else "column_wise", "shards": shards}

        entries = {
            "tiny": pieces(1, [], [16, 32], [0, 0, 0]),  # every column on one rank, yet in pieces
            "small": pieces(7, [], [16, 32], [1, 0, 1]),  # two pieces of a row on one rank, one between them elsewhere
            "shared": pieces(40, [3, 17], [32], [0, 1, 1, 0, 1, 1]),  # a grid
            "wide": pieces(101, [50], [], [1, 1]),  # two row ranges on one rank
        }
        return Plan.from_dict({"tables": entries}, self.tables(), num_ranks)


CELLS = product(
    size=[2, 4], pooling=[("sum", True), ("mean", False), ("none", False)], optimizer=["rowwise_adagrad", "adam"]
)


@pytest.mark.parametrize("cell", sample(CELLS, 2, seed=0))
def test_plans_by_hand_equal_one_process(ranks: Ranks, cell: dict[str, Any]) -> None:
    size, (pooling, weighted) = cell["size"], cell["pooling"]
    scenario = ByHand(sharding="by hand", pooling=pooling, weighted=weighted, optimizer=cell["optimizer"])
    differences(ranks, size, scenario)


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_plans_by_hand_keep_the_bits(ranks: Ranks, pooling: str, optimizer: str) -> None:
    scenario = ByHand(sharding="by hand", pooling=pooling, weighted=False, optimizer=optimizer, max_ids=1)
    assert bit_difference(ranks, 2, scenario) == 0
