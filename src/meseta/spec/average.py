"""Averages of weights over steps."""
# The average of a row is row - factor * lag. If step t changes a row by D, its lag grows by scale(t) * D, so that rows
# that do not change cost nothing.
#
# With n weights averaged before step t, and N after the last step:
#   swa: the mean of the last N weights. scale(t) = n and factor = 1 / N.
#   ema: average = decay * average + (1 - decay) * row, starting with the first weights. A change is missing in the
#        weights before it, so average - row shrinks by decay in each step. scale(t) = decay^(1 - n), and factor =
#        decay^(N - 1). Scales are stored relative to 2^(40 era), because they would overflow.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from meseta.errors import MesetaError, check_choice, check_number, is_int

AverageKind = Literal["ema", "swa"]
MAX_GATHERED_ROWS = 1 << 14
"""Number of rows that are averaged at a time, to limit memory."""
ERA_BITS = 40
"""Binary logarithm of the scale at the end of an era, relative to its beginning."""


@dataclass(frozen=True, kw_only=True)
class AverageSpec:
    """Average of the weights after steps, as in torch.optim.swa_utils."""

    kind: AverageKind
    """'swa' is the mean (arXiv 1803.05407), and 'ema' the exponential moving average."""
    decay: float = 0.999
    """Factor of the previous average in each step of 'ema', in (0, 1)."""
    start_step: int = 0
    """Number of steps whose weights are left out."""

    def __post_init__(self) -> None:
        check_choice("average", "kind", self.kind, get_args(AverageKind))
        if not 0.0 < check_number("average", "decay", self.decay) < 1.0:
            raise MesetaError(f"average: decay must be between 0 and 1, got {self.decay}")
        if not is_int(self.start_step) or self.start_step < 0:
            raise MesetaError(f"average: start_step must be a non-negative integer, got {self.start_step!r}")

    @property
    def has_eras(self) -> bool:
        """Whether the lag of a row is relative to its era."""
        return self.kind == "ema"

    def num_averaged(self, step: int) -> int:
        """Return the number of averaged weights after `step` steps."""
        return max(step - self.start_step, 0)

    def scale(self, step: int) -> float:
        """Return the factor of the change of a row in `step`, which starts at 1."""
        num_before = self.num_averaged(step - 1)
        if self.kind == "swa" or not num_before:
            return float(num_before)
        return 2.0 ** (self._bits(num_before - 1) - ERA_BITS * self.era(step))

    def era(self, step: int) -> int:
        """Return the era of `step`."""
        return int(self._bits(max(self.num_averaged(step - 1) - 1, 0)) // ERA_BITS)

    def factors(self, step: int) -> tuple[float, float]:
        """Return the factors of lags of the era of `step` and of the era before. Older lags are negligible."""
        num_averaged = self.num_averaged(step)
        if num_averaged < 2:
            return 0.0, 0.0
        if self.kind == "swa":
            return 1.0 / num_averaged, 0.0
        exponent = ERA_BITS * self.era(step) - self._bits(num_averaged - 1)
        return 2.0**exponent, 2.0 ** (exponent - ERA_BITS)

    def _bits(self, num_steps: int) -> float:
        """Return the binary logarithm of decay^-num_steps."""
        return -math.log2(self.decay) * num_steps
