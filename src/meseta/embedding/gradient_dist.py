"""The way back: gradients to the owners of rows, statistics between column shards."""

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
from meseta.embedding.message_format import GradientRounding, MatrixLayout, MessageFormat, MessageFormats
from meseta.embedding.routes import Route, Routing, column_groups
from meseta.spec import COLUMN_BLOCK, Plan, Shard
from meseta.storage import TableStorage


@dataclass(eq=False)
class GradientDist:
    """The gradients of one batch on their way to the owners of rows: begun when this is made."""

    routing: Routing
    world: World
    unpooled_features: Sequence[int]
    """Features that are not pooled."""
    input_dist: InputDist
    formats: MessageFormats
    rounding: GradientRounding | None
    """Of stochastic rounding, where numbers are rounded so."""
    gradients: Sequence[Tensor]
    """Of the bags of all features, and of each feature of `unpooled`."""
    scale: float
    """What all are multiplied by."""

    _wait_for_first_hop: Callable[[], InterHostGradients] | None = field(init=False, default=None)
    """Waits for what crosses hosts first, where something does."""
    _pending: PendingCollective | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.routing.reduces_across_hosts:
            self._wait_for_first_hop = self._start_first_hop()
        else:
            self._pending = self._send_to_owners(InterHostGradients(torch.empty(0), {}, {}))

    def wait(self) -> Tensor:
        """What came to this rank, as the owner of rows."""
        if self._wait_for_first_hop is not None:
            take, self._wait_for_first_hop = self._wait_for_first_hop, None
            self._pending = self._send_to_owners(take())
        assert self._pending is not None
        return self._pending.wait()

    def _send_to_owners(self, of_host: InterHostGradients) -> PendingCollective:
        """The mirror of the answers: begin to send to every owner the gradient of its direct bags [B_local, columns],
        to a mate also that of its partial bags, and [ids, D] of its routes that are not pooled."""
        routing, world, x, wire = self.routing, self.world, self.input_dist, self.formats.direct
        ranks, mates = range(world.size), routing.host_ranks(world.rank)
        met = mates if routing.is_hierarchical else ranks
        send = [
            routing.output_message(
                r, world.rank, x.batch_size_per_rank, x.ids_per_route.forwarded_to(r) if r in met else {}
            )
            for r in ranks
        ]
        receive = [routing.output_message(world.rank, r, x.batch_size_per_rank, x.ids_per_route.served) for r in ranks]
        buffer = wire.empty(send)
        for r, (direct, host_reduced, *rows) in enumerate(wire.views(buffer, send)):
            of_direct, of_reduced, *of_routes = send[r]
            if direct.numel() and routing.is_hierarchical:
                direct.copy_(of_host.direct[r])
            elif direct.numel():
                self._write_bags(wire, direct, of_direct, routing.gradient_moves[r], routing.direct_pieces[r])
            if host_reduced.numel():
                wire.write(host_reduced, of_reduced, [of_host.bags], routing.host_reduced_gradient_moves[r])
            for k, (out, matrix) in enumerate(zip(rows, of_routes, strict=True), start=routing.host_reduced[r].stop):
                if not routing.is_hierarchical:
                    self._write_rows(wire, out, matrix, routing.routes_by_owner[r][k])
                elif r in mates:
                    out.copy_(of_host.rows[r, k])
        scope = ExchangeScope(met, batch_tag=x.batch_tag)
        return world.all_to_all(buffer, wire.message_sizes(send), wire.message_sizes(receive), "gradients", scope=scope)

    def _start_first_hop(self) -> Callable[[], InterHostGradients]:
        """Begin to give each host the gradients of its bags and rows; what is returned takes those of this host."""
        routing, x, wire = self.routing, self.input_dist, self.formats.inter_host
        batch_size, hosts = x.batch_size_per_rank[self.world.rank], range(len(routing.host_widths))
        messages = [routing.cross_host_message(host, batch_size, x.ids_per_route.requested) for host in hosts]
        buffer = wire.empty(messages)
        for host, (bags, *others) in enumerate(wire.views(buffer, messages)):
            owners, (of_bags, *of_others) = routing.forwarding_ranks(host), messages[host]
            self._write_bags(wire, bags, of_bags, routing.host_gradient_moves[host], routing.host_pieces[host])
            for r, out, matrix in zip(owners, others, of_others, strict=False):
                self._write_bags(wire, out, matrix, routing.gradient_moves[r], routing.direct_pieces[r])
            of_routes = zip(
                routing.host_unpooled_routes[host], others[len(owners) :], of_others[len(owners) :], strict=True
            )
            for (r, k), out, matrix in of_routes:
                self._write_rows(wire, out, matrix, routing.routes_by_owner[r][k])
        return send_gradients_to_cross_host_peers(routing, self.world, x, buffer, wire)

    def _write_bags(
        self,
        wire: MessageFormat,
        out: Tensor,
        matrix: MatrixLayout,
        moves: Sequence[int],
        pieces: Sequence[tuple[int, int]],
    ) -> None:
        """Gradients of bags; `pieces` are (feature, first column)."""
        if not out.numel():
            return
        rounding = None if self.rounding is None else self.rounding.bag_rounding(pieces)
        wire.write(out, matrix, self.gradients[:1], moves, self.scale, rounding)

    def _write_rows(self, wire: MessageFormat, out: Tensor, matrix: MatrixLayout, route: Route) -> None:
        """Gradients of a route that is not pooled."""
        rows, rounding = select_row_gradients(self.unpooled_features, self.input_dist, self.gradients, route), None
        if self.rounding is not None:
            numbers = select_range(self.input_dist, self.rounding.row_positions(route.feature), route)
            rounding = self.rounding.row_rounding(route.feature, route.shard.columns[0], numbers)
        wire.write(out, matrix, [rows[:, slice(*route.shard.columns)]], None, self.scale, rounding)


