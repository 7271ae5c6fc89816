"""Valid weights of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_WEIGHT, MAX_WEIGHT = 1e-9, 1e9
"""Range of nonzero sample weights. No sum or product of weights overflows or vanishes within it."""
WEIGHT_RULE = f"0, or {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"


def is_weight(weights: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each weight [n] is 0 or in the valid range. NaN (missing) is not."""
    # The limits are rounded to the type of the weights, so the float32 value of 1e-9 is valid.
    return (weights == 0) | ((weights >= MIN_WEIGHT) & (weights <= MAX_WEIGHT))
