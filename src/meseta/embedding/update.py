"""Row updates from upstream gradients: fused for whole rows, or in stages with row statistics for column shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from meseta.embedding.input_dist import OwnedIds
from meseta.ops.coalesce import BLOCK_SAMPLES, coalesce
from meseta.ops.common import device_constant
from meseta.ops.jagged import lengths_to_offsets, permute_segments
from meseta.ops.row_program.optimizer import Hyper, compute_dtype, sum_across_blocks
from meseta.ops.row_update import (
    Bags,
    FeatureGradient,
    SortedRowIds,
    TableRows,
    UpdateGroup,
    apply_row_update,
    row_update,
)
from meseta.ops.row_update.staged import TouchedRows, stage_block_sums, update_with_stats
from meseta.ops.step_scalars import StepScalars
from meseta.sparse import KeyedJaggedTensor
from meseta.sparse.shapes import Float, Int
from meseta.spec import OptimizerSpec, TableSpec
from meseta.spec.average import AverageSpec
from meseta.storage import TableStorage

GatherStats = Callable[[list[Tensor | None]], list[Tensor | None]]
"""Function that turns the statistics of this rank's shards into those of whole rows, see `update_rows`."""


@dataclass(frozen=True)
class FusedShards:
    """Shards with the same row optimizer that one operator call updates."""

    spec: TableSpec
    group: UpdateGroup


def group_shards(
    shards: Sequence[TableStorage], rows: Sequence[TableRows], features: Sequence[FeatureGradient]
) -> tuple[FusedShards, ...]:
    """Group the shards that `features` name by index by row optimizer. Frozen shards are left out.

    `rows` are the acquired rows of all shards. Contributions are added in the order of `features`. Shards must have
    whole rows, or an optimizer without row statistics.
    """
    members: dict[tuple[OptimizerSpec, AverageSpec | None], list[int]] = {}
    for index in dict.fromkeys(feature.table for feature in features):
        spec = shards[index].spec
        if spec.optimizer.name != "frozen":
            members.setdefault((spec.optimizer, spec.average), []).append(index)
    groups = []
    for indices in members.values():
        number = {index: n for n, index in enumerate(indices)}
        group = UpdateGroup(
            optimizer=shards[indices[0]].optimizer,
            tables=tuple(rows[index] for index in indices),
            embedding_dims=tuple(shards[index].spec.embedding_dim for index in indices),
            features=tuple(replace(f, table=number[f.table]) for f in features if f.table in number),
        )
        groups.append(FusedShards(spec=shards[indices[0]].spec, group=group))
    return tuple(groups)


def step_shards(
    fused: FusedShards,
    lr: float,
    step: int,
    bags: Bags,
    gradients: Sequence[Tensor],
    found_inf: Float[Tensor, ""] | None = None,
    scalars: StepScalars | None = None,
    sorted_ids: SortedRowIds | None = None,
) -> None:
    """Update the touched rows, or all rows if the optimizer requires it, unless `found_inf` is nonzero.

    Kernels read rate and step from `scalars`, if there are any. `sorted_ids` is the result of an earlier sort.
    """
    group, output_gradients, optimizer = fused.group, list(gradients), fused.spec.optimizer
    if optimizer.stepped_rows == "looked_up" and bags.num_samples:
        looked_up = ids_by_table(group.features, bags, len(group.tables))
        extra_rows = [
            lookup_penalty(optimizer, table.weight, ids) for table, ids in zip(group.tables, looked_up, strict=True)
        ]
        sizes = torch.tensor([rows.numel() for rows, _ in extra_rows], device=bags.offsets.device)
        group, bags, output_gradients = _append_rows(group, bags, output_gradients, extra_rows, sizes)
    if optimizer.stepped_rows == "all" and bags.num_samples:
        sizes = device_constant(tuple(table.weight.shape[0] for table in group.tables), bags.offsets.device)
        group, bags, output_gradients = _append_rows(
            group, bags, output_gradients, [_all_rows(t, output_gradients[0]) for t in group.tables], sizes
        )
    # float64 rows are updated by the reference, which needs numbers of the host.
    uniforms = None
    if scalars is not None and group.weights[0].dtype != torch.float64:
        uniforms = group.uniforms_on_device(scalars, optimizer.lr)
    if sorted_ids is None:
        row_update(group, lr, step, bags, output_gradients, found_inf, uniforms)
    else:
        apply_row_update(sorted_ids, group, lr, step, bags, output_gradients, found_inf, uniforms)


