"""Sort the ids of a batch by the owner of their row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meseta.jagged.shapes import Int
from meseta.ops.bucketize import reference
from meseta.ops.core import core
from meseta.ops.library import register
from meseta.ops.memory import empty
from meseta.ops.tables import contiguous_ids
from meseta.spec import MesetaError

MAX_OWNERS = 1 << 20
"""Of all features together: each takes memory for every sample, so a wrong number must not reach the allocator."""


@dataclass(frozen=True)
class Buckets:
    """Ids of all features; feature after feature, in each owner after owner, in each as they came."""

    ids: Int[Tensor, " nnz"]
    """Rows, counted from the first of their owner."""
    lengths: Int[Tensor, "owners B"]
    """Ids per (feature and owner, sample)."""
    order: Int[Tensor, " nnz"]
    """Entry i came from position order[i] of the batch."""
    totals: Int[Tensor, " owners"]
    """Ids per feature and owner."""


def bucketize(
    ids: Int[Tensor, " nnz"], lengths: Int[Tensor, " B"], cuts: Sequence[int]
) -> tuple[Int[Tensor, " nnz"], Int[Tensor, "num_ranges B"], Int[Tensor, " nnz"]]:
    """Group ids of one feature by row range, keeping their order inside each range; ids become local to their range.

    Range n holds rows cuts[n] .. cuts[n + 1] - 1. Returns the local ids, the ids per (range, sample), and `order`:
    entry i of the result came from position order[i]. No host sync. Raises MesetaError, on a CPU, for lengths that do
    not add up and for an id outside all ranges.

        ids = [5, 1, 7], lengths = [2, 1], cuts = [0, 4, 8]   ->   [1, 1, 3], [[1, 0], [1, 1]], [1, 0, 2]
    """
    buckets = bucketize_features(ids, lengths, [cuts])
    return buckets.ids, buckets.lengths, buckets.order


def bucketize_features(
    ids: Int[Tensor, " nnz"], lengths: Int[Tensor, " F_times_B"], owners: Sequence[Sequence[int] | int]
) -> Buckets:
    """Group the ids of F features, which come feature-major, by the owners of their rows.

    `owners[f]` is either the cuts of row ranges, as in `bucketize`, or a number n of hash classes: then id i has the
    row i // n of owner (i + (SplitMix64(i // n) * n >> 64)) % n, so that each n neighbouring ids have n owners in an
    order that a hash chooses. Ids and lengths are int32 or int64, and so are those that come back. With several
    features on a GPU the host waits for their sizes.

    Raises MesetaError as `bucketize` does.
    """
    cuts = [[one] if isinstance(one, int) else list(one) for one in owners]
    for f, own in enumerate(cuts):
        if len(own) < 1 or (len(own) == 1 and not isinstance(owners[f], int)):
            raise MesetaError(f"bucketize: feature {f} has the cuts {own}; give at least one row range, [0, rows]")
    if lengths.dtype not in (torch.int32, torch.int64) or not cuts or lengths.numel() % len(cuts):
        raise MesetaError(
            f"bucketize: {lengths.numel()} lengths of {lengths.dtype} for {len(cuts)} features; give int32 or int64, "
            "one per feature and sample, and at least one feature"
        )
    return Buckets(*_operator(ids, lengths, [cut for own in cuts for cut in own], [len(own) for own in cuts]))


def _cpu(ids: Tensor, lengths: Tensor, cuts: list[int], sizes: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids, lengths = contiguous_ids("bucketize", ids), contiguous_ids("bucketize", lengths, "lengths")
    if not sizes or min(sizes) < 1 or sum(sizes) != len(cuts) or lengths.numel() % len(sizes):
        raise MesetaError(
            f"bucketize: {lengths.numel()} lengths and {len(cuts)} cuts in parts of {sizes}; give at least one "
            "feature, a length per feature and sample, and the cuts of each"
        )
    num_owners = _num_owners(cuts, sizes)
    if num_owners > MAX_OWNERS:
        raise MesetaError(f"bucketize: {num_owners} owners in all features; there may be {MAX_OWNERS} at most")
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
