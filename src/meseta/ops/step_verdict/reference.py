"""Reference of step verdicts in plain PyTorch, for any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def record_verdict(found_inf: Tensor, sums: Tensor, first_errors: Sequence[Tensor]) -> Tensor:
    """Implement `meseta.ops.step_verdict.record_verdict` in plain PyTorch."""
    verdict = (~sums[:1].isfinite()).long()
    for first_error in first_errors:
        verdict = verdict | (first_error[:1] >= 0).long() * 2
    found_inf.logical_or_(verdict[0] > 0)
    return torch.cat([verdict, sums.view(torch.int64), *first_errors])
