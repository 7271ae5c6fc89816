"""Verdict about a training step on its device: whether the loss is finite, and all ids are inside their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meseta.ops.step_verdict import reference
from meseta.sparse.shapes import Float, Int

NON_FINITE_LOSS, REJECTED_ID = 1, 2
"""Bits of a verdict."""
MAX_PARTIAL_SUMS = 1024
"""Maximum number of programs that sum the losses of a step."""


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
    num_outside: list[NDArray[np.int64]]
    """Number of out-of-range ids per feature of each group."""

    @staticmethod
    def from_words(words: NDArray[np.int64], group_sizes: Sequence[int]) -> StepReport:
        """Read the result of `record_verdict`. `group_sizes` has the number of features of each group."""
        sizes = [3 + size for size in group_sizes]
        bounds = list(accumulate(sizes, initial=len(words) - sum(sizes)))
        reports = [words[start:stop] for start, stop in pairwise(bounds)]
        return StepReport(
            verdict=int(words[0]),
            sums=words[1 : bounds[0]].view(np.float64).tolist(),
            rejected=[RejectedPlace(*report[:3].tolist()) for report in reports],
            num_outside=[report[3:] for report in reports],
        )


@dataclass(frozen=True)
class VerdictMemory:
    """Device memory that the verdicts of successive steps share. The kernels of two steps must not overlap."""

    words: Int[Tensor, " words"]
    """The flags, the number of programs of a kernel that have finished, which is 0 between kernels, and partial sums of
    the loss."""

    @staticmethod
    def create(device: torch.device) -> VerdictMemory:
        """Return the memory before the first step."""
        memory = VerdictMemory(torch.zeros(2 + MAX_PARTIAL_SUMS, dtype=torch.int64, device=device))
        memory.set_flags(found_inf=False)
        return memory

    @cached_property
    def flags(self) -> Float[Tensor, " 2"]:
        """`found_inf`, 1 if a step must not update anything, else 0, and 1 - `found_inf`. Both are float32."""
        return self.words[:1].view(torch.float32)

    def set_flags(self, *, found_inf: bool) -> None:
        """Write the flags. The host does not wait."""
        self.flags[0].fill_(float(found_inf))
        self.flags[1].fill_(float(not found_inf))


def record_verdict(
    memory: VerdictMemory, sums: Float[Tensor, " n"], id_reports: Sequence[Int[Tensor, " _words"]]
) -> Int[Tensor, " words"]:
    """Set the flags if a step must not update anything, and return a report of the step, without a host sync.

    The flags stay set until the caller clears them, so that the steps after a refused one change nothing either.

    Args:
        memory: Memory whose flags are set if the loss is not finite or an id is rejected.
        sums: float64 sums of the loss and of its terms. The first one is that of the loss.
        id_reports: `CheckedIds.report` of each group of features.

    Returns int64 words for `StepReport.from_words`: the verdict, the bits of the sums, and for each group the first
    error and the numbers of out-of-range ids.
    """
    if not sums.is_cuda:
        return reference.record_verdict(memory.flags, sums, id_reports)
    from meseta.ops.step_verdict import triton

    return triton.record_verdict(memory.words, sums, id_reports)
