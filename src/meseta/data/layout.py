"""Layout of raw files: the roles of their columns, inferred or from a schema file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from meseta.data.dataset.dataset import LabelRule
from meseta.data.number_format import NumberFormat

MAX_BUCKETS = 1000
"""Maximum number of quantile buckets of a column."""


@dataclass(frozen=True, kw_only=True)
class BucketRule:
    """Division of a numeric column into buckets. Bucket 0 is for missing values."""

    column: str
    """Raw column to divide."""
    boundaries: tuple[float, ...] = ()
    """Boundaries in ascending order. The bucket of a value is 1 plus the number of boundaries <= value."""
    num_quantiles: int | None = None
    """Number of buckets of equal size, whose boundaries are quantiles of the training rows. `None` uses
    `boundaries`."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the feature in its table."""
        return len(self.boundaries) + 2


@dataclass(frozen=True, kw_only=True)
class SparseColumn:
    """Sparse feature from a raw column, from the buckets of one, or from a cross of several."""

    name: str
    multi_valued: bool = False
    """Whether a sample has a list of values."""
    weighted: bool = False
    """Whether each value has a weight."""
    weight: str | None = None
    """Raw column with the weights. `None` if there are no weights, or if they are stored together with the values."""
    separator: str | None = None
    """Separator of the values in a field of CSV. `None` if fields are not divided."""
    weight_separator: str | None = None
    """Separator between a value and its weight in CSV. `None` if there are no weights."""
    buckets: BucketRule | None = None
    """Rule for buckets, if the feature is a numeric column that is divided into buckets."""
    cross: tuple[str, ...] = ()
    """Raw columns whose values are combined. Empty if the feature is not a cross."""
    column: str | None = None
    """Name of the raw column if it differs from `name`, otherwise `None`."""
    is_empty: bool = False
    """Whether no sample has a value, as in `NO_CATEGORY`."""

    @property
    def has_row_ids(self) -> bool:
        """Whether values are already rows of the table, which are neither hashed nor looked up in a vocabulary."""
        return self.is_empty or self.buckets is not None

    @property
    def raw_column(self) -> str:
        """Raw column of a feature without buckets that is not a cross."""
        return self.column or self.name

    @property
    def columns(self) -> tuple[str, ...]:
        """Raw columns from which the values are computed. Excludes the column of weights."""
        if self.is_empty:
            return ()
        return (self.buckets.column,) if self.buckets else self.cross or (self.raw_column,)

    @property
    def made_of(self) -> tuple[str, ...]:
        """Same as `columns`, but empty if the feature has the name of its only column."""
        return () if self.columns == (self.name,) else self.columns


NO_CATEGORY = SparseColumn(name="no_category", multi_valued=True, is_empty=True)
"""Feature of data without categories. All bags are empty, so it does not affect any model. With it, models, plans and
checkpoints need no special case for data without tables."""


