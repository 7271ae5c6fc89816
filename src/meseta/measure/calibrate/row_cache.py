"""Calibration of offloaded tables: train steps with a row cache, compared with steps of the same tables in memory."""

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
from meseta.measure.calibrate.networks import fit_relative
from meseta.measure.threads import use_num_threads
from meseta.sparse import KeyedJaggedTensor
from meseta.spec import FeatureSpec, OptimizerSpec, Plan, TableSpec
from meseta.spec.cost_model import TierCost
from meseta.spec.tiers import CACHED, DISK, StorageOptions, Tier
from meseta.storage import Lease, TieredShard, fetch_rows

NUM_ROWS, NUM_CACHE_ROWS = 1 << 17, 1 << 14
"""Number of rows of each table, and of its cache."""
NUM_ROUNDS, NUM_STEPS_PER_ROUND = 5, 8
ROWS_PER_CHUNK = 1 << 13
# Noise may make the difference between the two variants negative.
_MIN_EXTRA_S, _MIN_BYTE_S = 1e-5, 1e-12


@dataclass(frozen=True)
class RowCacheCase:
    """Tables and batches of one measurement."""

    tier: Tier
    num_tables: int
    dim: int
    batch_size: int
    num_hot: int
    num_cold: int


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


COST_NAMES = (
    "cache_call_s",
    "cache_shard_s",
    "cache_id_s",
    "cache_row_s",
    "host_row_s",
    "host_byte_s",
    "disk_processor_s",
)
"""Names of the fitted constants, in seconds. `host_byte_s` is the time per copied byte. The others are fields of
TierCost."""


@dataclass(frozen=True)
class RowCacheCost:
    """Additional time per step of one case, compared with the same tables in memory."""

    terms: tuple[float, ...]
    """Factors of the constants in COST_NAMES."""
    seconds: float
    """Additional seconds per step."""


def measure_row_cache(tiers: TierCost, num_threads: int, folder: Path | None = None) -> TierCost:
    """Return `tiers` with measured constants of the row cache, for a CPU rank with `num_threads` threads.

    If `folder` is set, cases of tier `disk` are measured in it, and the result has the rank time per row from disk.
    """
    cases = CACHED_CASES if folder is None else CACHED_CASES + DISK_CASES
    with use_num_threads(num_threads):
        costs = [measure_case(case, StorageOptions(dir=folder)) for case in cases]
    terms, seconds = np.array([cost.terms for cost in costs]), np.array([cost.seconds for cost in costs])
    constants = dict(zip(COST_NAMES, fit_relative(terms, seconds).tolist(), strict=True))
    host_bytes_per_s = 1.0 / max(constants.pop("host_byte_s"), _MIN_BYTE_S)
    # Without cases of tier `disk`, its constant is not determined.
    if folder is None:
        del constants["disk_processor_s"]
    return replace(tiers, host_bytes_per_s=host_bytes_per_s, **constants)


class TableTrainer:
    """Tables of one case, trained with the prefetching of `meseta.pipeline` on prepared batches."""

    def __init__(self, case: RowCacheCase, tier: Tier | None, options: StorageOptions) -> None:
        """Create the tables in `tier`. `None` keeps all rows in memory, without a cache."""
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
        """Fill all cache slots with rows that are rarely looked up, so that each miss evicts a row."""
        last = torch.arange(NUM_ROWS - NUM_CACHE_ROWS, NUM_ROWS)
        for rows in last.split(ROWS_PER_CHUNK) if self._offloaded_shards else ():
            shards = self.embeddings.shards
            lease = Lease(shards, fetch_rows(shards, [(index, rows) for index in range(len(self._offloaded_shards))]))
            lease.wait()
            lease.release()

    def train(self, batches: Sequence[KeyedJaggedTensor]) -> list[float]:
        """Train on `batches`, and return step seconds. The last batches are only started. The next call trains them."""
        seconds = []
        for batch in batches:
            start_s = time.perf_counter()
            if len(self._queued_batches) < max(self.embeddings.lookahead, 1):
                self._enqueue(batch)
                continue
            context = self._queued_batches.popleft()
            self.embeddings.lookup(context)
            self._enqueue(batch)
            self.embeddings.output_dist(context).pooled.values.square().mean().backward()
            seconds.append(time.perf_counter() - start_s)
        return seconds

    def _enqueue(self, batch: KeyedJaggedTensor) -> None:
        context = self.embeddings.input_dist(self.embeddings.start_input_dist(batch))
        self.embeddings.start_second_hop(context)
        self._queued_batches.append(context)
        for coming in self._queued_batches:
            self.embeddings.prefetch(coming)

    def close(self) -> None:
        """Drop the batches that were started but not trained."""
        while self._queued_batches:
            self.embeddings.drop(self._queued_batches.popleft())

    def row_counts(self) -> tuple[int, int]:
        """Return (distinct rows looked up, cache misses), totals over all tables and steps so far."""
        counters = [shard.cache.counters for shard in self._offloaded_shards]
        return sum(counter.num_rows for counter in counters), sum(counter.num_misses for counter in counters)


def _write_backing_store(shard: TieredShard) -> None:
    # The first lookup of an unwritten row also computes its values, which would distort the measurement.
    for first in range(0, NUM_ROWS, ROWS_PER_CHUNK):
        values = shard.read(first, first + ROWS_PER_CHUNK)
        shard.write(first, {name: value.numpy() for name, value in values.items()})
    # Rewriting a row file in random order makes it need cleaning, as in a long training run.
    if shard.shard.tier == DISK:
        records = torch.empty(ROWS_PER_CHUNK, shard.num_bytes() // NUM_ROWS, dtype=torch.uint8)
        for rows in torch.randperm(NUM_ROWS).split(ROWS_PER_CHUNK):
            shard.backing_store.read(rows, records).wait()
            shard.backing_store.write(rows, records)


def make_batches(case: RowCacheCase, count: int, random: np.random.Generator) -> list[KeyedJaggedTensor]:
    """Generate `count` batches with one id per bag: uniform ids of hot rows, and `num_cold` ids of other rows."""
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
    """Measure the additional time per step of one case. Rounds alternate between the cache and tables in memory."""
    random = np.random.default_rng(0)
    both = [TableTrainer(case, tier, options) for tier in (None, case.tier)]
    seconds: tuple[list[float], list[float]] = ([], [])
    before = (0, 0)
    # The first round warms up.
    for turn in range(NUM_ROUNDS + 1):
        batches = make_batches(case, NUM_STEPS_PER_ROUND, random)
        for step_s, tables in zip(seconds, both, strict=True):
            taken = tables.train(batches)
            if turn:
                step_s.extend(taken)
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
    """Return the factors of COST_NAMES for a step with `num_rows` distinct rows and `num_misses` cache misses."""
    # Per miss, one row is fetched and one is evicted. Row-wise Adagrad adds one element of state to each.
    in_host, on_disk = (num_misses, 0.0) if case.tier == CACHED else (0.0, num_misses)
    num_ids, row_bytes = case.num_tables * case.batch_size, 4 * (case.dim + 1)
    return 1.0, float(case.num_tables), float(num_ids), num_rows, in_host, 2 * row_bytes * in_host, on_disk
