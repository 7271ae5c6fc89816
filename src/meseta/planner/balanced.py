"""The simple balanced plan: replicate what is tiny, spread what is too large for a rank, hand out the rest greedily."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from meseta.planner.cost import SampleCost, cell_bytes, check_pooling_factors, table_bytes
from meseta.spec import (
    COLUMN_BLOCK,
    FeatureSpec,
    MesetaError,
    Plan,
    Shard,
    ShardingType,
    TablePlan,
    TableSpec,
    Topology,
    check_features,
)
from meseta.spec.cut import cut

COLUMN_WISE_MIN_DIM = 64
"""Narrower tables are spread by rows: pieces of columns would be shorter than a cache line or two."""


def balanced_plan(
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    topology: Topology,
    pooling_factors: Mapping[str, float] | None = None,
) -> Plan:
    """Place every table so that the predicted bytes per sample are spread evenly over the ranks.

    - Tiny tables are data_parallel: adding up their gradients over ranks moves no more bytes than their bags would.
    - A table that costs more than an even share of what is not tiny, or takes more than `topology.hbm_bytes`, is cut
      over all ranks: by columns where it is at least 64 wide, pooled, and that exchanges fewer bytes, else by rows.
    - The rest is table_wise, the most costly first, each to the rank with the least cost that has room for it: longest
      processing time first, R. L. Graham, SIAM J. Appl. Math. 17 (1969).

    Cutting for the sake of cost is kept only where it lowers the cost of the busiest rank. Where memory runs out,
    replicas are given up first and then further tables are cut, the largest first. On one rank all are table_wise.

    Args:
        tables: all tables of the model.
        features: all features that read them.
        topology: number of ranks, and `hbm_bytes` of each if memory is to be checked (rows and optimizer state).
        pooling_factors: mean ids per sample of each feature, as `meseta prepare` counts them; 1 where not given.

    Raises MesetaError for features that do not fit the tables, bad pooling factors, and tables that do not fit the
    memory. The same input gives the same plan.
    """
    check_features(tables, features)
    pooling_factors = dict(pooling_factors or {})
    check_pooling_factors(pooling_factors, features)
    num_ranks = topology.num_ranks
    costs = {table.name: SampleCost(table, features, pooling_factors, num_ranks) for table in tables}
    whole = {table.name: costs[table.name].total_bytes(ShardingType.TABLE_WISE) for table in tables}
    tiny = {table.name for table in tables if num_ranks > 1 and _is_tiny(costs[table.name])}
    even_share = sum(cost for name, cost in whole.items() if name not in tiny) / num_ranks
    limit_bytes = float("inf") if topology.hbm_bytes is None else topology.hbm_bytes
    too_large = {table.name for table in tables if num_ranks > 1 and table_bytes(table) > limit_bytes}
    too_costly = {name for name, cost in whole.items() if num_ranks > 1 and cost > even_share} - tiny
    plans = [
        _place_within_memory(tables, costs, topology, replicated=tiny - too_large, spread=spread)
        for spread in (too_large, too_large | too_costly)
    ]
    best = min(plans, key=lambda layout: max(layout.loads)) if tables else plans[0]
    plan = Plan(num_ranks=num_ranks, tables=tuple(best.placed[table.name] for table in tables))
    plan.check(tables)
    return plan


def _is_tiny(cost: SampleCost) -> bool:
    """Whether adding up the gradient of the whole table moves no more bytes than exchanging its bags."""
    return cost.exchanged_bytes(ShardingType.DATA_PARALLEL, 1) <= cost.exchanged_bytes(ShardingType.TABLE_WISE, 1)


class _Layout:
    """Tables placed so far, with the cost and the bytes of every rank."""

    def __init__(self, num_ranks: int) -> None:
        self.placed: dict[str, TablePlan] = {}
        self.loads = [0.0] * num_ranks
        self.held_bytes = [0] * num_ranks

    def add(self, table: TableSpec, piece: TablePlan, cost: float) -> None:
        """Place one table; each shard carries its share of the cells, each replica an equal share."""
        self.placed[table.name] = dataclasses.replace(piece, cost=cost)
        for shard in piece.shards:
            share = shard.num_rows * shard.num_columns / (table.num_embeddings * table.embedding_dim)
            for rank in shard.ranks:
                self.loads[rank] += cost * share / len(shard.ranks)
                self.held_bytes[rank] += _shard_bytes(table, shard)


def _shard_bytes(table: TableSpec, shard: Shard) -> int:
    return cell_bytes(table, shard.num_rows, shard.num_columns)


def _place_within_memory(
    tables: Sequence[TableSpec],
    costs: Mapping[str, SampleCost],
    topology: Topology,
    *,
    replicated: set[str],
    spread: set[str],
) -> _Layout:
    """Place all tables, with fewer replicas and more cuts as long as that is needed to fit."""
    while True:
        layout, left_over = _place(tables, costs, topology, replicated, spread)
        if not left_over:
            return layout
        whole = [table for table in tables if table.name not in replicated | spread]
        if replicated:
            replicated = set()
        elif whole and topology.num_ranks > 1:
            spread = spread | {max(whole, key=lambda table: (table_bytes(table), table.name)).name}
        else:
            raise _does_not_fit(tables, topology, max(layout.held_bytes))


def _place(
    tables: Sequence[TableSpec],
    costs: Mapping[str, SampleCost],
    topology: Topology,
    replicated: set[str],
    spread: set[str],
) -> tuple[_Layout, list[TableSpec]]:
    """One attempt; returns the tables that no rank has room for as well."""
    num_ranks = topology.num_ranks
    all_ranks = range(num_ranks)
    limit_bytes = float("inf") if topology.hbm_bytes is None else topology.hbm_bytes
    layout = _Layout(num_ranks)
    left_over = []
    for table in tables:
        if table.name in replicated or table.name in spread:
            sharding = _spread_type(table, costs[table.name], num_ranks)
            if table.name in replicated:
                sharding = ShardingType.DATA_PARALLEL
            piece = cut(table, sharding, all_ranks)
            layout.add(table, piece, costs[table.name].total_bytes(sharding, len(piece.shards)))
            if max(layout.held_bytes) > limit_bytes:
                left_over.append(table)
    whole = [table for table in tables if table.name not in replicated | spread]
    cost_of = {table.name: costs[table.name].total_bytes(ShardingType.TABLE_WISE) for table in whole}
    for table in sorted(whole, key=lambda table: (-cost_of[table.name], -table_bytes(table), table.name)):
        room = [rank for rank in all_ranks if layout.held_bytes[rank] + table_bytes(table) <= limit_bytes]
        if not room:
            left_over.append(table)
        rank = min(room or all_ranks, key=lambda rank: (layout.loads[rank], layout.held_bytes[rank], rank))
        layout.add(table, cut(table, ShardingType.TABLE_WISE, [rank]), cost_of[table.name])
    return layout, left_over


def _spread_type(table: TableSpec, cost: SampleCost, num_ranks: int) -> ShardingType:
    """Columns where every rank gets some of them and fewer bytes are exchanged, else rows."""
    by_columns, by_rows = (
        cost.exchanged_bytes(sharding, num_ranks) for sharding in (ShardingType.COLUMN_WISE, ShardingType.ROW_WISE)
    )
    fits = cost.is_pooled and table.embedding_dim >= max(COLUMN_WISE_MIN_DIM, COLUMN_BLOCK * num_ranks)
    return ShardingType.COLUMN_WISE if fits and by_columns < by_rows else ShardingType.ROW_WISE


def _does_not_fit(tables: Sequence[TableSpec], topology: Topology, needed_bytes: int) -> MesetaError:
    largest = sorted(tables, key=lambda table: (-table_bytes(table), table.name))[:3]
    names = ", ".join(f"{table.name!r} {table_bytes(table):,} bytes" for table in largest)
    return MesetaError(
        f"planner: the tables take {sum(map(table_bytes, tables)):,} bytes with optimizer state, and the fullest of "
        f"{topology.num_ranks} ranks would hold {needed_bytes:,}, but hbm_bytes is {topology.hbm_bytes:,}; the largest "
        f"tables are {names}; use more ranks, fewer rows, a smaller embedding_dim, or rowwise_adagrad or sgd "
        "with their smaller state"
    )
