"""Reference of `coalesce` in plain PyTorch, with one step per position within a run."""

from __future__ import annotations

import torch
from torch import Tensor


def coalesce(
    ids: Tensor, source: Tensor, block: Tensor, gradient: Tensor, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Implement `meseta.ops.coalesce.coalesce` in plain PyTorch."""
    if ids.numel() == 0:
        return ids.new_empty(0, dtype=torch.int64), gradient.new_empty(0, gradient.shape[1])
    ids, order = torch.sort(ids, stable=True)
    block = block[order]
    terms = gradient[source[order]]
    if scale is not None:
        terms = terms * scale[order, None].to(terms.dtype)
    new_row = torch.ones_like(ids, dtype=torch.bool)
    new_row[1:] = ids[1:] != ids[:-1]
    new_block = new_row.clone()
    new_block[1:] |= block[1:] != block[:-1]
    block_sums = _sum_runs(terms, new_block)
    return ids[new_row].to(torch.int64), _sum_runs(block_sums, new_row[new_block])


def _sum_runs(values: Tensor, first: Tensor) -> Tensor:
    """Sum runs of rows from left to right, [n, D] -> [num_runs, D]. `first` [n] is true at the start of each run."""
    start = torch.nonzero(first).squeeze(1)
    stop = torch.cat([start[1:], start.new_tensor([len(values)])])
    sums = values[start]
    for position in range(1, int((stop - start).max())):
        live = stop - start > position
        sums[live] = sums[live] + values[start[live] + position]
    return sums
