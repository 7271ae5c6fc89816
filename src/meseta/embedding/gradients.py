"""The way back: gradients to the owners of rows, statistics between column shards, sums over replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meseta.embedding.routes import column_groups
from meseta.embedding.update import Contribution, RowGradient, samples_of, sum_contributions, update_rows
from meseta.spec import COLUMN_BLOCK, Shard
from meseta.storage import TableShard

if TYPE_CHECKING:
    from meseta.embedding.sharded import Exchanged, ShardedEmbeddingBagCollection


def gradient_of(collection: ShardedEmbeddingBagCollection, feature: int, gradients: Sequence[Tensor]) -> Tensor:
    """[B_local, D] of a pooled feature (a view of gradients[0]), or [nnz_f, D] of one that is not."""
    spec = collection.features[feature]
    if spec.pooling == "none":
        return gradients[1 + collection.row_features.index(spec)]
    before = collection.pooled_features[: collection.pooled_features.index(spec)]
    start = sum(collection._table[f.table].embedding_dim for f in before)
    return gradients[0][:, start : start + collection._table[spec.table].embedding_dim]


def send_gradients(
    collection: ShardedEmbeddingBagCollection, x: Exchanged, gradients: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The mirror of the answers: every owner gets [B_global, its pooled columns] and [ids, D] of its unpooled
    routes."""
    routing, world = collection.routing, collection.world
    parts, splits = [], []
    for routes in routing.by_rank:
        pooled, rows = [], []
        for route in routes:
            gradient = gradient_of(collection, route.feature, gradients)[:, slice(*route.shard.columns)]
            if collection.features[route.feature].pooling != "none":
                pooled.append(gradient)
                continue
            bucket = x.buckets[route.feature]
            moved = gradient if bucket.order is None else gradient[bucket.order]
            rows.append(moved.split(x.range_counts[route.feature])[route.range].reshape(-1))
        mine = [torch.cat(pooled, dim=1).reshape(-1)] if pooled else []
        splits.append(sum(p.numel() for p in mine + rows))
        parts += mine + rows
    flat = torch.cat(parts) if parts else gradients[0].new_empty(0)
    first, columns = routing.num_pooled[world.rank], routing.pooled_columns[world.rank]
    widths = [route.shard.num_columns for route in routing.by_rank[world.rank][first:]]
    shapes = [
        [(b, columns), *zip(n[first:], widths, strict=True)] for b, n in zip(x.batch_sizes, x.received, strict=True)
    ]
    sizes = [a * b for shape in shapes for a, b in shape]
    received = world.all_to_all(flat, splits, [sum(a * b for a, b in s) for s in shapes]).wait().split(sizes)
    step = 1 + len(widths)
    pooled_rows = torch.cat(received[0::step]).view(-1, columns) if columns else flat.new_empty(x.num_samples, 0)
    return pooled_rows, [torch.cat(received[1 + k :: step]).view(-1, width) for k, width in enumerate(widths)]


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


def update_replicas(collection: ShardedEmbeddingBagCollection, x: Exchanged, gradients: Sequence[Tensor]) -> None:
    """Add the gradients of replicated tables over ranks in one buffer [rows and columns | touched], step each
    replica."""
    routing, world = collection.routing, collection.world
    if not routing.replicated:
        return
    first_sample = sum(x.batch_sizes[: world.rank])
    parts: dict[str, list[Contribution]] = {}
    own = [x.ids[collection.features[f].name] for f in routing.replicated]
    batch_size = x.batch_sizes[world.rank]
    bags = samples_of([jagged.values for jagged in own], [jagged.lengths for jagged in own], batch_size)
    for f, jagged, bag in zip(routing.replicated, own, bags, strict=True):
        spec = collection.features[f]
        source = bag if spec.pooling != "none" else torch.arange(bag.numel(), device=bag.device)
        gradient = gradient_of(collection, f, gradients)
        scale = jagged.weights if spec.weighted else None
        part = Contribution(jagged.values, bag + first_sample, gradient, source, scale)
        parts.setdefault(spec.table, []).append(part)
    shards = [shard for shard in collection.shards if shard.spec.name in parts]
    sizes = [n for s in shards for n in (s.weight.numel(), s.weight.shape[0])]
    buffer = torch.zeros(sum(sizes), dtype=collection.dtype, device=world.device)
    slots = buffer.split(sizes)
    for shard, total, touched in zip(shards, slots[0::2], slots[1::2], strict=True):
        local = sum_contributions(shard, parts[shard.spec.name], x.num_samples)
        total.view_as(shard.weight).index_copy_(0, local.rows, local.gradient)
        touched.index_fill_(0, local.rows, 1)
    world.all_reduce(buffer)
    sums = []
    for shard, total, touched in zip(shards, slots[0::2], slots[1::2], strict=True):
        rows = torch.nonzero(touched).squeeze(1)
        sums.append(RowGradient(rows, total.view_as(shard.weight)[rows]))
    update_rows(shards, sums, [collection.hyper(shard.spec) for shard in shards])
