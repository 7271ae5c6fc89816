"""Who looks up what: the plan, spelled out as routes of ids and places of the columns that come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise

from meseta.embedding.wire import Matrix
from meseta.ops.columns import Move, join_moves, split_moves
from meseta.spec import FeatureSpec, Plan, Shard, TableSpec
from meseta.spec.shards import SUMMED_IN_HOST

Slot = tuple[int, int]
"""(feature, row range): what ids are sorted by."""


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
    """First column of the answer inside the matrix that it is part of, see `Routing`; 0 where it is not pooled."""

    @property
    def rank(self) -> int:
        return self.shard.ranks[0]

    @property
    def slot(self) -> Slot:
        """Routes to the column shards of one row range carry the same ids."""
        return self.feature, self.range


@dataclass(frozen=True)
class Side:
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

    With exchange 'two_level' all bags and rows go so, added up or as they are, and ids there (the transform of arXiv
    2403.00877, section 3.1, that keeps what a model computes). Between hosts a rank then meets its twins alone, and an
    id that several ranks of a host need crosses once. The ids of the same bag:

        across         3 -> 1            3 stays           rows 1 and 6, once for each host that needs them
        inside         1 -> 0, 1 -> 1    3 -> 2, 3 -> 3    row 1 to the owner of row range 0, row 6 to that of 1
    """

    cuts: tuple[tuple[int, ...], ...]
    """Borders of the row ranges of each feature: (0, R) where the rows are whole."""
    by_rank: tuple[tuple[Route, ...], ...]
    """Routes by owner; `direct`, then `host_reduced`, then those that are not pooled; in each by feature, row range and
    column."""
    direct: tuple[Side, ...]
    """Of each owner: bags that go straight to the ranks that asked."""
    host_reduced: tuple[Side, ...]
    """Of each owner: partial bags that are added up inside its host."""
    replicated: tuple[Route, ...]
    """Rows that every rank holds, whose ids stay at home; the pooled ones first, then by feature."""
    out_columns: dict[int, int]
    """First column of each pooled feature in what a lookup returns."""
    dims: tuple[int, ...]
    """Columns of each feature's table."""
    per_host: int
    """Ranks of a host."""
    two_level: bool = False
    """Whether all that crosses hosts goes by way of the rank that has the place of the one that asked."""

    @cached_property
    def cut_features(self) -> tuple[int, ...]:
        """Features whose ids have to be sorted by row range."""
        return tuple(f for f, cuts in enumerate(self.cuts) if len(cuts) > 2)

    @property
    def out_width(self) -> int:
        """Columns of what a lookup returns."""
        return sum(self.dims[f] for f in self.out_columns)

    @cached_property
    def pooled_replicated(self) -> tuple[Route, ...]:
        """Routes that stay at home and are pooled."""
        return tuple(r for r in self.replicated if r.feature in self.out_columns)

    def ranks_of_host(self, rank: int) -> range:
        """All ranks of a rank's host."""
        first = rank - rank % self.per_host
        return range(first, first + self.per_host)

    def peers_across_hosts(self, rank: int) -> range:
        """The ranks that have the same place as `rank`, in all hosts."""
        return range(rank % self.per_host, len(self.by_rank), self.per_host)

    @cached_property
    def sums_bags(self) -> bool:
        """Whether partial bags are added up inside hosts."""
        return any(side.width for side in self.host_reduced)

    @property
    def goes_by_twins(self) -> bool:
        """Whether bags go to a rank of the owner's host first."""
        return self.two_level or self.sums_bags

    @cached_property
    def host_slots(self) -> tuple[tuple[Slot, ...], ...]:
        """Of each host: what its ranks look up, each (feature, row range) once."""
        firsts = range(0, len(self.by_rank), self.per_host)
        return tuple(
            tuple(sorted({r.slot for rank in self.ranks_of_host(first) for r in self.by_rank[rank]}))
            for first in firsts
        )

    @cached_property
    def host_rows(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each host: (rank, number of its route) of those that are not pooled, where rows go by way of twins."""
        hosts = []
        for first in range(0, len(self.by_rank), self.per_host):
            stops = [(rank, self.host_reduced[rank].stop) for rank in self.ranks_of_host(first) if self.two_level]
            hosts.append(tuple((rank, k) for rank, stop in stops for k in range(stop, len(self.by_rank[rank]))))
        return tuple(hosts)

    @cached_property
    def row_slots(self) -> tuple[Slot, ...]:
        """Slots of features that are not pooled, where each distinct row is asked for once: with two levels."""
        routes = (r for of_rank in self.by_rank for r in of_rank)
        features = sorted({r.feature for r in routes if self.two_level and r.feature not in self.out_columns})
        return tuple((f, n) for f in features for n in range(len(self.cuts[f]) - 1))

    def sent_slots(self, rank: int) -> tuple[tuple[Slot, ...], ...]:
        """What ids a rank sends to each rank at first: of its routes; with two levels to twins, of their hosts."""
        if not self.two_level:
            return tuple(tuple(r.slot for r in routes) for routes in self.by_rank)
        twins = self.peers_across_hosts(rank)
        return tuple(self.host_slots[r // self.per_host] if r in twins else () for r in range(len(self.by_rank)))

    def askers(self, owner: int, rank: int) -> Sequence[int]:
        """The ranks whose rows an owner gives to `rank`."""
        if not self.two_level:
            return (rank,)
        return self.peers_across_hosts(rank) if rank in self.ranks_of_host(owner) else ()

    @cached_property
    def host_columns(self) -> tuple[dict[tuple[int, tuple[int, int]], int], ...]:
        """Of each host: first column of each (feature, columns of its table) in the matrix of whole bags."""
        hosts = []
        for first in range(0, len(self.by_rank), self.per_host):
            pieces = {
                (r.feature, r.shard.columns)
                for rank in self.ranks_of_host(first)
                for r in self.by_rank[rank][self.host_reduced[rank].first : self.host_reduced[rank].stop]
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
    def pieces(self) -> tuple[list[list[tuple[int, Route]]], ...]:
        """Routes of each feature as [row range][column piece] -> (index among the owner's routes, route); nothing for
        a range that stays at home."""
        found: tuple[list[list[tuple[int, Route]]], ...] = tuple([[] for _ in cuts[1:]] for cuts in self.cuts)
        for routes in self.by_rank:
            for index, route in enumerate(routes):
                found[route.feature][route.range].append((index, route))
        for ranges in found:
            for pieces in ranges:
                pieces.sort(key=lambda entry: entry[1].shard.columns)
        return found

    @cached_property
    def answer_moves(self) -> tuple[int, ...]:
        """From [direct bags of the owners, whole bags of the hosts, bags at home] to what a lookup returns: row
        ranges are added from the first to the last."""
        num_ranks, num_hosts = len(self.by_rank), len(self.host_widths)
        replicated = {r.slot: r for r in self.pooled_replicated}
        moves = []
        for f, to in self.out_columns.items():
            for number, ranges in enumerate(self.pieces[f]):
                if (f, number) in replicated:
                    moves.append(Move(num_ranks + num_hosts, replicated[f, number].column, to, self.dims[f]))
                for index, r in ranges:
                    if index < self.direct[r.rank].stop:
                        moves.append(Move(r.rank, r.column, to + r.shard.columns[0], r.shard.num_columns))
            for host, columns in enumerate(self.host_columns):
                bags = ((piece, at) for (feature, piece), at in columns.items() if feature == f)
                moves += [Move(num_ranks + host, at, to + first, stop - first) for (first, stop), at in bags]
        return join_moves(_added_where_written(moves))

    @cached_property
    def moves_at_home(self) -> tuple[int, ...]:
        """Those of `answer_moves` that bring bags at home, from these alone."""
        last = len(self.by_rank) + len(self.host_widths)
        return join_moves(move._replace(source=0) for move in split_moves(self.answer_moves) if move.source == last)

    @cached_property
    def moves_of_others(self) -> tuple[int, ...]:
        """Those of `answer_moves` that bring what has travelled."""
        last = len(self.by_rank) + len(self.host_widths)
        return join_moves(move for move in split_moves(self.answer_moves) if move.source != last)

    @cached_property
    def host_moves(self) -> tuple[tuple[int, ...], ...]:
        """Of each host: from the partial bags of its ranks to whole bags, row ranges from the first to the last."""
        hosts: list[list[tuple[tuple[int, tuple[int, int], int], Move]]] = [[] for _ in self.host_columns]
        for rank, (routes, side) in enumerate(zip(self.by_rank, self.host_reduced, strict=True)):
            host = rank // self.per_host
            for r in routes[side.first : side.stop]:
                to = self.host_columns[host][r.feature, r.shard.columns]
                move = Move(rank % self.per_host, r.column, to, r.shard.num_columns)
                hosts[host].append(((r.feature, r.shard.columns, r.range), move))
        return tuple(join_moves(_added_after_the_first(own)) for own in hosts)

    @cached_property
    def gradient_moves(self) -> tuple[tuple[int, ...], ...]:
        """For each owner: from the gradient of what a lookup returned to that of its direct bags."""
        return tuple(
            join_moves(
                Move(0, self.out_columns[r.feature] + r.shard.columns[0], r.column, r.shard.num_columns)
                for r in routes[side.first : side.stop]
            )
            for routes, side in zip(self.by_rank, self.direct, strict=True)
        )

    @cached_property
    def host_gradient_moves(self) -> tuple[tuple[int, ...], ...]:
        """For each host: from the gradient of what a lookup returned to that of its whole bags."""
        return tuple(
            join_moves(
                Move(0, self.out_columns[feature] + first, at, stop - first)
                for (feature, (first, stop)), at in found.items()
            )
            for found in self.host_columns
        )

    @cached_property
    def host_reduced_gradient_moves(self) -> tuple[tuple[int, ...], ...]:
        """For each owner: from the gradient of its host's whole bags to that of its partial bags."""
        owners = []
        for rank, (routes, side) in enumerate(zip(self.by_rank, self.host_reduced, strict=True)):
            at = self.host_columns[rank // self.per_host]
            own = routes[side.first : side.stop]
            owners.append(
                join_moves(Move(0, at[r.feature, r.shard.columns], r.column, r.shard.num_columns) for r in own)
            )
        return tuple(owners)

    def answer_message(
        self, owner: int, rank: int, batch_sizes: Sequence[int], counts: Mapping[int, Sequence[int]]
    ) -> list[Matrix]:
        """What an owner sends to one rank, with counts[r][k] rows for rank r on its route k: direct bags for each of
        `askers`; to a rank of its host, partial bags for the samples of the rank and its peers across hosts; then the
        rows of each route that is not pooled, for each of `askers`. Gradients come back alike."""
        host_reduced = self.host_reduced[owner]
        num_partial = (
            sum(batch_sizes[peer] for peer in self.peers_across_hosts(rank)) if rank in self.ranks_of_host(owner) else 0
        )
        askers, unpooled = self.askers(owner, rank), range(host_reduced.stop, len(self.by_rank[owner]))
        rows = ((sum(counts[r][k] for r in askers), self.by_rank[owner][k].shard.num_columns) for k in unpooled)
        return [
            Matrix(sum(batch_sizes[r] for r in askers), self.direct_columns[owner]),
            Matrix(num_partial, self.host_reduced_columns[owner], stays_inside=True),
            *(Matrix(number, (columns,)) for number, columns in rows),
        ]

    @cached_property
    def direct_columns(self) -> tuple[tuple[int, ...], ...]:
        """Of each owner: columns of each route of its direct bags."""
        return tuple(_columns(routes[: side.stop]) for routes, side in zip(self.by_rank, self.direct, strict=True))

    @cached_property
    def host_reduced_columns(self) -> tuple[tuple[int, ...], ...]:
        """Of each owner: columns of each route of its partial bags."""
        sides = zip(self.by_rank, self.host_reduced, strict=True)
        return tuple(_columns(routes[side.first : side.stop]) for routes, side in sides)

    @cached_property
    def direct_pieces(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each owner: (feature, first column) of each route of its direct bags."""
        owned = zip(self.by_rank, self.direct, strict=True)
        return tuple(tuple((r.feature, r.shard.columns[0]) for r in routes[: side.stop]) for routes, side in owned)

    @cached_property
    def host_pieces(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Of each host: (feature, first column) of what lies side by side in its whole bags."""
        return tuple(tuple((feature, first) for feature, (first, _) in columns) for columns in self.host_columns)

    @cached_property
    def host_bag_columns(self) -> tuple[tuple[int, ...], ...]:
        """Of each host: columns of these."""
        return tuple(tuple(stop - first for _, (first, stop) in columns) for columns in self.host_columns)

    def twin_message(self, host: int, batch_size: int, counts: Mapping[int, Sequence[int]]) -> list[Matrix]:
        """What a host sends to a rank that asked for `batch_size` samples and, of its rank r, counts[r][k] rows on
        route k: whole bags that it has added up, with two levels direct bags of each of its ranks, and the rows of each
        of `host_rows`. Gradients come back alike."""
        rows = ((counts[rank][k], self.by_rank[rank][k].shard.num_columns) for rank, k in self.host_rows[host])
        return [
            self.host_bags(host, batch_size),
            *(Matrix(batch_size, self.direct_columns[rank]) for rank in self.handing_on(host)),
            *(Matrix(number, (columns,)) for number, columns in rows),
        ]

    def handing_on(self, host: int) -> range:
        """The ranks of a host whose direct bags go by way of twins."""
        return self.ranks_of_host(host * self.per_host) if self.two_level else range(0)

    def host_bags(self, host: int, batch_size: int) -> Matrix:
        """Whole bags of a host."""
        return Matrix(batch_size, self.host_bag_columns[host])


def make_routing(tables: Sequence[TableSpec], features: Sequence[FeatureSpec], plan: Plan) -> Routing:
    """Spell a checked plan out for these features."""
    by_name = {table.name: table for table in tables}
    dims = tuple(by_name[feature.table].embedding_dim for feature in features)
    pooled = [f for f, feature in enumerate(features) if feature.pooling != "none"]
    # Inside a single host, adding up on the way is what the ranks that asked do anyway.
    sums = plan.per_host < plan.num_ranks
    direct: list[list[Route]] = [[] for _ in range(plan.num_ranks)]
    host_reduced: list[list[Route]] = [[] for _ in range(plan.num_ranks)]
    unpooled: list[list[Route]] = [[] for _ in range(plan.num_ranks)]
    replicated: list[Route] = []
    cuts = []
    for index, feature in enumerate(features):
        entry = plan[feature.table]
        starts = sorted({shard.rows[0] for shard in entry.shards})
        cuts.append((*starts, by_name[feature.table].num_embeddings))
        parts = Counter((shard.ranks[0] // plan.per_host, shard.columns) for shard in entry.shards)
        for shard in entry.shards:
            is_host_reduced = sums and entry.sharding in SUMMED_IN_HOST
            if plan.is_two_level:
                is_host_reduced = parts[shard.ranks[0] // plan.per_host, shard.columns] > 1
            route = Route(index, shard, starts.index(shard.rows[0]), 0)
            if entry.is_replica(shard):
                replicated.append(route)
            elif feature.pooling == "none":
                unpooled[route.rank].append(route)
            else:
                (host_reduced if is_host_reduced else direct)[route.rank].append(route)
    by_rank, matrices = [], []
    for own in zip(direct, host_reduced, unpooled, strict=True):
        first, second, rows = (sorted(routes, key=lambda r: (*r.slot, r.shard.columns)) for routes in own)
        by_rank.append((*_side_by_side(first), *_side_by_side(second), *rows))
        stops = (0, len(first), len(first) + len(second))
        matrices.append([Side(a, b, sum(r.shard.num_columns for r in by_rank[-1][a:b])) for a, b in pairwise(stops)])
    replicated.sort(key=lambda r: (r.feature not in pooled, r.feature))
    num_pooled = sum(r.feature in pooled for r in replicated)
    return Routing(
        cuts=tuple(cuts),
        by_rank=tuple(by_rank),
        direct=tuple(own[0] for own in matrices),
        host_reduced=tuple(own[1] for own in matrices),
        replicated=(*_side_by_side(replicated[:num_pooled]), *replicated[num_pooled:]),
        out_columns=dict(zip(pooled, accumulate((dims[f] for f in pooled), initial=0), strict=False)),
        dims=dims,
        per_host=plan.per_host,
        two_level=plan.is_two_level,
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


def _columns(routes: Sequence[Route]) -> tuple[int, ...]:
    return tuple(route.shard.num_columns for route in routes)


def _side_by_side(routes: Sequence[Route]) -> list[Route]:
    """The routes, their columns one behind the other."""
    placed, column = [], 0
    for route in routes:
        placed.append(Route(route.feature, route.shard, route.range, column))
        column += route.shard.num_columns
    return placed


def _added_where_written(moves: Sequence[Move]) -> list[Move]:
    """The same moves, cut where what they bring is written in some columns and added to earlier moves in others."""
    cut: list[Move] = []
    written: set[int] = set()
    for move in moves:
        columns = range(move.to, move.to + move.width)
        for is_added, run in groupby(columns, written.__contains__):
            first, *rest = run
            start = move.start + first - move.to
            cut.append(Move(move.source, start, first, 1 + len(rest), int(is_added)))
        written.update(columns)
    return cut


def _added_after_the_first(moves: Sequence[tuple[tuple[int, tuple[int, int], int], Move]]) -> list[Move]:
    """Moves with their (feature, columns, row range): ordered, and added where an earlier range was written."""
    ordered, written = [], set()
    for (*place, _), move in sorted(moves):
        ordered.append(move._replace(add=int(tuple(place) in written)))
        written.add(tuple(place))
    return ordered