def select_row_gradients(unpooled: Sequence[int], x: InputDist, gradients: Sequence[Tensor], route: Route) -> Tensor:
    """[ids, D]: gradients of the rows of one row range, of a feature that is not pooled, in the order of the range."""
    return select_range(x, gradients[1 + unpooled.index(route.feature)], route)


def select_range(x: InputDist, values: Tensor, route: Route) -> Tensor:
    """[ids, any]: of what each id of a feature has, that of one row range, in the order of the range."""
    f = route.feature
    moved = values if f not in x.bucketize_permute else values[x.bucketize_permute[f]]
    return moved.split(x.range_counts[f])[route.row_range]


def receive_gradients(
    routing: Routing, world: World, x: InputDist, sent: GradientDist, wire: MessageFormat
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Of this owner: [B_global, columns] of its direct and of its partial bags, and [ids, D] of each route that is
    not pooled."""
    rank, buffer = world.rank, sent.wait()
    routes = routing.routes_by_owner[rank]
    messages = [
        routing.output_message(rank, r, x.batch_size_per_rank, x.ids_per_route.served) for r in range(world.size)
    ]
    host_reduced = torch.empty(x.num_samples, routing.host_reduced[rank].width, dtype=wire.dtype, device=wire.device)
    columns = routing.direct_columns[rank]
    if len(messages[0]) == 2 and not (routing.is_hierarchical or wire.is_mixed):
        whole = MatrixLayout(x.num_samples, columns)
        [[view]] = wire.views(buffer, [[whole]])
        return wire.decode(view, whole), host_reduced, []
    direct, partial, *rows = (list(of_ranks) for of_ranks in zip(*wire.views(buffer, messages), strict=True))
    if host_reduced.numel():
        torch.cat(order_by_cross_host_peer(routing, rank, partial, x.batch_size_per_rank), out=host_reduced)
    bags = wire.decode_all(order_by_rank(routing, rank, direct, x.batch_size_per_rank), columns)
    ordered = []
    for k, parts in enumerate(rows, start=routing.host_reduced[rank].stop):
        counts = [x.ids_per_route.served[r][k] for r in range(world.size)]
        ordered.append(wire.decode_all(order_by_rank(routing, rank, parts, counts), (routes[k].shard.num_columns,)))
    return bags, host_reduced, ordered


def gather_column_stats(
    plan: Plan, world: World, dtype: torch.dtype, shards: Sequence[TableStorage], stats: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """[n U, blocks of this shard] -> [n U, blocks of the whole row], blocks ordered by column, for n statistics of
    `dtype`.

    All column shards of a row range see the same ids, so they know each other's U and no size is exchanged.
    """
    known = {shard.shard: stat for shard, stat in zip(shards, stats, strict=True) if stat is not None}
    groups = column_groups(list(known), plan)
    send, splits, expected, sizes = [], [], [], []
    for rank in range(world.size):
        shared = [g for g in groups if rank != world.rank and any(s.ranks[0] == rank for s in g)]
        pieces = [known[s].reshape(-1) for group in shared for s in group if s in known]
        send += pieces
        splits.append(sum(piece.numel() for piece in pieces))
        theirs = [(s, _num_rows(group, known)) for group in shared for s in group if s.ranks[0] == rank]
        expected += theirs
        sizes.append(sum(num_rows * _num_blocks(s) for s, num_rows in theirs))
    flat = torch.cat(send) if send else torch.empty(0, dtype=dtype, device=world.device)
    received = world.all_to_all(flat, splits, sizes, "row statistics").wait()
    pieces = received.split([num_rows * _num_blocks(s) for s, num_rows in expected])
    for (shard, num_rows), piece in zip(expected, pieces, strict=True):
        known[shard] = piece.view(num_rows, _num_blocks(shard))
    whole = {s: torch.cat([known[piece] for piece in group], dim=1) for group in groups for s in group}
    return [whole.get(shard.shard) for shard in shards]


def _num_blocks(shard: Shard) -> int:
    return -(-shard.num_columns // COLUMN_BLOCK)


def _num_rows(group: Sequence[Shard], known: Mapping[Shard, Tensor]) -> int:
    return next(known[s].shape[0] for s in group if s in known)
