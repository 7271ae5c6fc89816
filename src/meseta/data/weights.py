"""Limits of sample weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_WEIGHT, MAX_WEIGHT = 1e-9, 1e9
"""Limits of nonzero sample weights. Within them, no sum or product of weights overflows or vanishes."""
WEIGHT_RULE = f"0, or {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"


def is_weight(weights: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each weight [n] is 0 or within the limits, rounded to its own type. False for NaN (missing)."""
    return (weights == 0) | ((weights >= MIN_WEIGHT) & (weights <= MAX_WEIGHT))
