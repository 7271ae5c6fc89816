"""A plan as arrays: one entry per shard."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meseta.planner.cost.loads import FAR, Indices, Pieces, WorkloadLoads
from meseta.spec import Plan
from meseta.spec.shards import SUMMED_IN_HOST
from meseta.spec.tiers import CACHED_SHARE, DISK, INDEX_BYTES, SLOT_BYTES, TIERS, StorageOptions


class Room(NamedTuple):
    """For rows that lie near."""

    storage: StorageOptions = StorageOptions()
    auto_share: float = CACHED_SHARE
    """Of the rows, where `storage` has no near_bytes."""


@dataclass(frozen=True)
class Placement:
    """Shards with one owner, and replicas apart."""

    sharded: Pieces
    """Shards that one rank holds [n]."""
    owner: Indices
    """Their ranks [n]."""
    host_parts: Indices
    """Into how many row ranges the shard's host cuts the same columns, where its partial bags are summed inside the
    host; 0 where bags go straight to the rank that asked [n]."""
    column_parts: Indices
    """How many shards hold columns of the same rows [n]."""
    host_columns: Indices
    """How many of those lie in the shard's host [n]."""
    row_parts: Indices
    """How many row ranges the table is cut into, hot rows among them [n]."""
    replicated: Pieces
    """Shards that every rank holds [m]."""
    num_ranks: int
    per_host: int
    """Ranks of a host."""

    @staticmethod
    def of(plan: Plan, loads: WorkloadLoads, per_host: int, room: Room | None = None) -> Placement:
        """Spell a plan out; it fits the tables of `loads`, on hosts of `per_host` devices. `room`: for rows that lie
        near, where the plan does not say how many do."""
        own: list[tuple[int, ...]] = []
        replicas: list[tuple[int, ...]] = []
        for entry in plan.tables:
            table = loads.index[entry.table]
            single = [shard for shard in entry.shards if not entry.is_replica(shard)]
            is_summed = plan.is_two_level or (entry.sharding in SUMMED_IN_HOST and plan.per_host < plan.num_ranks)
            row_parts = len({shard.rows for shard in entry.shards})
            hosts: dict[tuple[int, tuple[int, int]], int] = {}
            columns, host_columns = Counter[tuple[int, int]](), Counter[tuple[int, tuple[int, int]]]()
            for shard in single:
                host = shard.ranks[0] // per_host
                hosts[host, shard.columns] = hosts.get((host, shard.columns), 0) + 1
                columns[shard.rows] += 1
                host_columns[host, shard.rows] += 1
            for shard in entry.shards:
                near_rows = shard.near_rows or 0
                where = (table, *shard.rows, *shard.columns, TIERS.index(shard.tier), near_rows)
                if entry.is_replica(shard):
                    replicas.append(where)
                    continue
                host = shard.ranks[0] // per_host
                parts = hosts[host, shard.columns] if is_summed else 0
                same_rows = columns[shard.rows], host_columns[host, shard.rows]
                own.append((*where, shard.ranks[0], parts, *same_rows, row_parts))
        places = np.array(own, np.int64).reshape(-1, 12).T
        owner, sharded = places[7], Pieces(*places[:7])
        return Placement(
            sharded=replace(sharded, near_rows=_near_rows(sharded, owner, loads, room or Room())),
            owner=owner,
            host_parts=places[8],
            column_parts=places[9],
            host_columns=places[10],
            row_parts=places[11],
            replicated=Pieces(*np.array(replicas, np.int64).reshape(-1, 7).T),
            num_ranks=plan.num_ranks,
            per_host=per_host,
        )

    def by_rank(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums over each rank's shards: [n] -> [R]."""
        return np.bincount(self.owner, values, self.num_ranks).astype(np.float64)

    @property
    def host(self) -> Indices:
        """Host of each rank [R]."""
        return np.arange(self.num_ranks) // self.per_host


def _near_rows(pieces: Pieces, owner: Indices, loads: WorkloadLoads, room: Room) -> Indices:
    """Of each piece [n], as storage allots them: those of the plan, else a part of the room of its rank."""
    near_rows = pieces.near_rows.copy()
    shared = np.isin(pieces.tier, FAR) & (near_rows == 0)
    of_row, of_state = loads.row_bytes(pieces)
    row_bytes = of_row + of_state + SLOT_BYTES
    for rank in np.unique(owner[shared]):
        mine = np.flatnonzero(shared & (owner == rank))
        of_rank = row_bytes[mine].astype(np.int64).tolist(), pieces.num_rows[mine].tolist()
        index_bytes = INDEX_BYTES * int(pieces.num_rows[mine][pieces.tier[mine] == TIERS.index(DISK)].sum())
        near_rows[mine] = room.storage.near_rows(*of_rank, room.auto_share, index_bytes=index_bytes)
    return near_rows
