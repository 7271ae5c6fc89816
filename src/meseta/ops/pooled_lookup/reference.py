"""Reference of `pooled_lookup` in plain PyTorch, with one step per position within bags."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pooled_lookup(
    tables: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    weighted: Sequence[bool] = (),
    mean: Sequence[bool] = (),
) -> Tensor:
    """Implement `meseta.ops.pooled_lookup.pooled_lookup` in plain PyTorch. float64 tables are added in float64."""
    num_bags = (offsets.numel() - 1) // len(tables)
    dtype = torch.float64 if tables[0].dtype == torch.float64 else torch.float32
    pooled = []
    for f, table in enumerate(tables):
        start = offsets[f * num_bags : (f + 1) * num_bags]
        length = offsets[f * num_bags + 1 : (f + 1) * num_bags + 1] - start
        out = table.new_zeros(num_bags, table.shape[1], dtype=dtype)
        for position in range(int(length.max()) if num_bags else 0):
            live = length > position
            at = start[live] + position
            rows = table[ids[at]].to(dtype)
            if weights is not None and weighted and weighted[f]:
                rows = rows * weights[at, None].to(dtype)
            out[live] += rows
        if mean and mean[f]:
            out /= length.clamp(min=1)[:, None]
        pooled.append(out)
    return torch.cat(pooled, dim=1)
