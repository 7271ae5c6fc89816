"""Step verdicts on a GPU, in one launch per group of features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


def record_verdict(found_inf: Tensor, sums: Tensor, first_errors: Sequence[Tensor]) -> Tensor:
    """Implement `meseta.ops.step_verdict.reference.record_verdict` on a GPU, with equal results."""
    report = torch.empty(1 + sums.numel() + 3 * len(first_errors), dtype=torch.int64, device=sums.device)
    with torch.cuda.device_of(sums):
        for group, first_error in enumerate(first_errors or [None]):
            at = 1 + sums.numel() + 3 * group
            _record[(1,)](
                report, found_inf, sums, first_error, at, NUM_SUMS=sums.numel(), IS_FIRST=group == 0, num_warps=1
            )
    return report


@triton.jit(do_not_specialize=["at"])
@no_type_check  # Triton parses the source, so that no decorator that checks types may wrap the function.
def _record(report, found_inf, sums, first_error, at, NUM_SUMS: tl.constexpr, IS_FIRST: tl.constexpr):
    if IS_FIRST:
        loss = tl.load(sums)
        # NaN and infinity times 0 are NaN, which differs from 0.
        verdict = (loss * 0.0 != 0.0).to(tl.int64)
        for index in tl.static_range(NUM_SUMS):
            tl.store(report + 1 + index, tl.load(sums + index).to(tl.int64, bitcast=True))
    else:
        verdict = tl.load(report)
    if first_error is not None:
        feature = tl.load(first_error)
        verdict = verdict | ((feature >= 0).to(tl.int64) << 1)
        tl.store(report + at, feature)
        tl.store(report + at + 1, tl.load(first_error + 1))
        tl.store(report + at + 2, tl.load(first_error + 2))
    tl.store(report, verdict)
    tl.store(found_inf, tl.where(verdict > 0, 1.0, tl.load(found_inf)))
