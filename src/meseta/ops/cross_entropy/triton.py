"""Cross-entropies on a GPU: their sum, its gradient, and both with the verdict of a step in one launch."""
# All computation is in float64, so that sums are accurate in any order and for logits of any size. Triton parses the
# source of these functions, so that no decorator that checks types may wrap them.

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from meseta.ops.step_verdict import MAX_PARTIAL_SUMS
from meseta.ops.step_verdict.triton import is_non_finite, set_flags

BLOCK = tl.constexpr(256)
"""Number of logits that a program loads at a time. Many programs share the work, because a multiprocessor has few units
for float64."""
MAX_SUMS = tl.constexpr(MAX_PARTIAL_SUMS)


def cross_entropy(logits: Tensor, label: Tensor, factor: Tensor | None) -> Tensor:
    """Implement `meseta.ops.cross_entropy.cross_entropy` on a GPU. Returns a float64 scalar."""
    num_programs = _num_programs(logits)
    sums = torch.empty(num_programs, dtype=torch.float64, device=logits.device)
    with torch.cuda.device_of(logits):
        _sum_losses[(num_programs,)](sums, *_arguments(logits, label, factor))
    return sums.view(()) if num_programs == 1 else sums.sum()


def cross_entropy_backward(gradient: Tensor, logits: Tensor, label: Tensor, factor: Tensor | None) -> Tensor:
    """Implement `meseta.ops.cross_entropy.reference.cross_entropy_backward` on a GPU."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if out.numel():
        with torch.cuda.device_of(logits):
            _scale_gradients[(_num_programs(logits),)](out, gradient, *_arguments(logits, label, factor))
    return out


def cross_entropy_step(
    logits: Tensor, label: Tensor, factor: Tensor | None, scale: Tensor, memory: Tensor, report: Tensor
) -> Tensor:
    """Implement `meseta.ops.cross_entropy.reference.cross_entropy_step` in one launch."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    grid = (min(_num_programs(logits), MAX_PARTIAL_SUMS),)
    with torch.cuda.device_of(logits):
        _finish_step[grid](out, scale, *_arguments(logits, label, factor), memory, report)
    return out


def _num_programs(logits: Tensor) -> int:
    return int(max(triton.cdiv(logits.numel(), BLOCK.value), 1))


def _arguments(logits: Tensor, label: Tensor, factor: Tensor | None) -> tuple[Any, ...]:
    """Return (logits, labels, factors, number of logits)."""
    factor = None if factor is None else factor.expand_as(logits).contiguous()
    return logits.contiguous(), label.contiguous(), factor, logits.numel()


@triton.jit(do_not_specialize=["num_logits"])
@no_type_check
def _sum_losses(sums, logits, label, factor, num_logits):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    losses, _ = _losses_and_gradients(logits, label, factor, n, n < num_logits)
    tl.store(sums + tl.program_id(0), tl.sum(losses, axis=0))


@triton.jit(do_not_specialize=["num_logits"])
@no_type_check
def _scale_gradients(out, scale, logits, label, factor, num_logits):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, gradients = _losses_and_gradients(logits, label, factor, n, n < num_logits)
    _store_scaled(out, scale, gradients, n, n < num_logits)


@triton.jit(do_not_specialize=["num_logits"])
@no_type_check
def _finish_step(out, scale, logits, label, factor, num_logits, memory, report):
    """Write gradients and partial sums. The last program to finish adds the sums and reports the verdict."""
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, num_logits, tl.num_programs(0) * BLOCK):
        n = first + tl.arange(0, BLOCK)
        losses, gradients = _losses_and_gradients(logits, label, factor, n, n < num_logits)
        _store_scaled(out, scale, gradients, n, n < num_logits)
        total += losses
    sums = (memory + 2).to(tl.pointer_type(tl.float64))
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))
    # All threads of this program have written before its number of finished programs, which orders the writes of all
    # programs before the reads of the last one.
    tl.debug_barrier()
    if tl.atomic_add(memory + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        index = tl.arange(0, MAX_SUMS)
        # The order of this sum depends on the number of programs alone.
        loss = tl.sum(tl.load(sums + index, mask=index < tl.num_programs(0), other=0.0), axis=0)
        verdict = tl.load(report) | is_non_finite(loss)
        tl.store(report, verdict)
        tl.store(report + 1, loss.to(tl.int64, bitcast=True))
        tl.store(memory + 1, 0)
        set_flags(memory, verdict)


@triton.jit
@no_type_check
def _losses_and_gradients(logits, label, factor, n, live):
    """Return the losses of the logits n and their gradients, 0 if not `live`."""
    logit = tl.load(logits + n, mask=live, other=0.0).to(tl.float64)
    target = tl.load(label + n, mask=live, other=0.0).to(tl.float64)
    # log(1 + e), without the cancellation of 1 + e for small e. See Goldberg, "What every computer scientist should
    # know about floating-point arithmetic", theorem 4.
    e = tl.exp(-tl.abs(logit))
    one_plus = 1.0 + e
    log_1p = tl.where(one_plus == 1.0, e, tl.log(one_plus) * (e / tl.where(one_plus == 1.0, 1.0, one_plus - 1.0)))
    loss = (1.0 - target) * logit - tl.where(logit < 0, logit, 0.0) + log_1p
    gradient = tl.where(logit < 0, e, 1.0) / one_plus - target
    if factor is not None:
        weight = tl.load(factor + n, mask=live, other=0.0).to(tl.float64)
        loss, gradient = loss * weight, gradient * weight
    return tl.where(live, loss, 0.0), gradient


@triton.jit
@no_type_check
def _store_scaled(out, scale, gradients, n, live):
    scaled = gradients * tl.load(scale).to(tl.float64)
    if out.dtype.element_ty != tl.float64:
        scaled = scaled.to(tl.float32)
    tl.store(out + n, scaled.to(out.dtype.element_ty), mask=live)
