"""Pooled lookup in plain torch: one step per position inside the bags."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pooled_lookup(
    tables: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor,
    bounds: Sequence[int],
    weights: Tensor | None = None,
    weighted: Sequence[bool] = (),
) -> Tensor:
    """See meseta.ops.pooled_lookup.pooled_lookup; `bounds` follows from `offsets` and is not read."""
    num_bags = (offsets.numel() - 1) // len(tables)
    pooled = []
    for f, table in enumerate(tables):
        start = offsets[f * num_bags : (f + 1) * num_bags]
        length = offsets[f * num_bags + 1 : (f + 1) * num_bags + 1] - start
        out = table.new_zeros(num_bags, table.shape[1])
        for position in range(int(length.max()) if num_bags else 0):
            live = length > position
            at = start[live] + position
            rows = table[ids[at]]
            if weights is not None and weighted and weighted[f]:
                rows = rows * weights[at, None].to(table.dtype)
            out[live] += rows
        pooled.append(out)
    return torch.cat(pooled, dim=1)
