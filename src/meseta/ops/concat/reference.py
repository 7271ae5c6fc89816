"""Reference of `concat` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from meseta.sparse.shapes import Float


def concat(a: Float[Tensor, "B N"], b: Float[Tensor, "B M"], dtype: torch.dtype) -> Float[Tensor, "B N_plus_M"]:
    """Implement `meseta.ops.concat.concat` in plain PyTorch."""
    return torch.cat([a.to(dtype), b.to(dtype)], dim=1)
