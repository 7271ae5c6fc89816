"""Settings that affect the storage and transfer of rows, and training steps of a small model for each combination."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covering import Setting, covering
from meseta import checkpoint
from meseta.checkpoint.background import copy_shards
from meseta.checkpoint.delta_tracker import DeltaTracker
from meseta.checkpoint.files import layout
from meseta.comm import World
from meseta.data.read.batch import Batch
from meseta.embedding import EmbeddingBagCollection, shard
from meseta.ops.row_file.engine import IO_URING, THREADS
from meseta.ops.row_marks import Consumer
from meseta.ops.row_program.optimizer import Hyper
from meseta.optim import RowOptimizer, element_state
from meseta.pipeline import Pipeline
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import Communication, FeatureSpec, OptimizerSpec, Plan, ShardingType, TableSpec
from meseta.spec.optimizer import USED_FIELDS
from meseta.spec.stages import OVERLAPS
from meseta.spec.tiers import CACHED, DISK, HBM, StorageOptions
from meseta.storage import TieredShard
from optim.specs import SPECS

from .scenario import IS_SOAK, batch_slice

OWN = "an own one"
ALONE = ShardingType.TABLE_WISE
REPLICATED = (ShardingType.DATA_PARALLEL, ShardingType.HOT_REPLICATED)
AXES: dict[str, Sequence[Any]] = {
    "optimizer": [*sorted(USED_FIELDS), OWN],
    "dtype": ["float32", "float16", "bfloat16", "float64"],
    "tier": [CACHED, f"{DISK} by {IO_URING}", f"{DISK} by {THREADS}"],
    "lookahead": [0, 1, 8],
    "ranks": [1, 2, 4],
    "sharding": [str(one) for one in ShardingType if one not in REPLICATED],
    "overlap": ["off", *OVERLAPS, "all"],
    "precision": ["fp32", "paper", "fp16", "bf16", "fp8", "int8"],
    "exchange": ["flat", "hierarchical"],
    "pooling": ["sum", "mean", "weighted"],
    "parts": [1, 3],
    "num_cached_batches": [1, 3],
    "threads": [1, 2],
    "deltas": ["one_shot", "consecutive", "intermittent", "rolling"],
}
"""`num_cached_batches`: batches whose rows fit into the cache; `parts`: micro-batches of a step; `deltas`: the delta
policy of the run with offloaded rows. The other run writes whole checkpoints."""
ON_ONE_RANK = {"sharding": str(ALONE), "overlap": "off", "precision": "fp32", "exchange": "flat"}
"""Settings without sharding and exchanges."""


def can_meet(one: Setting, other: Setting) -> bool:
    """Whether a run may have both settings."""
    if one == ("ranks", 1):
        return ON_ONE_RANK.get(other[0], other[1]) == other[1]
    return one != ("dtype", "float64") or other[0] != "precision" or other[1] == "fp32"


CELLS = covering(AXES, can_meet, times=2, seed=19)

ROWS = {"tall": 900, "flat": 120}
WIDTH, NUM_DENSE = 32, 4
SAVED_AFTER = (17, 30, 41, 50) if IS_SOAK else (6, 11, 15, 18)
"""Steps with a checkpoint."""
NUM_STEPS = SAVED_AFTER[-1]
BLOCK_BYTES, MAX_CHAIN = 16_384, 3
SIZES = (24, 13, 24, 2, 17)
"""Samples of global batches, repeated. Slices are uneven, and some ranks have no samples."""
DRIFT = {"tall": 173, "flat": 41}
"""Rows by which the ids of a table shift from batch to batch. Rows return after some steps."""


def heavy_ball(spec: OptimizerSpec) -> RowOptimizer:
    """Return a user-defined optimizer: SGD with momentum."""

    def update(w: Any, g: Any, state: Any, stats: Any, h: Hyper) -> Any:
        velocity = state["velocity"] * spec.options["momentum"] + g
        return w - velocity * h.lr, {"velocity": velocity}

    return RowOptimizer(name="heavy_ball", init=lambda weight: {"velocity": element_state(weight)}, update=update)


class Towers(nn.Module):
    """A bottom layer, which can overlap with row transfers, and a top layer."""

    def __init__(self, embeddings: EmbeddingBagCollection, width: int) -> None:
        super().__init__()
        self.embeddings: Any = embeddings
        self.bottom, self.top = nn.Linear(NUM_DENSE, 8), nn.Linear(8 + width, 1)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / 8)

    def forward_dense(self, dense: Tensor) -> tuple[Tensor]:
        return (torch.tanh(self.bottom(dense.to(self.bottom.weight.dtype))),)

    def score(self, dense: Any, pooled: Tensor) -> Tensor:
        (x,) = dense if isinstance(dense, tuple) else self.forward_dense(dense)
        return self.top(torch.cat([x, pooled], dim=1)).squeeze(1)


@dataclass(frozen=True)
class Outcome:
    """Result of a run. `pieces` and the counts of misses differ between ranks; the other fields are equal."""

    losses: tuple[float, ...]
    checksums: tuple[str, ...]
    """Checksums of the checkpoints' contents."""
    pieces: int
    """Checksum of rows and states of this rank, of its dense weights and of its logits."""
    num_rows: int
    """Distinct rows of each batch, of this rank's pieces."""
    num_misses: int
    """Number of these rows that were not in the cache."""


