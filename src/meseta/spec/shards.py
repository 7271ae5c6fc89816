"""Pieces of a table, and the schemes that they follow."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from meseta.spec.tiers import HBM

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


SUMMED_IN_HOST = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID)
"""Schemes whose partial bags are added up inside a host."""
IN_ONE_HOST = (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE)
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
