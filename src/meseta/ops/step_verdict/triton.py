"""Step verdicts on a GPU, in one launch per group of features."""
# Triton parses the source of these functions, so that no decorator that checks types may wrap them.

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = tl.constexpr(256)
"""Number of words that are copied at a time."""


def record_verdict(memory: Tensor, sums: Tensor, id_reports: Sequence[Tensor]) -> Tensor:
    """Implement `meseta.ops.step_verdict.reference.record_verdict` on a GPU, with equal results."""
    at = 1 + sums.numel()
    report = torch.empty(at + sum(len(one) - 2 for one in id_reports), dtype=torch.int64, device=sums.device)
    with torch.cuda.device_of(sums):
        for group, one in enumerate(id_reports or [None]):
            size = 0 if one is None else len(one) - 2
            _record[(1,)](report, memory, sums, one, at, size, NUM_SUMS=sums.numel(), IS_FIRST=group == 0)
            at += size
    return report


@triton.jit(do_not_specialize=["at", "size"])
@no_type_check
def _record(report, memory, sums, id_report, at, size, NUM_SUMS: tl.constexpr, IS_FIRST: tl.constexpr):
    if IS_FIRST:
        verdict = is_non_finite(tl.load(sums))
        for index in tl.static_range(NUM_SUMS):
            tl.store(report + 1 + index, tl.load(sums + index).to(tl.int64, bitcast=True))
    else:
        verdict = tl.load(report)
    if id_report is not None:
        verdict = verdict | tl.load(id_report)
        for first in range(0, size, WORDS):
            index = first + tl.arange(0, WORDS)
            word = tl.load(id_report + 2 + index, mask=index < size, other=0)
            tl.store(report + at + index, word, mask=index < size)
    tl.store(report, verdict)
    set_flags(memory, verdict)


@triton.jit
@no_type_check
def is_non_finite(loss):
    """Return NON_FINITE_LOSS if a loss is infinite or NaN, else 0."""
    # NaN and infinity times 0 are NaN, which differs from 0.
    return (loss * 0.0 != 0.0).to(tl.int64)


@triton.jit
@no_type_check
def set_flags(memory, verdict):
    """Set the flags if a verdict is not 0."""
    flags = memory.to(tl.pointer_type(tl.float32))
    found_inf = tl.where(verdict > 0, 1.0, tl.load(flags))
    tl.store(flags, found_inf)
    tl.store(flags + 1, 1.0 - found_inf)
