"""The options to cut a table that the search chooses from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meseta.spec import COLUMN_BLOCK, Shard, ShardingType, TablePlan, TableSpec, Tier
from meseta.spec.tiers import DEFAULT_CACHE_SHARE, HBM, OFFLOADED_TIERS

Ints = NDArray[np.int64]

WITHIN_HOST_TYPES = (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID)
"""Schemes that are the same as another one where there is one host."""


@dataclass(frozen=True, kw_only=True)
class ShardingScheme:
    """How one table is cut; not where its pieces lie."""

    sharding_type: ShardingType
    """Its type."""
    row_parts: int = 1
    """Ranges of rows, at most."""
    column_parts: int = 1
    """Ranges of columns, at most."""
    tier: Tier = HBM
    """Memory of the pieces."""
    hot_rows: int = 0
    """Rows on every rank; all for data_parallel."""
    cache_share: float = 0.0
    """Of tiers 'cached' and 'disk': the part of the rows that lies near, if that has room for the batches under way."""

    @property
    def is_within_host(self) -> bool:
        """Whether pieces share a host: all, those of a range of columns for grid."""
        return self.sharding_type in WITHIN_HOST_TYPES

    def shard_rectangles(self, num_rows: int, num_columns: int) -> Ints:
        """[p, 4]: first row, one after the last, first column, one after the last, of all pieces that lie on one rank.
        Equal parts, as `meseta.spec.shards.shard_table` deals them; ranges of columns first, for grid."""
        if self.sharding_type is ShardingType.DATA_PARALLEL:
            return np.zeros((0, 4), np.int64)
        rows = _split_range(self.hot_rows, num_rows, self.row_parts, 1)
        columns = _split_range(0, num_columns, self.column_parts, COLUMN_BLOCK)
        pieces = np.empty((len(columns), len(rows), 4), np.int64)
        pieces[:, :, :2], pieces[:, :, 2:] = rows, columns[:, None]
        return pieces.reshape(-1, 4)

    def describe(self) -> str:
        """In a few words, for people."""
        parts = [str(self.row_parts)] * (self.row_parts > 1) + [str(self.column_parts)] * (self.column_parts > 1)
        text = f"{self.sharding_type}" + (f" {'x'.join(parts)}" if parts else "")
        text += f", {self.hot_rows:,} hot rows" if self.sharding_type is ShardingType.HOT_REPLICATED else ""
        near = f", {100 * self.cache_share:.3g} % near" if self.cache_share else ""
        return text + (f" in {self.tier}{near}" if self.tier != HBM else "")


def _split_range(first: int, last: int, parts: int, align: int) -> Ints:
    """[k, 2]: at most `parts` spans of equal size, the last perhaps shorter."""
    blocks = -(-(last - first) // align)
    starts = np.arange(first, last, -(-blocks // parts) * align)
    spans = np.empty((len(starts), 2), np.int64)
    spans[:, 0], spans[:-1, 1], spans[-1, 1] = starts, starts[1:], last
    return spans


def make_table_plan(
    table: TableSpec,
    scheme: ShardingScheme,
    ranks: Sequence[int] | Ints,
    num_ranks: int,
    cache_rows: Sequence[int] | Ints,
) -> TablePlan:
    """The pieces of a table on `ranks`, one for each piece, with so many rows that lie near (0: they are not apart),
    and its replicas on all ranks."""
    everywhere, dim = tuple(range(num_ranks)), table.embedding_dim
    replicated = table.num_embeddings if scheme.sharding_type is ShardingType.DATA_PARALLEL else scheme.hot_rows
    shards = [Shard(table=table.name, rows=(0, replicated), columns=(0, dim), ranks=everywhere)] * bool(replicated)
    pieces = scheme.shard_rectangles(table.num_embeddings, dim).tolist()
    for (first, last, left, right), rank, near in zip(pieces, ranks, cache_rows, strict=True):
        place = {"rows": (first, last), "columns": (left, right), "ranks": (int(rank),)}
        shards.append(Shard(table=table.name, **place, tier=scheme.tier, cache_rows=int(near) or None))
    shards.sort(key=lambda shard: (shard.rows, shard.columns))
    return TablePlan(table=table.name, sharding=scheme.sharding_type, shards=tuple(shards))


@dataclass(frozen=True, kw_only=True)
class SchemeSpace:
    """What decides which schemes are worth a look."""

    num_hosts: int
    devices_per_host: int
    max_parts: int
    """More pieces than this help neither the balance nor the room."""
    hot_rows: tuple[int, ...] = ()
    """Numbers of rows to replicate."""
    can_replicate: bool = True
    """Whether replicas of the whole table are worth a look."""
    cache_shares: tuple[float, ...] = (DEFAULT_CACHE_SHARE,)
    """Parts of the rows that may lie near."""


def enumerate_schemes(table: TableSpec, shape: SchemeSpace, tier: Tier) -> Iterator[ShardingScheme]:
    """All schemes of a table that differ on these machines, with pieces in `tier`."""
    for share in shape.cache_shares if tier in OFFLOADED_TIERS else (0.0,):
        for scheme in _enumerate_tier_schemes(table, shape, tier):
            yield replace(scheme, cache_share=share)


def _enumerate_tier_schemes(table: TableSpec, shape: SchemeSpace, tier: Tier) -> Iterator[ShardingScheme]:
    """The same, with nothing said of rows that lie near."""
    num_ranks = shape.num_hosts * shape.devices_per_host
    blocks = -(-table.embedding_dim // COLUMN_BLOCK)
    row_counts = part_counts(min(table.num_embeddings, num_ranks, shape.max_parts))
    column_counts = part_counts(min(blocks, num_ranks, shape.max_parts))
    yield ShardingScheme(sharding_type=ShardingType.TABLE_WISE, tier=tier)
    if num_ranks == 1:
        return
    yield from (ShardingScheme(sharding_type=ShardingType.ROW_WISE, row_parts=k, tier=tier) for k in row_counts)
    yield from (
        ShardingScheme(sharding_type=ShardingType.COLUMN_WISE, column_parts=k, tier=tier) for k in column_counts
    )
    if shape.num_hosts > 1 and shape.devices_per_host > 1:
        yield from _enumerate_within_host(table, shape, tier, blocks)
    if tier == HBM:
        if shape.can_replicate:
            yield ShardingScheme(sharding_type=ShardingType.DATA_PARALLEL)
        for hot in shape.hot_rows:
            for k in row_counts:
                yield ShardingScheme(sharding_type=ShardingType.HOT_REPLICATED, row_parts=k, hot_rows=hot)


def _enumerate_within_host(table: TableSpec, shape: SchemeSpace, tier: Tier, blocks: int) -> Iterator[ShardingScheme]:
    """Schemes whose pieces share a host."""
    rows = min(shape.devices_per_host, table.num_embeddings)
    if rows > 1:
        yield ShardingScheme(sharding_type=ShardingType.TABLE_ROW_WISE, row_parts=rows, tier=tier)
        for k in part_counts(min(blocks, shape.num_hosts, max(shape.max_parts // rows, 2))):
            yield ShardingScheme(sharding_type=ShardingType.GRID, row_parts=rows, column_parts=k, tier=tier)
    for k in part_counts(min(blocks, shape.devices_per_host)):
        yield ShardingScheme(sharding_type=ShardingType.TABLE_COLUMN_WISE, column_parts=k, tier=tier)


def part_counts(most: int) -> list[int]:
    """Powers of two from 2, and `most` itself."""
    powers = [1 << bit for bit in range(1, max(most, 1).bit_length()) if 1 << bit < most]
    return [*powers, most] if most > 1 else []
