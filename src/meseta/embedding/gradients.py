"""The way back: gradients to the owners of rows, statistics between column shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meseta.comm import Pending, Scope, World
from meseta.embedding.exchange import Exchanged, matrices, numbers_in
from meseta.embedding.relay import Rows, by_rank, take_from_twins
from meseta.embedding.routes import Route, Routing, column_groups
from meseta.ops.columns import place_columns
from meseta.ops.memory import empty
from meseta.spec import COLUMN_BLOCK, Plan, Shard
from meseta.storage import TableStorage


def send_gradients(
    routing: Routing, world: World, unpooled: Sequence[int], x: Exchanged, gradients: Sequence[Tensor], share: float
) -> Pending:
    """The mirror of the answers, times `share`: to every owner the gradient of its direct bags [B_local, columns], to
    a mate also that of its partial bags, and [ids, D] of its routes that are not pooled.

    `gradients` are those of the bags of all features, and of each feature of `unpooled`."""
    ranks, mates = range(world.size), routing.ranks_of_host(world.rank)
    of_bags, of_rows = torch.empty(0), Rows()
    if routing.sums_in_hosts:
        of_bags, of_rows = _gradients_of_hosts(routing, world, unpooled, x, gradients, share)
    met = mates if routing.two_level else ranks
    send = [routing.answer_shapes(r, world.rank, x.batch_sizes, x.ids_on.through(r) if r in met else {}) for r in ranks]
    receive = [routing.answer_shapes(world.rank, r, x.batch_sizes, x.ids_on.answered) for r in ranks]
    flat = empty((sum(numbers_in(send)),), gradients[0].dtype, world.device)
    for r, (direct, host_reduced, *rows) in enumerate(matrices(flat, send)):
        place_columns(direct, gradients[:1], routing.gradient_moves[r], share)
        if host_reduced.numel():
            place_columns(host_reduced, [of_bags], routing.host_reduced_gradient_moves[r])
        for k, out in enumerate(rows, start=routing.host_reduced[r].stop):
            if not routing.two_level:
                _put_rows(out, unpooled, x, gradients, routing.by_rank[r][k], share)
            elif r in mates:
                out.copy_(of_rows[r, k])
    return world.all_to_all(flat, numbers_in(send), numbers_in(receive), "gradients", scope=Scope(met, batch=x.mark))


def _gradients_of_hosts(
    routing: Routing, world: World, unpooled: Sequence[int], x: Exchanged, gradients: Sequence[Tensor], share: float
) -> tuple[Tensor, Rows]:
    """Gradients of the whole bags of this host, [samples of this rank and its twins, columns], and of its rows."""
    batch_size, hosts = x.batch_sizes[world.rank], range(len(routing.host_widths))
    shapes = [routing.twin_shapes(host, batch_size, x.ids_on.asked) for host in hosts]
    flat = empty((sum(numbers_in(shapes)),), gradients[0].dtype, world.device)
    for host, (bags, *rows) in enumerate(matrices(flat, shapes)):
        place_columns(bags, gradients[:1], routing.host_gradient_moves[host], share)
        for (r, k), out in zip(routing.host_rows[host], rows, strict=True):
            _put_rows(out, unpooled, x, gradients, routing.by_rank[r][k], share)
    return take_from_twins(routing, world, x, flat)


def _put_rows(
    out: Tensor, unpooled: Sequence[int], x: Exchanged, gradients: Sequence[Tensor], route: Route, share: float
) -> None:
    """Gradients of a route that is not pooled, times `share`."""
    rows = rows_of_range(unpooled, x, gradients, route)
    torch.mul(rows[:, slice(*route.shard.columns)], share, out=out)


def rows_of_range(unpooled: Sequence[int], x: Exchanged, gradients: Sequence[Tensor], route: Route) -> Tensor:
    """[ids, D]: gradients of the rows of one row range, of a feature that is not pooled, in the order of the range."""
    f = route.feature
    gradient = gradients[1 + unpooled.index(f)]
    moved = gradient if f not in x.order else gradient[x.order[f]]
    return moved.split(x.range_counts[f])[route.range]


def receive_gradients(
    routing: Routing, world: World, x: Exchanged, sent: Pending
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Of this owner: [B_global, columns] of its direct and of its partial bags, and [ids, D] of each route that is
    not pooled."""
    rank, flat = world.rank, sent.wait()
    shapes = [routing.answer_shapes(rank, r, x.batch_sizes, x.ids_on.answered) for r in range(world.size)]
    host_reduced = flat.new_empty(x.num_samples, routing.host_reduced[rank].width)
    if len(shapes[0]) == 2 and not host_reduced.numel():
        return flat.view(x.num_samples, routing.direct[rank].width), host_reduced, []
    parts = matrices(flat, shapes)
    if host_reduced.numel():
        blocks: dict[int, Tensor] = {}
        for neighbour in routing.ranks_of_host(rank):
            peers = routing.peers_across_hosts(neighbour)
            blocks |= zip(peers, parts[neighbour][1].split([x.batch_sizes[peer] for peer in peers]), strict=True)
        torch.cat([blocks[r] for r in range(len(shapes))], out=host_reduced)
    direct, _, *rows = (list(of_ranks) for of_ranks in zip(*parts, strict=True))
    ordered = [by_rank(routing, x, rank, k, own) for k, own in enumerate(rows, start=routing.host_reduced[rank].stop)]
    return torch.cat(direct), host_reduced, ordered


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
