"""Grouping of the ids of a batch by the owners of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.ops.bucketize import reference
from meseta.ops.common import contiguous_ids, register
from meseta.ops.core import core
from meseta.ops.memory import empty
from meseta.sparse.shapes import Int
from meseta.spec import MesetaError

# Each owner takes memory for every sample, so that a wrong number must not reach the allocator.
MAX_OWNERS = 1 << 20
"""Maximum total number of owners of all features."""


@dataclass(frozen=True)
class Buckets:
    """Ids of all features, ordered by feature, owner and position in the batch."""

    ids: Int[Tensor, " nnz"]
    """Rows relative to the first row of their owner."""
    lengths: Int[Tensor, "owners B"]
    """Number of ids per (feature and owner, sample)."""
    order: Int[Tensor, " nnz"]
    """Position in the batch of each id."""
    totals: Int[Tensor, " owners"]
    """Number of ids per feature and owner."""


def bucketize(
    ids: Int[Tensor, " nnz"], lengths: Int[Tensor, " B"], cuts: Sequence[int]
) -> tuple[Int[Tensor, " nnz"], Int[Tensor, "num_ranges B"], Int[Tensor, " nnz"]]:
    """Group the ids of one feature by row range. The order within a range is kept.

    Example: ids [5, 1, 7], lengths [2, 1] and cuts [0, 4, 8] return [1, 1, 3], [[1, 0], [1, 1]] and [1, 0, 2].

    Args:
        ids: Row ids.
        lengths: Number of ids per sample.
        cuts: Range n has rows cuts[n]..cuts[n + 1]-1.

    Returns:
        Ids relative to their range, number of ids per (range, sample), and the original position of each id. There is
        no host sync.

    Raises:
        MesetaError: On a CPU, lengths do not match the number of ids, or an id is outside all ranges.
    """
    buckets = bucketize_features(ids, lengths, [cuts])
    return buckets.ids, buckets.lengths, buckets.order


def bucketize_features(
    ids: Int[Tensor, " nnz"], lengths: Int[Tensor, " F_times_B"], owners: Sequence[Sequence[int] | int]
) -> Buckets:
    """Group the ids of F features by the owners of their rows.

    Args:
        ids: int32 or int64 ids, in feature-major order.
        lengths: int32 or int64 number of ids per feature and sample. With several features on a GPU the host waits for
            the number of ids per feature.
        owners: For each feature the cuts of row ranges as for `bucketize`, or the number of hash classes.

    Raises:
        MesetaError: On a CPU, lengths do not match the number of ids, or an id is outside all ranges.
    """
    # With n hash classes, id i is row i // n of owner (i + (SplitMix64(i // n) * n >> 64)) % n. Any n adjacent ids have
    # n different owners, in an order that a hash determines.
    cuts = [[one] if isinstance(one, int) else list(one) for one in owners]
    for f, feature_cuts in enumerate(cuts):
        if len(feature_cuts) < 1 or (len(feature_cuts) == 1 and not isinstance(owners[f], int)):
            raise MesetaError(
                f"bucketize: feature {f} has the cuts {feature_cuts}; pass at least one row range, [0, rows]"
            )
    if lengths.dtype not in (torch.int32, torch.int64) or not cuts or lengths.numel() % len(cuts):
        raise MesetaError(
            f"bucketize: {lengths.numel()} lengths of {lengths.dtype} for {len(cuts)} features; pass int32 or int64, "
            "one length per feature and sample, and at least one feature"
        )
    return Buckets(
        *_operator(
            ids,
            lengths,
            [cut for feature_cuts in cuts for cut in feature_cuts],
            [len(feature_cuts) for feature_cuts in cuts],
        )
    )


def _cpu(ids: Tensor, lengths: Tensor, cuts: list[int], sizes: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids, lengths = contiguous_ids("bucketize", ids), contiguous_ids("bucketize", lengths, "lengths")
    if not sizes or min(sizes) < 1 or sum(sizes) != len(cuts) or lengths.numel() % len(sizes):
        raise MesetaError(
            f"bucketize: {lengths.numel()} lengths and {len(cuts)} cuts in parts of {sizes}; pass at least one "
            "feature, a length per feature and sample, and the cuts of each feature"
        )
    num_owners = _num_owners(cuts, sizes)
    if num_owners > MAX_OWNERS:
        raise MesetaError(f"bucketize: {num_owners} owners in all features; use at most {MAX_OWNERS}")
    num_samples = lengths.numel() // len(sizes)
    local, order = empty((ids.numel(),), ids.dtype), empty((ids.numel(),), torch.int64)
    counts = empty((num_owners, num_samples), lengths.dtype)
    totals = torch.zeros(num_owners, dtype=torch.int64)
    wide = [int(ids.dtype == torch.int64), int(lengths.dtype == torch.int64)]
    try:
        core().bucketize(
            cuts,
            sizes,
            [ids.data_ptr(), lengths.data_ptr(), ids.numel(), num_samples, *wide],
            [out.data_ptr() for out in (local, counts, order, totals)],
            torch.get_num_threads(),
        )
    except ValueError as error:
        raise MesetaError(f"bucketize: {error}") from None
    return local, counts, order, totals


def _num_owners(cuts: Sequence[int], sizes: Sequence[int]) -> int:
    # A single number is a number of hash classes. Otherwise there is one more cut than ranges.
    total, at = 0, 0
    for size in sizes:
        total += max(cuts[at], 0) if size == 1 else size - 1
        at += size
    return total


def _fake(ids: Tensor, lengths: Tensor, cuts: list[int], sizes: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_owners = _num_owners(cuts, sizes)
    counts = lengths.new_empty(num_owners, lengths.shape[0] // len(sizes))
    order = ids.new_empty(ids.shape[0], dtype=torch.int64)
    return torch.empty_like(ids), counts, order, ids.new_empty(num_owners, dtype=torch.int64)


_operator = register(
    "bucketize(Tensor ids, Tensor lengths, int[] cuts, int[] sizes) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu,
    cuda=reference.bucketize,
    fake=_fake,
)
