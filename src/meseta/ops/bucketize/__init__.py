"""Sort the ids of one feature by the row range that holds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meseta.jagged.shapes import Int


def bucketize(
    ids: Int[Tensor, " nnz"], lengths: Int[Tensor, " B"], cuts: Sequence[int]
) -> tuple[Int[Tensor, " nnz"], Int[Tensor, "num_ranges B"], Int[Tensor, " nnz"]]:
    """Group ids by row range, keeping their order inside each range; ids become local to their range.

    Range n holds rows cuts[n] .. cuts[n + 1] - 1. Returns the local ids, the ids per (range, sample), and `order`:
    entry i of the result came from position order[i]. No host sync.

        ids = [5, 1, 7], lengths = [2, 1], cuts = [0, 4, 8]   ->   [1, 1, 3], [[1, 0], [1, 1]], [1, 0, 2]
    """
    num_ranges, num_samples = len(cuts) - 1, lengths.numel()
    edges = torch.tensor(cuts, dtype=ids.dtype, device=ids.device)
    owner = torch.bucketize(ids, edges[1:-1], right=True)
    order = torch.argsort(owner, stable=True)
    sample = torch.repeat_interleave(torch.arange(num_samples, device=ids.device), lengths, output_size=ids.numel())
    counts = torch.zeros(num_ranges * num_samples, dtype=lengths.dtype, device=ids.device)
    counts.scatter_add_(0, owner * num_samples + sample, torch.ones_like(ids, dtype=lengths.dtype))
    return (ids - edges[owner])[order], counts.view(num_ranges, num_samples), order
