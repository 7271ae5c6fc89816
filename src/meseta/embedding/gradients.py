"""The way back: gradients to the owners of rows, statistics between column shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meseta.comm import Pending
from meseta.embedding.exchange import Exchanged, matrices, numbers_in
from meseta.embedding.routes import column_groups
from meseta.ops.columns import place_columns
from meseta.ops.memory import empty
from meseta.spec import COLUMN_BLOCK, Shard
from meseta.storage import TableShard

if TYPE_CHECKING:
    from meseta.embedding.sharded import ShardedEmbeddingBagCollection


def send_gradients(
    collection: ShardedEmbeddingBagCollection, x: Exchanged, gradients: Sequence[Tensor], share: float
) -> Pending:
    """The mirror of the answers, times `share`: to every owner [B_local, its pooled columns] and [ids, D] of its
    unpooled routes."""
    routing, world = collection.routing, collection.world
    num_samples = x.batch_sizes[world.rank]
    send = [routing.answer_shapes(r, num_samples, x.sent[r]) for r in range(world.size)]
    receive = [routing.answer_shapes(world.rank, b, n) for b, n in zip(x.batch_sizes, x.received, strict=True)]
    flat = empty((sum(numbers_in(send)),), gradients[0].dtype, world.device)
    for r, (pooled, *rows) in enumerate(matrices(flat, send)):
        place_columns(pooled, gradients[:1], routing.gradient_moves[r], share)
        for route, out in zip(routing.by_rank[r][routing.num_pooled[r] :], rows, strict=True):
            f = route.feature
            gradient = gradients[1 + collection.row_features.index(collection.features[f])]
            moved = gradient if f not in x.order else gradient[x.order[f]]
            own = moved.split(x.range_counts[f])[route.range]
            torch.mul(own[:, slice(*route.shard.columns)], share, out=out)
    return world.all_to_all(flat, numbers_in(send), numbers_in(receive))


def receive_gradients(
    collection: ShardedEmbeddingBagCollection, x: Exchanged, sent: Pending
) -> tuple[Tensor, list[Tensor]]:
    """[B_global, pooled columns] of this owner, and [ids, D] of each of its unpooled routes."""
    routing, rank = collection.routing, collection.world.rank
    flat, columns = sent.wait(), routing.pooled_columns[rank]
    shapes = [routing.answer_shapes(rank, b, n) for b, n in zip(x.batch_sizes, x.received, strict=True)]
    if len(shapes[0]) == 1:
        return flat.view(x.num_samples, columns), []
    pooled, *rows = (torch.cat(parts) for parts in zip(*matrices(flat, shapes), strict=True))
    return pooled, rows


def gather_column_stats(
    collection: ShardedEmbeddingBagCollection, shards: Sequence[TableShard], stats: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """[n U, blocks of this shard] -> [n U, blocks of the whole row], blocks ordered by column, for n statistics.

    All column shards of a row range see the same ids, so they know each other's U and no size is exchanged.
    """
    world = collection.world
    known = {shard.shard: stat for shard, stat in zip(shards, stats, strict=True) if stat is not None}
    groups = column_groups(list(known), collection.plan)
    send, splits, expected, sizes = [], [], [], []
    for rank in range(world.size):
        shared = [g for g in groups if rank != world.rank and any(s.ranks[0] == rank for s in g)]
        pieces = [known[s].reshape(-1) for group in shared for s in group if s in known]
        send += pieces
        splits.append(sum(piece.numel() for piece in pieces))
        theirs = [(s, _num_rows(group, known)) for group in shared for s in group if s.ranks[0] == rank]
        expected += theirs
        sizes.append(sum(num_rows * _num_blocks(s) for s, num_rows in theirs))
    flat = torch.cat(send) if send else torch.empty(0, dtype=collection.dtype, device=world.device)
    received = world.all_to_all(flat, splits, sizes).wait()
    pieces = received.split([num_rows * _num_blocks(s) for s, num_rows in expected])
    for (shard, num_rows), piece in zip(expected, pieces, strict=True):
        known[shard] = piece.view(num_rows, _num_blocks(shard))
    whole = {s: torch.cat([known[piece] for piece in group], dim=1) for group in groups for s in group}
    return [whole.get(shard.shard) for shard in shards]


def _num_blocks(shard: Shard) -> int:
    return -(-shard.num_columns // COLUMN_BLOCK)


def _num_rows(group: Sequence[Shard], known: Mapping[Shard, Tensor]) -> int:
    return next(known[s].shape[0] for s in group if s in known)
