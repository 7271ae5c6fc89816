"""Reference of `weight_gradient` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

LANES = 16


def weight_gradient(
    tables: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor,
    gradient: Tensor,
    weighted: Sequence[bool],
    mean: Sequence[bool] = (),
) -> Tensor:
    """Implement `meseta.ops.weight_gradient.weight_gradient` in plain PyTorch. Float64 tables use float64."""
    dtype = torch.float64 if tables[0].dtype == torch.float64 else torch.float32
    out = gradient.new_zeros(ids.numel(), dtype=dtype)
    num_bags, column = (offsets.numel() - 1) // len(tables), 0
    for f, table in enumerate(tables):
        upstream = gradient[:, column : column + table.shape[1]].to(dtype)
        column += table.shape[1]
        if not weighted[f]:
            continue
        feature_offsets = offsets[f * num_bags : (f + 1) * num_bags + 1]
        lengths = feature_offsets[1:] - feature_offsets[:-1]
        if mean and mean[f]:
            upstream = upstream / lengths.clamp(min=1)[:, None]
        start, stop = int(feature_offsets[0]), int(feature_offsets[-1])
        bag = torch.repeat_interleave(torch.arange(num_bags, device=ids.device), lengths)
        out[start:stop] = _dot(upstream[bag], table[ids[start:stop]].to(dtype))
    return out


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot product of each pair of rows, [n, D] and [n, D] -> [n]."""
    # A tree over each block of 16 columns, blocks from left to right, as in the kernels.
    num_blocks = -(-a.shape[1] // LANES)
    blocks = pad(a * b, (0, num_blocks * LANES - a.shape[1])).view(-1, num_blocks, LANES)
    for half in (8, 4, 2, 1):
        blocks = blocks[..., :half] + blocks[..., half : 2 * half]
    total = blocks.new_zeros(len(a))
    for block in range(num_blocks):
        total = total + blocks[:, block, 0]
    return total
