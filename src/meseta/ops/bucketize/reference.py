"""Bucketize in plain torch, one feature after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meseta.ops.device_constants import device_constant
from meseta.ops.hash_ids.reference import multiply_high, splitmix64


def bucketize(
    ids: Tensor, lengths: Tensor, cuts: Sequence[int], sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(local ids, lengths [owners, B], order, ids per owner) of all features; see meseta.ops.bucketize.

    Feature f has sizes[f] of `cuts`: the first rows of its ranges and its number of rows, or one, the number of hash
    classes.
    """
    num_samples = lengths.numel() // max(len(sizes), 1)
    found, at = [], 0
    # One feature needs no length on the host, so nothing waits for a device.
    per_feature = [ids.numel()] if len(sizes) == 1 else lengths.view(len(sizes), num_samples).sum(1).tolist()
    own_lengths = lengths.split([num_samples] * len(sizes))
    starts = torch.tensor([0, *per_feature]).cumsum(0).tolist()
    for f, (own, of_samples) in enumerate(zip(ids.split(per_feature), own_lengths, strict=True)):
        local, counts, order = _bucketize_feature(own, of_samples, list(cuts[at : at + sizes[f]]))
        found.append((local, counts, order + starts[f]))
        at += sizes[f]
    counts = torch.cat([counts for _, counts, _ in found])
    order = torch.cat([order for *_, order in found])
    return torch.cat([local for local, *_ in found]), counts, order, counts.sum(1, dtype=torch.int64)


def assign_owners(ids: Tensor, cuts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Owner of each id and its row there: a range of rows, or, of one number n, a class of n."""
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
