"""Columns of a synthetic log: numbers of values, distributions and missing values, and functions that draw them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Number of distinct values of C1 to C26 in the Criteo Kaggle display advertising log.
CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
NUM_DENSE = 13
NUM_SPARSE = len(CARDINALITIES)
# Sparse features of medium size, between which interactions are planted.
MEDIUM_FEATURES = (0, 6, 9, 10, 12, 13, 17, 18, 23, 25)
# Popularity rank k = 0, 1, ... of a sparse feature has a weight of about (k + 1 + ZIPF_SHIFT) ** -exponent.
ZIPF_SHIFT = 2.0
ZIPF_EXPONENTS = tuple(1.1 + 0.05 * (f % 5) for f in range(NUM_SPARSE))
# Shares of missing values per feature, similar to the Criteo Kaggle log.
MISSING_SPARSE = (
    *(0.0, 0.0, 0.034, 0.034, 0.0, 0.12, 0.0, 0.0, 0.0, 0.0, 0.0, 0.034, 0.0),
    *(0.0, 0.0, 0.034, 0.0, 0.0, 0.44, 0.44, 0.034, 0.76, 0.0, 0.034, 0.44, 0.44),
)
MISSING_DENSE = (0.45, 0.0, 0.21, 0.22, 0.026, 0.22, 0.043, 0.0005, 0.043, 0.45, 0.043, 0.77, 0.22)
# Counts are log-logistic, rounded down: median * (u / (1 - u)) ** spread.
DENSE_MEDIANS = (1.5, 4.0, 6.0, 5.0, 2800.0, 32.0, 3.5, 8.0, 38.0, 0.6, 1.6, 0.5, 5.0)
DENSE_SPREAD = (0.8, 1.1, 1.0, 0.7, 1.0, 0.9, 0.8, 0.6, 0.7, 0.5, 0.6, 0.6, 0.7)
# This feature has values down to -1, like the second one of Criteo's log.
SHIFTED_DENSE_FEATURE = 1
MAX_COUNT = 65_535
MISSING_COUNT = np.iinfo(np.int32).min
"""Value of a missing integer. A missing category has rank -1."""

CHUNK_ROWS = 32_768
# Shares of missing values are rounded to multiples of 1 / _SHARE_STEPS.
_SHARE_STEPS = 2048


def draw_counts(stream: np.random.Philox) -> NDArray[np.int32]:
    """Draw the integers of a chunk [13, CHUNK_ROWS]. Missing values are `MISSING_COUNT`."""
    counts = np.empty((NUM_DENSE, CHUNK_ROWS), np.int32)
    for j in range(NUM_DENSE):
        # One draw decides both the value and whether it is missing.
        uniform, missing = split_draw(stream.random_raw(CHUNK_ROWS), MISSING_DENSE[j])
        counts[j] = np.minimum(DENSE_MEDIANS[j] * (uniform / (1.0 - uniform)) ** DENSE_SPREAD[j], MAX_COUNT)
        counts[j] -= int(j == SHIFTED_DENSE_FEATURE)
        counts[j][missing] = MISSING_COUNT
    return counts


def draw_categories(stream: np.random.Philox) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Draw a chunk's independent categories as (uniforms for `zipf_ranks`, whether missing) [26, CHUNK_ROWS]."""
    draws = [split_draw(stream.random_raw(CHUNK_ROWS), share) for share in MISSING_SPARSE]
    return np.stack([uniform for uniform, _ in draws]), np.stack([missing for _, missing in draws])


def to_ids(
    uniforms: NDArray[np.float64], missing: NDArray[np.bool_], cardinalities: tuple[int, ...]
) -> NDArray[np.int64]:
    """Convert uniforms to popularity ranks [26, n]. The rank of a missing category is -1."""
    laws = zip(uniforms, cardinalities, ZIPF_EXPONENTS, strict=True)
    ranks = [zipf_ranks(uniform, num_ids, exponent) for uniform, num_ids, exponent in laws]
    return np.where(missing, -1, np.stack(ranks))


def id_probabilities(feature: int, cardinality: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return (ids, probabilities) of a sparse feature, both [cardinality + 1]. The missing id -1 comes first."""
    missing = _share_steps(MISSING_SPARSE[feature]) / _SHARE_STEPS
    present = (1.0 - missing) * zipf_probabilities(cardinality, ZIPF_EXPONENTS[feature])
    return np.arange(-1, cardinality), np.append(missing, present)


def split_draw(raw: NDArray[np.uint64], share: float) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return (uniforms in [0, 1), mask of about `share` of the draws)."""
    # The high 53 bits of a draw give the uniform, and the independent low 11 bits the mask.
    masked = (raw & np.uint64(_SHARE_STEPS - 1)) < np.uint64(_share_steps(share))
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53, masked


def _share_steps(share: float) -> int:
    return round(share * _SHARE_STEPS)


def zipf_probabilities(num_ids: int, exponent: float) -> NDArray[np.float64]:
    """Return the probability of each rank [num_ids]: the integral of x ** -exponent over an interval of length 1."""
    # Unlike a sum, the integral has a closed inverse, which `zipf_ranks` uses.
    edges = (np.arange(num_ids + 1) + 1.0 + ZIPF_SHIFT) ** (1.0 - exponent)
    return np.asarray((edges[:-1] - edges[1:]) / (edges[0] - edges[-1]), np.float64)


def zipf_ranks(uniform: NDArray[np.float64], num_ids: int, exponent: float) -> NDArray[np.int64]:
    """Convert `uniform` in [0, 1) to ranks 0..num_ids-1 with the distribution of `zipf_probabilities`, by inversion."""
    first, last = ((k + 1.0 + ZIPF_SHIFT) ** (1.0 - exponent) for k in (0, num_ids))
    x = (first + uniform * (last - first)) ** (1.0 / (1.0 - exponent))
    return np.clip((x - (1.0 + ZIPF_SHIFT)).astype(np.int64), 0, num_ids - 1)
