"""Differences between two plans: rows that have to move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meseta.planner.cost.sizes import shard_storage_bytes
from meseta.spec import MesetaError, Plan, Shard, TableSpec


@dataclass(frozen=True, kw_only=True)
class TableMove:
    """Change of the placement of a table between two plans."""

    table: str
    before: str
    """Sharding type and ranks in the first plan. Empty if the plan does not have the table."""
    after: str
    """Sharding type and ranks in the second plan. Empty if the plan does not have the table."""
    num_rows: int
    """Number of rows that move to a rank that did not have them, summed over ranks."""
    num_bytes: int
    """Bytes that move, including optimizer states."""


def diff_plans(before: Plan, after: Plan, tables: Mapping[str, TableSpec]) -> list[TableMove]:
    """Return the tables with a different placement, in descending order of the bytes that move.

    New tables and new rows count as moved. A change of tier is a change of placement. Raises MesetaError if `tables`
    lacks a table of the second plan.

    Args:
        before: First plan.
        after: Second plan.
        tables: Tables by name.
    """
    old = {entry.table: entry for entry in before.tables}
    moves = []
    for entry in after.tables:
        if entry.table not in tables:
            raise MesetaError(
                f"plan diff: table {entry.table!r} of the second plan is not in the model; pass the config of its model"
            )
        rows = num_bytes = 0
        sources = old[entry.table].shards if entry.table in old else ()
        for shard in entry.shards:
            for rank in shard.ranks:
                missing_rows, missing_cells = _missing_cells(
                    shard, [s for s in sources if rank in s.ranks and s.tier == shard.tier]
                )
                rows += missing_rows
                num_bytes += shard_storage_bytes(tables[entry.table], missing_cells, 1)
        earlier = old.pop(entry.table, None)
        if rows or earlier is None or earlier.sharding != entry.sharding:
            source = "" if earlier is None else describe_placement(str(earlier.sharding), earlier.shards)
            moves.append(
                TableMove(
                    table=entry.table,
                    before=source,
                    after=describe_placement(str(entry.sharding), entry.shards),
                    num_rows=rows,
                    num_bytes=num_bytes,
                )
            )
    for entry in old.values():
        gone = describe_placement(str(entry.sharding), entry.shards)
        moves.append(TableMove(table=entry.table, before=gone, after="", num_rows=0, num_bytes=0))
    return sorted(moves, key=lambda one: (-one.num_bytes, one.table))


def _missing_cells(shard: Shard, held: list[Shard]) -> tuple[int, int]:
    rows = cells = 0
    for other in held:
        common = min(shard.rows[1], other.rows[1]) - max(shard.rows[0], other.rows[0])
        width = min(shard.columns[1], other.columns[1]) - max(shard.columns[0], other.columns[0])
        if common > 0 and width > 0:
            cells += common * width
            rows += common if width == shard.num_columns else 0
    return max(shard.num_rows - rows, 0), shard.num_rows * shard.num_columns - cells


def describe_placement(sharding: str, shards: tuple[Shard, ...]) -> str:
    """Return the sharding type with its ranks, such as 'row_wise on 0-3'."""
    ranks = sorted({rank for shard in shards for rank in shard.ranks})
    return f"{sharding} on {format_ranks(ranks)}"


def format_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """Return ascending ranks as ranges, such as '0-3, 7', or their number if there are more than four ranges."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    if len(ranges) > 4:
        return f"{len(ranks)} ranks"
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges) or "none"
