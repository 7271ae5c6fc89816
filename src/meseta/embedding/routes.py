"""Who looks up what: the plan, spelled out as routes of ids and places of the columns that come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meseta.ops.columns import Move, join_moves
from meseta.spec import FeatureSpec, MesetaError, Plan, Shard, ShardingType, TableSpec


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

    @property
    def slot(self) -> tuple[int, int]:
        """(feature, row range): routes to the column shards of one row range carry the same ids."""
        return self.feature, self.range


@dataclass(frozen=True)
class Routing:
    """All routes of a plan, the same on every rank, computed once."""

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
    out_columns: dict[int, int]
    """First column of each pooled feature in what a lookup returns."""
    dims: tuple[int, ...]
    """Columns of each feature's table."""

    @cached_property
    def cut_features(self) -> tuple[int, ...]:
        """Features whose ids have to be sorted by row range."""
        return tuple(f for f, cuts in self.cuts.items() if len(cuts) > 2)

    @property
    def out_width(self) -> int:
        """Columns of what a lookup returns."""
        return sum(self.dims[f] for f in self.out_columns)

    @cached_property
    def pooled_replicas(self) -> tuple[int, ...]:
        """Replicated features that are pooled."""
        return tuple(f for f in self.replicated if f in self.out_columns)

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

    @cached_property
    def answer_moves(self) -> tuple[int, ...]:
        """From [pooled outputs of the owners, pooled replicas side by side] to what a lookup returns: row ranges are
        added from the first to the last."""
        moves, column = [], 0
        for f, to in self.out_columns.items():
            for number, ranges in enumerate(self.pieces.get(f, [])):
                for _, r in ranges:
                    moves.append(
                        Move(r.rank, r.column, to + r.shard.columns[0], r.shard.num_columns, add=int(number > 0))
                    )
        for f in self.pooled_replicas:
            moves.append(Move(len(self.by_rank), column, self.out_columns[f], self.dims[f]))
            column += self.dims[f]
        return join_moves(moves)

    @cached_property
    def gradient_moves(self) -> tuple[tuple[int, ...], ...]:
        """For each owner: from the gradient of what a lookup returned to that of its pooled output."""
        return tuple(
            join_moves(
                Move(0, self.out_columns[r.feature] + r.shard.columns[0], r.column, r.shard.num_columns)
                for r in routes[:first]
            )
            for routes, first in zip(self.by_rank, self.num_pooled, strict=True)
        )

    def answer_shapes(self, owner: int, num_samples: int, counts: Sequence[int]) -> list[tuple[int, int]]:
        """What an owner answers for so many samples of one rank, with counts[k] ids on its route k: its pooled
        columns, then the rows of each unpooled route. Gradients come back in the same shapes."""
        first = self.num_pooled[owner]
        unpooled = zip(counts[first:], self.by_rank[owner][first:], strict=True)
        return [(num_samples, self.pooled_columns[owner]), *((n, r.shard.num_columns) for n, r in unpooled)]


def make_routing(tables: Sequence[TableSpec], features: Sequence[FeatureSpec], plan: Plan) -> Routing:
    """Spell a checked plan out for these features."""
    by_name = {table.name: table for table in tables}
    by_rank: list[list[Route]] = [[] for _ in range(plan.num_ranks)]
    cuts: dict[int, tuple[int, ...]] = {}
    replicated = []
    for index, feature in enumerate(features):
        entry = plan[feature.table]
        if entry.sharding is ShardingType.DATA_PARALLEL:
            replicated.append(index)
            continue
        if entry.sharding is ShardingType.HOT_REPLICATED:
            raise MesetaError(f"plan: table {entry.table!r}: hot_replicated cannot be trained; choose another scheme")
        starts = sorted({shard.rows[0] for shard in entry.shards})
        cuts[index] = (*starts, by_name[feature.table].num_embeddings)
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
    dims = tuple(by_name[feature.table].embedding_dim for feature in features)
    pooled_features = [f for f, feature in enumerate(features) if feature.pooling != "none"]
    return Routing(
        cuts=cuts,
        by_rank=tuple(placed),
        num_pooled=tuple(num_pooled),
        pooled_columns=tuple(widths),
        replicated=tuple(replicated),
        out_columns={f: sum(dims[g] for g in pooled_features[:n]) for n, f in enumerate(pooled_features)},
        dims=dims,
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
