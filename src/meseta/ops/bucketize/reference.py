"""Bucketize by plain loops over Python integers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def bucketize(ids: Tensor, lengths: Tensor, cuts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """See meseta.ops.bucketize.bucketize."""
    sample_of = [b for b, length in enumerate(lengths.tolist()) for _ in range(length)]
    local, counts, order = [], torch.zeros(len(cuts) - 1, lengths.numel(), dtype=lengths.dtype), []
    for n, (start, stop) in enumerate(pairwise(cuts)):
        for position, i in enumerate(ids.tolist()):
            if start <= i < stop:
                local.append(i - start)
                counts[n, sample_of[position]] += 1
                order.append(position)
    return torch.tensor(local, dtype=ids.dtype), counts, torch.tensor(order, dtype=torch.int64)
