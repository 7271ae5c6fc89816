"""Accumulated gradients of several backward passes, arranged as those of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from meseta.embedding.input_dist import OwnedIds
from meseta.ops.jagged import lengths_to_offsets, permute_segments
from meseta.ops.row_update import Bags
from meseta.sparse import KeyedJaggedTensor


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


def local_segment(ids: KeyedJaggedTensor, gradients: Sequence[Tensor], unpooled: Sequence[int]) -> GradientSegment:
    """Return the segment of one rank's samples, by feature."""
    sizes = tuple(b - a for a, b in pairwise(ids.key_offsets))
    bags = Bags(ids.values, ids.offsets, ids.batch_size, ids.weights)
    return GradientSegment(
        ids=OwnedIds(bags=bags, lengths=ids.lengths, sizes=sizes),
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
