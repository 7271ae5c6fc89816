"""Reference of step verdicts in plain PyTorch, for any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def record_verdict(flags: Tensor, sums: Tensor, id_reports: Sequence[Tensor]) -> Tensor:
    """Implement `meseta.ops.step_verdict.record_verdict` in plain PyTorch."""
    verdict = (~sums[:1].isfinite()).long()
    for id_report in id_reports:
        verdict = verdict | id_report[:1]
    flags[0].logical_or_(verdict[0] > 0)
    torch.sub(1.0, flags[0], out=flags[1])
    return torch.cat([verdict, sums.view(torch.int64), *(id_report[2:] for id_report in id_reports)])