def ids_by_table(features: Sequence[FeatureGradient], bags: Bags, num_tables: int) -> list[Int[Tensor, " nnz"]]:
    """Return the ids that the features of each table look up."""
    bounds = bags.offsets[:: bags.num_samples].tolist()
    ids: list[list[Tensor]] = [[] for _ in range(num_tables)]
    for feature in features:
        ids[feature.table].append(bags.ids[bounds[feature.position] : bounds[feature.position + 1]])
    return [torch.cat(table_ids) for table_ids in ids]


def lookup_penalty(
    optimizer: OptimizerSpec, weight: Float[Tensor, "rows D"], ids: Int[Tensor, " nnz"]
) -> tuple[Int[Tensor, " U"], Float[Tensor, "U D"]]:
    """Return the looked-up rows in ascending order, and the gradients of their penalties.

    The penalty of a row is weight_decay / 2 * |row|^2 + l1 * sum(|row|), times its number of lookups.
    """
    rows, counts = torch.unique(ids, return_counts=True)
    looked_up = weight[rows].to(compute_dtype(weight.dtype))
    each = optimizer.weight_decay * looked_up + optimizer.l1 * looked_up.sign()
    return rows, each * counts[:, None]


def _all_rows(table: TableRows, like: Tensor) -> tuple[Tensor, Tensor]:
    # All gradients are the same row of zeros, to save memory.
    num_rows = table.weight.shape[0]
    return torch.arange(num_rows, device=like.device), like.new_zeros(1, table.weight.shape[1]).expand(num_rows, -1)


def _append_rows(
    group: UpdateGroup, bags: Bags, gradients: list[Tensor], more: Sequence[tuple[Tensor, Tensor]], sizes: Tensor
) -> tuple[UpdateGroup, Bags, list[Tensor]]:
    """Append one feature per table, whose first sample has `more` rows and gradients. `sizes` are the tables' rows."""
    # The new rows come last, so that the sums of other contributions keep their bits.
    num_features = (bags.offsets.numel() - 1) // bags.num_samples
    ends = bags.ids.numel() + sizes.cumsum(0)
    places = [
        FeatureGradient(num_features + table, table, len(gradients) + table, per_id=True)
        for table in range(len(group.tables))
    ]
    weights = bags.weights
    if weights is not None:
        weights = torch.cat([weights, weights.new_ones(sum(rows.numel() for rows, _ in more))])
    offsets = torch.cat([bags.offsets, ends.to(bags.offsets.dtype).repeat_interleave(bags.num_samples)])
    ids = torch.cat([bags.ids, *(rows.to(bags.ids.dtype) for rows, _ in more)])
    group = replace(group, features=(*group.features, *places))
    return group, Bags(ids, offsets, bags.num_samples, weights), [*gradients, *(gradient for _, gradient in more)]


def zero_contribution(shard: TableStorage) -> GradientContribution:
    """Return zero gradients for all rows of a shard, so that all rows are updated. Append it to other contributions."""
    device, num_rows, width = shard.device, shard.shard.num_rows, shard.shard.num_columns
    nothing = torch.zeros(num_rows, dtype=torch.int64, device=device)
    zeros = torch.zeros(1, width, dtype=compute_dtype(shard.dtype), device=device)
    return GradientContribution(torch.arange(num_rows, device=device), nothing, zeros, nothing)


def penalty_contribution(
    shard: TableStorage, rows: TableRows, parts: Sequence[GradientContribution]
) -> GradientContribution:
    """Return the gradients of penalties for each lookup in `parts`. Append it to these contributions."""
    looked_up, penalty = lookup_penalty(shard.spec.optimizer, rows.weight, torch.cat([part.ids for part in parts]))
    source = torch.arange(looked_up.numel(), device=looked_up.device)
    return GradientContribution(looked_up, torch.zeros_like(source), penalty, source)


@dataclass(frozen=True)
class GradientContribution:
    """Contribution of one feature to the gradient of one shard."""

    ids: Int[Tensor, " nnz"]
    """Rows of the shard, ordered by (global sample, position)."""
    sample: Int[Tensor, " nnz"]
    gradient: Float[Tensor, "G D"]
    """Upstream gradient with one row per bag or per id."""
    source: Int[Tensor, " nnz"]
    """Row of `gradient` for each id."""
    scale: Float[Tensor, " nnz"] | None = None


