"""What rows that lie near and far cost a training step: steps of tables that lie so beside steps of the same tables in
memory, in turns."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from meseta.embedding import EmbeddingBagCollection
from meseta.jagged import KeyedJaggedTensor
from meseta.measure.calibrate.fit import fit_relative
from meseta.measure.threads import use_num_threads
from meseta.spec import FeatureSpec, OptimizerSpec, Plan, TableSpec
from meseta.spec.cost_model import TierCost
from meseta.spec.tiers import CACHED, DISK, StorageOptions, Tier
from meseta.storage import Lease, TieredShard

NUM_ROWS, NUM_CACHE_ROWS = 1 << 17, 1 << 14
"""Of a table, and of these, rows that lie near."""
NUM_ROUNDS, NUM_STEPS_PER_ROUND = 5, 8
"""So many turns of so many steps with rows near and far, and of as many in memory."""
ROWS_PER_CHUNK = 1 << 13
_MIN_EXTRA_S, _MIN_BYTE_S = 1e-5, 1e-12
"""A difference of steps, and what a byte takes, that are below count as so much: noise may make them negative."""


@dataclass(frozen=True)
class RowCacheCase:
    """Tables to train."""

    tier: Tier
    num_tables: int
    dim: int
    batch_size: int
    num_hot: int
    """Rows of a table that are looked up in nearly every batch."""
    num_cold: int
    """Of the ids of a table in a batch, those of rows that hardly ever come again."""


CACHED_CASES = (
    RowCacheCase(CACHED, 1, 16, 512, 512, 0),
    RowCacheCase(CACHED, 12, 16, 512, 256, 0),
    RowCacheCase(CACHED, 4, 16, 16384, 512, 0),
    RowCacheCase(CACHED, 4, 16, 8192, 8192, 0),
    RowCacheCase(CACHED, 4, 16, 4096, 2048, 1024),
    RowCacheCase(CACHED, 2, 128, 4096, 2048, 1024),
    RowCacheCase(CACHED, 8, 64, 2048, 1024, 256),
    RowCacheCase(CACHED, 4, 32, 4096, 1024, 512),
)
DISK_CASES = (
    RowCacheCase(DISK, 4, 64, 8192, 2048, 200),
    RowCacheCase(DISK, 8, 16, 8192, 2048, 100),
    RowCacheCase(DISK, 4, 32, 8192, 4096, 150),
)
"""With few misses, which the disk has brought before the step is over."""


COST_NAMES = (
    "cache_call_s",
    "cache_shard_s",
    "cache_id_s",
    "cache_row_s",
    "host_row_s",
    "host_byte_s",
    "disk_processor_s",
)
"""What the fit finds, in seconds; `host_byte_s` is of a byte that is copied."""


@dataclass(frozen=True)
class RowCacheCost:
    """What a step of one case takes longer than with its tables in memory."""

    terms: tuple[float, ...]
    """What multiplies each of NAMES."""
    seconds: float


def measure_row_cache(tiers: TierCost, num_threads: int, folder: Path | None = None) -> TierCost:
    """`tiers` with what rows near and far cost a rank of so many threads that computes on a CPU; where `folder` is on a
    disk, with what a row that is read from it costs the rank."""
    cases = CACHED_CASES if folder is None else CACHED_CASES + DISK_CASES
    with use_num_threads(num_threads):
        costs = [measure_case(case, StorageOptions(dir=folder)) for case in cases]
    terms, seconds = np.array([cost.terms for cost in costs]), np.array([cost.seconds for cost in costs])
    found = dict(zip(COST_NAMES, fit_relative(terms, seconds).tolist(), strict=True))
    host_bytes_per_s = 1.0 / max(found.pop("host_byte_s"), _MIN_BYTE_S)
    if folder is None:
        del found["disk_processor_s"]
    return replace(tiers, host_bytes_per_s=host_bytes_per_s, **found)


class TableTrainer:
    """Tables that are trained as `meseta.ahead` does it, on batches that are made before."""

    def __init__(self, case: RowCacheCase, tier: Tier | None, options: StorageOptions) -> None:
        """`tier` None: in memory."""
        optimizer = OptimizerSpec(name="rowwise_adagrad")
        tables = tuple(
            TableSpec(name=f"t{n}", num_embeddings=NUM_ROWS, embedding_dim=case.dim, optimizer=optimizer)
            for n in range(case.num_tables)
        )
        features = tuple(FeatureSpec(name=table.name, table=table.name) for table in tables)
        self.case = case
        self.embeddings = EmbeddingBagCollection(tables, features, seed=0)
        if tier is not None:
            place = {"sharding": "table_wise", "tier": tier, "cache_rows": NUM_CACHE_ROWS}
            self.embeddings.apply_plan(Plan.from_dict({"tables": {"*": place}}, tables, 1), options)
        self._offloaded_shards = [shard for shard in self.embeddings.shards if isinstance(shard, TieredShard)]
        self._names = [feature.name for feature in features]
        self._queued_batches: deque[Any] = deque()
        for shard in self._offloaded_shards:
            _write_backing_store(shard)
        self._fill_cache()

    def _fill_cache(self) -> None:
        """Rows that no batch asks for lie in all slots."""
        last = torch.arange(NUM_ROWS - NUM_CACHE_ROWS, NUM_ROWS)
        for rows in last.split(ROWS_PER_CHUNK) if self._offloaded_shards else ():
            lease = Lease(self.embeddings.shards, [(number, rows) for number in range(len(self._offloaded_shards))])
            lease.wait()
            lease.release()

    def train(self, batches: Sequence[KeyedJaggedTensor]) -> list[float]:
        """Seconds of each step; the last batches are begun, and trained by the next call."""
        seconds = []
        for batch in batches:
            start_s = time.perf_counter()
            if len(self._queued_batches) < max(self.embeddings.lookahead, 1):
                self._enqueue(batch)
                continue
            flight = self._queued_batches.popleft()
            self.embeddings.lookup(flight)
            self._enqueue(batch)
            self.embeddings.output_dist(flight).pooled.values.square().mean().backward()
            seconds.append(time.perf_counter() - start_s)
        return seconds

    def _enqueue(self, batch: KeyedJaggedTensor) -> None:
        flight = self.embeddings.input_dist(self.embeddings.start_input_dist(batch))
        self.embeddings.start_second_hop(flight)
        self._queued_batches.append(flight)
        for coming in self._queued_batches:
            self.embeddings.prefetch(coming)

    def close(self) -> None:
        """Give up what is begun."""
        while self._queued_batches:
            self.embeddings.drop(self._queued_batches.popleft())

    def row_counts(self) -> tuple[int, int]:
        """(distinct rows of batches, those that did not lie near), of all tables so far."""
        counters = [shard.cache.counters for shard in self._offloaded_shards]
        return sum(own.num_rows for own in counters), sum(own.num_misses for own in counters)


def _write_backing_store(shard: TieredShard) -> None:
    """All rows lie on the far side from now on: those that are made when they are first looked up cost more. On a disk
    they are written again in any order, so that its file is cleaned as that of a long training."""
    for first in range(0, NUM_ROWS, ROWS_PER_CHUNK):
        values = shard.read(first, first + ROWS_PER_CHUNK)
        shard.write(first, {name: value.numpy() for name, value in values.items()})
    if shard.shard.tier == DISK:
        records = torch.empty(ROWS_PER_CHUNK, shard.num_bytes() // NUM_ROWS, dtype=torch.uint8)
        for rows in torch.randperm(NUM_ROWS).split(ROWS_PER_CHUNK):
            shard.backing_store.read(rows, records).wait()
            shard.backing_store.write(rows, records)


def make_batches(case: RowCacheCase, count: int, random: np.random.Generator) -> list[KeyedJaggedTensor]:
    """Batches of one id a sample: of hot rows all alike, and of the others."""
    names = tuple(f"t{n}" for n in range(case.num_tables))
    lengths = torch.ones(case.num_tables * case.batch_size, dtype=torch.int64)
    made = []
    for _ in range(count):
        ids = random.integers(0, case.num_hot, (case.num_tables, case.batch_size))
        cold = random.integers(case.num_hot, NUM_ROWS, (case.num_tables, case.num_cold))
        ids[:, : case.num_cold] = cold
        made.append(KeyedJaggedTensor(names, torch.from_numpy(random.permuted(ids, axis=1).ravel()), lengths))
    return made


def measure_case(case: RowCacheCase, options: StorageOptions) -> RowCacheCost:
    """Steps of its tables, beside the same in memory."""
    random = np.random.default_rng(0)
    both = [TableTrainer(case, tier, options) for tier in (None, case.tier)]
    seconds: tuple[list[float], list[float]] = ([], [])
    before = (0, 0)
    for turn in range(NUM_ROUNDS + 1):
        batches = make_batches(case, NUM_STEPS_PER_ROUND, random)
        for own, tables in zip(seconds, both, strict=True):
            taken = tables.train(batches)
            if turn:
                own.extend(taken)
            elif tables is both[1]:
                before = tables.row_counts()
    counted = [
        (now - then) / (NUM_ROUNDS * NUM_STEPS_PER_ROUND)
        for now, then in zip(both[1].row_counts(), before, strict=True)
    ]
    for tables in both:
        tables.close()
    resident_s, tiered_s = map(statistics.median, seconds)
    return RowCacheCost(cost_terms(case, *counted), max(tiered_s - resident_s, _MIN_EXTRA_S))


def cost_terms(case: RowCacheCase, num_rows: float, num_misses: float) -> tuple[float, ...]:
    """Of a step that looks up so many distinct rows, of which some do not lie near: what multiplies each of NAMES. A
    row of row-wise Adagrad, and the one that makes room, are copied with a number of state each."""
    in_host, on_disk = (num_misses, 0.0) if case.tier == CACHED else (0.0, num_misses)
    num_ids, row_bytes = case.num_tables * case.batch_size, 4 * (case.dim + 1)
    return 1.0, float(case.num_tables), float(num_ids), num_rows, in_host, 2 * row_bytes * in_host, on_disk
