"""A small model, its batches and its training steps, which one process and every rank run identically."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meseta.comm import DenseGradients, World
from meseta.comm.sums import DENSE_FP16_EXPONENT
from meseta.data.read.batch import Batch
from meseta.embedding import EmbeddingBagCollection, ShardedEmbeddingBagCollection
from meseta.ops.row_marks import Consumer
from meseta.sparse import JaggedTensor, KeyedJaggedTensor
from meseta.spec import Communication, FeatureSpec, OptimizerSpec, Plan, Shard, TableSpec
from meseta.spec.tiers import StorageOptions
from meseta.storage import ROW

IS_SOAK = bool(os.environ.get("MESETA_SOAK"))
"""Whether tests run in their long form."""
DIM = 48  # three blocks of 16 columns: two or three column shards


@dataclass(frozen=True)
class Scenario:
    """One cell of the matrix."""

    sharding: str  # a ShardingType, or "mixed"
    pooling: str  # "sum", "mean", "none"
    weighted: bool
    optimizer: str
    dtype: str = "float32"
    num_steps: int = 4 if IS_SOAK else 2
    batch_size: int = 24
    max_ids: int = 5  # per bag
    seed: int = 0
    exchange: str = "flat"  # of ids and rows between hosts
    per_host: int | None = None  # half of the ranks by default
    comm: Communication = field(default_factory=Communication)
    tier: str = "hbm"  # of tables that are not replicated
    cache_rows: int | None = None  # of each shard
    folder: str | None = None  # for tier "disk"

    def tables(self) -> list[TableSpec]:
        constants = {"initial_accumulator": 0.01} if "adagrad" in self.optimizer else {}
        lr = {} if self.optimizer == "frozen" else {"lr": 0.1}
        optimizer = OptimizerSpec(name=self.optimizer, **lr, **constants)
        sizes = {"tiny": 1, "small": 7, "shared": 40, "wide": 101}
        return [
            TableSpec(name=n, num_embeddings=r, embedding_dim=DIM, dtype=self.dtype, optimizer=optimizer)
            for n, r in sizes.items()
        ]

    def features(self) -> list[FeatureSpec]:
        reads = {"a": "tiny", "b": "small", "c": "shared", "d": "shared", "e": "wide"}
        return [FeatureSpec(name=n, table=t, pooling=self.pooling, weighted=self.weighted) for n, t in reads.items()]

    def plan(self, num_ranks: int) -> Plan:
        """Return the plan for this number of ranks, on two hosts if there are several ranks."""
        mixes = {
            "mixed": ("data_parallel", "table_wise", "column_wise", "row_wise"),
            "mixed of hosts": ("table_row_wise", "hot_replicated", "grid", "table_column_wise"),
        }
        names = mixes.get(self.sharding, (self.sharding,) * 4)
        entries: dict[str, Any] = {}
        for table, name in zip(self.tables(), names, strict=True):
            entries[table.name] = name
            if name == "hot_replicated":  # a table of one row has no cold rows
                hot = {"sharding": name, "hot_rows": -(-table.num_embeddings // 3)}
                entries[table.name] = hot if table.num_embeddings > 1 else "data_parallel"
            elif self.tier != "hbm" and name != "data_parallel":
                entries[table.name] = {"sharding": name, "tier": self.tier, "cache_rows": self.cache_rows}
        per_host = self.per_host or max(num_ranks // 2, 1)
        document = {"devices_per_host": per_host, "exchange": self.exchange, "tables": entries}
        return Plan.from_dict(document, self.tables(), num_ranks)

    def batch(self, step: int) -> KeyedJaggedTensor:
        """Return the global batch of a step. Bags may be empty."""
        random = np.random.default_rng([self.seed, step])
        values, lengths = [], []
        rows = {table.name: table.num_embeddings for table in self.tables()}
        for feature in self.features():
            bag = random.integers(0, self.max_ids + 1, self.batch_size)
            lengths.append(bag)
            values.append(random.integers(0, rows[feature.table], bag.sum()))
        ids = torch.from_numpy(np.concatenate(values))
        weights = torch.from_numpy(random.normal(size=ids.numel()).astype(self.dtype)) if self.weighted else None
        keys = tuple(feature.name for feature in self.features())
        return KeyedJaggedTensor(
            keys=keys, values=ids, lengths=torch.from_numpy(np.concatenate(lengths)), weights=weights
        )

    def but(self, **changes: Any) -> Scenario:
        return replace(self, **changes)


def local_slice(batch: KeyedJaggedTensor, rank: int, num_ranks: int) -> tuple[KeyedJaggedTensor, slice]:
    """Return the rank's contiguous samples. The first ranks get one more if the batch does not divide."""
    bounds = [0]
    for r in range(num_ranks):
        bounds.append(bounds[-1] + batch.batch_size // num_ranks + (r < batch.batch_size % num_ranks))
    local = slice(bounds[rank], bounds[rank + 1])
    return samples_of(batch, local), local


def batch_slice(batch: Batch, world: World) -> Batch:
    """Return this rank's slice of a whole batch."""
    sparse, local = local_slice(batch.sparse, world.rank, world.size)
    weight = None if batch.weight is None else batch.weight[local]
    mask = None if batch.label_mask is None else batch.label_mask[local]
    return Batch(dense=batch.dense[local], sparse=sparse, label=batch.label[local], weight=weight, label_mask=mask)


def random_ids(draw: np.random.Generator, rows: dict[str, int], size: int) -> tuple[Tensor, Tensor]:
    """Return values and lengths of a batch of `size` samples with 0 to 3 ids each, by feature."""
    lengths = {name: draw.integers(0, 4, size) for name in rows}
    ids = np.concatenate([draw.integers(0, rows[name], bags.sum()) for name, bags in lengths.items()])
    return torch.from_numpy(ids), torch.from_numpy(np.concatenate(list(lengths.values())))


def samples_of(batch: KeyedJaggedTensor, local: slice) -> KeyedJaggedTensor:
    values, lengths, weights = [], [], []
    for key in batch.keys:
        jagged = batch[key]
        ids = slice(int(jagged.offsets[local.start]), int(jagged.offsets[local.stop]))
        values.append(jagged.values[ids])
        lengths.append(jagged.lengths[local])
        if jagged.weights is not None:
            weights.append(jagged.weights[ids])
    return KeyedJaggedTensor(
        keys=batch.keys,
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        weights=torch.cat(weights) if weights else None,
        batch_sizes=(local.stop - local.start,) * len(batch.keys),
    )


def per_sample(out: Any, features: list[FeatureSpec]) -> Tensor:
    """Return [B, sum of D]: pooled features unchanged, and rows of the others added per sample after a nonlinearity."""
    columns = []
    for feature in features:
        value = out[feature.name]
        if isinstance(value, JaggedTensor):
            bag = torch.repeat_interleave(torch.arange(value.lengths.numel()), value.lengths)
            zeros = value.values.new_zeros(value.lengths.numel(), value.values.shape[1])
            value = zeros.index_add(0, bag, torch.tanh(value.values))
        columns.append(value)
    return torch.cat(columns, dim=1)


def train(scenario: Scenario, given_gradients: bool = False) -> dict[str, Any]:
    """Return losses, outputs and shards of this rank after `num_steps`.

    With `given_gradients` the upstream gradient is a fixed function of (step, global sample), so that only the
    embedding is compared. Otherwise the model has a small dense layer and a mean cross-entropy.
    """
    world = World.current()
    dtype = getattr(torch, scenario.dtype)
    collection: Any = EmbeddingBagCollection(scenario.tables(), scenario.features(), seed=scenario.seed)
    if world.size > 1:
        plan = scenario.plan(world.size)
        world = world.with_plan(plan)
        storage = StorageOptions(dir=None if scenario.folder is None else Path(scenario.folder))
        collection = ShardedEmbeddingBagCollection(collection, plan, world, scenario.comm, storage)
    else:
        collection.emulate_rounding(scenario.comm)
    generator = torch.Generator().manual_seed(scenario.seed)
    width = DIM * len(scenario.features())
    layer = torch.nn.Linear(width, 1).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(1, width, generator=generator, dtype=torch.float64) / 10)
        layer.bias.zero_()
    coding = collection.make_sum_codec("dense", "dense", DENSE_FP16_EXPONENT) if world.size > 1 else None
    reducer = DenseGradients(list(layer.parameters()), world, collection, coding)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses, outputs = [], []
    for step in range(scenario.num_steps):
        batch, local = local_slice(scenario.batch(step), world.rank, world.size)
        x = per_sample(collection(batch), scenario.features())
        outputs.append(x.detach())
        generator = torch.Generator().manual_seed(step)
        target = torch.randn(scenario.batch_size, width, generator=generator, dtype=torch.float64).to(dtype)
        if given_gradients:
            (x * target[local] / max(collection.local_share, 1e-9)).sum().backward()
            continue
        label = (target[local, 0] > 0).to(dtype)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(layer(x).squeeze(1), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()) * collection.local_share if collection.local_share > 0 else 0.0)
    assert reducer.parameters
    return {
        "losses": losses,
        "outputs": outputs,
        "shards": held(collection),
        "changed": [(piece.shard, piece.take_changed_rows(Consumer.CHECKPOINTS)) for piece in collection.shards],
        "dense": [p.detach() for p in layer.parameters()],
    }


