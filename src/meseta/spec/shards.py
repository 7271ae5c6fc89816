"""Sizes and concurrency limits of checkpoint blocks, shared by `meseta.checkpoint` and the memory prediction."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from meseta.errors import MesetaError
from meseta.spec.tables import TableSpec
from meseta.spec.tiers import HBM

BLOCK_BYTES = 32 << 20
"""Maximum size of a block, and of the data that a rank receives, or sends to one other rank, in an exchange round."""
# The disk writes some rounds while others are checksummed.
NUM_PENDING_WRITES = 4
"""Maximum number of concurrent checkpoint writes per rank, each of the blocks of one exchange round."""
# The disk reads some blocks while others are checksummed.
NUM_PARALLEL_READS, NUM_PARALLEL_CHAIN_READS = 6, 3
"""Maximum number of blocks read concurrently. `NUM_PARALLEL_READS` is for unquantized blocks of one file.
`NUM_PARALLEL_CHAIN_READS` is for all others, which need up to three times their size in memory."""
GLOBAL_ROW_ID_BYTES = 8
"""Size of the int64 id that a block stores with each row."""
LOCAL_ROW_ID_BYTES = 4
"""Size of a uint32 row index relative to the block, in files that store only some rows of a block."""


def rows_per_block(row_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Return the rows per block, a power of two. The last one may have fewer. `row_bytes` includes id and states."""
    return 1 << (max(block_bytes // row_bytes, 1).bit_length() - 1)


MAX_RANKS = 1 << 16
COLUMN_BLOCK = 16
"""Number of columns in a block. Column shards start at multiples of it, and row statistics are accumulated per
block."""


class ShardingType(enum.StrEnum):
    """Rule by which a table is split into shards and placed on ranks."""

    DATA_PARALLEL = "data_parallel"
    """Each rank has a replica of the whole table. Row gradients are summed over all ranks."""
    TABLE_WISE = "table_wise"
    """One rank owns the whole table."""
    ROW_WISE = "row_wise"
    """Contiguous row ranges, one per rank. The requesting rank sums partial bags."""
    COLUMN_WISE = "column_wise"
    """Column ranges, one per rank, aligned to 16 columns. The requesting rank concatenates the parts of a bag."""
    TABLE_ROW_WISE = "table_row_wise"
    """Row ranges on the ranks of one host. Partial bags are summed inside the host before they are sent."""
    TABLE_COLUMN_WISE = "table_column_wise"
    """Column ranges on the ranks of one host."""
    GRID = "grid"
    """Column ranges, one per host. Each of them is split by rows over the ranks of its host, as in table_row_wise."""
    HOT_REPLICATED = "hot_replicated"
    """The first rows, which should be the most frequent ones, are data_parallel. The remaining rows are row_wise."""


HOST_REDUCED_TYPES = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID)
SINGLE_HOST_TYPES = (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE)
"""Sharding types that place all shards of a table on one host."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Row and column range of a table, with the ranks and the tier that it is placed on."""

    table: str
    rows: tuple[int, int]
    """Row range (start, stop), for example (0, 500)."""
    columns: tuple[int, int]
    """Column range (start, stop), for example (16, 32)."""
    ranks: tuple[int, ...]
    """Rank that owns the shard, or all ranks if the shard is replicated."""
    tier: str = HBM
    """Storage tier of the rows: 'hbm', 'host', 'cached' or 'disk'."""
    cache_rows: int | None = None
    """Capacity of the row cache in tiers 'cached' and 'disk'. `None` derives it from the available memory."""

    @property
    def label(self) -> str:
        """Name of the shard in messages, such as "table 'user', rows 0..99"."""
        return f"table {self.table!r}, rows {self.rows[0]:,}..{self.rows[1] - 1:,}"

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_columns(self) -> int:
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """Sharding type and shards of one table. The shards tile the table."""

    table: str
    sharding: ShardingType
    """Sharding type that the shards conform to. In a plan that lists its shards, row_wise shards may also be split by
    columns."""
    shards: tuple[Shard, ...]
    """Shards of the table, ordered by (row, column)."""
    cost: float = 0.0
    """Predicted seconds per step for this table, summed over ranks. 0 if there is no prediction."""

    def is_replica(self, shard: Shard) -> bool:
        """Whether all ranks have a copy of the shard, so that lookups need no exchange."""
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
    """Shard a table evenly over `ranks`.

    Row shards are contiguous, and column shards consist of blocks of 16 columns. If there are fewer rows or blocks than
    ranks (for grid, than hosts), the last ranks get no shard.

    For hot_replicated, `num_ranks` ranks (by default all of `ranks`) replicate the first `hot_rows` rows. For grid,
    `devices_per_host` is the number of ranks per host, and `None` means that all ranks share one host.

    Raises MesetaError if `ranks` is empty, table_wise has several ranks, or `hot_rows` does not fit the sharding type.
    """
    where = f"plan: table {table.name!r} ({sharding})"
    if not ranks:
        raise MesetaError(f"{where}: ranks must not be empty; add at least one rank")
    if sharding is ShardingType.TABLE_WISE and len(ranks) != 1:
        raise MesetaError(f"plan: table {table.name!r} is table_wise and must have one rank, got {list(ranks)}")
    is_hot = sharding is ShardingType.HOT_REPLICATED
    if is_hot and not 0 < hot_rows < table.num_embeddings:
        raise MesetaError(
            f"{where}: hot_rows must be in 1..{table.num_embeddings - 1}, got {hot_rows}; use row_wise to replicate "
            f"none of the {table.num_embeddings} rows, or data_parallel to replicate all"
        )
    if hot_rows and not is_hot:
        raise MesetaError(f"{where}: hot_rows can only be used with hot_replicated; remove hot_rows")
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
            for column_span, host_ranks in _split_evenly(columns, list(hosts.values()), COLUMN_BLOCK)
            for row_span, rank in _split_evenly(rows, host_ranks)
        ]
        pieces.sort()
    else:
        pieces = [(rows, span, (rank,)) for span, rank in _split_evenly(columns, ranks, COLUMN_BLOCK)]
    shards = tuple(Shard(table=table.name, rows=r, columns=c, ranks=owners) for r, c, owners in pieces)
    return TablePlan(table=table.name, sharding=sharding, shards=shards)


def _split_evenly(span: _Range, owners: Sequence[T], align: int = 1) -> list[tuple[_Range, T]]:
    """Split `span` into contiguous parts, one per owner, aligned to `align` relative to its start. The last part may be
    shorter, the last owners may get none."""
    first, last = span
    blocks = -(-(last - first) // align)
    step = -(-blocks // len(owners)) * align
    spans = [(start, min(start + step, last)) for start in range(first, last, step)]
    return list(zip(spans, owners, strict=False))
