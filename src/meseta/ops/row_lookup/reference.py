"""Reference of `row_lookup` in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def row_lookup(tables: Sequence[Tensor], ids: Tensor, bounds: Sequence[int]) -> list[Tensor]:
    """Implement `meseta.ops.row_lookup.row_lookup` in plain PyTorch."""
    return [
        (table[ids[start:stop]] if table.dtype == torch.float64 else table[ids[start:stop]].to(torch.float32))
        for table, (start, stop) in zip(tables, pairwise(bounds), strict=True)
    ]