def held(collection: Any) -> list[tuple[Shard, Tensor, dict[str, Tensor]]]:
    """Return (shard, rows, states) of each shard of this rank."""
    pieces = [(s.shard, s.read(0, s.shard.num_rows)) for s in collection.shards]
    return [(place, values.pop(ROW), values) for place, values in pieces]


def whole_tables(results: list[dict[str, Any]], scenario: Scenario) -> dict[str, dict[str, Tensor]]:
    """Return {table: {"weight": [R, D], state ...}}, assembled from the shards of all ranks. Replicas must be equal."""
    tables: dict[str, dict[str, Tensor]] = {t.name: {} for t in scenario.tables()}
    sizes = {t.name: t.num_embeddings for t in scenario.tables()}
    for result in results:
        for shard, weight, state in result["shards"]:
            for name, piece in {"weight": weight, **state}.items():
                shape = (sizes[shard.table], DIM) if piece.dim() == 2 else (sizes[shard.table],)
                whole = tables[shard.table].setdefault(name, torch.full(shape, torch.nan, dtype=piece.dtype))
                place = (slice(*shard.rows), slice(*shard.columns))[: piece.dim()]
                seen = ~whole[place].isnan()
                assert torch.equal(whole[place][seen], piece[seen]), f"copies of {shard.table}.{name} differ"
                whole[place] = piece
    for name, parts in tables.items():
        for key, value in parts.items():
            assert not value.isnan().any(), f"{name}.{key} is not covered"
    return tables


@dataclass
class Passes:
    """Context of backward passes that do not accumulate gradients."""

    local_share: float
    accumulates_gradients: bool = False
    accumulated_dense: list[Tensor] = field(default_factory=list)
