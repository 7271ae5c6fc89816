"""Who looks up what: the plan, spelled out as routes of ids and places of the columns that come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise

from meseta.embedding.message_format import MatrixLayout
from meseta.ops.columns import ColumnMove, pack_moves, unpack_moves
from meseta.spec import FeatureSpec, Plan, Shard, TableSpec
from meseta.spec.shards import HOST_REDUCED_TYPES

BucketKey = tuple[int, int]
"""(feature, row range): what ids are sorted by."""


@dataclass(frozen=True)
class Route:
    """Ids of one feature that travel to one shard, and rows that travel back."""

    feature: int
    """Index of the FeatureSpec."""
    shard: Shard
    """The piece that answers."""
    row_range: int
    """Which of the table's row ranges the piece holds."""
    column: int
    """First column of the answer inside the matrix that it is part of, see `Routing`; 0 where it is not pooled."""

    @property
    def rank(self) -> int:
        return self.shard.ranks[0]

    @property
    def bucket(self) -> BucketKey:
        """Routes to the column shards of one row range carry the same ids."""
        return self.feature, self.row_range


@dataclass(frozen=True)
class RouteRange:
    """Routes of one owner whose answers lie side by side in one matrix."""

    first: int
    """The owner's first route among them."""
    stop: int
    """The route behind the last."""
    width: int
    """Columns of the matrix."""


