"""The bytes that a plan is predicted to exchange are those that two ranks hand to the collectives, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meseta.comm import World
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.jagged import KeyedJaggedTensor
from meseta.planner import predict
from meseta.spec import FeatureLoad, FeatureSpec, OptimizerSpec, Plan, TableSpec, Topology, Workload

from .pool import RankPool

ROWS, BATCH, IDS = 64, 512, 4
"""Every rank's ids visit every row of a table equally often, so that expected and real numbers of ids agree."""


def specs(optimizer: str, weighted: bool, pooling: str) -> tuple[list[TableSpec], list[FeatureSpec]]:
    spec = OptimizerSpec(name=optimizer)
    tables = [
        TableSpec(name=n, num_embeddings=ROWS, embedding_dim=d, optimizer=spec) for n, d in (("a", 32), ("b", 48))
    ]
    first = FeatureSpec(name="one", table="a", weighted=weighted, pooling=pooling)  # type: ignore[arg-type]
    return tables, [first, FeatureSpec(name="two", table="a"), FeatureSpec(name="three", table="b", pooling="mean")]


def count(plan: Any, optimizer: str, weighted: bool, pooling: str) -> tuple[list[int], list[int]]:
    """Bytes that this rank sends to others in each all-to-all, and sums in each all-reduce, of one training step."""
    tables, features = specs(optimizer, weighted, pooling)
    world = World.current()
    model = torch.nn.Sequential(EmbeddingBagCollection(tables, features, seed=1))
    embeddings = shard(model, Plan.from_dict(plan, tables, world.size))[0]
    sent: list[int] = []
    summed: list[int] = []
    all_to_all, all_reduce = World.all_to_all, World.start_all_reduce

    def counted(self: World, send: torch.Tensor, send_splits: Any, receive_splits: Any) -> Any:
        sent.append(sum(n for r, n in enumerate(send_splits) if r != self.rank) * send[:1].nbytes)
        return all_to_all(self, send, send_splits, receive_splits)

    def reduced(self: World, tensor: torch.Tensor) -> Any:
        summed.append(tensor.nbytes)
        return all_reduce(self, tensor)

    batch = BATCH // world.size
    ids = torch.arange(batch * IDS).repeat(3) % ROWS
    lengths = torch.full((3 * batch,), IDS)
    weights = torch.ones(ids.numel()) if weighted else None
    kjt = KeyedJaggedTensor(keys=("one", "two", "three"), values=ids, lengths=lengths, weights=weights)
    World.all_to_all, World.start_all_reduce = counted, reduced  # type: ignore[method-assign,assignment]
    try:
        found = embeddings(kjt)
        rows = [found[name].values.sum() for name in ("one",) if pooling == "none"]
        (found.pooled.values.sum() + sum(rows)).backward()
    finally:
        World.all_to_all, World.start_all_reduce = all_to_all, all_reduce  # type: ignore[method-assign]
    return sent, summed


PLANS = {
    "table_wise": {
        "tables": {"a": {"sharding": "table_wise", "ranks": [1]}, "b": {"sharding": "table_wise", "ranks": 0}}
    },
    "row_wise": {"tables": {"*": "row_wise"}},
    "column_wise": {"tables": {"*": "column_wise"}},
    "data_parallel": {"tables": {"a": "data_parallel", "b": "table_wise"}},
    "hot_replicated": {"tables": {"a": {"sharding": "hot_replicated", "hot_rows": 16}, "b": "table_wise"}},
    "mixed": {"tables": {"a": "row_wise", "b": "column_wise"}},
}


HOSTS = {
    name: {"devices_per_host": 2, "tables": {"a": name, "b": name}}
    for name in ("table_wise", "row_wise", "table_row_wise", "table_column_wise", "grid")
}
HOSTS["mixed of hosts"] = {"devices_per_host": 2, "tables": {"a": "table_row_wise", "b": "row_wise"}}


def check(ranks: RankPool, plan: Any, num_hosts: int, optimizer: str, weighted: bool, pooling: str) -> None:
    """Compare every collective of a step, on every rank."""
    tables, features = specs(optimizer, weighted, pooling)
    counted = ranks.run(count, plan, optimizer, weighted, pooling)
    loads = {feature.name: FeatureLoad(pooling_factor=float(IDS)) for feature in features}
    work = Workload(tables=tuple(tables), features=tuple(features), batch_size=BATCH, loads=loads)
    topology = Topology(num_hosts=num_hosts, devices_per_host=2)
    found = predict(Plan.from_dict(plan, tables, topology.num_ranks), work, topology)
    part = (topology.num_ranks - 1) / topology.num_ranks
    for rank in range(topology.num_ranks):
        sent = [own.sent_inside[rank] + own.sent_across[rank] for own in found.collectives if not own.reduces]
        assert counted[rank][0] == pytest.approx(sent, rel=1e-6)
        summed = [own.sent_inside[rank] + own.sent_across[rank] for own in found.collectives if own.reduces]
        assert [2 * part * size for size in counted[rank][1]] == pytest.approx(summed)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("optimizer", "weighted", "pooling"), [("adam", True, "sum"), ("rowwise_adagrad", False, "none")]
)
def test_predicted_bytes_are_counted_bytes(
    ranks: Callable[[int], RankPool], name: str, optimizer: str, weighted: bool, pooling: str
) -> None:
    check(ranks(2), PLANS[name], 1, optimizer, weighted, pooling)


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_predicted_bytes_are_counted_bytes_of_two_hosts(
    ranks: Callable[[int], RankPool], name: str, pooling: str
) -> None:
    check(ranks(4), HOSTS[name], 2, "rowwise_adagrad", False, pooling)
