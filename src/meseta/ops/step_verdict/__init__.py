"""Verdict about a training step on its device: whether the loss is finite, and all ids are inside their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from meseta.ops.step_verdict import reference
from meseta.sparse.shapes import Float, Int

NON_FINITE_LOSS, REJECTED_ID = 1, 2
"""Bits of a verdict."""


class RejectedPlace(NamedTuple):
    """Place of a rejected id, as in `CheckedIds.first_error`."""

    feature: int
    """-1 if no id was rejected."""
    sample: int
    row: int


@dataclass(frozen=True)
class StepReport:
    """Numbers of a step that its device reports."""

    verdict: int
    sums: list[float]
    """Sums of the loss and of its terms."""
    rejected: list[RejectedPlace]
    """First rejected id of each group of features."""

    @staticmethod
    def from_words(words: NDArray[np.int64], num_sums: int) -> StepReport:
        """Read the result of `record_verdict`."""
        places = words[1 + num_sums :].reshape(-1, 3).tolist()
        sums = words[1 : 1 + num_sums].view(np.float64).tolist()
        return StepReport(int(words[0]), sums, [RejectedPlace(*place) for place in places])


def record_verdict(
    found_inf: Float[Tensor, ""], sums: Float[Tensor, " n"], first_errors: Sequence[Int[Tensor, " 3"]]
) -> Int[Tensor, " words"]:
    """Set `found_inf` to 1 if a step must not update anything, and return a report of the step, without a host sync.

    `found_inf` stays 1 until the caller clears it, so that the steps after a refused one change nothing either.

    Args:
        found_inf: float32 scalar, 0 or 1. It is set to 1 if the loss is not finite or an id is rejected.
        sums: float64 sums of the loss and of its terms. The first one is that of the loss.
        first_errors: int64 (feature, sample, id) of the first rejected id of each group of features, or feature -1.

    Returns int64 words for `StepReport.from_words`: the verdict, the bits of the sums, and the first errors.
    """
    if not sums.is_cuda:
        return reference.record_verdict(found_inf, sums, first_errors)
    from meseta.ops.step_verdict import triton

    return triton.record_verdict(found_inf, sums, first_errors)
