"""What makes the pieces of a table a plan: they tile it, and keep the form of their scheme."""

from __future__ import annotations

from collections.abc import Sequence

from meseta.errors import MesetaError
from meseta.spec.shards import COLUMN_BLOCK, IN_ONE_HOST, Shard, ShardingType, TablePlan
from meseta.spec.tables import TableSpec


def check_tiling(table: TableSpec, entry: TablePlan) -> None:
    """Raise MesetaError unless the shards cover every cell of the table exactly once and respect column blocks."""
    if _tiles(table, entry.shards):
        return
    where = f"plan: table {table.name!r} ({entry.sharding})"
    area = 0
    for index, shard in enumerate(entry.shards):
        (r0, r1), (c0, c1) = shard.rows, shard.columns
        if not (0 <= r0 < r1 <= table.num_embeddings and 0 <= c0 < c1 <= table.embedding_dim):
            raise MesetaError(
                f"{where}: shard {index} holds rows {r0}..{r1 - 1} and columns {c0}..{c1 - 1}, outside the "
                f"{table.num_embeddings} x {table.embedding_dim} table"
            )
        if c0 % COLUMN_BLOCK:
            raise MesetaError(f"{where}: shard {index} starts at column {c0}; column shards start at multiples of 16")
        for other in entry.shards[:index]:
            if r0 < other.rows[1] and other.rows[0] < r1 and c0 < other.columns[1] and other.columns[0] < c1:
                raise MesetaError(f"{where}: shard {index} overlaps another; every row and column is placed once")
            if shard.rows != other.rows and r0 < other.rows[1] and other.rows[0] < r1:
                raise MesetaError(
                    f"{where}: shard {index} holds rows {r0}..{r1 - 1} and another {other.rows[0]}.."
                    f"{other.rows[1] - 1}; row ranges must be equal or apart, so that rows are cut alike in all columns"
                )
        area += shard.num_rows * shard.num_columns
    if area != table.num_embeddings * table.embedding_dim:
        raise MesetaError(
            f"{where}: its shards cover {area} of {table.num_embeddings * table.embedding_dim} cells; "
            "every row and column is placed once"
        )


def _tiles(table: TableSpec, shards: Sequence[Shard]) -> bool:
    """The same as a question, answered in time that does not grow with the square of the pieces."""
    ranges: dict[tuple[int, int], list[Shard]] = {}
    for shard in shards:
        ranges.setdefault(shard.rows, []).append(shard)
    columns = [sorted(shard.columns for shard in pieces) for pieces in ranges.values()]
    aligned = all(shard.columns[0] % COLUMN_BLOCK == 0 for shard in shards)
    return aligned and all(
        _is_chain(spans, last)
        for spans, last in [(sorted(ranges), table.num_embeddings), *((own, table.embedding_dim) for own in columns)]
    )


def _is_chain(spans: Sequence[tuple[int, int]], last: int) -> bool:
    """Whether spans that are not empty lead from 0 to `last` without a gap."""
    ends = [0, *(stop for _, stop in spans)]
    return ends[-1] == last and all(a == end and a < b for (a, b), end in zip(spans, ends, strict=False))


def check_scheme(table: TableSpec, entry: TablePlan, num_ranks: int, per_host: int) -> None:
    """Raise MesetaError unless the pieces, which tile the table, have the form that the scheme promises on hosts of
    `per_host` ranks."""
    where = f"plan: table {table.name!r} ({entry.sharding})"
    sharding, shards = entry.sharding, entry.shards
    one_piece = sharding in (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL)
    if one_piece and len(shards) > 1:
        raise MesetaError(f"{where}: it is cut into {len(shards)} shards, but the scheme keeps the table whole")
    for index, shard in enumerate(shards):
        if entry.is_replica(shard):
            _check_replica(f"{where}: shard {index}", shard, table, num_ranks)
        elif len(shard.ranks) > 1:
            raise MesetaError(
                f"{where}: shard {index} has {len(shard.ranks)} owners; only data_parallel and the hot rows of "
                "hot_replicated have replicas"
            )
    if sharding is ShardingType.HOT_REPLICATED and len(shards) < 2:
        raise MesetaError(f"{where}: it has no rows beside the hot ones; use data_parallel")
    whole_rows = sharding in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE)
    if whole_rows and any(s.num_rows != table.num_embeddings for s in shards):
        raise MesetaError(f"{where}: a shard holds only some of the rows; use row_wise to cut rows")
    if sharding is ShardingType.TABLE_ROW_WISE and any(s.num_columns != table.embedding_dim for s in shards):
        raise MesetaError(f"{where}: a shard holds only some of the columns; use grid to cut both")
    if sharding in (*IN_ONE_HOST, ShardingType.GRID):
        hosts: dict[tuple[int, int], set[int]] = {}
        for shard in shards:
            part = shard.columns if sharding is ShardingType.GRID else (0, table.embedding_dim)
            hosts.setdefault(part, set()).add(shard.ranks[0] // per_host)
        for (first, stop), found in hosts.items():
            if len(found) > 1:
                raise MesetaError(
                    f"{where}: columns {first}..{stop - 1} lie in hosts {sorted(found)} of {per_host} ranks, but the "
                    "scheme keeps them in one; name ranks of one host, set devices_per_host, or use row_wise or "
                    "column_wise"
                )


def _check_replica(where: str, shard: Shard, table: TableSpec, num_ranks: int) -> None:
    if sorted(shard.ranks) != list(range(num_ranks)):
        raise MesetaError(
            f"{where}: replicas on ranks {list(shard.ranks)}, but every one of the {num_ranks} ranks needs one; leave "
            "ranks out, or choose another scheme"
        )
    if shard.num_columns != table.embedding_dim:
        raise MesetaError(f"{where}: it holds only some of the columns, but replicas hold whole rows")
