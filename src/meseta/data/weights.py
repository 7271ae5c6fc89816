"""The weights that a sample may have."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_WEIGHT, MAX_WEIGHT = 1e-9, 1e9
"""A weight of a sample is 0 or between these, so that no sum or product of weights overflows or vanishes."""
WEIGHT_RULE = f"0, or {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"


def is_weight(weights: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each weight [n] is 0 or within the limits, as its own type rounds them; NaN (missing) is not."""
    return (weights == 0) | ((weights >= MIN_WEIGHT) & (weights <= MAX_WEIGHT))