def specs_of(cell: dict[str, Any]) -> tuple[list[TableSpec], list[FeatureSpec]]:
    name = cell["optimizer"]
    optimizer = OptimizerSpec(name=f"{__name__}:heavy_ball", options={"momentum": 0.9}, element_states=1)
    if name != OWN:
        optimizer = SPECS[name]
    if name != "frozen":
        optimizer = replace(optimizer, lr=0.02)
    tables = [
        TableSpec(name=table, num_embeddings=rows, embedding_dim=WIDTH, dtype=cell["dtype"], optimizer=optimizer)
        for table, rows in ROWS.items()
    ]
    is_weighted = cell["pooling"] == "weighted"
    pooling = "sum" if is_weighted else cell["pooling"]
    reads = {"first": "tall", "second": "tall", "third": "flat"}
    return tables, [
        FeatureSpec(name=feature, table=table, pooling=pooling, weighted=is_weighted)
        for feature, table in reads.items()
    ]


@cache
def global_batch(number: int, dtype: str, is_weighted: bool) -> Batch:
    """Return a batch of drifting ids, with some ids that every batch looks up."""
    draw, size = np.random.default_rng([19, number]), SIZES[number % len(SIZES)]
    ids, lengths = [], []
    for table in ("tall", "tall", "flat"):
        of_table = draw.integers(0, 5, size)
        offsets = draw.zipf(1.3, of_table.sum()) % (ROWS[table] // 3)
        stays = draw.random(of_table.sum()) < 0.1
        ids.append((DRIFT[table] * number * ~stays + offsets) % ROWS[table])
        lengths.append(of_table)
    values = torch.from_numpy(np.concatenate(ids))
    weights = torch.from_numpy(draw.normal(size=len(values))).to(getattr(torch, dtype)) if is_weighted else None
    sparse = KeyedJaggedTensor(("first", "second", "third"), values, torch.from_numpy(np.concatenate(lengths)), weights)
    return Batch(
        dense=torch.from_numpy(draw.normal(size=(size, NUM_DENSE)).astype(np.float32)),
        sparse=sparse,
        label=torch.from_numpy(draw.integers(0, 2, size).astype(np.float32)),
        weight=torch.from_numpy(draw.random(size).astype(np.float32)) if number % 2 else None,
    )


def plan_of(cell: dict[str, Any], tables: list[TableSpec], tier: str) -> Plan:
    """Return a plan on hosts of two ranks. Caches fit the rows of `num_cached_batches` consecutive batches."""
    entries: dict[str, Any] = {table.name: {"sharding": cell["sharding"]} for table in tables}
    document = {"devices_per_host": min(cell["ranks"], 2), "exchange": cell["exchange"], "tables": entries}
    plan = Plan.from_dict(document, tables, cell["ranks"])
    if tier == HBM:
        return plan
    placed = []
    for entry in plan.tables:
        asked = _rows_asked(entry.table)
        counts = [max(_num_within(one.rows, asked, cell["num_cached_batches"]), 1) for one in entry.shards]
        shards = [replace(one, tier=tier, cache_rows=count) for one, count in zip(entry.shards, counts, strict=True)]
        placed.append(replace(entry, shards=tuple(shards)))
    return replace(plan, tables=tuple(placed))


@cache
def _rows_asked(table: str) -> tuple[frozenset[int], ...]:
    """Return the rows that each batch looks up."""
    features = ("first", "second") if table == "tall" else ("third",)
    batches = [global_batch(number, "float32", False).sparse for number in range(NUM_STEPS)]
    return tuple(frozenset(torch.cat([one[name].values for name in features]).tolist()) for one in batches)


def _num_within(rows: tuple[int, int], asked: tuple[frozenset[int], ...], num_batches: int) -> int:
    """Return the largest number of distinct rows of a shard in `num_batches` consecutive batches."""
    windows = [frozenset().union(*asked[first : first + num_batches]) for first in range(len(asked))]
    return max(sum(rows[0] <= row < rows[1] for row in window) for window in windows)


def slices(cell: dict[str, Any], world: World, first: int, stop: int) -> Iterator[Batch]:
    for number in range(first, stop):
        yield batch_slice(global_batch(number, cell["compute"], cell["pooling"] == "weighted"), world)


def train(cell: dict[str, Any], folder: Path, is_resident: bool) -> Outcome:
    """Train `NUM_STEPS` steps and save several times below `folder`. Runs on every rank."""
    torch.set_num_threads(cell["threads"])
    block_bytes, layout.BLOCK_BYTES = layout.BLOCK_BYTES, BLOCK_BYTES
    try:
        return _train(cell, folder, is_resident)
    finally:
        layout.BLOCK_BYTES = block_bytes
        torch.set_num_threads(1)
        gc.collect()  # row files are deleted with their owners


def _train(cell: dict[str, Any], folder: Path, is_resident: bool) -> Outcome:
    world = World.current()
    tables, features = specs_of(cell)
    tier, _, engine = cell["tier"].partition(" by ")
    plan = plan_of(cell, tables, HBM if is_resident else tier)
    storage = StorageOptions(dir=folder / "scratch", engine=engine or "auto", lookahead=cell["lookahead"])
    collection = EmbeddingBagCollection(tables, features, seed=3)
    model: Any = Towers(collection, WIDTH * len(features)).to(collection.dtype)
    cell = {**cell, "compute": str(collection.dtype).removeprefix("torch.")}
    comm = Communication(precision=cell["precision"])
    model = shard(model, plan, world=world, comm=comm, storage=storage)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    overlap = {"off": (), "all": OVERLAPS}.get(cell["overlap"], (cell["overlap"],))
    pipeline = Pipeline(model, optimizer, world, accumulate_steps=cell["parts"], overlap=overlap)
    shards = model.embeddings.shards
    parent = folder / ("resident" if is_resident else "tiered")
    saving = model.embeddings.world if world.size > 1 else world
    changes = DeltaTracker(parent, saving, "none" if is_resident else cell["deltas"], MAX_CHAIN)
    steps, checksums = [], []
    for before, after in pairwise((0, *SAVED_AFTER)):
        steps += [(step.loss, step.logits) for step in pipeline.steps(slices(cell, world, before, after))]
        base, rows = changes.begin_save(before, shards)
        path = checkpoint.save(
            parent,
            world=saving,
            step=after,
            plan=model.embeddings.plan,
            shards=shards if rows is None else copy_shards(shards, rows),
            dense={name: value.detach() for name, value in model.state_dict().items()},
            state={},
            options=checkpoint.SaveOptions(base=base),
        )
        checksums.append(checkpoint.verify(path))
    for piece in shards if is_resident else ():
        asked = sorted(frozenset[int]().union(*_rows_asked(piece.spec.name)) if cell["optimizer"] != "frozen" else ())
        changed = [row - piece.shard.rows[0] for row in asked if piece.shard.rows[0] <= row < piece.shard.rows[1]]
        assert piece.take_changed_rows(Consumer.CHECKPOINTS).tolist() == changed
    dense = {name: value.detach() for name, value in model.state_dict().items()}
    tensors = [*(logits for _, logits in steps), *dense.values()]
    tensors += [value for piece in shards for value in piece.read(0, piece.shard.num_rows).values()]
    counters = [piece.cache.counters for piece in shards if isinstance(piece, TieredShard)]
    assert len(counters) == (0 if is_resident else len(shards))
    return Outcome(
        losses=tuple(loss for loss, _ in steps),
        checksums=tuple(checksums),
        pieces=zlib.crc32(b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)),
        num_rows=sum(one.num_rows for one in counters),
        num_misses=sum(one.num_misses for one in counters),
    )