@dataclass(frozen=True)
class RowGradient:
    """Gradient of the touched rows of one shard."""

    rows: Int[Tensor, " U"]
    gradient: Float[Tensor, "U D"]


def sample_indices(ids: Sequence[Tensor], lengths: Sequence[Tensor], num_samples: int) -> tuple[Tensor, ...]:
    """Return the sample index of each id for several features, such as [0, 0, 1] for lengths [2, 1]."""
    # One call for all features is faster, because each call of a kernel wakes its threads.
    if not ids:
        return ()
    samples = torch.arange(num_samples, device=ids[0].device).repeat(len(ids))
    sizes = [feature_ids.numel() for feature_ids in ids]
    return torch.repeat_interleave(samples, torch.cat(list(lengths)), output_size=sum(sizes)).split(sizes)


def sum_contributions(shard: TableStorage, parts: Sequence[GradientContribution], num_samples: int) -> RowGradient:
    """Sum the contributions of features to a shard, in the order of the features."""
    if len(parts) == 1:
        [part] = parts
        return RowGradient(*coalesce(part.ids, part.source, part.sample // BLOCK_SAMPLES, part.gradient, part.scale))
    num_blocks = -(-num_samples // BLOCK_SAMPLES)
    ids, sources, blocks, first_row = [], [], [], 0
    for index, part in enumerate(parts):
        ids.append(part.ids)
        sources.append(part.source + first_row)
        # Blocks of different features have different numbers, so contributions are added in the order of features.
        blocks.append(part.sample // BLOCK_SAMPLES + index * num_blocks)
        first_row += part.gradient.shape[0]
    scale = None
    if any(part.scale is not None for part in parts):
        ones = [
            p.gradient.new_ones(p.ids.numel(), dtype=shard.dtype) if p.scale is None else p.scale.to(shard.dtype)
            for p in parts
        ]
        scale = torch.cat(ones)
    gradient = torch.cat([part.gradient for part in parts])
    return RowGradient(*coalesce(torch.cat(ids), torch.cat(sources), torch.cat(blocks), gradient, scale))


def sum_gradients(
    shards: Sequence[TableStorage],
    rows: Sequence[TableRows],
    places: Sequence[FeatureGradient],
    owned: OwnedIds,
    gradients: Sequence[Tensor],
) -> dict[int, RowGradient]:
    """Return the gradients of the shards that `places` name by index, with contributions that their optimizers require.

    These are zeros for all rows, or penalties of lookups. `rows` are the acquired rows of all shards.
    """
    num_samples, ids = owned.bags.num_samples, owned.ids_by_route()
    lengths = owned.lengths.split(num_samples) if num_samples else [owned.lengths] * len(ids)
    samples, weights = sample_indices(ids, lengths, num_samples), owned.bags.weights
    parts: dict[int, list[GradientContribution]] = {}
    for place in places:
        width, k = shards[place.table].shard.num_columns, place.position
        source = torch.arange(ids[k].numel(), device=ids[k].device) if place.per_id else samples[k]
        scale = weights.split(owned.sizes)[k] if place.weighted and weights is not None else None
        gradient = gradients[place.gradient][:, place.column : place.column + width]
        parts.setdefault(place.table, []).append(GradientContribution(ids[k], samples[k], gradient, source, scale))
    for index, contributions in parts.items():
        if shards[index].spec.optimizer.stepped_rows == "all":
            contributions.append(zero_contribution(shards[index]))
        elif shards[index].spec.optimizer.stepped_rows == "looked_up":
            contributions.append(penalty_contribution(shards[index], rows[index], contributions))
    return {index: sum_contributions(shards[index], parts[index], num_samples) for index in sorted(parts)}


def update_rows(
    shards: Sequence[TableStorage],
    rows: Sequence[TableRows],
    gradients: Sequence[RowGradient],
    hypers: Sequence[Hyper],
    gather_stats: GatherStats = list,
    num_exchanges: int = 0,
    found_inf: Float[Tensor, ""] | None = None,
) -> None:
    """Update the touched rows of each shard once in place. No row is updated if `found_inf` is nonzero.

    `rows` are the acquired rows of each shard, `gradients` those of the touched rows, and `hypers` the hyperparameters.
    `gather_stats` turns the statistics of this rank's shards, [n U, blocks] each for n statistics, into those of whole
    rows. It is called on all ranks in each of the first `num_exchanges` stages.
    """
    # Statistics are exchanged in the order of rows, because the slots of rows may differ between ranks.
    touched = [
        TouchedRows(shard_rows, g.rows, g.gradient, hyper)
        for shard_rows, g, hyper in zip(rows, gradients, hypers, strict=True)
    ]
    stats = [g.gradient.new_empty(0, g.rows.numel()) for g in gradients]
    orders = [
        None if shard_rows.row_ids is None else shard_rows.row_ids[g.rows].argsort()
        for shard_rows, g in zip(rows, gradients, strict=True)
    ]
    for stage in range(max([num_exchanges, *(len(shard.optimizer.row_stats) for shard in shards)])):
        sums: list[Tensor | None] = [
            stage_block_sums(shard.optimizer, stage, touched[k], stats[k])
            if stage < len(shard.optimizer.row_stats)
            else None
            for k, shard in enumerate(shards)
        ]
        sums_by_row = [
            shard_sums if shard_sums is None or order is None else shard_sums[:, order]
            for shard_sums, order in zip(sums, orders, strict=True)
        ]
        parts = [None if shard_sums is None else shard_sums.flatten(0, 1) for shard_sums in sums_by_row]
        for k, part in enumerate(gather_stats(parts) if stage < num_exchanges else parts):
            shard_sums = sums[k]
            if part is not None and shard_sums is not None:
                row_sums, order = sum_across_blocks(part).view(shard_sums.shape[:2]), orders[k]
                row_sums = row_sums if order is None else torch.empty_like(row_sums).index_copy_(1, order, row_sums)
                stats[k] = torch.cat([stats[k], row_sums])
    for shard, touched_rows, stat in zip(shards, touched, stats, strict=True):
        if shard.spec.optimizer.name != "frozen":
            update_with_stats(shard.optimizer, touched_rows, stat, found_inf)


@dataclass(frozen=True)
class GradientSegment:
    """Ids of a micro-batch and the gradients of their bags or rows."""

    # Gradients are kept per bag and not per row. The rows of a bag share its gradient, and can still be added in the
    # order of the whole batch.

    ids: OwnedIds
    """Ids by route, or by feature in one process, each ordered by (rank, sample, position)."""
    batch_size_per_rank: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    gradients: tuple[Tensor, ...]
    """Gradients of bags as one or more matrices [B, columns], then one matrix [ids, D] per unpooled route."""
    unpooled_routes: tuple[int, ...]


def local_bags(ids: KeyedJaggedTensor) -> Bags:
    """Return the bags of one rank."""
    return Bags(ids.values, ids.offsets, ids.batch_size, ids.weights)


def local_segment(ids: KeyedJaggedTensor, gradients: Sequence[Tensor], unpooled: Sequence[int]) -> GradientSegment:
    """Return the segment of one rank's samples, by feature."""
    # No caller needs the sizes of a single segment.
    sizes = () if ids.is_padded else tuple(b - a for a, b in pairwise(ids.key_offsets))
    return GradientSegment(
        ids=OwnedIds(bags=local_bags(ids), lengths=ids.lengths, sizes=sizes),
        batch_size_per_rank=(ids.batch_size,),
        counts=(sizes,),
        gradients=tuple(gradients),
        unpooled_routes=tuple(unpooled),
    )


def merge_micro_batches(segments: Sequence[GradientSegment]) -> GradientSegment:
    """Merge micro-batches into one segment with samples ordered by (rank, micro-batch, sample)."""
    # This is the order of the whole batch, because the micro-batches of a rank are consecutive parts of its slice.
    if len(segments) == 1:
        return segments[0]
    ranks, routes = range(len(segments[0].batch_size_per_rank)), range(len(segments[0].ids.sizes))
    # Segments of ids are ordered by (micro-batch, route, rank). The new order is (route, rank, micro-batch).
    order = [
        (i * len(routes) + route) * len(ranks) + rank
        for route in routes
        for rank in ranks
        for i in range(len(segments))
    ]
    num_ids = [s.counts[rank][route] for s in segments for route in routes for rank in ranks]
    num_bags = [s.batch_size_per_rank[rank] for s in segments for _ in routes for rank in ranks]
    ids = permute_segments(torch.cat([s.ids.bags.ids for s in segments]), num_ids, order)
    lengths = permute_segments(torch.cat([s.ids.lengths for s in segments]), num_bags, order)
    weights_per_segment = [s.ids.bags.weights for s in segments]
    weights = (
        permute_segments(torch.cat([w for w in weights_per_segment if w is not None]), num_ids, order)
        if weights_per_segment[0] is not None
        else None
    )
    num_bag_matrices = len(segments[0].gradients) - len(segments[0].unpooled_routes)
    sizes_of: list[list[tuple[int, ...]]] = [[s.batch_size_per_rank for s in segments]] * num_bag_matrices
    sizes_of += [[tuple(n[route] for n in s.counts) for s in segments] for route in segments[0].unpooled_routes]
    gradients = [
        _interleave_by_rank([s.gradients[m] for s in segments], part_sizes) for m, part_sizes in enumerate(sizes_of)
    ]
    bags = Bags(ids, lengths_to_offsets(lengths), sum(sum(s.batch_size_per_rank) for s in segments), weights)
    sizes = tuple(sum(s.ids.sizes[route] for s in segments) for route in routes)
    return GradientSegment(
        ids=OwnedIds(bags=bags, lengths=lengths, sizes=sizes),
        batch_size_per_rank=tuple(sum(s.batch_size_per_rank[rank] for s in segments) for rank in ranks),
        counts=tuple(tuple(sum(s.counts[rank][route] for s in segments) for route in routes) for rank in ranks),
        gradients=tuple(gradients),
        unpooled_routes=segments[0].unpooled_routes,
    )


def merge_groups(segments: Sequence[GradientSegment]) -> tuple[OwnedIds, tuple[Tensor, ...]]:
    """Merge feature groups with different batch sizes into one batch, and return its ids and gradients.

    Routes and matrices of the groups follow each other. Smaller groups are padded with empty bags at the end.
    """
    if len(segments) == 1:
        return segments[0].ids, segments[0].gradients
    num_samples = max(s.ids.bags.num_samples for s in segments)
    lengths, gradients, weights = [], [], []
    is_weighted = any(s.ids.bags.weights is not None for s in segments)
    for s in segments:
        segment_bags = s.ids.bags
        missing = num_samples - segment_bags.num_samples
        lengths.append(pad(s.ids.lengths.view(len(s.ids.sizes), segment_bags.num_samples), (0, missing)).view(-1))
        num_bag_matrices = len(s.gradients) - len(s.unpooled_routes)
        gradients += [pad(matrix, (0, 0, 0, missing)) for matrix in s.gradients[:num_bag_matrices]]
        gradients += s.gradients[num_bag_matrices:]
        if is_weighted:
            weights.append(
                s.gradients[0].new_ones(segment_bags.ids.numel())
                if segment_bags.weights is None
                else segment_bags.weights
            )
    dtype = max((s.ids.bags.ids.dtype for s in segments), key=lambda dtype: dtype.itemsize)
    ids = torch.cat([s.ids.bags.ids.to(dtype) for s in segments])
    whole = torch.cat([segment_lengths.to(dtype) for segment_lengths in lengths])
    bags = Bags(ids, lengths_to_offsets(whole), num_samples, torch.cat(weights) if is_weighted else None)
    sizes = tuple(size for s in segments for size in s.ids.sizes)
    return OwnedIds(bags=bags, lengths=whole, sizes=sizes), tuple(gradients)


def merge_backward_passes(passes: Sequence[Sequence[GradientSegment]]) -> tuple[OwnedIds, tuple[Tensor, ...]]:
    """Merge backward passes, each with one segment per feature group. Returns the ids and gradients of one batch."""
    return merge_groups([merge_micro_batches(group_segments) for group_segments in zip(*passes, strict=True)])


def _interleave_by_rank(matrices: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> Tensor:
    """Merge matrices with rows ordered by rank into one with rows ordered by (rank, matrix)."""
    parts = [matrix.split(list(sizes_per_rank)) for matrix, sizes_per_rank in zip(matrices, sizes, strict=True)]
    return torch.cat([part for rank_parts in zip(*parts, strict=True) for part in rank_parts])
