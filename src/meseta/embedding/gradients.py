"""The way back: gradients to the owners of rows, statistics between column shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meseta.comm import Pending, Scope, World
from meseta.embedding.exchange import Exchanged
from meseta.embedding.relay import GradientsOfHost, by_rank, by_twins, take_from_twins
from meseta.embedding.routes import Route, Routing, column_groups
from meseta.embedding.wire import GradientDraw, Matrix, Wire, Wires
from meseta.spec import COLUMN_BLOCK, Plan, Shard
from meseta.storage import TableStorage


@dataclass(eq=False)
class SentGradients:
    """The gradients of one batch on their way to the owners of rows: begun when this is made."""

    routing: Routing
    world: World
    unpooled: Sequence[int]
    """Features that are not pooled."""
    x: Exchanged
    wires: Wires
    draw: GradientDraw | None
    """Of stochastic rounding, where numbers are rounded so."""
    gradients: Sequence[Tensor]
    """Of the bags of all features, and of each feature of `unpooled`."""
    share: float
    """What all are multiplied by."""

    _of_hosts: Callable[[], GradientsOfHost] | None = field(init=False, default=None)
    """Waits for what crosses hosts first, where something does."""
    _pending: Pending | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.routing.goes_by_twins:
            self._of_hosts = self._send_to_hosts()
        else:
            self._pending = self._send(GradientsOfHost(torch.empty(0), {}, {}))

    def wait(self) -> Tensor:
        """What came to this rank, as the owner of rows."""
        if self._of_hosts is not None:
            take, self._of_hosts = self._of_hosts, None
            self._pending = self._send(take())
        assert self._pending is not None
        return self._pending.wait()

    def _send(self, of_host: GradientsOfHost) -> Pending:
        """The mirror of the answers: begin to send to every owner the gradient of its direct bags [B_local, columns],
        to a mate also that of its partial bags, and [ids, D] of its routes that are not pooled."""
        routing, world, x, wire = self.routing, self.world, self.x, self.wires.near
        ranks, mates = range(world.size), routing.ranks_of_host(world.rank)
        met = mates if routing.two_level else ranks
        send = [
            routing.answer_message(r, world.rank, x.batch_sizes, x.ids_on.through(r) if r in met else {}) for r in ranks
        ]
        receive = [routing.answer_message(world.rank, r, x.batch_sizes, x.ids_on.answered) for r in ranks]
        buffer = wire.empty(send)
        for r, (direct, host_reduced, *rows) in enumerate(wire.views(buffer, send)):
            of_direct, of_reduced, *of_routes = send[r]
            if direct.numel() and routing.two_level:
                direct.copy_(of_host.direct[r])
            elif direct.numel():
                self._put_bags(wire, direct, of_direct, routing.gradient_moves[r], routing.direct_pieces[r])
            if host_reduced.numel():
                wire.put(host_reduced, of_reduced, [of_host.bags], routing.host_reduced_gradient_moves[r])
            for k, (out, matrix) in enumerate(zip(rows, of_routes, strict=True), start=routing.host_reduced[r].stop):
                if not routing.two_level:
                    self._put_rows(wire, out, matrix, routing.by_rank[r][k])
                elif r in mates:
                    out.copy_(of_host.rows[r, k])
        scope = Scope(met, batch=x.mark)
        return world.all_to_all(buffer, wire.sizes(send), wire.sizes(receive), "gradients", scope=scope)

    def _send_to_hosts(self) -> Callable[[], GradientsOfHost]:
        """Begin to give each host the gradients of its bags and rows; what is returned takes those of this host."""
        routing, x, wire = self.routing, self.x, self.wires.far
        batch_size, hosts = x.batch_sizes[self.world.rank], range(len(routing.host_widths))
        messages = [routing.twin_message(host, batch_size, x.ids_on.asked) for host in hosts]
        buffer = wire.empty(messages)
        for host, (bags, *others) in enumerate(wire.views(buffer, messages)):
            owners, (of_bags, *of_others) = routing.handing_on(host), messages[host]
            self._put_bags(wire, bags, of_bags, routing.host_gradient_moves[host], routing.host_pieces[host])
            for r, out, matrix in zip(owners, others, of_others, strict=False):
                self._put_bags(wire, out, matrix, routing.gradient_moves[r], routing.direct_pieces[r])
            of_routes = zip(routing.host_rows[host], others[len(owners) :], of_others[len(owners) :], strict=True)
            for (r, k), out, matrix in of_routes:
                self._put_rows(wire, out, matrix, routing.by_rank[r][k])
        return take_from_twins(routing, self.world, x, buffer, wire)

    def _put_bags(
        self, wire: Wire, out: Tensor, matrix: Matrix, moves: Sequence[int], pieces: Sequence[tuple[int, int]]
    ) -> None:
        """Gradients of bags; `pieces` are (feature, first column)."""
        if not out.numel():
            return
        rounding = None if self.draw is None else self.draw.bags(pieces)
        wire.put(out, matrix, self.gradients[:1], moves, self.share, rounding)

    def _put_rows(self, wire: Wire, out: Tensor, matrix: Matrix, route: Route) -> None:
        """Gradients of a route that is not pooled."""
        rows, rounding = rows_of_range(self.unpooled, self.x, self.gradients, route), None
        if self.draw is not None:
            numbers = ids_of_range(self.x, self.draw.row_numbers(route.feature), route)
            rounding = self.draw.rows(route.feature, route.shard.columns[0], numbers)
        wire.put(out, matrix, [rows[:, slice(*route.shard.columns)]], None, self.share, rounding)


def rows_of_range(unpooled: Sequence[int], x: Exchanged, gradients: Sequence[Tensor], route: Route) -> Tensor:
    """[ids, D]: gradients of the rows of one row range, of a feature that is not pooled, in the order of the range."""
    return ids_of_range(x, gradients[1 + unpooled.index(route.feature)], route)


def ids_of_range(x: Exchanged, values: Tensor, route: Route) -> Tensor:
    """[ids, any]: of what each id of a feature has, that of one row range, in the order of the range."""
    f = route.feature
    moved = values if f not in x.order else values[x.order[f]]
    return moved.split(x.range_counts[f])[route.range]


def receive_gradients(
    routing: Routing, world: World, x: Exchanged, sent: SentGradients, wire: Wire
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Of this owner: [B_global, columns] of its direct and of its partial bags, and [ids, D] of each route that is
    not pooled."""
    rank, buffer = world.rank, sent.wait()
    routes = routing.by_rank[rank]
    messages = [routing.answer_message(rank, r, x.batch_sizes, x.ids_on.answered) for r in range(world.size)]
    host_reduced = torch.empty(x.num_samples, routing.host_reduced[rank].width, dtype=wire.dtype, device=wire.device)
    columns = routing.direct_columns[rank]
    if len(messages[0]) == 2 and not (routing.two_level or wire.is_mixed):
        whole = Matrix(x.num_samples, columns)
        [[view]] = wire.views(buffer, [[whole]])
        return wire.read(view, whole), host_reduced, []
    direct, partial, *rows = (list(of_ranks) for of_ranks in zip(*wire.views(buffer, messages), strict=True))
    if host_reduced.numel():
        torch.cat(by_twins(routing, rank, partial, x.batch_sizes), out=host_reduced)
    bags = wire.read_all(by_rank(routing, rank, direct, x.batch_sizes), columns)
    ordered = []
    for k, parts in enumerate(rows, start=routing.host_reduced[rank].stop):
        counts = [x.ids_on.answered[r][k] for r in range(world.size)]
        ordered.append(wire.read_all(by_rank(routing, rank, parts, counts), (routes[k].shard.num_columns,)))
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
