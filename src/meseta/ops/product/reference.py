"""Reference of the matrix products in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from meseta.sparse.shapes import Float


def product(a: Float[Tensor, "M K"], b: Float[Tensor, "K N"], bias: Float[Tensor, " N"] | None) -> Float[Tensor, "M N"]:
    """Implement `meseta.ops.product.product` in plain PyTorch."""
    if bias is not None and a.is_meta:
        return torch.mm(a, b).add_(bias)  # Decomposing `addmm` in Python takes 0.4 ms there, ten times as long.
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def batched_product(
    a: Float[Tensor, "B M K"], b: Float[Tensor, "B K N"], bias: Float[Tensor, " N"] | None
) -> Float[Tensor, "B M N"]:
    """Implement the operator `meseta::product` in plain PyTorch: one product per item, and a common bias."""
    return torch.bmm(a, b) if bias is None else torch.bmm(a, b) + bias
