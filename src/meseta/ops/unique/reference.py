"""Reference of `unique` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def unique(ids: Tensor, bounds: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Implement the operator `unique` in plain PyTorch. Returns (rows, inverse, counts, bounds)."""
    nothing = ids.new_empty(0, dtype=torch.int64)
    rows, inverse, counts, first = [nothing], [nothing], [nothing], [0]
    for start, stop in pairwise(bounds):
        distinct, where, count = torch.unique(ids[start:stop].to(torch.int64), return_inverse=True, return_counts=True)
        rows.append(distinct)
        inverse.append(where + first[-1])
        counts.append(count)
        first.append(first[-1] + distinct.numel())
    return torch.cat(rows), torch.cat(inverse), torch.cat(counts), torch.tensor(first, device=ids.device)
