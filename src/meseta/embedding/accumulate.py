"""Gradients of several backward passes, put together as if one batch had come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from meseta.embedding.input_dist import OwnedIds
from meseta.jagged import KeyedJaggedTensor
from meseta.ops.jagged import lengths_to_offsets, permute_segments
from meseta.ops.row_update import Bags


@dataclass(frozen=True)
class GradientSegment:
    """Ids of a micro-batch and the upstream gradients that their rows receive.

    What is kept is the gradient of each bag beside its ids, not one of each row: the rows of a bag share it, and their
    contributions can still be added in the order that a whole batch has.
    """

    ids: OwnedIds
    """By route (in one process: by feature), each ordered by (rank, sample, position)."""
    batch_size_per_rank: tuple[int, ...]
    """Samples from each rank."""
    counts: tuple[tuple[int, ...], ...]
    """counts[r][k]: ids from rank r for route k."""
    gradients: tuple[Tensor, ...]
    """[B, columns] of one matrix or more of bags, and [ids, D] of each route of `unpooled`."""
    unpooled_routes: tuple[int, ...]
    """Routes whose gradients are per id."""


def local_segment(ids: KeyedJaggedTensor, gradients: Sequence[Tensor], unpooled: Sequence[int]) -> GradientSegment:
    """Of the samples of one rank, by feature."""
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
    """One segment, its samples ordered by (rank, micro-batch, sample).

    A rank's micro-batches are consecutive parts of its slice, so this is the order of the whole batch.
    """
    if len(segments) == 1:
        return segments[0]
    ranks, routes = range(len(segments[0].batch_size_per_rank)), range(len(segments[0].ids.sizes))
    # Pieces lie by (micro-batch, route, rank).
    at = [
        (i * len(routes) + route) * len(ranks) + rank
        for route in routes
        for rank in ranks
        for i in range(len(segments))
    ]
    num_ids = [s.counts[rank][route] for s in segments for route in routes for rank in ranks]
    num_bags = [s.batch_size_per_rank[rank] for s in segments for _ in routes for rank in ranks]
    ids = permute_segments(torch.cat([s.ids.bags.ids for s in segments]), num_ids, at)
    lengths = permute_segments(torch.cat([s.ids.lengths for s in segments]), num_bags, at)
    given = [s.ids.bags.weights for s in segments]
    weights = (
        permute_segments(torch.cat([w for w in given if w is not None]), num_ids, at) if given[0] is not None else None
    )
    num_bag_matrices = len(segments[0].gradients) - len(segments[0].unpooled_routes)
    sizes_of: list[list[tuple[int, ...]]] = [[s.batch_size_per_rank for s in segments]] * num_bag_matrices
    sizes_of += [[tuple(n[route] for n in s.counts) for s in segments] for route in segments[0].unpooled_routes]
    gradients = [_interleave_by_rank([s.gradients[m] for s in segments], own) for m, own in enumerate(sizes_of)]
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
    """Ids and gradients of groups of features with batch sizes of their own, as those of one batch: routes and matrices
    one group after the other, where the smaller ones have empty bags at the end."""
    if len(segments) == 1:
        return segments[0].ids, segments[0].gradients
    num_samples = max(s.ids.bags.num_samples for s in segments)
    lengths, gradients, weights = [], [], []
    is_weighted = any(s.ids.bags.weights is not None for s in segments)
    for s in segments:
        own = s.ids.bags
        missing = num_samples - own.num_samples
        lengths.append(pad(s.ids.lengths.view(len(s.ids.sizes), own.num_samples), (0, missing)).view(-1))
        num_bag_matrices = len(s.gradients) - len(s.unpooled_routes)
        gradients += [pad(matrix, (0, 0, 0, missing)) for matrix in s.gradients[:num_bag_matrices]]
        gradients += s.gradients[num_bag_matrices:]
        if is_weighted:
            weights.append(s.gradients[0].new_ones(own.ids.numel()) if own.weights is None else own.weights)
    dtype = max((s.ids.bags.ids.dtype for s in segments), key=lambda dtype: dtype.itemsize)
    ids = torch.cat([s.ids.bags.ids.to(dtype) for s in segments])
    whole = torch.cat([own.to(dtype) for own in lengths])
    bags = Bags(ids, lengths_to_offsets(whole), num_samples, torch.cat(weights) if is_weighted else None)
    sizes = tuple(size for s in segments for size in s.ids.sizes)
    return OwnedIds(bags=bags, lengths=whole, sizes=sizes), tuple(gradients)


def merge_backward_passes(passes: Sequence[Sequence[GradientSegment]]) -> tuple[OwnedIds, tuple[Tensor, ...]]:
    """Ids and gradients of all backward passes, each of which has a segment for every group of features."""
    return merge_groups([merge_micro_batches(of_group) for of_group in zip(*passes, strict=True)])


def _interleave_by_rank(matrices: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> Tensor:
    """Rows of several matrices that lie by rank, as one matrix by (rank, matrix)."""
    parts = [matrix.split(list(of_ranks)) for matrix, of_ranks in zip(matrices, sizes, strict=True)]
    return torch.cat([part for of_rank in zip(*parts, strict=True) for part in of_rank])
