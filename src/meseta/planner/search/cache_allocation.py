"""Allocation of cache memory to the offloaded shards of each rank, by the gain of the next cached row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meseta.planner.cost.loads import OFFLOADED_TIER_INDICES, Indices, ShardArrays, WorkloadLoads
from meseta.planner.cost.memory import RunBytes
from meseta.planner.cost.operators import disk_seconds, fetch_seconds
from meseta.planner.cost.predict import Prediction, predict
from meseta.planner.cost.reuse import Floats
from meseta.spec import CostModel, Plan, Shard, Topology, Workload
from meseta.spec.tiers import CACHE_SLOT_OVERHEAD_BYTES, DISK, HBM, HOST, ROW_INDEX_BYTES, TIERS, Memory, StorageOptions

NUM_CACHE_SIZES = 25
"""Number of cache sizes that are tried per shard, from the minimum to all rows."""
MAX_SLOWDOWN_FACTOR = 1.03
"""Maximum duration of a step with the recommended cache, relative to a step with the largest possible cache."""
_NUM_BISECTIONS = 8
_CACHE_MEMORIES: tuple[Memory, ...] = (HBM, HOST)


def allocate_cache_rows(
    plan: Plan,
    workload: Workload,
    topology: Topology,
    cost_model: CostModel,
    run: RunBytes | None = None,
    loads: WorkloadLoads | None = None,
) -> Plan:
    """Return a user's plan with `cache_rows` for offloaded shards that have none.

    The size per rank is `storage.cache_bytes`, or the recommended size. Without a reuse histogram for any of these
    tables, the plan is unchanged, and storage divides the cache by size.
    """
    reused_tables = {feature.table for feature in workload.features if workload.load(feature).reuse is not None}
    shards = [
        shard for entry in plan.tables for shard in entry.shards if _is_offloaded(shard) and shard.cache_rows is None
    ]
    if not any(shard.table in reused_tables for shard in shards):
        return plan
    near = CacheAllocator(plan, loads or WorkloadLoads(workload), topology, cost_model, run)
    cache_bytes = None if run is None or run.storage is None else run.storage.cache_bytes
    return near.allocate(
        near.recommended_bytes if cache_bytes is None else np.full(near.num_groups, float(cache_bytes))
    )


def reallocate_cache_rows(
    plan: Plan, loads: WorkloadLoads, topology: Topology, cost_model: CostModel, run: RunBytes | None = None
) -> Plan:
    """Return a plan of the planner with `cache_rows` for the remaining memory. A run limits them to
    `storage.cache_bytes`, or to the recommended size."""
    near = CacheAllocator(without_cache_rows(plan), loads, topology, cost_model, run)
    if not near.num_groups:
        return plan
    if run is None or run.storage is None:
        return near.allocate(near.max_cache_bytes)
    cache_bytes = run.storage.cache_bytes
    return near.allocate(
        near.recommended_bytes if cache_bytes is None else np.minimum(cache_bytes, near.max_cache_bytes)
    )


def without_cache_rows(plan: Plan) -> Plan:
    """Return the plan without `cache_rows`."""
    return _with_cache_rows(plan, iter(lambda: 0, 1))


@dataclass(frozen=True)
class _CostCurve:
    """Lower convex hull of the fetch time of a shard by cache size."""

    num_bytes: Floats
    """Cache sizes in ascending order, starting with the minimum of the shard [k]."""
    seconds: Floats
    """Seconds per step, in descending order [k]."""


class CacheAllocator:
    """Allocator of caches for the offloaded shards without `cache_rows` in a plan. A group contains the shards of a
    rank whose caches share a memory."""

    def __init__(
        self, plan: Plan, loads: WorkloadLoads, topology: Topology, cost_model: CostModel, run: RunBytes | None = None
    ) -> None:
        self._plan, self._loads, self._topology, self._cost_model, self._run = plan, loads, topology, cost_model, run
        shards = [shard for entry in plan.tables for shard in entry.shards if _is_offloaded(shard)]
        self._unallocated = [number for number, shard in enumerate(shards) if shard.cache_rows is None]
        self._shards = [shards[number] for number in self._unallocated]
        table = np.array([loads.table_index[shard.table] for shard in self._shards], np.int64)
        rows = np.array([shard.rows for shard in self._shards], np.int64).reshape(-1, 2)
        columns = np.array([shard.columns for shard in self._shards], np.int64).reshape(-1, 2)
        tier = np.array([TIERS.index(shard.tier) for shard in self._shards], np.int64)
        self._shard_arrays = ShardArrays.from_values(
            table, (rows[:, 0], rows[:, 1]), (columns[:, 0], columns[:, 1]), tier
        )
        on_host = (tier == TIERS.index(DISK)) & (topology.device != "cpu")
        owner = np.array([shard.ranks[0] for shard in self._shards], np.int64)
        self._group_keys, self._shard_group = np.unique(2 * owner + on_host, return_inverse=True)
        of_row, of_state = loads.row_bytes(self._shard_arrays)
        self._row_bytes = of_row + of_state + CACHE_SLOT_OVERHEAD_BYTES
        index_bytes = ROW_INDEX_BYTES * self._shard_arrays.num_rows * (tier == TIERS.index(DISK))
        self._index_bytes = self._by_group(index_bytes.astype(np.float64))
        storage = None if run is None else run.storage
        tiers = {shard.tier for entry in plan.tables for shard in entry.shards}
        self._num_batches = (storage or StorageOptions()).num_cached_batches(tiers)

    @property
    def num_groups(self) -> int:
        """Number of groups. A rank with caches in two memories has two groups."""
        return len(self._group_keys)

    @cached_property
    def full_cache_bytes(self) -> Floats:
        """Cache size of each group that holds all rows."""
        return self._by_group(self._row_bytes * self._shard_arrays.num_rows) + self._index_bytes

    @cached_property
    def _min_cache_rows(self) -> Indices:
        return self._loads.min_cache_rows(self._shard_arrays, self._num_batches)

    @cached_property
    def min_cache_bytes(self) -> Floats:
        """Minimum cache size of each group, which holds the rows of the batches in flight."""
        return self._by_group(self._row_bytes * self._min_cache_rows) + self._index_bytes

    def _by_group(self, values: Floats) -> Floats:
        return np.bincount(self._shard_group, values, self.num_groups).astype(np.float64)

    @cached_property
    def max_cache_bytes(self) -> Floats:
        """Memory available for the caches of each group, at least `min_cache_bytes`."""
        held = self.predict(self.min_cache_bytes).memory_bytes.values()
        most = np.full(self.num_groups, np.inf)
        for number, key in enumerate(self._group_keys):
            rank, memory = int(key) // 2, _CACHE_MEMORIES[int(key) % 2]
            room = self._capacity(memory)
            if room is not None:
                counted = self._memories_in_capacity(memory)
                taken = max(float(sum(phase[name][rank] for name in counted)) for phase in held)
                most[number] = room - taken + self.min_cache_bytes[number]
        return np.clip(most, self.min_cache_bytes, self.full_cache_bytes)

    def _capacity(self, memory: Memory) -> float | None:  # bytes of one rank
        if memory == HBM:
            return self._topology.hbm_bytes
        host_bytes = self._topology.host_bytes
        return None if host_bytes is None else host_bytes / self._topology.devices_per_host

    def _memories_in_capacity(self, memory: Memory) -> tuple[Memory, ...]:
        return (HBM, HOST) if self._topology.has_shared_host_memory else (memory,)

    @cached_property
    def recommended_bytes(self) -> Floats:
        """Recommended cache size of each group: the smallest one that keeps to `MAX_SLOWDOWN_FACTOR`."""
        most, least = self.max_cache_bytes, self.min_cache_bytes
        limit_s = MAX_SLOWDOWN_FACTOR * self.predict(most).step_s
        low, high = 0.0, 1.0
        if self.predict(least).step_s <= limit_s:
            return least
        for _ in range(_NUM_BISECTIONS):
            middle = 0.5 * (low + high)
            fits = self.predict(least + middle * (most - least)).step_s <= limit_s
            low, high = (low, middle) if fits else (middle, high)
        return least + high * (most - least)

    def cache_bytes(self, plan: Plan) -> Floats:
        """Return the cache size of each group in a plan with the same shards."""
        shards = [shard for entry in plan.tables for shard in entry.shards if _is_offloaded(shard)]
        near = np.array([shards[number].cache_rows or 0 for number in self._unallocated], np.float64)
        return self._by_group(self._row_bytes * near) + self._index_bytes

    def predict(self, budget: Floats) -> Prediction:
        """Predict a step with `budget` bytes for the caches of each group."""
        plan = self.allocate(budget)
        loads = self._loads
        return predict(plan, loads.workload, self._topology, self._cost_model, loads=loads, run=self._run)

    def allocate(self, budget: Floats) -> Plan:
        """Return the plan with caches of `budget` bytes per group. If that is less than the minimum, shards are reduced
        in proportion."""
        near = np.zeros(len(self._shards), np.int64)
        for number in range(self.num_groups):
            shards = np.flatnonzero(self._shard_group == number)
            near[shards] = self._allocate_group(shards, float(budget[number] - self._index_bytes[number]))
        by_piece = dict(zip(self._unallocated, near.tolist(), strict=True))
        count = sum(_is_offloaded(shard) for entry in self._plan.tables for shard in entry.shards)
        return _with_cache_rows(self._plan, (by_piece.get(number, -1) for number in range(count)))

    def _allocate_group(self, shards: Indices, num_bytes: float) -> Indices:
        row_bytes, num_rows, least = (
            self._row_bytes[shards],
            self._shard_arrays.num_rows[shards],
            self._min_cache_rows[shards],
        )
        needed = float((row_bytes * least).sum())
        if num_bytes <= needed:
            part = max(num_bytes, 0.0) / needed
            return np.clip((part * least).astype(np.int64), 1, num_rows)
        curves = [self._curves[piece] for piece in shards]
        owner = np.repeat(np.arange(len(shards)), [len(curve.num_bytes) - 1 for curve in curves])
        size = np.concatenate([np.diff(curve.num_bytes) for curve in curves])
        gain = np.concatenate([-np.diff(curve.seconds) for curve in curves]) / np.maximum(size, 1e-300)
        # Segments of convex curves are taken in descending order of gain per byte.
        order = np.argsort(-gain, kind="stable")
        left = num_bytes - needed - np.concatenate([[0.0], np.cumsum(size[order])[:-1]]) if len(order) else np.zeros(0)
        taken = np.clip(left, 0.0, size[order])
        more = np.bincount(owner[order], taken, len(shards)) / row_bytes
        return np.clip(least + more.astype(np.int64), 1, num_rows)

    @cached_property
    def _curves(self) -> list[_CostCurve]:
        pieces, least = self._shard_arrays, self._min_cache_rows
        steps = np.linspace(0.0, 1.0, NUM_CACHE_SIZES)
        ratio = pieces.num_rows / np.maximum(least, 1)
        sizes = np.round(least[:, None] * ratio[:, None] ** steps).astype(np.int64)
        many = pieces.take(np.repeat(np.arange(len(least)), NUM_CACHE_SIZES))
        load = self._loads.shard_loads(replace(many, cache_rows=sizes.reshape(-1)))
        limit = None if self._run is None or self._run.storage is None else self._run.storage.max_reads_per_s
        of_row = fetch_seconds(self._cost_model, load)
        of_row = of_row + disk_seconds(self._cost_model, load, self._topology.devices_per_host, limit)
        seconds = (load.tier_misses * of_row).reshape(sizes.shape)
        return [_lower_hull(b, s) for b, s in zip(self._row_bytes[:, None] * sizes, seconds, strict=True)]


def _lower_hull(num_bytes: Floats, seconds: Floats) -> _CostCurve:
    kept: list[int] = []
    for point in np.unique(num_bytes, return_index=True)[1].tolist():
        while len(kept) > 1 and _is_on_or_above(num_bytes, seconds, (kept[-2], kept[-1], point)):
            kept.pop()
        kept.append(point)
    return _CostCurve(num_bytes[kept], np.minimum.accumulate(seconds[kept]))


def _is_on_or_above(x: Floats, y: Floats, points: tuple[int, int, int]) -> bool:
    """Whether the second of three points is on or above the line through the others."""
    a, b, c = points
    return bool((y[b] - y[a]) * (x[c] - x[a]) >= (y[c] - y[a]) * (x[b] - x[a]))


def _is_offloaded(shard: Shard) -> bool:
    return TIERS.index(shard.tier) in OFFLOADED_TIER_INDICES


def _with_cache_rows(plan: Plan, cache_rows: Iterator[int]) -> Plan:
    """Return the plan with the given cache capacities of its offloaded shards. 0 removes `cache_rows`, and -1
    keeps it."""

    def changed(shard: Shard) -> Shard:
        count = next(cache_rows) if _is_offloaded(shard) else -1
        return shard if count < 0 else replace(shard, cache_rows=count or None)

    entries = (replace(entry, shards=tuple(map(changed, entry.shards))) for entry in plan.tables)
    return replace(plan, tables=tuple(entries))
