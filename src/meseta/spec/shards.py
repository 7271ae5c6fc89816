"""Pieces of tables, and cutting a table into them by a scheme."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from meseta.errors import MesetaError
from meseta.spec.tables import TableSpec
from meseta.spec.tiers import HBM

MAX_RANKS = 1 << 16
COLUMN_BLOCK = 16
"""Column shards start at multiples of this many columns; row statistics are accumulated in blocks of as many."""


class ShardingType(enum.StrEnum):
    """How a table is cut and placed."""

    DATA_PARALLEL = "data_parallel"
    """Every rank holds the whole table; the gradients of touched rows are added up over ranks."""
    TABLE_WISE = "table_wise"
    """One rank holds the whole table."""
    ROW_WISE = "row_wise"
    """Contiguous row ranges, one per rank; partial bags are added up at the rank that asked."""
    COLUMN_WISE = "column_wise"
    """Column ranges, one per rank, aligned to 16; bags are concatenated at the rank that asked."""
    TABLE_ROW_WISE = "table_row_wise"
    """Row ranges, one per rank of one host; partial bags are added up inside the host before they leave it."""
    TABLE_COLUMN_WISE = "table_column_wise"
    """Column ranges, one per rank of one host."""
    GRID = "grid"
    """Column ranges, one per host, each cut by rows over the ranks of its host as table_row_wise is."""
    HOT_REPLICATED = "hot_replicated"
    """The first rows, which are the most frequent ones, as data_parallel; the others as row_wise."""


HOST_REDUCED_TYPES = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID)
"""Schemes whose partial bags are added up inside a host."""
SINGLE_HOST_TYPES = (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE)
"""Schemes whose pieces all lie in one host."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One placed piece of a table."""

    table: str
    """Name of the TableSpec."""
    rows: tuple[int, int]
    """First row and the row after the last, for example (0, 500)."""
    columns: tuple[int, int]
    """First column and the column after the last, for example (16, 32)."""
    ranks: tuple[int, ...]
    """The one owner, or all replicas."""
    tier: str = HBM
    """Memory that holds the rows: 'hbm', the memory of the rank's device (on a CPU rank, DRAM); 'host', the DRAM of its
    host; 'cached', that with the frequent rows in 'hbm'; 'disk', a local disk."""
    cache_rows: int | None = None
    """Of tiers 'cached' and 'disk': rows that lie near at most, in 'hbm' or in DRAM; None: as there is room."""

    @property
    def label(self) -> str:
        """For messages: "table 'user', rows 0..99"."""
        return f"table {self.table!r}, rows {self.rows[0]:,}..{self.rows[1] - 1:,}"

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_columns(self) -> int:
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """The pieces of one table; together they tile it."""

    table: str
    """Name of the TableSpec."""
    sharding: ShardingType
    """The scheme that the pieces follow; row_wise pieces that are written out one by one may be cut by columns too."""
    shards: tuple[Shard, ...]
    """Pieces, ordered by (row, column)."""
    cost: float = 0.0
    """Predicted seconds that all ranks together spend on the table in a step; 0 where nobody predicted."""

    def is_replica(self, shard: Shard) -> bool:
        """Whether every rank holds this piece, so that its rows are looked up at home."""
        hot = self.sharding is ShardingType.HOT_REPLICATED and shard.rows[0] == 0
        return hot or self.sharding is ShardingType.DATA_PARALLEL


T = TypeVar("T")
_Range = tuple[int, int]


def shard_table(
    table: TableSpec,
    sharding: ShardingType,
    ranks: Sequence[int],
    *,
    num_ranks: int | None = None,
    devices_per_host: int | None = None,
    hot_rows: int = 0,
) -> TablePlan:
    """Cut one table by a scheme over `ranks`: equal contiguous rows, equal groups of 16 columns, or both.

    A table with fewer rows, or fewer groups of 16 columns, than ranks (grid: hosts) leaves the last ones empty-handed.
    `hot_rows` of hot_replicated lie on all `num_ranks` ranks (None: on `ranks`), the others in equal parts on `ranks`.
    `devices_per_host` tells which ranks share a host, None: all do.
    Raises MesetaError when there are no ranks, several for table_wise, or hot rows where they do not fit.
    """
    where = f"plan: table {table.name!r} ({sharding})"
    if not ranks:
        raise MesetaError(f"{where} has no ranks; name at least one")
    if sharding is ShardingType.TABLE_WISE and len(ranks) != 1:
        raise MesetaError(f"plan: table {table.name!r} is table_wise and needs one rank, got {list(ranks)}")
    is_hot = sharding is ShardingType.HOT_REPLICATED
    if is_hot and not 0 < hot_rows < table.num_embeddings:
        raise MesetaError(
            f"{where}: hot_rows must be in 1..{table.num_embeddings - 1}, got {hot_rows}; use row_wise for none of its "
            f"{table.num_embeddings} rows and data_parallel for all"
        )
    if hot_rows and not is_hot:
        raise MesetaError(f"{where}: hot_rows are for hot_replicated alone; leave them out")
    rows, columns = (0, table.num_embeddings), (0, table.embedding_dim)
    pieces: list[tuple[_Range, _Range, tuple[int, ...]]]
    if sharding in (ShardingType.DATA_PARALLEL, ShardingType.TABLE_WISE):
        pieces = [(rows, columns, tuple(ranks))]
    elif sharding in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE):
        pieces = [(span, columns, (rank,)) for span, rank in _split_evenly(rows, ranks)]
    elif is_hot:
        everywhere = tuple(ranks if num_ranks is None else range(num_ranks))
        cold = _split_evenly((hot_rows, table.num_embeddings), ranks)
        pieces = [((0, hot_rows), columns, everywhere), *((span, columns, (rank,)) for span, rank in cold)]
    elif sharding is ShardingType.GRID:
        hosts: dict[int, list[int]] = {}
        for rank in ranks:
            hosts.setdefault(rank // devices_per_host if devices_per_host else 0, []).append(rank)
        pieces = [
            (row_span, column_span, (rank,))
            for column_span, own in _split_evenly(columns, list(hosts.values()), COLUMN_BLOCK)
            for row_span, rank in _split_evenly(rows, own)
        ]
        pieces.sort()
    else:
        pieces = [(rows, span, (rank,)) for span, rank in _split_evenly(columns, ranks, COLUMN_BLOCK)]
    shards = tuple(Shard(table=table.name, rows=r, columns=c, ranks=owners) for r, c, owners in pieces)
    return TablePlan(table=table.name, sharding=sharding, shards=shards)


def _split_evenly(span: _Range, owners: Sequence[T], align: int = 1) -> list[tuple[_Range, T]]:
    """At most as many non-empty spans as owners, of equal size (the last may be shorter), that start at multiples of
    `align` from the first."""
    first, last = span
    blocks = -(-(last - first) // align)
    step = -(-blocks // len(owners)) * align
    spans = [(start, min(start + step, last)) for start in range(first, last, step)]
    return list(zip(spans, owners, strict=False))
