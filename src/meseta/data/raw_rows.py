"""Result of the parsers of raw rows, and checks of values that they share."""

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
    """Strings or binary [nnz], where a missing value is empty. With buckets, int32 rows."""
    lengths: NDArray[np.int64] | None = None
    """Number of values per sample [n]. `None` means one each."""
    weights: NDArray[np.float32] | None = None
    """Weight of each value [nnz]."""


@dataclass(frozen=True)
class RawRows:
    """Parsed block of n samples."""

    labels: list[NDArray[np.float32]]
    """One array [n] per label, in 0..1. NaN means missing, which is allowed if there are several labels."""
    dense: list[NDArray[np.float32]]
    """One array [n] per dense feature with log1p(max(x, 0)), or sign(x) * log1p(|x|) if signed. Missing values are
    0."""
    sparse: list[RawSparse]
    weight: NDArray[np.float32] | None = None
    """Sample weights [n], which are 0 or in 1e-9..1e9."""
    group: NDArray[np.int64] | None = None
    """Keys of groups [n]."""
    time: NDArray[np.float64] | None = None
    """Seconds since 1970-01-01 UTC [n]. NaN means missing."""
    surveyed_values: list[NDArray[np.float64]] = field(default_factory=list)
    """One array [n] of numbers per surveyed column. NaN means missing."""
    num_non_finite: tuple[int, ...] = ()
    """Number of infinite or NaN values of each dense feature, which count as missing. Empty if all values are
    finite."""

    @property
    def unlabeled_mask(self) -> NDArray[np.bool_]:
        """Mask [n] of samples without any label. There must be at least one label."""
        return np.all([np.isnan(label) for label in self.labels], axis=0)


def log_transform(values: NDArray[np.generic], *, signed: bool = False) -> NDArray[np.float32]:
    """Return log1p(max(x, 0)), or sign(x) * log1p(|x|) if `signed`, as float32. NaN (missing) becomes 0."""
    # Computed in float64, so that the float32 result hardly depends on the machine's vector library.
    numbers = values.astype(np.float64, copy=False)
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
"""Rule for the values of a label, in error messages."""


def find_value_row(place: int, lengths: NDArray[np.int64] | None) -> int:
    """Return the row that contains value number `place`. `lengths` [n] are values per row, and `None` means one
    each."""
    return place if lengths is None else int(np.searchsorted(np.cumsum(lengths), place, side="right"))


def is_label(label: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each label [n] is in 0..1. False for NaN (missing)."""
    return (label >= 0) & (label <= 1)
