"""Layout of the matrices of an exchange in messages between ranks, as numbers or encoded by a codec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from meseta.ops.codec import HalfRange, StochasticRounding, decode_columns, encode_columns, rounding_key
from meseta.ops.columns import ColumnMove, pack_moves, place_columns, unpack_moves
from meseta.ops.memory import empty
from meseta.sparse.shapes import Int
from meseta.spec import FeatureSpec, Plan, Shard, TableSpec
from meseta.spec.codecs import FP32, Codec
from meseta.spec.shards import HOST_REDUCED_TYPES

# A message is a sequence of matrices. Without a codec, a buffer has numbers:
#
#     | direct bags [B, columns] | partial bags [n, columns] | rows of a route [ids, columns] | ...
#
# With a codec, a buffer has bytes. Data that stays inside a host is not encoded. It comes first, where it is aligned:
#
#     | partial bags, float32 | direct bags, encoded | rows of a route, encoded | ... | up to 3 padding bytes

MAX_BAG_SIZE = 2**31
"""Exclusive upper bound of the number of ids in a bag."""


class MatrixLayout(NamedTuple):
    """Shape and encoding of one matrix in a message."""

    num_rows: int
    pieces: tuple[int, ...]
    """Number of columns of each adjacent piece. Each piece starts a new block of the codec."""
    is_intra_host: bool = False
    """Whether the matrix is only sent inside a host, and therefore not encoded."""

    @property
    def width(self) -> int:
        return sum(self.pieces)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.width


MessageLayout = Sequence[MatrixLayout]


@dataclass(frozen=True)
class MessageFormat:
    """Format of messages of one kind."""

    dtype: torch.dtype
    """Dtype of numbers that are not encoded."""
    device: torch.device
    codec: Codec = FP32
    is_mixed: bool = False
    """Whether a message may have both intra-host matrices and others."""
    half_range: HalfRange = field(default_factory=HalfRange)

    @property
    def is_lossless(self) -> bool:
        return self.codec.is_lossless

    def message_sizes(self, messages: Sequence[MessageLayout]) -> list[int]:
        """Return the number of entries of each message in a buffer. An entry is a number, or a byte with a codec."""
        if self.is_lossless:
            return [sum(matrix.num_rows * matrix.width for matrix in message) for message in messages]
        return [sum(self._matrix_bytes(message)) for message in messages]

    def _order(self, message: MessageLayout) -> Sequence[int]:
        """Return the order of matrices in a message with a codec. Intra-host matrices come first."""
        places = range(len(message))
        return sorted(places, key=lambda index: not message[index].is_intra_host) if self.is_mixed else places

    def _matrix_bytes(self, message: MessageLayout) -> list[int]:
        """Return the size of each matrix in a message with a codec. With mixed matrices, the size of the padding
        follows."""
        lengths = [message[index].num_rows * self.row_bytes(message[index]) for index in self._order(message)]
        return [*lengths, -sum(lengths) % 4] if self.is_mixed else lengths

    def row_bytes(self, matrix: MatrixLayout) -> int:
        if matrix.is_intra_host:
            return matrix.width * self.dtype.itemsize
        return self.codec.row_bytes(matrix.pieces)

    def empty(self, messages: Sequence[MessageLayout]) -> Tensor:
        """Allocate a buffer for consecutive messages."""
        return empty((sum(self.message_sizes(messages)),), self.dtype if self.is_lossless else torch.uint8, self.device)

    def views(self, buffer: Tensor, messages: Sequence[MessageLayout]) -> list[list[Tensor]]:
        """Return views of the matrices of each message in a buffer: [rows, columns] of numbers, or uint8 [rows,
        bytes] if encoded."""
        if self.is_lossless:
            pieces = iter(buffer.split([m.num_rows * m.width for message in messages for m in message]))
            return [[next(pieces).view(matrix.shape) for matrix in message] for message in messages]
        pieces = iter(buffer.split([length for message in messages for length in self._matrix_bytes(message)]))
        views = list[list[Tensor]]()
        for message in messages:
            places = {index: self._view(next(pieces), message[index]) for index in self._order(message)}
            views.append([places[index] for index in range(len(message))])
            if self.is_mixed:
                next(pieces)  # padding
        return views

    def _view(self, piece: Tensor, matrix: MatrixLayout) -> Tensor:
        if not piece.numel():  # An empty piece may have an unaligned address.
            shape = matrix.shape if matrix.is_intra_host else (matrix.num_rows, self.row_bytes(matrix))
            return torch.empty(shape, dtype=self.dtype if matrix.is_intra_host else torch.uint8, device=self.device)
        if matrix.is_intra_host:
            return piece.view(self.dtype).view(matrix.shape)
        return piece.view(matrix.num_rows, -1)

    def write(
        self,
        view: Tensor,
        matrix: MatrixLayout,
        sources: Sequence[Tensor],
        moves: Sequence[int] | None = None,
        scale: float = 1.0,
        rounding: StochasticRounding | None = None,
    ) -> None:
        """Write columns of the sources [rows, ...] times `scale` to a matrix in a buffer. Without `moves`, writes
        all columns of a single source."""
        moves = full_row_move(matrix.width) if moves is None else moves
        if self.is_lossless or matrix.is_intra_host:
            place_columns(view, sources, moves, scale)
        else:
            half = self.half_range if self.codec.name == "fp16" else None
            encode_columns(
                view, sources, moves, self.codec, matrix.pieces, scale=scale, rounding=rounding, half_range=half
            )

    def pack(self, matrix: MatrixLayout, sources: Sequence[Tensor], moves: Sequence[int] | None = None) -> Tensor:
        """Write one matrix to a new buffer, and return its view. `moves` of `None` writes all columns of one source."""
        if moves is None and self.is_lossless:
            return sources[0]
        buffer = self.empty([[matrix]])
        [[view]] = self.views(buffer, [[matrix]])
        self.write(view, matrix, sources, moves)
        return view

    def decode_into(
        self, out: Tensor, views: Sequence[Tensor], matrices: Sequence[MatrixLayout], moves: Sequence[int]
    ) -> None:
        """Write columns of received matrices to `out` [rows, ...]. With a codec, all matrices must be encoded."""
        if self.is_lossless:
            place_columns(out, views, moves)
        else:
            pieces = [matrix.pieces for matrix in matrices]
            decode_columns(out, views, moves, self.codec, pieces, exponent=self.half_range.exponent)

    def decode(self, view: Tensor, matrix: MatrixLayout) -> Tensor:
        """Return a received matrix as numbers [rows, columns]."""
        if self.is_lossless or matrix.is_intra_host:
            return view
        out = empty(matrix.shape, self.dtype, self.device)
        self.decode_into(out, [view], [matrix], full_row_move(matrix.width))
        return out

    def decode_all(self, views: Sequence[Tensor], pieces: tuple[int, ...]) -> Tensor:
        """Concatenate received matrices with the same columns, and return them as numbers [all rows, columns]."""
        joined = torch.cat(list(views))
        return self.decode(joined, MatrixLayout(joined.shape[0], pieces))

    def round_trip(self, values: Tensor, pieces: tuple[int, ...], rounding: StochasticRounding | None = None) -> Tensor:
        """Encode and decode `values` [rows, columns], as an exchange does."""
        if self.is_lossless:
            return values
        matrix = MatrixLayout(values.shape[0], pieces)
        buffer = self.empty([[matrix]])
        [[view]] = self.views(buffer, [[matrix]])
        self.write(view, matrix, [values], rounding=rounding)
        return self.decode(view, matrix)


class MessageFormats(NamedTuple):
    """Formats of the messages of one exchange."""

    direct: MessageFormat
    """Format between owners and requesting ranks. Its messages may have intra-host matrices."""
    inter_host: MessageFormat


def gradient_exponent(num_samples: int) -> int:
    """Return the exponent k of the factor 2^k for gradients in fp16. A mean over many samples has small gradients."""
    return max(num_samples - 1, 0).bit_length()


def full_row_move(width: int) -> tuple[int, ...]:
    """Return the move that copies all columns of one source."""
    return pack_moves([ColumnMove(0, 0, 0, width)])


@dataclass(frozen=True)
class GradientRounding:
    """Stochastic rounding of the gradients of one batch, independent of the plan and the exchange algorithm."""

    # Random numbers are derived from the seed, the step, the feature, the global sample and the column. For unpooled
    # features they also depend on the position in the bag.

    seed: int
    step: int
    feature_names: Sequence[str]
    first_sample: int
    """Index of the first sample of this rank in the global batch."""
    lengths: Int[Tensor, " F_times_B"]
    """Length of each bag of this rank, ordered by (feature, sample)."""

    @cached_property
    def keys(self) -> tuple[int, ...]:
        return tuple(rounding_key(self.seed, self.step, name) for name in self.feature_names)

    def bag_rounding(self, pieces: Sequence[tuple[int, int]]) -> StochasticRounding:
        """Return the rounding of bags of this rank. `pieces` are pairs (feature, first column)."""
        keys = tuple(self.keys[feature] for feature, _ in pieces)
        return StochasticRounding(keys, tuple(column for _, column in pieces), self.first_sample)

    def row_positions(self, feature: int) -> Int[Tensor, " nnz"]:
        """Return a number for each id of an unpooled feature that combines its global sample and its position in the
        bag."""
        lengths = self.lengths.view(len(self.feature_names), -1)[feature].to(torch.int64)
        firsts = lengths.cumsum(0) - lengths
        samples = self.first_sample + torch.arange(lengths.numel(), device=lengths.device)
        bag_numbers = torch.repeat_interleave(samples * MAX_BAG_SIZE - firsts, lengths)
        return bag_numbers + torch.arange(bag_numbers.numel(), device=lengths.device)

    def row_rounding(self, feature: int, column: int, numbers: Tensor) -> StochasticRounding:
        """Return the rounding of rows of an unpooled feature. `numbers` are selected from `row_positions`."""
        return StochasticRounding((self.keys[feature],), (column,), numbers)


BucketKey = tuple[int, int]
"""Pair (feature, row range) by which ids are sorted."""


@dataclass(frozen=True)
class Route:
    """Ids of one feature that are sent to one shard, and the rows that are returned."""

    feature: int
    shard: Shard
    row_range: int
    """Index of the shard's row range within the table."""
    column: int
    """First column of the bags in their matrix, see `Routing`. 0 for unpooled features."""

    @property
    def rank(self) -> int:
        return self.shard.ranks[0]

    @property
    def bucket(self) -> BucketKey:
        """Bucket of the ids. The column shards of a row range receive the same bucket."""
        return self.feature, self.row_range