@dataclass(frozen=True)
class Routing:
    """All routes of a plan, the same on every rank, computed once.

    An owner answers with a matrix of bags that go straight to the ranks that asked; one of partial bags that are added
    up inside its host first (4D parallelism, arXiv 2104.05158, section 4.2.1); and the rows of each route that is not
    pooled. A grid of 8 rows x 32 columns on two hosts of two ranks, and a bag of rank 3 with rows 1 and 6:

                    columns 0..15   columns 16..31
                    (host 0)        (host 1)
        rows 0..3   rank 0          rank 2            row 1 is asked of ranks 0 and 2
        rows 4..7   rank 1          rank 3            row 6 is asked of ranks 1 and 3

        partial bags   0 -> 1, 1 -> 1    2 -> 3, 3 -> 3    in each host, to the rank with the place that 3 has in its
        whole bags     1 -> 3            3 -> 3            row range 0 + row range 1, to the rank that asked

    With exchange 'hierarchical' all bags and rows go so, added up or as they are, and ids there (the transform of arXiv
    2403.00877, section 3.1, that keeps what a model computes). Between hosts a rank then meets its twins alone, and an
    id that several ranks of a host need crosses once. The ids of the same bag:

        across         3 -> 1            3 stays           rows 1 and 6, once for each host that needs them
        inside         1 -> 0, 1 -> 1    3 -> 2, 3 -> 3    row 1 to the owner of row range 0, row 6 to that of 1
    """

    range_bounds: tuple[tuple[int, ...], ...]
    """Borders of the row ranges of each feature: (0, R) where the rows are whole."""
    routes_by_owner: tuple[tuple[Route, ...], ...]
    """Routes by owner; `direct`, then `host_reduced`, then those that are not pooled; in each by feature, row range and
    column."""
    direct: tuple[RouteRange, ...]
    """Of each owner: bags that go straight to the ranks that asked."""
    host_reduced: tuple[RouteRange, ...]
    """Of each owner: partial bags that are added up inside its host."""
    replicated: tuple[Route, ...]
    """Rows that every rank holds, whose ids stay at home; the pooled ones first, then by feature."""
    output_columns: dict[int, int]
    """First column of each pooled feature in what a lookup returns."""
    dims: tuple[int, ...]
    """Columns of each feature's table."""
    ranks_per_host: int
    """Ranks of a host."""
    is_hierarchical: bool = False
    """Whether all that crosses hosts goes by way of the rank that has the place of the one that asked."""

    @cached_property
    def row_sharded_features(self) -> tuple[int, ...]:
        """Features whose ids have to be sorted by row range."""
        return tuple(f for f, cuts in enumerate(self.range_bounds) if len(cuts) > 2)

    @property
    def output_width(self) -> int:
        """Columns of what a lookup returns."""
        return sum(self.dims[f] for f in self.output_columns)

    @cached_property
    def pooled_replicated(self) -> tuple[Route, ...]:
        """Routes that stay at home and are pooled."""
        return tuple(r for r in self.replicated if r.feature in self.output_columns)

    def host_ranks(self, rank: int) -> range:
        """All ranks of a rank's host."""
        first = rank - rank % self.ranks_per_host
        return range(first, first + self.ranks_per_host)

    def cross_host_peers(self, rank: int) -> range:
        """The ranks that have the same place as `rank`, in all hosts."""
        return range(rank % self.ranks_per_host, len(self.routes_by_owner), self.ranks_per_host)

    @cached_property
    def reduces_within_host(self) -> bool:
        """Whether partial bags are added up inside hosts."""
        return any(side.width for side in self.host_reduced)

    @property
    def reduces_across_hosts(self) -> bool:
        """Whether bags go to a rank of the owner's host first."""
        return self.is_hierarchical or self.reduces_within_host

    @cached_property
    def host_buckets(self) -> tuple[tuple[BucketKey, ...], ...]:
        """Of each host: what its ranks look up, each (feature, row range) once."""
        firsts = range(0, len(self.routes_by_owner), self.ranks_per_host)
        return tuple(
            tuple(sorted({r.bucket for rank in self.host_ranks(first) for r in self.routes_by_owner[rank]}))
            for first in firsts
        )

    @cached_property
    def host_unpooled_routes(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each host: (rank, number of its route) of those that are not pooled, where rows go by way of twins."""
        hosts = []
        for first in range(0, len(self.routes_by_owner), self.ranks_per_host):
            stops = [(rank, self.host_reduced[rank].stop) for rank in self.host_ranks(first) if self.is_hierarchical]
            hosts.append(tuple((rank, k) for rank, stop in stops for k in range(stop, len(self.routes_by_owner[rank]))))
        return tuple(hosts)

    @cached_property
    def row_buckets(self) -> tuple[BucketKey, ...]:
        """Slots of features that are not pooled, where each distinct row is asked for once: with two levels."""
        routes = (r for of_rank in self.routes_by_owner for r in of_rank)
        features = sorted({r.feature for r in routes if self.is_hierarchical and r.feature not in self.output_columns})
        return tuple((f, n) for f in features for n in range(len(self.range_bounds[f]) - 1))

    def send_layout(self, rank: int) -> tuple[tuple[BucketKey, ...], ...]:
        """What ids a rank sends to each rank at first: of its routes; with two levels to twins, of their hosts."""
        if not self.is_hierarchical:
            return tuple(tuple(r.bucket for r in routes) for routes in self.routes_by_owner)
        twins = self.cross_host_peers(rank)
        return tuple(
            self.host_buckets[r // self.ranks_per_host] if r in twins else () for r in range(len(self.routes_by_owner))
        )

    def requesting_ranks(self, owner: int, rank: int) -> Sequence[int]:
        """The ranks whose rows an owner gives to `rank`."""
        if not self.is_hierarchical:
            return (rank,)
        return self.cross_host_peers(rank) if rank in self.host_ranks(owner) else ()

    @cached_property
    def host_columns(self) -> tuple[dict[tuple[int, tuple[int, int]], int], ...]:
        """Of each host: first column of each (feature, columns of its table) in the matrix of whole bags."""
        hosts = []
        for first in range(0, len(self.routes_by_owner), self.ranks_per_host):
            pieces = {
                (r.feature, r.shard.columns)
                for rank in self.host_ranks(first)
                for r in self.routes_by_owner[rank][self.host_reduced[rank].first : self.host_reduced[rank].stop]
            }
            found, column = {}, 0
            for feature, columns in sorted(pieces):
                found[feature, columns] = column
                column += columns[1] - columns[0]
            hosts.append(found)
        return tuple(hosts)

    @cached_property
    def host_widths(self) -> tuple[int, ...]:
        """Columns of each host's matrix of whole bags."""
        return tuple(sum(b - a for _, (a, b) in columns) for columns in self.host_columns)

    @cached_property
    def routes_by_range(self) -> tuple[list[list[tuple[int, Route]]], ...]:
        """Routes of each feature as [row range][column piece] -> (index among the owner's routes, route); nothing for
        a range that stays at home."""
        found: tuple[list[list[tuple[int, Route]]], ...] = tuple([[] for _ in cuts[1:]] for cuts in self.range_bounds)
        for routes in self.routes_by_owner:
            for index, route in enumerate(routes):
                found[route.feature][route.row_range].append((index, route))
        for ranges in found:
            for pieces in ranges:
                pieces.sort(key=lambda entry: entry[1].shard.columns)
        return found

    @cached_property
    def output_moves(self) -> tuple[int, ...]:
        """From [direct bags of the owners, whole bags of the hosts, bags at home] to what a lookup returns: row
        ranges are added from the first to the last."""
        num_ranks, num_hosts = len(self.routes_by_owner), len(self.host_widths)
        replicated = {r.bucket: r for r in self.pooled_replicated}
        moves = []
        for f, to in self.output_columns.items():
            for number, ranges in enumerate(self.routes_by_range[f]):
                if (f, number) in replicated:
                    moves.append(ColumnMove(num_ranks + num_hosts, replicated[f, number].column, to, self.dims[f]))
                for index, r in ranges:
                    if index < self.direct[r.rank].stop:
                        moves.append(ColumnMove(r.rank, r.column, to + r.shard.columns[0], r.shard.num_columns))
            for host, columns in enumerate(self.host_columns):
                bags = ((piece, at) for (feature, piece), at in columns.items() if feature == f)
                moves += [ColumnMove(num_ranks + host, at, to + first, stop - first) for (first, stop), at in bags]
        return pack_moves(_split_overlapping_moves(moves))

    @cached_property
    def replicated_moves(self) -> tuple[int, ...]:
        """Those of `output_moves` that bring bags at home, from these alone."""
        last = len(self.routes_by_owner) + len(self.host_widths)
        return pack_moves(move._replace(source=0) for move in unpack_moves(self.output_moves) if move.source == last)

    @cached_property
    def received_moves(self) -> tuple[int, ...]:
        """Those of `output_moves` that bring what has travelled."""
        last = len(self.routes_by_owner) + len(self.host_widths)
        return pack_moves(move for move in unpack_moves(self.output_moves) if move.source != last)

    @cached_property
    def host_reduce_moves(self) -> tuple[tuple[int, ...], ...]:
        """Of each host: from the partial bags of its ranks to whole bags, row ranges from the first to the last."""
        hosts: list[list[tuple[tuple[int, tuple[int, int], int], ColumnMove]]] = [[] for _ in self.host_columns]
        for rank, (routes, side) in enumerate(zip(self.routes_by_owner, self.host_reduced, strict=True)):
            host = rank // self.ranks_per_host
            for r in routes[side.first : side.stop]:
                to = self.host_columns[host][r.feature, r.shard.columns]
                move = ColumnMove(rank % self.ranks_per_host, r.column, to, r.shard.num_columns)
                hosts[host].append(((r.feature, r.shard.columns, r.row_range), move))
        return tuple(pack_moves(_accumulate_row_ranges(own)) for own in hosts)

    @cached_property
    def gradient_moves(self) -> tuple[tuple[int, ...], ...]:
        """For each owner: from the gradient of what a lookup returned to that of its direct bags."""
        return tuple(
            pack_moves(
                ColumnMove(0, self.output_columns[r.feature] + r.shard.columns[0], r.column, r.shard.num_columns)
                for r in routes[side.first : side.stop]
            )
            for routes, side in zip(self.routes_by_owner, self.direct, strict=True)
        )

    @cached_property
    def host_gradient_moves(self) -> tuple[tuple[int, ...], ...]:
        """For each host: from the gradient of what a lookup returned to that of its whole bags."""
        return tuple(
            pack_moves(
                ColumnMove(0, self.output_columns[feature] + first, at, stop - first)
                for (feature, (first, stop)), at in found.items()
            )
            for found in self.host_columns
        )

    @cached_property
    def host_reduced_gradient_moves(self) -> tuple[tuple[int, ...], ...]:
        """For each owner: from the gradient of its host's whole bags to that of its partial bags."""
        owners = []
        for rank, (routes, side) in enumerate(zip(self.routes_by_owner, self.host_reduced, strict=True)):
            at = self.host_columns[rank // self.ranks_per_host]
            own = routes[side.first : side.stop]
            owners.append(
                pack_moves(ColumnMove(0, at[r.feature, r.shard.columns], r.column, r.shard.num_columns) for r in own)
            )
        return tuple(owners)

    def output_message(
        self, owner: int, rank: int, batch_sizes: Sequence[int], counts: Mapping[int, Sequence[int]]
    ) -> list[MatrixLayout]:
        """What an owner sends to one rank, with counts[r][k] rows for rank r on its route k: direct bags for each of
        `askers`; to a rank of its host, partial bags for the samples of the rank and its peers across hosts; then the
        rows of each route that is not pooled, for each of `askers`. Gradients come back alike."""
        host_reduced = self.host_reduced[owner]
        num_partial = (
            sum(batch_sizes[peer] for peer in self.cross_host_peers(rank)) if rank in self.host_ranks(owner) else 0
        )
        askers, unpooled = (
            self.requesting_ranks(owner, rank),
            range(host_reduced.stop, len(self.routes_by_owner[owner])),
        )
        rows = ((sum(counts[r][k] for r in askers), self.routes_by_owner[owner][k].shard.num_columns) for k in unpooled)
        return [
            MatrixLayout(sum(batch_sizes[r] for r in askers), self.direct_columns[owner]),
            MatrixLayout(num_partial, self.host_reduced_columns[owner], is_intra_host=True),
            *(MatrixLayout(number, (columns,)) for number, columns in rows),
        ]

    @cached_property
    def direct_columns(self) -> tuple[tuple[int, ...], ...]:
        """Of each owner: columns of each route of its direct bags."""
        return tuple(
            _route_widths(routes[: side.stop]) for routes, side in zip(self.routes_by_owner, self.direct, strict=True)
        )

    @cached_property
    def host_reduced_columns(self) -> tuple[tuple[int, ...], ...]:
        """Of each owner: columns of each route of its partial bags."""
        sides = zip(self.routes_by_owner, self.host_reduced, strict=True)
        return tuple(_route_widths(routes[side.first : side.stop]) for routes, side in sides)

    @cached_property
    def direct_pieces(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each owner: (feature, first column) of each route of its direct bags."""
        owned = zip(self.routes_by_owner, self.direct, strict=True)
        return tuple(tuple((r.feature, r.shard.columns[0]) for r in routes[: side.stop]) for routes, side in owned)

    @cached_property
    def host_pieces(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each host: (feature, first column) of what lies side by side in its whole bags."""
        return tuple(tuple((feature, first) for feature, (first, _) in columns) for columns in self.host_columns)

    @cached_property
    def host_bag_columns(self) -> tuple[tuple[int, ...], ...]:
        """Of each host: columns of these."""
        return tuple(tuple(stop - first for _, (first, stop) in columns) for columns in self.host_columns)

    def cross_host_message(self, host: int, batch_size: int, counts: Mapping[int, Sequence[int]]) -> list[MatrixLayout]:
        """What a host sends to a rank that asked for `batch_size` samples and, of its rank r, counts[r][k] rows on
        route k: whole bags that it has added up, with two levels direct bags of each of its ranks, and the rows of each
        of `host_unpooled_routes`. Gradients come back alike."""
        rows = (
            (counts[rank][k], self.routes_by_owner[rank][k].shard.num_columns)
            for rank, k in self.host_unpooled_routes[host]
        )
        return [
            self.host_bag_layout(host, batch_size),
            *(MatrixLayout(batch_size, self.direct_columns[rank]) for rank in self.forwarding_ranks(host)),
            *(MatrixLayout(number, (columns,)) for number, columns in rows),
        ]

    def forwarding_ranks(self, host: int) -> range:
        """The ranks of a host whose direct bags go by way of twins."""
        return self.host_ranks(host * self.ranks_per_host) if self.is_hierarchical else range(0)

    def host_bag_layout(self, host: int, batch_size: int) -> MatrixLayout:
        """Whole bags of a host."""
        return MatrixLayout(batch_size, self.host_bag_columns[host])


def make_routing(tables: Sequence[TableSpec], features: Sequence[FeatureSpec], plan: Plan) -> Routing:
    """Spell a checked plan out for these features."""
    by_name = {table.name: table for table in tables}
    dims = tuple(by_name[feature.table].embedding_dim for feature in features)
    pooled = [f for f, feature in enumerate(features) if feature.pooling != "none"]
    # Inside a single host, adding up on the way is what the ranks that asked do anyway.
    sums = plan.ranks_per_host < plan.num_ranks
    direct: list[list[Route]] = [[] for _ in range(plan.num_ranks)]
    host_reduced: list[list[Route]] = [[] for _ in range(plan.num_ranks)]
    unpooled: list[list[Route]] = [[] for _ in range(plan.num_ranks)]
    replicated: list[Route] = []
    cuts = []
    for index, feature in enumerate(features):
        entry = plan[feature.table]
        starts = sorted({shard.rows[0] for shard in entry.shards})
        cuts.append((*starts, by_name[feature.table].num_embeddings))
        parts = Counter((shard.ranks[0] // plan.ranks_per_host, shard.columns) for shard in entry.shards)
        for shard in entry.shards:
            is_host_reduced = sums and entry.sharding in HOST_REDUCED_TYPES
            if plan.is_hierarchical:
                is_host_reduced = parts[shard.ranks[0] // plan.ranks_per_host, shard.columns] > 1
            route = Route(index, shard, starts.index(shard.rows[0]), 0)
            if entry.is_replica(shard):
                replicated.append(route)
            elif feature.pooling == "none":
                unpooled[route.rank].append(route)
            else:
                (host_reduced if is_host_reduced else direct)[route.rank].append(route)
    by_rank, matrices = [], []
    for own in zip(direct, host_reduced, unpooled, strict=True):
        first, second, rows = (sorted(routes, key=lambda r: (*r.bucket, r.shard.columns)) for routes in own)
        by_rank.append((*_assign_columns(first), *_assign_columns(second), *rows))
        stops = (0, len(first), len(first) + len(second))
        matrices.append(
            [RouteRange(a, b, sum(r.shard.num_columns for r in by_rank[-1][a:b])) for a, b in pairwise(stops)]
        )
    replicated.sort(key=lambda r: (r.feature not in pooled, r.feature))
    num_pooled = sum(r.feature in pooled for r in replicated)
    return Routing(
        range_bounds=tuple(cuts),
        routes_by_owner=tuple(by_rank),
        direct=tuple(own[0] for own in matrices),
        host_reduced=tuple(own[1] for own in matrices),
        replicated=(*_assign_columns(replicated[:num_pooled]), *replicated[num_pooled:]),
        output_columns=dict(zip(pooled, accumulate((dims[f] for f in pooled), initial=0), strict=False)),
        dims=dims,
        ranks_per_host=plan.ranks_per_host,
        is_hierarchical=plan.is_hierarchical,
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


def _route_widths(routes: Sequence[Route]) -> tuple[int, ...]:
    return tuple(route.shard.num_columns for route in routes)


def _assign_columns(routes: Sequence[Route]) -> list[Route]:
    """The routes, their columns one behind the other."""
    placed, column = [], 0
    for route in routes:
        placed.append(Route(route.feature, route.shard, route.row_range, column))
        column += route.shard.num_columns
    return placed


def _split_overlapping_moves(moves: Sequence[ColumnMove]) -> list[ColumnMove]:
    """The same moves, cut where what they bring is written in some columns and added to earlier moves in others."""
    cut: list[ColumnMove] = []
    written: set[int] = set()
    for move in moves:
        columns = range(move.target, move.target + move.width)
        for is_added, run in groupby(columns, written.__contains__):
            first, *rest = run
            start = move.start + first - move.target
            cut.append(ColumnMove(move.source, start, first, 1 + len(rest), int(is_added)))
        written.update(columns)
    return cut


def _accumulate_row_ranges(moves: Sequence[tuple[tuple[int, tuple[int, int], int], ColumnMove]]) -> list[ColumnMove]:
    """Moves with their (feature, columns, row range): ordered, and added where an earlier range was written."""
    ordered, written = [], set()
    for (*place, _), move in sorted(moves):
        ordered.append(move._replace(add=int(tuple(place) in written)))
        written.add(tuple(place))
    return ordered
