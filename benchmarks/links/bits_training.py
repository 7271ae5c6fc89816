"""One small run on every rank of a crew, for its bits."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from links import shapes
from links.training import takes_codecs
from meseta.comm import World, sums
from meseta.config import DenseOptimizerConfig
from meseta.data import Batch
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.models import DLRM
from meseta.optim.dense import make_dense_optimizer
from meseta.pipeline import Pipeline
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, OptimizerSpec, Plan, TableSpec
from meseta.storage import ROW

if TYPE_CHECKING:
    from links.bits_part import Case
    from links.variants import Layout

NUM_STEPS, BATCH, NUM_DENSE, DIM = 20, 64, 4, 48
ROWS = {"replicated": 7, "small": 13, "middle": 101, "large": 700}
REPLICATED = "replicated"
"""Whose gradients are added over ranks, as those of the dense part are."""
MOST_IDS = 4
LATE_S = 0.002
"""By which the ranks of a host follow each other into a step."""


def train(case: Case, layout: Layout) -> dict[str, Any]:
    """The pieces of tables and states, and the dense weights, of this rank after NUM_STEPS."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sums.CHUNK_BYTES = case.chunk_bytes
    world = World.current()
    optimizer = OptimizerSpec(name="rowwise_adagrad", lr=0.1, initial_accumulator=0.01)
    tables = [
        TableSpec(name=name, num_embeddings=rows, embedding_dim=DIM, optimizer=optimizer) for name, rows in ROWS.items()
    ]
    features = [FeatureSpec(name=f"of {table.name}", table=table.name) for table in tables]
    model = DLRM(EmbeddingBagCollection(tables, features), num_dense=NUM_DENSE, bottom_mlp=(64, DIM), top_mlp=(128, 64))
    # Ways of sums as the plan says; where meseta.shard hears of no codecs, as the rank's World does.
    world = replace(world, plan_ranks_per_host=layout.per_host, sum_algorithm=cast(Any, case.variant.sum_path))
    more: dict[str, Any] = {"comm": shapes.communication(case.variant)} if takes_codecs() else {}
    model = shard(model, plan(tables, case, layout), world=world, **more)
    dense = make_dense_optimizer(DenseOptimizerConfig(name="adam", lr=0.01), model.parameters())
    step = Pipeline(cast(Any, model), dense, world)
    place = turned(world.rank, case.order, layout)
    for number in range(NUM_STEPS):
        time.sleep(LATE_S * place)
        step(batch(features, number, world))
    pieces = []
    for held in cast(Any, model).embeddings.shards:
        one = held.shard
        shape = (ROWS[one.table], DIM)
        for key, values in held.read(0, one.num_rows).items():
            name = "row" if key == ROW else str(key)
            pieces.append((one.table, shape, one.rows, one.columns, name, values.numpy().copy()))
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return {"pieces": pieces, "dense": weights}


def turned(rank: int, order: int, layout: Layout) -> int:
    """The place in its host that a rank takes in the first, the second and the third order."""
    host, place = divmod(rank, layout.per_host)
    return (place + (0, 1, 1 + host)[order]) % layout.per_host


def plan(tables: list[TableSpec], case: Case, layout: Layout) -> Plan:
    """Tables on ranks of each host in the order of the case; one is on all."""
    hosts = (rank // layout.per_host for rank in range(layout.size))
    ranks = [host * layout.per_host + turned(rank, case.order, layout) for rank, host in enumerate(hosts)]
    entries: dict[str, Any] = {REPLICATED: "data_parallel"}
    for number, table in enumerate(table for table in tables if table.name != REPLICATED):
        whole = case.variant.sharding == "table_wise"
        some = [ranks[number * layout.per_host % layout.size]] if whole else ranks[: DIM // 16]
        entries[table.name] = {"sharding": case.variant.sharding, "ranks": some}
    document: dict[str, Any] = {
        "devices_per_host": layout.per_host,
        "exchange": case.variant.exchange,
        "tables": entries,
    }
    if case.variant.sum_path != "flat":
        document["dense_exchange"] = case.variant.sum_path
    return Plan.from_dict(document, tables, layout.size)


def batch(features: list[FeatureSpec], number: int, world: World) -> Batch:
    """This rank's slice of a global batch; bags may be empty."""
    random = np.random.default_rng([11, number])
    first, last = (r * BATCH // world.size for r in (world.rank, world.rank + 1))
    values, lengths = [], []
    for feature in features:
        bags = random.integers(0, MOST_IDS + 1, BATCH)
        ids = random.integers(0, ROWS[feature.table], bags.sum())
        ends = np.concatenate([[0], np.cumsum(bags)])
        values.append(ids[ends[first] : ends[last]])
        lengths.append(bags[first:last])
    dense = random.standard_normal((BATCH, NUM_DENSE), dtype=np.float32)[first:last]
    label = (random.random(BATCH) < 0.3).astype(np.float32)[first:last]
    sparse = KeyedJaggedTensor(
        keys=tuple(feature.name for feature in features),
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
    )
    return Batch(dense=torch.from_numpy(dense), sparse=sparse, label=torch.from_numpy(label))
