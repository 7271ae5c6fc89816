"""Who looks up what: the plan, spelled out as routes of ids and places of the columns that come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meseta.spec import FeatureSpec, Plan, Shard, ShardingType, TableSpec


@dataclass(frozen=True)
class Route:
    """Ids of one feature that travel to one shard, and rows that travel back."""

    feature: int
    """Index of the FeatureSpec."""
    shard: Shard
    """The piece that answers."""
    range: int
    """Which of the table's row ranges the piece holds."""
    column: int
    """First column of the answer inside the owner's pooled output (pooled routes), else 0."""

    @property
    def rank(self) -> int:
        return self.shard.ranks[0]


@dataclass(frozen=True)
class Routing:
    """All routes of a plan, the same on every rank, computed once."""

    num_ranks: int
    cuts: dict[int, tuple[int, ...]]
    """Borders of the row ranges of each routed feature: (0, R) where the rows are whole."""
    by_rank: tuple[tuple[Route, ...], ...]
    """Routes by owner; the pooled ones first, then by feature, row range and column."""
    num_pooled: tuple[int, ...]
    """How many of an owner's routes are pooled."""
    pooled_columns: tuple[int, ...]
    """Width of each owner's pooled output."""
    replicated: tuple[int, ...]
    """Features whose table every rank holds; their ids stay at home."""

    @cached_property
    def pieces(self) -> dict[int, list[list[tuple[int, Route]]]]:
        """Routes of each feature as [row range][column piece] -> (index among the owner's routes, route)."""
        found: dict[int, list[list[tuple[int, Route]]]] = {f: [[] for _ in cuts[1:]] for f, cuts in self.cuts.items()}
        for routes in self.by_rank:
            for index, route in enumerate(routes):
                found[route.feature][route.range].append((index, route))
        for ranges in found.values():
            for pieces in ranges:
                pieces.sort(key=lambda entry: entry[1].shard.columns)
        return found


def make_routing(tables: Sequence[TableSpec], features: Sequence[FeatureSpec], plan: Plan) -> Routing:
    """Spell a checked plan out for these features."""
    by_rank: list[list[Route]] = [[] for _ in range(plan.num_ranks)]
    cuts: dict[int, tuple[int, ...]] = {}
    replicated = []
    for index, feature in enumerate(features):
        entry = plan[feature.table]
        if entry.sharding is ShardingType.DATA_PARALLEL:
            replicated.append(index)
            continue
        starts = sorted({shard.rows[0] for shard in entry.shards})
        rows = next(table.num_embeddings for table in tables if table.name == feature.table)
        cuts[index] = (*starts, rows)
        for shard in entry.shards:
            by_rank[shard.ranks[0]].append(Route(index, shard, starts.index(shard.rows[0]), 0))
    placed, num_pooled, widths = [], [], []
    for routes in by_rank:
        routes.sort(key=lambda r: (features[r.feature].pooling == "none", r.feature, r.range, r.shard.columns))
        column, ordered = 0, []
        for route in routes:
            pooled = features[route.feature].pooling != "none"
            ordered.append(Route(route.feature, route.shard, route.range, column if pooled else 0))
            column += route.shard.num_columns if pooled else 0
        placed.append(tuple(ordered))
        num_pooled.append(sum(features[r.feature].pooling != "none" for r in ordered))
        widths.append(column)
    return Routing(
        num_ranks=plan.num_ranks,
        cuts=cuts,
        by_rank=tuple(placed),
        num_pooled=tuple(num_pooled),
        pooled_columns=tuple(widths),
        replicated=tuple(replicated),
    )


def column_groups(shards: Sequence[Shard], plan: Plan) -> list[tuple[Shard, ...]]:
    """For each row range that `shards` touch, all shards of the plan that hold its columns, ordered by column.

    Groups are ordered by (table, row), so two ranks meet the groups that they share in one order.
    """
    order = {entry.table: index for index, entry in enumerate(plan.tables)}
    ranges = sorted({(order[s.table], s.table, s.rows) for s in shards})
    return [
        tuple(sorted((s for s in plan[table].shards if s.rows == rows), key=lambda s: s.columns))
        for _, table, rows in ranges
    ]
