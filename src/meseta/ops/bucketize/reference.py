"""Reference of `bucketize` in plain PyTorch, one feature at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meseta.ops.common import device_constant
from meseta.ops.hash_ids.reference import multiply_high, splitmix64


def bucketize(
    ids: Tensor, lengths: Tensor, cuts: Sequence[int], sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implement the operator `bucketize` in plain PyTorch.

    Returns (local ids, lengths [owners, B], order, number of ids per owner).
    Feature f has the next sizes[f] numbers of `cuts`: the cuts of its row ranges, or its number of hash classes.
    """
    num_samples = lengths.numel() // max(len(sizes), 1)
    pieces, at = [], 0
    # A single feature needs no length on the host, so that the host does not wait for the device.
    per_feature = [ids.numel()] if len(sizes) == 1 else lengths.view(len(sizes), num_samples).sum(1).tolist()
    sample_lengths = lengths.split([num_samples] * len(sizes))
    starts = torch.tensor([0, *per_feature]).cumsum(0).tolist()
    for f, (feature_ids, of_samples) in enumerate(zip(ids.split(per_feature), sample_lengths, strict=True)):
        local, counts, order = _bucketize_feature(feature_ids, of_samples, list(cuts[at : at + sizes[f]]))
        pieces.append((local, counts, order + starts[f]))
        at += sizes[f]
    counts = torch.cat([counts for _, counts, _ in pieces])
    order = torch.cat([order for *_, order in pieces])
    return torch.cat([local for local, *_ in pieces]), counts, order, counts.sum(1, dtype=torch.int64)


def assign_owners(ids: Tensor, cuts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return (owner, row of the owner) of each id. `cuts` are row ranges, or one number of hash classes."""
    if len(cuts) == 1:
        block = torch.div(ids, cuts[0], rounding_mode="floor")
        return (ids % cuts[0] + multiply_high(splitmix64(block.to(torch.int64)), cuts[0])) % cuts[0], block
    edges = device_constant(tuple(cuts), ids.device).to(ids.dtype)
    owner = torch.bucketize(ids.contiguous(), edges[1:-1], right=True)
    return owner, ids - edges[owner]


def _bucketize_feature(ids: Tensor, lengths: Tensor, cuts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    num_owners, num_samples = cuts[0] if len(cuts) == 1 else len(cuts) - 1, lengths.numel()
    owner, local = assign_owners(ids, cuts)
    order = torch.argsort(owner, stable=True)
    sample = torch.repeat_interleave(torch.arange(num_samples, device=ids.device), lengths, output_size=ids.numel())
    counts = torch.zeros(num_owners * num_samples, dtype=lengths.dtype, device=ids.device)
    counts.scatter_add_(0, owner * num_samples + sample, torch.ones_like(ids, dtype=lengths.dtype))
    return local[order], counts.view(num_owners, num_samples), order
