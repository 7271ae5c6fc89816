"""Sharding schemes of a table among which the search chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meseta.spec import COLUMN_BLOCK, Shard, ShardingType, TablePlan, TableSpec, Tier
from meseta.spec.tiers import DEFAULT_CACHE_SHARE, HBM, OFFLOADED_TIERS

Ints = NDArray[np.int64]

WITHIN_HOST_TYPES = (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID)
"""Sharding types that are equal to another type on a single host."""


@dataclass(frozen=True, kw_only=True)
class ShardingScheme:
    """Sharding type, numbers of shards and tier of one table, without ranks."""

    sharding_type: ShardingType
    row_parts: int = 1
    """Maximum number of row ranges."""
    column_parts: int = 1
    """Maximum number of column ranges."""
    tier: Tier = HBM
    hot_rows: int = 0
    """Number of replicated rows of `hot_replicated`. `data_parallel` replicates all rows."""
    cache_share: float = 0.0
    """Share of the rows that fit in the cache of an offloaded tier. The cache is larger if batches in flight need more
    rows."""

    @property
    def is_within_host(self) -> bool:
        """Whether shards share a host: all shards of a table, or for `grid` those of a column range."""
        return self.sharding_type in WITHIN_HOST_TYPES

    def shard_rectangles(self, num_rows: int, num_columns: int) -> Ints:
        """Return (first row, stop row, first column, stop column) of each shard with one owner [p, 4].

        Ranges have equal sizes, as in `meseta.spec.shards.shard_table`. Shards are ordered by column range, then by row
        range.
        """
        if self.sharding_type is ShardingType.DATA_PARALLEL:
            return np.zeros((0, 4), np.int64)
        rows = _split_range(self.hot_rows, num_rows, self.row_parts, 1)
        columns = _split_range(0, num_columns, self.column_parts, COLUMN_BLOCK)
        pieces = np.empty((len(columns), len(rows), 4), np.int64)
        pieces[:, :, :2], pieces[:, :, 2:] = rows, columns[:, None]
        return pieces.reshape(-1, 4)

    def describe(self) -> str:
        """Return a short description for reports."""
        parts = [str(self.row_parts)] * (self.row_parts > 1) + [str(self.column_parts)] * (self.column_parts > 1)
        text = f"{self.sharding_type}" + (f" {'x'.join(parts)}" if parts else "")
        text += f", {self.hot_rows:,} hot rows" if self.sharding_type is ShardingType.HOT_REPLICATED else ""
        near = f", {100 * self.cache_share:.3g} % cached" if self.cache_share else ""
        return text + (f" in {self.tier}{near}" if self.tier != HBM else "")


def _split_range(first: int, last: int, parts: int, align: int) -> Ints:
    """Split a range into at most `parts` equal parts [k, 2]. The last part may be shorter."""
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
    """Return a table's plan with one shard per entry of `ranks`, and replicas on all ranks. `cache_rows` is the
    capacity of each cache, or 0."""
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
    """Limits of the schemes that are considered for a table."""

    num_hosts: int
    devices_per_host: int
    max_parts: int
    """Number of shards beyond which neither balance nor memory improves."""
    hot_rows: tuple[int, ...] = ()  # numbers of rows to replicate in `hot_replicated`
    can_replicate: bool = True  # whether `data_parallel` is considered
    cache_shares: tuple[float, ...] = (DEFAULT_CACHE_SHARE,)
    """Shares of the rows that the cache of an offloaded tier may have."""


def enumerate_schemes(table: TableSpec, shape: SchemeSpace, tier: Tier) -> Iterator[ShardingScheme]:
    """Yield all different schemes of a table in one tier."""
    for share in shape.cache_shares if tier in OFFLOADED_TIERS else (0.0,):
        for scheme in _enumerate_tier_schemes(table, shape, tier):
            yield replace(scheme, cache_share=share)


def _enumerate_tier_schemes(table: TableSpec, shape: SchemeSpace, tier: Tier) -> Iterator[ShardingScheme]:
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
    rows = min(shape.devices_per_host, table.num_embeddings)
    if rows > 1:
        yield ShardingScheme(sharding_type=ShardingType.TABLE_ROW_WISE, row_parts=rows, tier=tier)
        for k in part_counts(min(blocks, shape.num_hosts, max(shape.max_parts // rows, 2))):
            yield ShardingScheme(sharding_type=ShardingType.GRID, row_parts=rows, column_parts=k, tier=tier)
    for k in part_counts(min(blocks, shape.devices_per_host)):
        yield ShardingScheme(sharding_type=ShardingType.TABLE_COLUMN_WISE, column_parts=k, tier=tier)


def part_counts(most: int) -> list[int]:
    """Return the powers of two from 2 to `most`, and `most` itself. Empty if `most` is 1."""
    powers = [1 << bit for bit in range(1, max(most, 1).bit_length()) if 1 << bit < most]
    return [*powers, most] if most > 1 else []
