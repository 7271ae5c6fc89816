"""Reference of `cross_entropy` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from meseta.ops.common import total
from meseta.ops.step_verdict.reference import record_verdict
from meseta.sparse.shapes import Float, Int


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


def cross_entropy_step(
    logits: Float[Tensor, "*shape"],
    label: Float[Tensor, "*shape"],
    factor: Float[Tensor, "*_shape"] | None,
    scale: Float[Tensor, ""],
    flags: Float[Tensor, " 2"],
    report: Int[Tensor, " words"],
) -> Float[Tensor, "*shape"]:
    """Implement `meseta.ops.cross_entropy.cross_entropy_step` in plain PyTorch. Returns the gradient."""
    loss = cross_entropy(logits.double(), label.double(), None if factor is None else factor.double())
    report.copy_(record_verdict(flags, loss.view(1), [report]))
    return cross_entropy_backward(scale, logits, label, factor)
