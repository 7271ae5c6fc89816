"""From measured seconds to constants: non-negative least squares on relative errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NUM_ROUNDS = 20
_MIN_ERROR = 0.01
"""Relative errors below this weigh alike."""
_MIN_RATIO = 0.2
"""Predictions further below what was measured weigh alike."""


def fit_relative(terms: Floats, seconds: Floats) -> Floats:
    """Non-negative constants [k] under which terms [n, k] @ constants come near to seconds [n], in proportion to them.

    Rows are weighed by one over the root of their relative error, again and again, which approaches the smallest sum of
    absolute errors: a measurement that something disturbed then pulls at little (iteratively reweighted least squares,
    E. J. Schlossmacher, Journal of the American Statistical Association 68, 1973). Errors count as logarithms of the
    proportion: of relative errors, predictions that are too low have none above 1, and noise would draw constants down.
    """
    relative = terms / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0, initial=0.0), 1e-300)
    weights = np.ones(len(seconds))
    for _ in range(_NUM_ROUNDS):
        found = nnls(relative / scale * weights[:, None], weights)
        ratio = np.maximum(relative / scale @ found, _MIN_RATIO)
        weights = 1.0 / np.sqrt(np.maximum(np.abs(np.log(ratio)), _MIN_ERROR) * ratio)
    return found / scale


def nnls(matrix: Floats, target: Floats) -> Floats:
    """x >= 0 [k] with the smallest |matrix [n, k] x - target [n]|: the active-set method of C. L. Lawson and R. J.
    Hanson, "Solving least squares problems", 1974, chapter 23."""
    num = matrix.shape[1]
    found, active = np.zeros(num), np.zeros(num, bool)
    tolerance = 1e-10 * max(np.abs(matrix).sum(axis=0).max(initial=0.0), 1e-300)
    for _ in range(3 * num):
        slope = matrix.T @ (target - matrix @ found)
        slope[active] = -np.inf
        if active.all() or slope.max() <= tolerance:
            break
        active[slope.argmax()] = True
        while True:
            trial = np.zeros(num)
            trial[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
            negative = active & (trial <= 0.0)
            if not negative.any():
                break
            step = (found[negative] / np.maximum(found[negative] - trial[negative], 1e-300)).min()
            found = found + step * (trial - found)
            active &= found > 1e-14 * max(found.max(), 1e-300)
        found = trial
    return found


def relative_errors(predicted: Sequence[float] | Floats, measured: Sequence[float] | Floats) -> Floats:
    """Relative errors [n], without sign."""
    return np.abs(np.asarray(predicted, np.float64) / np.asarray(measured, np.float64) - 1.0)