@dataclass(frozen=True)
class RouteRange:
    """Consecutive routes of an owner whose bags form one matrix."""

    first: int
    stop: int
    width: int


@dataclass(frozen=True)
class Routing:
    """All routes of a plan for one feature group, equal on all ranks.

    An owner sends three kinds of data: direct bags to the requesting ranks, partial bags that are added inside its host
    (4D parallelism, arXiv 2104.05158, section 4.2.1), and the rows of unpooled routes.

    With exchange 'hierarchical', ranks communicate between hosts only with their cross-host peers. Bags and rows pass
    through them, and so do ids. An id that several ranks of a host need is sent to the host once.
    """

    # Example: a grid of 8 rows x 32 columns on two hosts of two ranks, and a bag of rank 3 with rows 1 and 6.
    #
    #                 columns 0..15   columns 16..31
    #                 (host 0)        (host 1)
    #     rows 0..3   rank 0          rank 2            row 1 is requested from ranks 0 and 2
    #     rows 4..7   rank 1          rank 3            row 6 is requested from ranks 1 and 3
    #
    #     partial bags   0 -> 1, 1 -> 1    2 -> 3, 3 -> 3    in each host, to the cross-host peer of rank 3
    #     whole bags     1 -> 3            3 -> 3            row range 0 + row range 1, to the requesting rank
    #
    # Exchange 'hierarchical' is the transform of section 3.1 of arXiv 2403.00877 that does not change the model. The
    # ids of this bag:
    #
    #     between hosts   3 -> 1            3 -> 3            rows 1 and 6, once for each host that needs them
    #     inside hosts    1 -> 0, 1 -> 1    3 -> 2, 3 -> 3    row 1 to the owner of row range 0, row 6 to that of 1

    range_bounds: tuple[tuple[int, ...], ...]
    """Bounds of the row ranges of each feature's table, (0, R) if it has one row range."""
    routes_by_owner: tuple[tuple[Route, ...], ...]
    """Routes of each owner: `direct`, then `host_reduced`, then unpooled routes. Each part is ordered by feature, row
    range and column."""
    direct: tuple[RouteRange, ...]
    """Routes of each owner whose bags are sent directly to the requesting ranks."""
    host_reduced: tuple[RouteRange, ...]
    """Routes of each owner whose partial bags are added inside its host."""
    replicated: tuple[Route, ...]
    """Routes of replicated rows, whose ids are not sent. Pooled routes come first, then by feature."""
    output_columns: dict[int, int]
    """First column of each pooled feature in the output of a lookup."""
    dims: tuple[int, ...]
    ranks_per_host: int
    is_hierarchical: bool = False
    """Whether all data between hosts passes through the cross-host peer of the requesting rank."""

    @cached_property
    def row_sharded_features(self) -> tuple[int, ...]:
        """Features whose tables have several row ranges, by which their ids are sorted."""
        return tuple(f for f, cuts in enumerate(self.range_bounds) if len(cuts) > 2)

    @cached_property
    def pooled_replicated(self) -> tuple[Route, ...]:
        return tuple(r for r in self.replicated if r.feature in self.output_columns)

    def host_ranks(self, rank: int) -> range:
        """Return all ranks of a rank's host."""
        first = rank - rank % self.ranks_per_host
        return range(first, first + self.ranks_per_host)

    def cross_host_peers(self, rank: int) -> range:
        """Return the ranks with the local index of `rank` on all hosts."""
        return range(rank % self.ranks_per_host, len(self.routes_by_owner), self.ranks_per_host)

    @cached_property
    def reduces_within_host(self) -> bool:
        return any(side.width for side in self.host_reduced)

    @property
    def reduces_across_hosts(self) -> bool:
        """Whether bags are first sent to a rank in the owner's host."""
        return self.is_hierarchical or self.reduces_within_host

    @cached_property
    def host_buckets(self) -> tuple[tuple[BucketKey, ...], ...]:
        """Distinct buckets that the ranks of each host look up."""
        firsts = range(0, len(self.routes_by_owner), self.ranks_per_host)
        return tuple(
            tuple(sorted({r.bucket for rank in self.host_ranks(first) for r in self.routes_by_owner[rank]}))
            for first in firsts
        )

    @cached_property
    def host_unpooled_routes(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Unpooled routes of each host as (rank, index of its route). Empty unless the exchange is hierarchical."""
        hosts = []
        for first in range(0, len(self.routes_by_owner), self.ranks_per_host):
            stops = [(rank, self.host_reduced[rank].stop) for rank in self.host_ranks(first) if self.is_hierarchical]
            hosts.append(tuple((rank, k) for rank, stop in stops for k in range(stop, len(self.routes_by_owner[rank]))))
        return tuple(hosts)

    @cached_property
    def row_buckets(self) -> tuple[BucketKey, ...]:
        """Buckets of unpooled features whose distinct rows are requested once. Empty unless the exchange is
        hierarchical."""
        routes = (r for of_rank in self.routes_by_owner for r in of_rank)
        features = sorted({r.feature for r in routes if self.is_hierarchical and r.feature not in self.output_columns})
        return tuple((f, n) for f in features for n in range(len(self.range_bounds[f]) - 1))

    def send_layout(self, rank: int) -> tuple[tuple[BucketKey, ...], ...]:
        """Return the buckets that `rank` sends to each rank in the first hop: in a hierarchical exchange, to cross-host
        peers those of all ranks of their host."""
        if not self.is_hierarchical:
            return tuple(tuple(r.bucket for r in routes) for routes in self.routes_by_owner)
        peers = self.cross_host_peers(rank)
        return tuple(
            self.host_buckets[r // self.ranks_per_host] if r in peers else () for r in range(len(self.routes_by_owner))
        )

    def requesting_ranks(self, owner: int, rank: int) -> Sequence[int]:
        """Return the ranks whose embeddings an owner sends to `rank`."""
        if not self.is_hierarchical:
            return (rank,)
        return self.cross_host_peers(rank) if rank in self.host_ranks(owner) else ()

    @cached_property
    def host_columns(self) -> tuple[dict[tuple[int, tuple[int, int]], int], ...]:
        """First column of each (feature, columns of its table) in the matrix of whole bags of each host."""
        hosts = []
        for first in range(0, len(self.routes_by_owner), self.ranks_per_host):
            pieces = {
                (r.feature, r.shard.columns)
                for rank in self.host_ranks(first)
                for r in self.routes_by_owner[rank][self.host_reduced[rank].first : self.host_reduced[rank].stop]
            }
            first_columns, column = {}, 0
            for feature, columns in sorted(pieces):
                first_columns[feature, columns] = column
                column += columns[1] - columns[0]
            hosts.append(first_columns)
        return tuple(hosts)

    @cached_property
    def host_widths(self) -> tuple[int, ...]:
        """Number of columns in the matrix of whole bags of each host."""
        return tuple(sum(b - a for _, (a, b) in columns) for columns in self.host_columns)

    @cached_property
    def routes_by_range(self) -> tuple[list[list[tuple[int, Route]]], ...]:
        """Routes of each feature as [row range][column piece], each with its index among the owner's routes. Empty for
        replicated row ranges."""
        routes_by_range: tuple[list[list[tuple[int, Route]]], ...] = tuple(
            [[] for _ in cuts[1:]] for cuts in self.range_bounds
        )
        for routes in self.routes_by_owner:
            for index, route in enumerate(routes):
                routes_by_range[route.feature][route.row_range].append((index, route))
        for ranges in routes_by_range:
            for pieces in ranges:
                pieces.sort(key=lambda entry: entry[1].shard.columns)
        return routes_by_range

    @cached_property
    def output_moves(self) -> tuple[int, ...]:
        """Moves from [direct bags of owners, whole bags of hosts, replicated bags] to the output. Row ranges are
        added in ascending order."""
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
        # The first move to a column writes it, and later ones add to it.
        return pack_moves(_split_overlapping_moves(moves))

    @cached_property
    def replicated_moves(self) -> tuple[int, ...]:
        """Moves of `output_moves` from replicated bags, with these as the only source."""
        last = len(self.routes_by_owner) + len(self.host_widths)
        return pack_moves(move._replace(source=0) for move in unpack_moves(self.output_moves) if move.source == last)

    @cached_property
    def received_moves(self) -> tuple[int, ...]:
        """Moves of `output_moves` from received bags."""
        last = len(self.routes_by_owner) + len(self.host_widths)
        return pack_moves(move for move in unpack_moves(self.output_moves) if move.source != last)

    @cached_property
    def host_reduce_moves(self) -> tuple[tuple[int, ...], ...]:
        """Moves from the partial bags of each host's ranks to whole bags. Row ranges are added in ascending order."""
        hosts: list[list[tuple[tuple[int, tuple[int, int], int], ColumnMove]]] = [[] for _ in self.host_columns]
        for rank, (routes, side) in enumerate(zip(self.routes_by_owner, self.host_reduced, strict=True)):
            host = rank // self.ranks_per_host
            for r in routes[side.first : side.stop]:
                to = self.host_columns[host][r.feature, r.shard.columns]
                move = ColumnMove(rank % self.ranks_per_host, r.column, to, r.shard.num_columns)
                hosts[host].append(((r.feature, r.shard.columns, r.row_range), move))
        return tuple(pack_moves(_accumulate_row_ranges(host_moves)) for host_moves in hosts)

    @cached_property
    def gradient_moves(self) -> tuple[tuple[int, ...], ...]:
        """Moves from the gradients of the output to those of the direct bags of each owner."""
        return tuple(
            pack_moves(
                ColumnMove(0, self.output_columns[r.feature] + r.shard.columns[0], r.column, r.shard.num_columns)
                for r in routes[side.first : side.stop]
            )
            for routes, side in zip(self.routes_by_owner, self.direct, strict=True)
        )

    @cached_property
    def host_gradient_moves(self) -> tuple[tuple[int, ...], ...]:
        """Moves from the gradients of the output to those of the whole bags of each host."""
        return tuple(
            pack_moves(
                ColumnMove(0, self.output_columns[feature] + first, at, stop - first)
                for (feature, (first, stop)), at in host_columns.items()
            )
            for host_columns in self.host_columns
        )

    @cached_property
    def host_reduced_gradient_moves(self) -> tuple[tuple[int, ...], ...]:
        """Moves from the gradients of whole bags to those of the partial bags of each owner."""
        owners = []
        for rank, (routes, side) in enumerate(zip(self.routes_by_owner, self.host_reduced, strict=True)):
            at = self.host_columns[rank // self.ranks_per_host]
            owner_routes = routes[side.first : side.stop]
            owners.append(
                pack_moves(
                    ColumnMove(0, at[r.feature, r.shard.columns], r.column, r.shard.num_columns) for r in owner_routes
                )
            )
        return tuple(owners)

    def output_message(
        self, owner: int, rank: int, batch_sizes: Sequence[int], counts: Mapping[int, Sequence[int]]
    ) -> list[MatrixLayout]:
        """Return the layout of the message from an owner to one rank.

        The message has direct bags of the requesting ranks. Inside the owner's host, it also has partial bags for the
        samples of `rank` and its cross-host peers. Rows of each unpooled route follow. `counts[r][k]` is the number of
        rows for rank r on route k. Gradients are sent back in the same layout.
        """
        host_reduced = self.host_reduced[owner]
        num_partial = (
            sum(batch_sizes[peer] for peer in self.cross_host_peers(rank)) if rank in self.host_ranks(owner) else 0
        )
        requesting_ranks, unpooled = (
            self.requesting_ranks(owner, rank),
            range(host_reduced.stop, len(self.routes_by_owner[owner])),
        )
        rows = (
            (sum(counts[r][k] for r in requesting_ranks), self.routes_by_owner[owner][k].shard.num_columns)
            for k in unpooled
        )
        return [
            MatrixLayout(sum(batch_sizes[r] for r in requesting_ranks), self.direct_columns[owner]),
            MatrixLayout(num_partial, self.host_reduced_columns[owner], is_intra_host=True),
            *(MatrixLayout(number, (columns,)) for number, columns in rows),
        ]

    @cached_property
    def direct_columns(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            _route_widths(routes[: side.stop]) for routes, side in zip(self.routes_by_owner, self.direct, strict=True)
        )

    @cached_property
    def host_reduced_columns(self) -> tuple[tuple[int, ...], ...]:
        sides = zip(self.routes_by_owner, self.host_reduced, strict=True)
        return tuple(_route_widths(routes[side.first : side.stop]) for routes, side in sides)

    @cached_property
    def direct_pieces(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Pairs (feature, first column) of the direct routes of each owner."""
        owned = zip(self.routes_by_owner, self.direct, strict=True)
        return tuple(tuple((r.feature, r.shard.columns[0]) for r in routes[: side.stop]) for routes, side in owned)

    @cached_property
    def host_pieces(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Pairs (feature, first column) of the pieces in the whole bags of each host."""
        return tuple(tuple((feature, first) for feature, (first, _) in columns) for columns in self.host_columns)

    @cached_property
    def host_bag_columns(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(stop - first for _, (first, stop) in columns) for columns in self.host_columns)

    def cross_host_message(self, host: int, batch_size: int, counts: Mapping[int, Sequence[int]]) -> list[MatrixLayout]:
        """Return the layout of the message from a host to a requesting rank with `batch_size` samples.

        The message has whole bags and, with a hierarchical exchange, direct bags of each rank of the host. Rows of
        `host_unpooled_routes` follow. `counts[r][k]` is the number of rows on route k of rank r. Gradients are sent
        back in the same layout.
        """
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
        """Return the ranks of a host whose direct bags are forwarded by cross-host peers."""
        return self.host_ranks(host * self.ranks_per_host) if self.is_hierarchical else range(0)

    def host_bag_layout(self, host: int, batch_size: int) -> MatrixLayout:
        return MatrixLayout(batch_size, self.host_bag_columns[host])


def make_routing(tables: Sequence[TableSpec], features: Sequence[FeatureSpec], plan: Plan) -> Routing:
    """Compute the routes of the given features under a checked plan."""
    by_name = {table.name: table for table in tables}
    dims = tuple(by_name[feature.table].embedding_dim for feature in features)
    pooled = [f for f, feature in enumerate(features) if feature.pooling != "none"]
    # With a single host, the requesting ranks add partial bags.
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
                # Partial bags exist if a host has several row ranges of the same columns.
                is_host_reduced = parts[shard.ranks[0] // plan.ranks_per_host, shard.columns] > 1
            route = Route(index, shard, starts.index(shard.rows[0]), 0)
            if entry.is_replica(shard):
                replicated.append(route)
            elif feature.pooling == "none":
                unpooled[route.rank].append(route)
            else:
                (host_reduced if is_host_reduced else direct)[route.rank].append(route)
    by_rank, matrices = [], []
    for owner_routes in zip(direct, host_reduced, unpooled, strict=True):
        first, second, rows = (sorted(routes, key=lambda r: (*r.bucket, r.shard.columns)) for routes in owner_routes)
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
        direct=tuple(owner_routes[0] for owner_routes in matrices),
        host_reduced=tuple(owner_routes[1] for owner_routes in matrices),
        replicated=(*_assign_columns(replicated[:num_pooled]), *replicated[num_pooled:]),
        output_columns=dict(zip(pooled, accumulate((dims[f] for f in pooled), initial=0), strict=False)),
        dims=dims,
        ranks_per_host=plan.ranks_per_host,
        is_hierarchical=plan.is_hierarchical,
    )


def column_groups(shards: Sequence[Shard], plan: Plan) -> list[tuple[Shard, ...]]:
    """Return the shards of each row range that `shards` touch, with all its columns in ascending order.

    Groups are ordered by (table, row), so that two ranks list their common groups in the same order.
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
    placed, column = [], 0
    for route in routes:
        placed.append(Route(route.feature, route.shard, route.row_range, column))
        column += route.shard.num_columns
    return placed


def _split_overlapping_moves(moves: Sequence[ColumnMove]) -> list[ColumnMove]:
    """Split moves at the columns where writing changes to adding to earlier moves."""
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
    """Sort moves by (feature, columns, row range). A move adds if an earlier one writes the same columns."""
    ordered, written = [], set()
    for (*place, _), move in sorted(moves):
        ordered.append(move._replace(add=int(tuple(place) in written)))
        written.add(tuple(place))
    return ordered
