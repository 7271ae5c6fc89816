"""Plans as arrays with one entry per shard."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meseta.planner.cost.loads import OFFLOADED_TIER_INDICES, Indices, ShardArrays, WorkloadLoads
from meseta.spec import Plan
from meseta.spec.shards import HOST_REDUCED_TYPES
from meseta.spec.tiers import (
    CACHE_SLOT_OVERHEAD_BYTES,
    DEFAULT_CACHE_SHARE,
    DISK,
    ROW_INDEX_BYTES,
    TIERS,
    StorageOptions,
)


class CacheOptions(NamedTuple):
    """Sizes of row caches for which the plan has no `cache_rows`."""

    storage: StorageOptions = StorageOptions()
    default_share: float = DEFAULT_CACHE_SHARE
    """Share of the rows that are cached if `storage` has no `cache_bytes`."""


@dataclass(frozen=True)
class Placement:
    """Shards of a plan. Arrays of shape [n] have one entry per shard with one owner. See `Partitioning` for numbers of
    parts."""

    sharded: ShardArrays  # shards with one owner [n]
    owner: Indices  # [n]
    host_row_parts: Indices  # [n]
    column_parts: Indices  # [n]
    host_column_parts: Indices  # [n]
    row_parts: Indices
    """Number of row ranges of the table, including replicated hot rows [n]."""
    replicated: ShardArrays  # shards with a replica on each rank
    num_ranks: int
    ranks_per_host: int

    @staticmethod
    def from_plan(plan: Plan, loads: WorkloadLoads, per_host: int, room: CacheOptions | None = None) -> Placement:
        """Convert a plan, which must match the tables of `loads`. `room` sizes the row caches that the plan does not
        specify."""
        entries: list[tuple[int, ...]] = []
        replicas: list[tuple[int, ...]] = []
        for entry in plan.tables:
            table = loads.table_index[entry.table]
            single = [shard for shard in entry.shards if not entry.is_replica(shard)]
            is_summed = plan.is_hierarchical or (
                entry.sharding in HOST_REDUCED_TYPES and plan.ranks_per_host < plan.num_ranks
            )
            row_parts = len({shard.rows for shard in entry.shards})
            hosts: dict[tuple[int, tuple[int, int]], int] = {}
            columns, host_columns = Counter[tuple[int, int]](), Counter[tuple[int, tuple[int, int]]]()
            for shard in single:
                host = shard.ranks[0] // per_host
                hosts[host, shard.columns] = hosts.get((host, shard.columns), 0) + 1
                columns[shard.rows] += 1
                host_columns[host, shard.rows] += 1
            for shard in entry.shards:
                cache_rows = shard.cache_rows or 0
                where = (table, *shard.rows, *shard.columns, TIERS.index(shard.tier), cache_rows)
                if entry.is_replica(shard):
                    replicas.append(where)
                    continue
                host = shard.ranks[0] // per_host
                parts = hosts[host, shard.columns] if is_summed else 0
                same_rows = columns[shard.rows], host_columns[host, shard.rows]
                entries.append((*where, shard.ranks[0], parts, *same_rows, row_parts))
        places = np.array(entries, np.int64).reshape(-1, 12).T
        owner, sharded = places[7], ShardArrays(*places[:7])
        return Placement(
            sharded=replace(sharded, cache_rows=_allocate_cache_rows(sharded, owner, loads, room or CacheOptions())),
            owner=owner,
            host_row_parts=places[8],
            column_parts=places[9],
            host_column_parts=places[10],
            row_parts=places[11],
            replicated=ShardArrays(*np.array(replicas, np.int64).reshape(-1, 7).T),
            num_ranks=plan.num_ranks,
            ranks_per_host=per_host,
        )

    def sum_by_rank(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum values of shards [n] over the shards of each rank [R]."""
        return np.bincount(self.owner, values, self.num_ranks).astype(np.float64)

    @property
    def rank_hosts(self) -> Indices:  # [R]
        return np.arange(self.num_ranks) // self.ranks_per_host


def _allocate_cache_rows(pieces: ShardArrays, owner: Indices, loads: WorkloadLoads, room: CacheOptions) -> Indices:
    # Shards without `cache_rows` share the remaining cache of their rank, as at run time.
    cache_rows = pieces.cache_rows.copy()
    shared = np.isin(pieces.tier, OFFLOADED_TIER_INDICES) & (cache_rows == 0)
    of_row, of_state = loads.row_bytes(pieces)
    row_bytes = of_row + of_state + CACHE_SLOT_OVERHEAD_BYTES
    for rank in np.unique(owner[shared]):
        of_owner = np.flatnonzero(shared & (owner == rank))
        of_rank = row_bytes[of_owner].astype(np.int64).tolist(), pieces.num_rows[of_owner].tolist()
        index_bytes = ROW_INDEX_BYTES * int(pieces.num_rows[of_owner][pieces.tier[of_owner] == TIERS.index(DISK)].sum())
        cache_rows[of_owner] = room.storage.allocate_cache_rows(*of_rank, room.default_share, index_bytes=index_bytes)
    return cache_rows
