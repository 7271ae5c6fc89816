"""Distinct ids of several groups by torch.unique."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def unique(ids: Tensor, bounds: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, inverse, counts, bounds) of meseta.ops.unique.unique."""
    nothing = ids.new_empty(0, dtype=torch.int64)
    rows, inverse, counts, first = [nothing], [nothing], [nothing], [0]
    for start, stop in pairwise(bounds):
        own, where, count = torch.unique(ids[start:stop].to(torch.int64), return_inverse=True, return_counts=True)
        rows.append(own)
        inverse.append(where + first[-1])
        counts.append(count)
        first.append(first[-1] + own.numel())
    return torch.cat(rows), torch.cat(inverse), torch.cat(counts), torch.tensor(first, device=ids.device)