@dataclass(frozen=True, kw_only=True)
class RawLayout:
    """Roles of the columns of raw files."""

    labels: tuple[str, ...]
    """Names of the labels, which are raw columns unless they have a rule."""
    dense: tuple[str, ...]
    sparse: tuple[SparseColumn, ...]
    label_rules: tuple[LabelRule, ...] = ()
    """Rules of the labels that are computed from other values."""
    signed: tuple[str, ...] = ()
    """Dense columns that keep negative values. Negative values of other columns count as 0."""
    whole_numbers: tuple[str, ...] = ()
    """Raw columns of categories, or of the group, in which all spellings of a whole number are the same value."""
    number_format: NumberFormat | None = None
    """Number format of text. `None` means plain decimal notation such as 1234.5."""
    weight: str | None = None
    """Column of sample weights."""
    group: str | None = None
    """Column with the group of each sample, such as a user or a request. It may be a feature too."""
    time: str | None = None
    """Column with the time of each sample."""
    surveyed_columns: tuple[str, ...] = ()
    """Columns whose numbers are parsed unchanged for a survey, before bucket boundaries are known."""
    ignored: tuple[str, ...] = field(default=(), compare=False)
    """Columns that are not read."""
    other_times: tuple[str, ...] = field(default=(), compare=False)
    """Ignored columns that contain times. `--time` can select any of them. Only set if the layout was inferred."""
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Reason for the role of each column whose role was inferred."""
    delimiter: str = field(default=",", compare=False)
    """Delimiter of the first CSV file, for the printed schema."""
    header: tuple[str, ...] = field(default=(), compare=False)
    """Column names of text without a header, for the printed schema."""
    encoding: str | None = field(default=None, compare=False)
    """Text encoding. `None` keeps bytes as they are, as in datasets of former versions."""

    partition_keys: tuple[str, ...] = field(default=(), compare=False)
    """Columns from folders such as `date=2026-01-31`."""

    @property
    def labels_without_rule(self) -> list[str]:
        """Labels that are raw columns with values in 0..1."""
        return [name for name in self.labels if self.label_rule(name) is None]

    @property
    def raw_label_columns(self) -> list[str]:
        """Distinct raw columns from which labels are computed."""
        rules = {name: self.label_rule(name) for name in self.labels}
        return list(dict.fromkeys(name if rule is None else rule.column for name, rule in rules.items()))

    @property
    def columns(self) -> list[str]:
        """Distinct raw columns that are read."""
        samples = [name for name in (*self.raw_label_columns, self.weight, self.group, self.time) if name is not None]
        return list(dict.fromkeys([*samples, *self.feature_columns, *self.surveyed_columns]))

    @property
    def numeric_columns(self) -> list[str]:
        """Distinct raw columns that are read as numbers."""
        buckets = [column.buckets.column for column in self.sparse if column.buckets]
        weight = [] if self.weight is None else [self.weight]
        return list(dict.fromkeys([*self.raw_label_columns, *weight, *self.dense, *buckets, *self.surveyed_columns]))

    @property
    def text_columns(self) -> list[str]:
        """Raw columns that are read as text. Some of them are also read as numbers."""
        parts = [name for column in self.encoded_features for name in column.columns if self.get_buckets(name) is None]
        return [name for name in (self.group, self.time, *parts) if name is not None]

    @property
    def encoded_features(self) -> list[SparseColumn]:
        """Sparse features whose values are hashed or looked up in a vocabulary."""
        return [column for column in self.sparse if not column.has_row_ids]

    @property
    def feature_names(self) -> list[str]:
        """Names of the features, dense ones first."""
        return [*self.dense, *(column.name for column in self.sparse if not column.is_empty)]

    @property
    def feature_columns(self) -> list[str]:
        """Distinct raw columns from which features are computed, including those with weights of ids."""
        sparse = [name for column in self.sparse for name in column.columns]
        weights = [column.weight for column in self.sparse if column.weight is not None]
        return list(dict.fromkeys([*self.dense, *sparse, *weights]))

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Names of the label columns in the dataset."""
        return ("label",) if len(self.labels) == 1 else self.labels

    @property
    def group_column(self) -> str | None:
        """Name of the group column in the dataset. It differs from a feature with the same raw column."""
        return f"{self.group}.group" if self.group in self.feature_names else self.group

    @property
    def sample_columns(self) -> list[str]:
        """Columns of the dataset that are not features."""
        return [name for name in (*self.label_columns, self.weight, self.group_column, self.time) if name is not None]

    def label_rule(self, name: str) -> LabelRule | None:
        """Return the rule of a label, or `None` if it is a raw column."""
        return next((rule for rule in self.label_rules if rule.name == name), None)

    def get_buckets(self, column: str) -> BucketRule | None:
        """Return the bucket rule of a raw column, or `None`."""
        return self._buckets.get(column)

    def is_signed(self, dense: str) -> bool:
        """Whether a dense column keeps negative values."""
        return dense in self._signed

    def has_whole_numbers(self, column: str) -> bool:
        """Whether all spellings of a whole number in a raw column are the same value."""
        return column in self._whole_numbers

    # Cached, because there may be thousands of columns and each is looked up once.
    @cached_property
    def _buckets(self) -> dict[str, BucketRule]:
        return {s.buckets.column: s.buckets for s in reversed(self.sparse) if s.buckets}

    @cached_property
    def _whole_numbers(self) -> frozenset[str]:
        return frozenset(self.whole_numbers)

    @cached_property
    def _signed(self) -> frozenset[str]:
        return frozenset(self.signed)

    def with_boundaries(self, boundaries: Mapping[str, tuple[float, ...]]) -> RawLayout:
        """Return a copy with the given bucket boundaries of columns."""
        sparse = tuple(
            replace(
                column, buckets=BucketRule(column=column.buckets.column, boundaries=boundaries[column.buckets.column])
            )
            if column.buckets and column.buckets.column in boundaries
            else column
            for column in self.sparse
        )
        return replace(self, sparse=sparse)
