"""What has to move when one plan follows another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meseta.planner.cost.sizes import shard_storage_bytes
from meseta.spec import MesetaError, Plan, Shard, TableSpec


@dataclass(frozen=True, kw_only=True)
class TableMove:
    """One table under two plans."""

    table: str
    before: str
    """Scheme and ranks; empty where the first plan does not have it."""
    after: str
    """Scheme and ranks; empty where the second plan does not have it."""
    num_rows: int
    """Rows, or parts of rows, that come to ranks which did not hold them."""
    num_bytes: int
    """Their bytes, with optimizer state where the tables tell it."""


def diff_plans(before: Plan, after: Plan, tables: Mapping[str, TableSpec]) -> list[TableMove]:
    """Tables whose places differ, the most bytes first. New tables and new rows are counted as moved: their ranks get
    them. A tier counts as another place.

    Args:
        before: the plan that holds.
        after: the plan that follows.
        tables: by name, for the bytes of a row.

    Raises MesetaError for a table that `tables` lacks.
    """
    old = {entry.table: entry for entry in before.tables}
    found = []
    for entry in after.tables:
        if entry.table not in tables:
            raise MesetaError(
                f"plan diff: table {entry.table!r} of the second plan is not in the model; name its config"
            )
        rows = num_bytes = 0
        sources = old[entry.table].shards if entry.table in old else ()
        for shard in entry.shards:
            for rank in shard.ranks:
                own_rows, own_cells = _missing_cells(
                    shard, [s for s in sources if rank in s.ranks and s.tier == shard.tier]
                )
                rows += own_rows
                num_bytes += shard_storage_bytes(tables[entry.table], own_cells, 1)
        earlier = old.pop(entry.table, None)
        if rows or earlier is None or earlier.sharding != entry.sharding:
            source = "" if earlier is None else describe_placement(str(earlier.sharding), earlier.shards)
            found.append(
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
        found.append(TableMove(table=entry.table, before=gone, after="", num_rows=0, num_bytes=0))
    return sorted(found, key=lambda one: (-one.num_bytes, one.table))


def _missing_cells(shard: Shard, held: list[Shard]) -> tuple[int, int]:
    """(rows, cells) of a shard that its rank does not hold yet."""
    rows = cells = 0
    for other in held:
        common = min(shard.rows[1], other.rows[1]) - max(shard.rows[0], other.rows[0])
        width = min(shard.columns[1], other.columns[1]) - max(shard.columns[0], other.columns[0])
        if common > 0 and width > 0:
            cells += common * width
            rows += common if width == shard.num_columns else 0
    return max(shard.num_rows - rows, 0), shard.num_rows * shard.num_columns - cells


def describe_placement(sharding: str, shards: tuple[Shard, ...]) -> str:
    """A scheme with its ranks: 'row_wise on 0-3'."""
    ranks = sorted({rank for shard in shards for rank in shard.ranks})
    return f"{sharding} on {format_ranks(ranks)}"


def format_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """Ascending ranks in short: '0-3, 7'; of more than four spans, how many ranks."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    if len(found) > 4:
        return f"{len(ranks)} ranks"
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found) or "none"
