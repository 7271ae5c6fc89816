"""A plan as arrays: one entry per shard."""

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
    """For rows that lie near."""

    storage: StorageOptions = StorageOptions()
    default_share: float = DEFAULT_CACHE_SHARE
    """Of the rows, where `storage` has no cache_bytes."""


@dataclass(frozen=True)
class Placement:
    """Shards with one owner, and replicas apart."""

    sharded: ShardArrays
    """Shards that one rank holds [n]."""
    owner: Indices
    """Their ranks [n]."""
    host_row_parts: Indices
    """Into how many row ranges the shard's host cuts the same columns, where its partial bags are summed inside the
    host; 0 where bags go straight to the rank that asked [n]."""
    column_parts: Indices
    """How many shards hold columns of the same rows [n]."""
    host_column_parts: Indices
    """How many of those lie in the shard's host [n]."""
    row_parts: Indices
    """How many row ranges the table is cut into, hot rows among them [n]."""
    replicated: ShardArrays
    """Shards that every rank holds [m]."""
    num_ranks: int
    ranks_per_host: int
    """Ranks of a host."""

    @staticmethod
    def from_plan(plan: Plan, loads: WorkloadLoads, per_host: int, room: CacheOptions | None = None) -> Placement:
        """Spell a plan out; it fits the tables of `loads`, on hosts of `per_host` devices. `room`: for rows that lie
        near, where the plan does not say how many do."""
        own: list[tuple[int, ...]] = []
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
                own.append((*where, shard.ranks[0], parts, *same_rows, row_parts))
        places = np.array(own, np.int64).reshape(-1, 12).T
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
        """Sums over each rank's shards: [n] -> [R]."""
        return np.bincount(self.owner, values, self.num_ranks).astype(np.float64)

    @property
    def rank_hosts(self) -> Indices:
        """Host of each rank [R]."""
        return np.arange(self.num_ranks) // self.ranks_per_host


def _allocate_cache_rows(pieces: ShardArrays, owner: Indices, loads: WorkloadLoads, room: CacheOptions) -> Indices:
    """Of each piece [n], as storage allots them: those of the plan, else a part of the room of its rank."""
    cache_rows = pieces.cache_rows.copy()
    shared = np.isin(pieces.tier, OFFLOADED_TIER_INDICES) & (cache_rows == 0)
    of_row, of_state = loads.row_bytes(pieces)
    row_bytes = of_row + of_state + CACHE_SLOT_OVERHEAD_BYTES
    for rank in np.unique(owner[shared]):
        mine = np.flatnonzero(shared & (owner == rank))
        of_rank = row_bytes[mine].astype(np.int64).tolist(), pieces.num_rows[mine].tolist()
        index_bytes = ROW_INDEX_BYTES * int(pieces.num_rows[mine][pieces.tier[mine] == TIERS.index(DISK)].sum())
        cache_rows[mine] = room.storage.allocate_cache_rows(*of_rank, room.default_share, index_bytes=index_bytes)
    return cache_rows
