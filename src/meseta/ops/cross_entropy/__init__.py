"""Sum of binary cross-entropies of logits, the loss of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meseta.ops.common import LIBRARY, register
from meseta.ops.cross_entropy import reference
from meseta.ops.step_verdict import VerdictMemory
from meseta.sparse.shapes import Float, Int
from meseta.spec import MesetaError


@dataclass(frozen=True)
class StepLoss:
    """Loss of a step, for which its kernel has made the report."""

    gradient: Float[Tensor, "*shape"]
    """Gradient of the logits, in their dtype."""
    report: Int[Tensor, " words"]
    """See `record_verdict`."""

    @property
    def sums(self) -> Float[Tensor, " 1"]:
        """Sum of the losses, float64."""
        return self.report[1:2].view(torch.float64)


def cross_entropy(
    logits: Float[Tensor, "*shape"], label: Float[Tensor, "*shape"], factor: Float[Tensor, "*_shape"] | None = None
) -> Float[Tensor, ""]:
    """Return the sum of factor * (log(1 + exp(logit)) - label * logit). Differentiable once, with respect to `logits`.

    Args:
        logits: Logits of one or two dimensions.
        label: Probabilities of the positive class.
        factor: Factors that can be broadcast to the shape of `logits`. `None` means 1.

    Returns:
        On a CPU a scalar of the dtype of `logits`, bitwise identical for any number of threads. On a GPU float64.
    """
    if logits.is_cuda:
        result: Tensor = _forward(logits, label, factor)
        return result
    return reference.cross_entropy(logits, label, factor)


def cross_entropy_step(
    logits: Float[Tensor, "*shape"],
    label: Float[Tensor, "*shape"],
    factor: Float[Tensor, "*_shape"] | None,
    scale: Float[Tensor, ""],
    memory: VerdictMemory,
    report: Int[Tensor, " words"],
) -> StepLoss:
    """Compute the loss of a step, the gradient of its logits and the verdict, on a GPU in one launch.

    Args:
        logits: Logits of one or two dimensions.
        label: Probabilities of the positive class.
        factor: Factors of the losses, as in `cross_entropy`.
        scale: Gradient of the sum of the losses, float64.
        memory: Memory whose flags are set if the loss is not finite or an id is rejected.
        report: `CheckedIds.report` of all features, or two zeros. It becomes the report of the step, like that of
            `record_verdict`.
    """
    _check(logits, label, factor)
    if not logits.is_cuda:
        gradient = reference.cross_entropy_step(logits, label, factor, scale, memory.flags, report)
    else:
        from meseta.ops.cross_entropy import triton

        gradient = triton.cross_entropy_step(logits, label, factor, scale, memory.words, report)
    return StepLoss(gradient, report)


def _check(logits: Tensor, label: Tensor, factor: Tensor | None) -> None:
    if logits.dim() not in (1, 2) or label.shape != logits.shape:
        raise MesetaError(
            f"cross_entropy: logits {list(logits.shape)} and labels {list(label.shape)}; pass both as [B] or [B, T]"
        )
    if factor is not None and torch.broadcast_shapes(factor.shape, logits.shape) != logits.shape:
        raise MesetaError(
            f"cross_entropy: factors {list(factor.shape)} for logits {list(logits.shape)}; pass one per logit"
        )


def _forward_gpu(logits: Tensor, label: Tensor, factor: Tensor | None) -> Tensor:
    from meseta.ops.cross_entropy import triton

    _check(logits, label, factor)
    return triton.cross_entropy(logits, label, factor)


def _backward_gpu(gradient: Tensor, logits: Tensor, label: Tensor, factor: Tensor | None) -> Tensor:
    from meseta.ops.cross_entropy import triton

    _check(logits, label, factor)
    return triton.cross_entropy_backward(gradient, logits, label, factor)


def _forward_cpu(logits: Tensor, label: Tensor, factor: Tensor | None) -> Tensor:
    _check(logits, label, factor)
    return reference.cross_entropy(logits, label, factor).double()


_forward = register(
    "cross_entropy(Tensor logits, Tensor label, Tensor? factor) -> Tensor",
    cpu=_forward_cpu,
    cuda=_forward_gpu,
    fake=lambda logits, label, factor: logits.new_empty((), dtype=torch.float64),
)
_backward = register(
    "cross_entropy_backward(Tensor gradient, Tensor logits, Tensor label, Tensor? factor) -> Tensor",
    cpu=reference.cross_entropy_backward,
    cuda=_backward_gpu,
    fake=lambda gradient, logits, label, factor: logits.new_empty(logits.shape),
)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_of_call(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _backward(gradient, *ctx.saved_tensors), None, None


torch.library.register_autograd("meseta::cross_entropy", _backward_of_call, setup_context=_setup_context, lib=LIBRARY)
