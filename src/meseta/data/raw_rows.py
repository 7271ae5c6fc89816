"""What every parser of raw rows returns, and the rules on values that all of them share."""

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
    """Strings or binary [nnz], a missing value the empty string; of a feature cut into buckets, int32 rows."""
    lengths: NDArray[np.int64] | None = None
    """Values per sample [n]; None: one each."""
    weights: NDArray[np.float32] | None = None
    """One per value [nnz]."""


@dataclass(frozen=True)
class RawRows:
    """A parsed block of n samples."""

    labels: list[NDArray[np.float32]]
    """[n] per label, 0 to 1; NaN if missing, which one of several labels may be."""
    dense: list[NDArray[np.float32]]
    """log1p(max(x, 0)), of a signed column sign(x) * log1p(|x|), missing as 0; [n] per feature."""
    sparse: list[RawSparse]
    weight: NDArray[np.float32] | None = None
    """[n], 0 or 1e-9 to 1e9."""
    group: NDArray[np.int64] | None = None
    """Keys [n]."""
    time: NDArray[np.float64] | None = None
    """Seconds since 1970-01-01 UTC [n]; NaN where it is missing."""
    surveyed_values: list[NDArray[np.float64]] = field(default_factory=list)
    """[n] per column that is surveyed, missing as NaN."""
    num_non_finite: tuple[int, ...] = ()
    """Of each dense feature, values that are inf or nan and count as missing; empty: none of any."""

    @property
    def unlabeled_mask(self) -> NDArray[np.bool_]:
        """Samples [n] that have none of the labels, of which there is at least one."""
        return np.all([np.isnan(label) for label in self.labels], axis=0)


def log_transform(values: NDArray[np.generic], *, signed: bool = False) -> NDArray[np.float32]:
    """Logarithms of 1 + x, of negative values 0, or where `signed` that of 1 - x with a minus; NaN (missing) gives 0.

    In float64, so that the float32 result hardly depends on the machine's vector library.
    """
    numbers = values.astype(np.float64, copy=False)
    if not signed:
        return np.log1p(np.fmax(numbers, 0.0)).astype(np.float32)
    return signed_log1p(np.nan_to_num(numbers)).astype(np.float32)


def signed_log1p(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """sign(x) * log1p(|x|)."""
    return np.copysign(np.log1p(np.abs(values)), values)


def signed_expm1(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse of `signed_log1p`."""
    return np.copysign(np.expm1(np.abs(logs)), logs)


LABEL_RULE = "a number from 0 to 1, or true or false (t, f, yes, no, y, n)"
"""What a value must be to be a label."""


def find_value_row(place: int, lengths: NDArray[np.int64] | None) -> int:
    """Return the row of a value: `place` counts values, of which the rows have `lengths` [n], or one each if None."""
    return place if lengths is None else int(np.searchsorted(np.cumsum(lengths), place, side="right"))


def is_label(label: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each label [n] is in 0..1; NaN (missing) is not."""
    return (label >= 0) & (label <= 1)
