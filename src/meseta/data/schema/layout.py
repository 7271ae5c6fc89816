"""Parsed rows of raw files, in the form that all parsers return, and rules for raw values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.data.dataset.records import LabelRule, TimeAge, TimePart
from meseta.data.schema.text_syntax import NumberFormat


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
    surveyed_times: list[NDArray[np.float64]] = field(default_factory=list)
    """Times [n] of each surveyed column of times, in seconds since 1970-01-01 UTC. NaN if missing."""
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


MAX_BUCKETS = 1000
"""Maximum number of buckets with quantiles as boundaries."""


@dataclass(frozen=True, kw_only=True)
class BucketRule:
    """Buckets of a numeric column. Bucket 0 is for missing values, and n boundaries give n + 1 further buckets."""

    column: str
    boundaries: tuple[float, ...] = ()
    """Boundaries in ascending order. A value is in bucket 1 + the number of boundaries that are not above it."""
    num_quantiles: int | None = None
    """Number of buckets of about equal size, with boundaries computed from the training rows. `None` means that
    `boundaries` is fixed."""

    @property
    def num_rows(self) -> int:
        """Number of table rows of the feature."""
        return len(self.boundaries) + 2


NUM_TIME_PARTS: Mapping[TimePart, int] = {"hour": 24, "weekday": 7}
"""Number of values of each part of a time. Row 0 of its table is for missing times."""


@dataclass(frozen=True, kw_only=True)
class SparseColumn:
    """Sparse feature made from a raw column, from the buckets of a column, or from a cross of columns."""

    name: str
    multi_valued: bool = False
    """Whether each sample has a list of values."""
    weighted: bool = False
    weight: str | None = None
    """Raw column with the weights. `None` without weights, or if weights are written next to the values."""
    separator: str | None = None
    """Separator of the values in a text. `None` if each text has one value, or the column has lists."""
    weight_separator: str | None = None
    """Separator of a value and its weight in CSV. `None` without weights."""
    buckets: BucketRule | None = None
    cross: tuple[str, ...] = ()
    """Columns whose combined values are the values of a cross. Empty for other features."""
    column: str | None = None
    """Raw column, if the feature has another name."""
    is_empty: bool = False
    """Whether no sample has a value, as in NO_CATEGORY."""
    time_part: TimePart | None = None
    """Part of the time in `column` that is the category. `None` for other features."""

    @property
    def has_row_ids(self) -> bool:
        """Whether the values are table rows already, and are neither hashed nor looked up."""
        return self.is_empty or self.buckets is not None or self.time_part is not None

    @property
    def num_row_ids(self) -> int:
        """Number of table rows of a feature whose values are table rows."""
        if self.time_part is not None:
            return NUM_TIME_PARTS[self.time_part] + 1
        return self.buckets.num_rows if self.buckets else 1

    @property
    def raw_column(self) -> str:
        """Raw column of a feature that is neither bucketized nor a cross."""
        return self.column or self.name

    @property
    def columns(self) -> tuple[str, ...]:
        """Raw columns from which the feature is made, without the weight column."""
        if self.is_empty:
            return ()
        return (self.buckets.column,) if self.buckets else self.cross or (self.raw_column,)

    @property
    def made_of(self) -> tuple[str, ...]:
        """Raw columns from which the feature is made. Empty if the only one has the name of the feature."""
        return () if self.columns == (self.name,) else self.columns


# All bags are empty, so the feature adds nothing to any model. Models, plans and checkpoints need no special case for
# data without tables.
NO_CATEGORY = SparseColumn(name="no_category", multi_valued=True, is_empty=True)
"""Feature of data without categorical columns."""


@dataclass(frozen=True, kw_only=True)
class RawLayout:
    """Names and roles of the columns of raw files."""

    labels: tuple[str, ...]
    """Names of the labels. A label without a rule is a raw column."""
    dense: tuple[str, ...]
    """Names of the dense features. They are raw columns, except those of `ages`."""
    sparse: tuple[SparseColumn, ...]
    label_rules: tuple[LabelRule, ...] = ()
    signed: tuple[str, ...] = ()
    """Dense columns whose negative values are kept. In other columns they become 0."""
    whole_numbers: tuple[str, ...] = ()
    """Raw columns in which all spellings of a whole number are one value."""
    number_format: NumberFormat | None = None
    """Format of numbers in text. `None` means numbers such as 1234.5."""
    weight: str | None = None
    group: str | None = None
    """Column of the group of each sample, such as a user. It may also be a feature."""
    time: str | None = None
    ages: tuple[TimeAge, ...] = ()
    """Dense features that are ages. Their periods are 0 until the survey has found them."""
    surveyed_columns: tuple[str, ...] = ()
    """Columns whose raw numbers are needed by the survey before encoding."""
    surveyed_times: tuple[str, ...] = ()
    """Columns whose times are needed by the survey before encoding."""
    ignored: tuple[str, ...] = field(default=(), compare=False)
    other_times: tuple[str, ...] = field(default=(), compare=False)
    """Ignored columns of times, any of which `--time` can select."""
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Reason for the inferred role of each column."""
    delimiter: str = field(default=",", compare=False)
    """Delimiter of the first CSV file, for the printed schema."""
    header: tuple[str, ...] = field(default=(), compare=False)
    """Column names of text without a header line, for the printed schema."""
    encoding: str | None = field(default=None, compare=False)
    """Encoding of the text. `None` means that categories are stored as bytes without decoding, as earlier versions
    did."""

    partition_keys: tuple[str, ...] = field(default=(), compare=False)
    """Columns from partition folders such as `date=2026-01-31`."""

    @property
    def labels_without_rule(self) -> list[str]:
        return [name for name in self.labels if self.label_rule(name) is None]

    @property
    def raw_label_columns(self) -> list[str]:
        """Distinct raw columns from which labels are made."""
        rules = {name: self.label_rule(name) for name in self.labels}
        return list(dict.fromkeys(name if rule is None else rule.column for name, rule in rules.items()))

    @property
    def columns(self) -> list[str]:
        """Distinct raw columns that are read."""
        samples = [name for name in (*self.raw_label_columns, self.weight, self.group, self.time) if name is not None]
        return list(dict.fromkeys([*samples, *self.feature_columns, *self.surveyed_columns, *self.surveyed_times]))

    @property
    def raw_dense(self) -> tuple[str, ...]:
        """Raw columns that are dense features."""
        ages = {age.name for age in self.ages}
        return tuple(name for name in self.dense if name not in ages)

    @property
    def time_columns(self) -> list[str]:
        """Distinct raw columns that are read as times."""
        parts = [column.raw_column for column in self.sparse if column.time_part is not None]
        times = [name for name in (self.time, *parts, *self.surveyed_times) if name is not None]
        return list(dict.fromkeys([*times, *(age.column for age in self.ages)]))

    @property
    def numeric_columns(self) -> list[str]:
        """Distinct raw columns that are read as numbers."""
        buckets = [column.buckets.column for column in self.sparse if column.buckets]
        weight = [] if self.weight is None else [self.weight]
        numbers = [*self.raw_label_columns, *weight, *self.raw_dense, *buckets, *self.surveyed_columns]
        return list(dict.fromkeys(numbers))

    @property
    def text_columns(self) -> list[str]:
        """Raw columns that are read as text. Some of them are read as numbers too."""
        parts = [name for column in self.encoded_features for name in column.columns if self.get_buckets(name) is None]
        return [name for name in (self.group, *self.time_columns, *parts) if name is not None]

    @property
    def encoded_features(self) -> list[SparseColumn]:
        """Sparse features whose values are hashed or looked up in a vocabulary."""
        return [column for column in self.sparse if not column.has_row_ids]

    @property
    def feature_names(self) -> list[str]:
        """Names of the features, the dense ones first."""
        return [*self.dense, *(column.name for column in self.sparse if not column.is_empty)]

    @property
    def feature_columns(self) -> list[str]:
        """Distinct raw columns from which features are made, and the columns of id weights."""
        sparse = [name for column in self.sparse for name in column.columns]
        weights = [column.weight for column in self.sparse if column.weight is not None]
        return list(dict.fromkeys([*self.raw_dense, *sparse, *weights, *(age.column for age in self.ages)]))

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Label columns of the dataset. A single label is named "label"."""
        return ("label",) if len(self.labels) == 1 else self.labels

    @property
    def group_column(self) -> str | None:
        """Group column of the dataset. It has the suffix ".group" if a feature has the same name."""
        return f"{self.group}.group" if self.group in self.feature_names else self.group

    @property
    def sample_columns(self) -> list[str]:
        """Columns of the dataset that are not features."""
        return [name for name in (*self.label_columns, self.weight, self.group_column, self.time) if name is not None]

    def label_rule(self, name: str) -> LabelRule | None:
        """Return the rule of a label, or `None` if the label is a raw column."""
        return next((rule for rule in self.label_rules if rule.name == name), None)

    def get_buckets(self, column: str) -> BucketRule | None:
        """Return the buckets of a raw column, or `None` if it is not bucketized."""
        return self._buckets.get(column)

    def is_signed(self, dense: str) -> bool:
        """Whether negative values of a dense column are kept."""
        return dense in self._signed

    def has_whole_numbers(self, column: str) -> bool:
        """Whether all spellings of a whole number in a raw column are one value."""
        return column in self._whole_numbers

    # Cached, because the lookups run once for each of thousands of columns.
    @cached_property
    def _buckets(self) -> dict[str, BucketRule]:
        return {s.buckets.column: s.buckets for s in reversed(self.sparse) if s.buckets}

    @cached_property
    def _whole_numbers(self) -> frozenset[str]:
        return frozenset(self.whole_numbers)

    @cached_property
    def _signed(self) -> frozenset[str]:
        return frozenset(self.signed)

    def with_survey(
        self,
        boundaries: Mapping[str, tuple[float, ...]],
        periods: Mapping[str, tuple[float, float]],
        dates: Collection[str] = (),
    ) -> RawLayout:
        """Return a copy with the boundaries of columns that are divided by quantiles and the periods of ages, and
        without the hours of `dates`."""
        ages = [
            TimeAge(column=age.column, origin=periods[age.column][0], last=periods[age.column][1])
            if age.column in periods
            else age
            for age in self.ages
        ]
        sparse = tuple(
            replace(
                column, buckets=BucketRule(column=column.buckets.column, boundaries=boundaries[column.buckets.column])
            )
            if column.buckets and column.buckets.column in boundaries
            else column
            for column in self.sparse
            if column.time_part != "hour" or column.raw_column not in dates
        )
        return replace(self, sparse=sparse, ages=tuple(ages))
