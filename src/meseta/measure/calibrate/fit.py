"""Fit of cost constants to measured seconds by non-negative least squares on relative errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NUM_ROUNDS = 20
_MIN_ERROR = 0.01
"""Errors below this value have equal weights."""
_MIN_RATIO = 0.2
"""Ratios of predicted to measured seconds below this value have equal weights."""


def fit_relative(terms: Floats, seconds: Floats) -> Floats:
    """Fit non-negative constants [k] such that terms [n, k] @ constants approximates seconds [n].

    Approximately minimizes the sum of the absolute logarithms of predicted over measured seconds, by iteratively
    reweighted least squares (E. J. Schlossmacher, Journal of the American Statistical Association 68, 1973).
    """
    # Absolute errors make the fit robust to measurements that other programs disturbed. Logarithms treat predictions
    # that are too low and too high equally. The relative error of a low prediction never exceeds 1, so noise would bias
    # the constants downward.
    relative = terms / seconds[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0, initial=0.0), 1e-300)
    weights = np.ones(len(seconds))
    for _ in range(_NUM_ROUNDS):
        constants = nnls(relative / scale * weights[:, None], weights)
        ratio = np.maximum(relative / scale @ constants, _MIN_RATIO)
        weights = 1.0 / np.sqrt(np.maximum(np.abs(np.log(ratio)), _MIN_ERROR) * ratio)
    return constants / scale


def nnls(matrix: Floats, target: Floats) -> Floats:
    """Return x >= 0 [k] that minimizes the norm of matrix [n, k] @ x - target [n].

    Uses the active-set method of C. L. Lawson and R. J. Hanson, "Solving least squares problems", 1974, chapter 23.
    """
    num = matrix.shape[1]
    solution, active = np.zeros(num), np.zeros(num, bool)
    tolerance = 1e-10 * max(np.abs(matrix).sum(axis=0).max(initial=0.0), 1e-300)
    for _ in range(3 * num):
        slope = matrix.T @ (target - matrix @ solution)
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
            step = (solution[negative] / np.maximum(solution[negative] - trial[negative], 1e-300)).min()
            solution = solution + step * (trial - solution)
            active &= solution > 1e-14 * max(solution.max(), 1e-300)
        solution = trial
    return solution


def relative_errors(predicted: Sequence[float] | Floats, measured: Sequence[float] | Floats) -> Floats:
    """Return the absolute values of the relative errors [n]."""
    return np.abs(np.asarray(predicted, np.float64) / np.asarray(measured, np.float64) - 1.0)
