"""Exchange of gradients with the owners of rows, and of row statistics between column shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meseta.comm import ExchangeScope, PendingCollective, World
from meseta.embedding.hierarchical import (
    InterHostGradients,
    order_by_cross_host_peer,
    order_by_rank,
    send_gradients_to_cross_host_peers,
)
from meseta.embedding.input_dist import InputDist
from meseta.embedding.routes import (
    GradientRounding,
    MatrixLayout,
    MessageFormat,
    MessageFormats,
    Route,
    Routing,
    column_groups,
)
from meseta.spec import COLUMN_BLOCK, Plan, Shard
from meseta.storage import TableStorage


@dataclass(eq=False)
class GradientDist:
    """Gradients of one batch in flight to the owners of rows. The exchange starts when the object is created."""

    routing: Routing
    world: World
    unpooled_features: Sequence[int]
    input_dist: InputDist
    formats: MessageFormats
    rounding: GradientRounding | None
    """Stochastic rounding, or `None` if the codec does not use it."""
    gradients: Sequence[Tensor]
    """Gradients of the bags of all pooled features, then of the rows of each unpooled feature."""
    scale: float

    _wait_for_first_hop: Callable[[], InterHostGradients] | None = field(init=False, default=None)
    _pending: PendingCollective | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.routing.reduces_across_hosts:
            self._wait_for_first_hop = self._start_first_hop()
        else:
            self._pending = self._send_to_owners(InterHostGradients(torch.empty(0), {}, {}))

    def wait(self) -> Tensor:
        """Return the gradients that this rank received as an owner of rows."""
        if self._wait_for_first_hop is not None:
            take, self._wait_for_first_hop = self._wait_for_first_hop, None
            self._pending = self._send_to_owners(take())
        assert self._pending is not None
        return self._pending.wait()

    def _send_to_owners(self, inter_host: InterHostGradients) -> PendingCollective:
        """Start to send gradients of bags [B_local, columns] and of unpooled rows [ids, D] to all owners, in the layout
        of the embeddings.

        Owners in this host also receive the gradients of partial bags.
        """
        routing, world, x, message_format = self.routing, self.world, self.input_dist, self.formats.direct
        ranks, host_ranks = range(world.size), routing.host_ranks(world.rank)
        exchange_ranks = host_ranks if routing.is_hierarchical else ranks
        send = [
            routing.output_message(
                r, world.rank, x.batch_size_per_rank, x.ids_per_route.forwarded_to(r) if r in exchange_ranks else {}
            )
            for r in ranks
        ]
        receive = [routing.output_message(world.rank, r, x.batch_size_per_rank, x.ids_per_route.served) for r in ranks]
        buffer = message_format.empty(send)
        for r, (direct, host_reduced, *rows) in enumerate(message_format.views(buffer, send)):
            direct_layout, reduced_layout, *route_layouts = send[r]
            if direct.numel() and routing.is_hierarchical:
                direct.copy_(inter_host.direct[r])
            elif direct.numel():
                self._write_bags(
                    message_format, direct, direct_layout, routing.gradient_moves[r], routing.direct_pieces[r]
                )
            if host_reduced.numel():
                message_format.write(
                    host_reduced, reduced_layout, [inter_host.bags], routing.host_reduced_gradient_moves[r]
                )
            for k, (out, matrix) in enumerate(
                zip(rows, route_layouts, strict=True), start=routing.host_reduced[r].stop
            ):
                if not routing.is_hierarchical:
                    self._write_rows(message_format, out, matrix, routing.routes_by_owner[r][k])
                elif r in host_ranks:
                    out.copy_(inter_host.rows[r, k])
        scope = ExchangeScope(exchange_ranks, batch_tag=x.batch_tag)
        return world.all_to_all(
            buffer, message_format.message_sizes(send), message_format.message_sizes(receive), "gradients", scope=scope
        )

    def _start_first_hop(self) -> Callable[[], InterHostGradients]:
        routing, x, message_format = self.routing, self.input_dist, self.formats.inter_host
        batch_size, hosts = x.batch_size_per_rank[self.world.rank], range(len(routing.host_widths))
        messages = [routing.cross_host_message(host, batch_size, x.ids_per_route.requested) for host in hosts]
        buffer = message_format.empty(messages)
        for host, (bags, *other_views) in enumerate(message_format.views(buffer, messages)):
            owners, (bag_layout, *other_layouts) = routing.forwarding_ranks(host), messages[host]
            self._write_bags(
                message_format, bags, bag_layout, routing.host_gradient_moves[host], routing.host_pieces[host]
            )
            for r, out, matrix in zip(owners, other_views, other_layouts, strict=False):
                self._write_bags(message_format, out, matrix, routing.gradient_moves[r], routing.direct_pieces[r])
            routes = zip(
                routing.host_unpooled_routes[host],
                other_views[len(owners) :],
                other_layouts[len(owners) :],
                strict=True,
            )
            for (r, k), out, matrix in routes:
                self._write_rows(message_format, out, matrix, routing.routes_by_owner[r][k])
        return send_gradients_to_cross_host_peers(routing, self.world, x, buffer, message_format)

    def _write_bags(
        self,
        message_format: MessageFormat,
        out: Tensor,
        matrix: MatrixLayout,
        moves: Sequence[int],
        pieces: Sequence[tuple[int, int]],
    ) -> None:
        """Write gradients of bags. `pieces` are pairs (feature, first column)."""
        if not out.numel():
            return
        rounding = None if self.rounding is None else self.rounding.bag_rounding(pieces)
        message_format.write(out, matrix, self.gradients[:1], moves, self.scale, rounding)

    def _write_rows(self, message_format: MessageFormat, out: Tensor, matrix: MatrixLayout, route: Route) -> None:
        rows, rounding = select_row_gradients(self.unpooled_features, self.input_dist, self.gradients, route), None
        if self.rounding is not None:
            numbers = select_range(self.input_dist, self.rounding.row_positions(route.feature), route)
            rounding = self.rounding.row_rounding(route.feature, route.shard.columns[0], numbers)
        message_format.write(out, matrix, [rows[:, slice(*route.shard.columns)]], None, self.scale, rounding)


def select_row_gradients(unpooled: Sequence[int], x: InputDist, gradients: Sequence[Tensor], route: Route) -> Tensor:
    """Return the gradients [ids, D] of an unpooled feature for the row range of a route, in the order of the range."""
    return select_range(x, gradients[1 + unpooled.index(route.feature)], route)


def select_range(x: InputDist, values: Tensor, route: Route) -> Tensor:
    """Select values [ids, ...] of the row range of a route from the values of its feature, in the order of the
    range."""
    f = route.feature
    moved = values if f not in x.bucketize_permute else values[x.bucketize_permute[f]]
    return moved.split(x.range_counts[f])[route.row_range]


def receive_gradients(
    routing: Routing, world: World, x: InputDist, sent: GradientDist, message_format: MessageFormat
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the gradients of this owner as (direct bags, partial bags, rows of each unpooled route).

    The shapes are [B_global, columns] for bags and [ids, D] for rows.
    """
    rank, buffer = world.rank, sent.wait()
    routes = routing.routes_by_owner[rank]
    messages = [
        routing.output_message(rank, r, x.batch_size_per_rank, x.ids_per_route.served) for r in range(world.size)
    ]
    host_reduced = torch.empty(
        x.num_samples, routing.host_reduced[rank].width, dtype=message_format.dtype, device=message_format.device
    )
    columns = routing.direct_columns[rank]
    # With direct bags only, the messages of all ranks form one matrix.
    if len(messages[0]) == 2 and not (routing.is_hierarchical or message_format.is_mixed):
        whole = MatrixLayout(x.num_samples, columns)
        [[view]] = message_format.views(buffer, [[whole]])
        return message_format.decode(view, whole), host_reduced, []
    direct, partial, *rows = (
        list(rank_parts) for rank_parts in zip(*message_format.views(buffer, messages), strict=True)
    )
    if host_reduced.numel():
        torch.cat(order_by_cross_host_peer(routing, rank, partial, x.batch_size_per_rank), out=host_reduced)
    bags = message_format.decode_all(order_by_rank(routing, rank, direct, x.batch_size_per_rank), columns)
    ordered = []
    for k, parts in enumerate(rows, start=routing.host_reduced[rank].stop):
        counts = [x.ids_per_route.served[r][k] for r in range(world.size)]
        ordered.append(
            message_format.decode_all(order_by_rank(routing, rank, parts, counts), (routes[k].shard.num_columns,))
        )
    return bags, host_reduced, ordered


