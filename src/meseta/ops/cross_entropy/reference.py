"""Reference of `cross_entropy` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from meseta.ops.common import total
from meseta.sparse.shapes import Float


def cross_entropy(
    logits: Float[Tensor, "*shape"], label: Float[Tensor, "*shape"], factor: Float[Tensor, "*_shape"] | None
) -> Float[Tensor, ""]:
    """Implement `meseta.ops.cross_entropy.cross_entropy` in plain PyTorch, in the dtype of the logits."""
    return total(functional.binary_cross_entropy_with_logits(logits, label, factor, reduction="none"))


def cross_entropy_backward(
    gradient: Float[Tensor, ""],
    logits: Float[Tensor, "*shape"],
    label: Float[Tensor, "*shape"],
    factor: Float[Tensor, "*_shape"] | None,
) -> Float[Tensor, "*shape"]:
    """Return the gradient of the logits, given that of the sum."""
    result = (logits.double().sigmoid() - label) * gradient
    return (result if factor is None else result * factor).to(logits.dtype)
