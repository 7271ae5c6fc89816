"""Parsed rows of raw files, in the form that all parsers return, and rules for raw values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True)
class RawSparse:
    """Values of one sparse feature in n samples."""

    values: pa.Array
    """Values [nnz] as strings or binary, empty if missing. For a bucketized feature, int32 ids."""
    lengths: NDArray[np.int64] | None = None
    """Number of values per sample [n]. `None` means one each."""
    weights: NDArray[np.float32] | None = None
    """Weight of each value [nnz]. `None` without weights."""


@dataclass(frozen=True)
class RawRows:
    """Parsed block of n samples."""

    labels: list[NDArray[np.float32]]
    """Values [n] of each label, 0 to 1. With several labels, NaN marks missing ones."""
    dense: list[NDArray[np.float32]]
    """Transformed values [n] of each dense feature: log1p(max(x, 0)), or sign(x) * log1p(|x|) if signed. Missing values
    are 0."""
    sparse: list[RawSparse]
    weight: NDArray[np.float32] | None = None
    """Sample weights [n], 0 or in 1e-9..1e9."""
    group: NDArray[np.int64] | None = None
    time: NDArray[np.float64] | None = None
    """Times [n] in seconds since 1970-01-01 UTC. NaN if missing."""
    surveyed_values: list[NDArray[np.float64]] = field(default_factory=list)
    """Raw numbers [n] of each surveyed column. NaN if missing."""
    num_non_finite: tuple[int, ...] = ()
    """Number of inf and NaN values in each dense feature, which count as missing. Empty if there are none."""

    @property
    def unlabeled_mask(self) -> NDArray[np.bool_]:
        """Mask [n] of the samples that have none of the labels. There must be at least one label."""
        return np.all([np.isnan(label) for label in self.labels], axis=0)


def log_transform(values: NDArray[np.generic], *, signed: bool = False) -> NDArray[np.float32]:
    """Return log(1 + max(x, 0)), or sign(x) * log(1 + |x|) if `signed`. NaN (missing) gives 0."""
    numbers = values.astype(np.float64, copy=False)
    # Computed in float64, so that the float32 result hardly depends on the machine's vector library.
    if not signed:
        return np.log1p(np.fmax(numbers, 0.0)).astype(np.float32)
    return signed_log1p(np.nan_to_num(numbers)).astype(np.float32)


def signed_log1p(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sign(x) * log1p(|x|)."""
    return np.copysign(np.log1p(np.abs(values)), values)


def signed_expm1(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the inverse of `signed_log1p`."""
    return np.copysign(np.expm1(np.abs(logs)), logs)


LABEL_RULE = "a number from 0 to 1, or true or false (t, f, yes, no, y, n)"
"""Rule for label values, for error messages."""


def find_value_row(place: int, lengths: NDArray[np.int64] | None) -> int:
    """Return the row of value number `place`. Rows have `lengths` [n] values, or one each if `lengths` is `None`."""
    return place if lengths is None else int(np.searchsorted(np.cumsum(lengths), place, side="right"))


def is_label(label: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each label [n] is in 0..1. NaN (missing) is not."""
    return (label >= 0) & (label <= 1)


# No sum or product of weights in this range overflows or vanishes.
MIN_WEIGHT, MAX_WEIGHT = 1e-9, 1e9
"""Range of nonzero sample weights."""
WEIGHT_RULE = f"0, or {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"


def is_weight(weights: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each weight [n] is 0 or in the valid range. NaN (missing) is not."""
    # The limits are rounded to the type of the weights, so the float32 value of 1e-9 is valid.
    return (weights == 0) | ((weights >= MIN_WEIGHT) & (weights <= MAX_WEIGHT))
