"""Reference of the jagged operators in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def permute_keys(arrays: Sequence[Tensor], bounds: Sequence[int], order: Sequence[int]) -> list[Tensor]:
    """Implement the operator `permute_keys` in plain PyTorch."""
    step, permuted = len(bounds) // max(len(arrays), 1), []
    for index, array in enumerate(arrays):
        pieces = [array[start:stop] for start, stop in pairwise(bounds[index * step : (index + 1) * step])]
        permuted.append(torch.cat([array[:0], *(pieces[key] for key in order)]))
    return permuted


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Implement `meseta.ops.jagged.lengths_to_offsets` in plain PyTorch."""
    return torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0, dtype=torch.int64)])