def gather_column_stats(
    plan: Plan, world: World, dtype: torch.dtype, shards: Sequence[TableStorage], stats: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gather the statistics of each shard [n U, blocks of the shard] to those of whole rows [n U, blocks of the row].

    There are n statistics of `dtype`. Blocks are ordered by column.
    """
    # Column shards of a row range receive the same ids, so each rank knows the U of the others without an exchange.
    stats_by_shard = {shard.shard: stat for shard, stat in zip(shards, stats, strict=True) if stat is not None}
    groups = column_groups(list(stats_by_shard), plan)
    send, splits, expected, sizes = [], [], [], []
    for rank in range(world.size):
        shared = [g for g in groups if rank != world.rank and any(s.ranks[0] == rank for s in g)]
        pieces = [stats_by_shard[s].reshape(-1) for group in shared for s in group if s in stats_by_shard]
        send += pieces
        splits.append(sum(piece.numel() for piece in pieces))
        remote_shards = [(s, _num_rows(group, stats_by_shard)) for group in shared for s in group if s.ranks[0] == rank]
        expected += remote_shards
        sizes.append(sum(num_rows * _num_blocks(s) for s, num_rows in remote_shards))
    flat = torch.cat(send) if send else torch.empty(0, dtype=dtype, device=world.device)
    received = world.all_to_all(flat, splits, sizes, "row statistics").wait()
    pieces = received.split([num_rows * _num_blocks(s) for s, num_rows in expected])
    for (shard, num_rows), piece in zip(expected, pieces, strict=True):
        stats_by_shard[shard] = piece.view(num_rows, _num_blocks(shard))
    gathered = {s: torch.cat([stats_by_shard[piece] for piece in group], dim=1) for group in groups for s in group}
    return [gathered.get(shard.shard) for shard in shards]


def _num_blocks(shard: Shard) -> int:
    return -(-shard.num_columns // COLUMN_BLOCK)


def _num_rows(group: Sequence[Shard], stats_by_shard: Mapping[Shard, Tensor]) -> int:
    return next(stats_by_shard[s].shape[0] for s in group if s in stats_by_shard)
