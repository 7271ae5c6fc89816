"""Sum of cross-entropies on a GPU, with one launch for at most SPAN logits and two for more, and one backward."""
# All computation is in float64, so that sums are accurate in any order and for logits of any size. Triton parses the
# source of these functions, so that no decorator that checks types may wrap them.

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

SPAN = tl.constexpr(4096)
"""Number of logits that a program sums."""
BLOCK = tl.constexpr(1024)
"""Number of logits that a program loads at a time."""


def cross_entropy(logits: Tensor, label: Tensor, factor: Tensor | None) -> Tensor:
    """Implement `meseta.ops.cross_entropy.cross_entropy` on a GPU. Returns a float64 scalar."""
    num_programs = max(triton.cdiv(logits.numel(), SPAN.value), 1)
    sums = torch.empty(num_programs, dtype=torch.float64, device=logits.device)
    with torch.cuda.device_of(logits):
        _sum_losses[(num_programs,)](sums, *_arguments(logits, label, factor))
    return sums.view(()) if num_programs == 1 else sums.sum()


def cross_entropy_backward(gradient: Tensor, logits: Tensor, label: Tensor, factor: Tensor | None) -> Tensor:
    """Implement `meseta.ops.cross_entropy.reference.cross_entropy_backward` on a GPU."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel():
        with torch.cuda.device_of(logits):
            _scale_gradients[(triton.cdiv(out.numel(), BLOCK.value),)](
                out, gradient, *_arguments(logits, label, factor)
            )
    return out


def _arguments(logits: Tensor, label: Tensor, factor: Tensor | None) -> tuple[Any, ...]:
    """Return (logits, labels, factors, number of logits)."""
    factor = None if factor is None else factor.expand_as(logits).contiguous()
    return logits.contiguous(), label.contiguous(), factor, logits.numel()


@triton.jit(do_not_specialize=["num_logits"])
@no_type_check
def _sum_losses(sums, logits, label, factor, num_logits):
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for first in range(0, SPAN, BLOCK):
        n = tl.program_id(0).to(tl.int64) * SPAN + first + tl.arange(0, BLOCK)
        live = n < num_logits
        logit = tl.load(logits + n, mask=live, other=0.0).to(tl.float64)
        # log(1 + e), without the cancellation of 1 + e for small e. See Goldberg, "What every computer scientist should
        # know about floating-point arithmetic", theorem 4.
        e = tl.exp(-tl.abs(logit))
        one_plus = 1.0 + e
        log_1p = tl.where(one_plus == 1.0, e, tl.log(one_plus) * (e / tl.where(one_plus == 1.0, 1.0, one_plus - 1.0)))
        positive = 1.0 - tl.load(label + n, mask=live, other=0.0).to(tl.float64)
        loss = positive * logit - tl.where(logit < 0, logit, 0.0) + log_1p
        if factor is not None:
            loss = loss * tl.load(factor + n, mask=live, other=0.0).to(tl.float64)
        total += tl.where(live, loss, 0.0)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["num_logits"])
@no_type_check
def _scale_gradients(out, gradient, logits, label, factor, num_logits):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = n < num_logits
    logit = tl.load(logits + n, mask=live, other=0.0).to(tl.float64)
    difference = 1.0 / (1.0 + tl.exp(-logit)) - tl.load(label + n, mask=live, other=0.0).to(tl.float64)
    result = difference * tl.load(gradient).to(tl.float64)
    if factor is not None:
        result = result * tl.load(factor + n, mask=live, other=0.0).to(tl.float64)
    if out.dtype.element_ty != tl.float64:
        result = result.to(tl.float32)
    tl.store(out + n, result.to(out.dtype.element_ty), mask=live)
