"""Tables that keep their placement in an earlier plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from meseta.planner.cost.loads import shard_storage_bytes
from meseta.spec import MesetaError, Plan, Shard, TablePlan, TableSpec, Topology
from meseta.spec.constraints import PinnedPlacement
from meseta.spec.documents import read_mapping
from meseta.spec.plan import check_sharding, check_tiling, read_explicit_plan


def load_kept_tables(keep: PinnedPlacement, tables: Sequence[TableSpec], topology: Topology) -> dict[str, TablePlan]:
    """Return the placement of each table that can remain as in an earlier plan.

    If a table has more rows than before, its last shards get the new rows. Replicas are extended to all ranks. Raises
    MesetaError if the file is not a plan that lists all shards.
    """
    plan, _ = read_plan_file(keep.plan)
    names = {table.name for table in tables}
    old = {entry.table: entry for entry in plan.tables if entry.table in names}
    kept = {}
    for table in tables:
        if table.name in old and any(fnmatchcase(table.name, name) for name in keep.tables):
            entry = _extend_entry(old[table.name], table, topology)
            if entry is not None:
                kept[table.name] = entry
    return kept


def read_plan_file(path: str) -> tuple[Plan, tuple[TableSpec, ...]]:
    """Read a plan file of all shards. Tables have only names, rows and columns. Raises MesetaError if it is invalid."""
    where = f"plan file {str(path)!r}"
    try:
        return read_explicit_plan(read_mapping(path))
    except MesetaError as error:
        raise MesetaError(f"{where}: {error}") from None


def _extend_entry(entry: TablePlan, table: TableSpec, topology: Topology) -> TablePlan | None:
    """Return the placement of a table that may have more rows or ranks than before, or `None` if it is not valid for
    them."""
    last = max(shard.rows[1] for shard in entry.shards)
    width = max(shard.columns[1] for shard in entry.shards)
    if width != table.embedding_dim or last > table.num_embeddings:
        return None
    everywhere = tuple(range(topology.num_ranks))
    shards: list[Shard] = []
    for shard in entry.shards:
        stop = table.num_embeddings if shard.rows[1] == last else shard.rows[1]
        ranks = everywhere if entry.is_replica(shard) else shard.ranks
        if ranks[0] >= topology.num_ranks:
            return None
        shards.append(replace(shard, rows=(shard.rows[0], stop), ranks=ranks))
    grown = replace(entry, shards=tuple(shards), cost=0.0)
    try:
        check_tiling(table, grown)
        check_sharding(table, grown, topology.num_ranks, topology.devices_per_host)
    except MesetaError:
        return None
    return grown


def release_one_table(
    kept: Mapping[str, TablePlan], tables: Sequence[TableSpec], room_bytes: int
) -> dict[str, TablePlan]:
    """Return the kept tables without one table of the fullest rank: the smallest one that resolves the excess over
    `room_bytes`, otherwise the largest."""
    held: dict[int, dict[str, int]] = {}
    for table in tables:
        for shard in kept[table.name].shards if table.name in kept else ():
            for rank in shard.ranks:
                sizes = held.setdefault(rank, {})
                sizes[table.name] = sizes.get(table.name, 0) + shard_storage_bytes(
                    table, shard.num_rows, shard.num_columns
                )
    rank = max(held, key=lambda rank: (sum(held[rank].values()), -rank))
    excess = sum(held[rank].values()) - room_bytes
    enough = {name: size for name, size in held[rank].items() if size >= excess}
    choice = min(enough, key=lambda name: (enough[name], name)) if enough and excess > 0 else None
    choice = choice or max(held[rank], key=lambda name: (held[rank][name], name))
    return {name: entry for name, entry in kept.items() if name != choice}
