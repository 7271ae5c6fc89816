"""The columns of a log: how many values each has, how popular they are, which are missing; and how they are drawn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Distinct values of C1..C26 in the Criteo Kaggle display advertising log."""
NUM_DENSE = 13
NUM_SPARSE = len(CARDINALITIES)
MEDIUM_FEATURES = (0, 6, 9, 10, 12, 13, 17, 18, 23, 25)
"""Sparse features of middling size, between which interactions are planted."""
ZIPF_SHIFT = 2.0
ZIPF_EXPONENTS = tuple(1.1 + 0.05 * (f % 5) for f in range(NUM_SPARSE))
"""Popularity rank k = 0, 1, ... has a weight of about (k + 1 + ZIPF_SHIFT) ** -exponent."""
MISSING_SPARSE = (
    *(0.0, 0.0, 0.034, 0.034, 0.0, 0.12, 0.0, 0.0, 0.0, 0.0, 0.0, 0.034, 0.0),
    *(0.0, 0.0, 0.034, 0.0, 0.0, 0.44, 0.44, 0.034, 0.76, 0.0, 0.034, 0.44, 0.44),
)
MISSING_DENSE = (0.45, 0.0, 0.21, 0.22, 0.026, 0.22, 0.043, 0.0005, 0.043, 0.45, 0.043, 0.77, 0.22)
"""Shares of missing values: about those of the Criteo Kaggle log."""
DENSE_MEDIANS = (1.5, 4.0, 6.0, 5.0, 2800.0, 32.0, 3.5, 8.0, 38.0, 0.6, 1.6, 0.5, 5.0)
DENSE_SPREAD = (0.8, 1.1, 1.0, 0.7, 1.0, 0.9, 0.8, 0.6, 0.7, 0.5, 0.6, 0.6, 0.7)
"""Counts are log-logistic, rounded down: median * (u / (1 - u)) ** spread."""
SHIFTED_DENSE_FEATURE = 1
"""This integer goes down to -1, as the second one of Criteo's log does."""
MAX_COUNT = 65_535
MISSING_COUNT = np.iinfo(np.int32).min
"""Marks a missing integer; a missing category has the rank -1."""

CHUNK_ROWS = 32_768
_SHARE_STEPS = 2048
"""Shares are met to a half of 1 / _SHARE_STEPS."""


def draw_counts(stream: np.random.Philox) -> NDArray[np.int32]:
    """[13, CHUNK_ROWS] the integers of a chunk; MISSING_COUNT where missing."""
    counts = np.empty((NUM_DENSE, CHUNK_ROWS), np.int32)
    for j in range(NUM_DENSE):
        uniform, missing = split_draw(stream.random_raw(CHUNK_ROWS), MISSING_DENSE[j])
        counts[j] = np.minimum(DENSE_MEDIANS[j] * (uniform / (1.0 - uniform)) ** DENSE_SPREAD[j], MAX_COUNT)
        counts[j] -= int(j == SHIFTED_DENSE_FEATURE)
        counts[j][missing] = MISSING_COUNT
    return counts


def draw_categories(stream: np.random.Philox) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The categories of a chunk, each as a uniform that zipf_ranks inverts, and whether it is missing; both
    [26, CHUNK_ROWS], all independent."""
    draws = [split_draw(stream.random_raw(CHUNK_ROWS), share) for share in MISSING_SPARSE]
    return np.stack([uniform for uniform, _ in draws]), np.stack([missing for _, missing in draws])


def to_ids(
    uniforms: NDArray[np.float64], missing: NDArray[np.bool_], cardinalities: tuple[int, ...]
) -> NDArray[np.int64]:
    """[26, n] popularity ranks, of such uniforms and where they are missing [26, n]; -1 where missing."""
    laws = zip(uniforms, cardinalities, ZIPF_EXPONENTS, strict=True)
    ranks = [zipf_ranks(uniform, num_ids, exponent) for uniform, num_ids, exponent in laws]
    return np.where(missing, -1, np.stack(ranks))


def id_probabilities(feature: int, cardinality: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Every id of a sparse feature, the missing one (-1) first, and how probable it is; both [cardinality + 1]."""
    missing = _share_steps(MISSING_SPARSE[feature]) / _SHARE_STEPS
    present = (1.0 - missing) * zipf_probabilities(cardinality, ZIPF_EXPONENTS[feature])
    return np.arange(-1, cardinality), np.append(missing, present)


def split_draw(raw: NDArray[np.uint64], share: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Uniforms in [0, 1) from the high 53 bits, and a mask of about `share` of them from the low 11."""
    masked = (raw & np.uint64(_SHARE_STEPS - 1)) < np.uint64(_share_steps(share))
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53, masked


def _share_steps(share: float) -> int:
    return round(share * _SHARE_STEPS)


def zipf_probabilities(num_ids: int, exponent: float) -> NDArray[np.float64]:
    """[num_ids] probability of each rank: the integral of x ** -exponent over unit steps, a law with closed inverse."""
    edges = (np.arange(num_ids + 1) + 1.0 + ZIPF_SHIFT) ** (1.0 - exponent)
    return np.asarray((edges[:-1] - edges[1:]) / (edges[0] - edges[-1]), np.float64)


def zipf_ranks(uniform: NDArray[np.float64], num_ids: int, exponent: float) -> NDArray[np.int64]:
    """Ranks 0..num_ids-1 of zipf_probabilities, by inversion of `uniform` in [0, 1)."""
    first, last = ((k + 1.0 + ZIPF_SHIFT) ** (1.0 - exponent) for k in (0, num_ids))
    x = (first + uniform * (last - first)) ** (1.0 / (1.0 - exponent))
    return np.clip((x - (1.0 + ZIPF_SHIFT)).astype(np.int64), 0, num_ids - 1)
