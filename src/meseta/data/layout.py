"""The layout of raw files: what each column is, as inferred or as a schema file says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from meseta.data.dataset.dataset import LabelRule
from meseta.data.number_format import NumberFormat

MAX_BUCKETS = 1000
"""Most buckets that quantiles may cut a column into."""


@dataclass(frozen=True, kw_only=True)
class BucketRule:
    """How a column of numbers is cut: bucket 0 for missing values, then one more than the boundaries."""

    column: str
    """The column that is cut."""
    boundaries: tuple[float, ...] = ()
    """Ascending; a value is in bucket 1 + (boundaries that it reaches or exceeds)."""
    num_quantiles: int | None = None
    """Buckets of about equal size, whose boundaries the training rows decide; None: as given."""

    @property
    def num_rows(self) -> int:
        """Rows that the feature takes in its table."""
        return len(self.boundaries) + 2


@dataclass(frozen=True, kw_only=True)
class SparseColumn:
    """One sparse feature, from a column of the raw files, from its buckets or from a cross of columns."""

    name: str
    multi_valued: bool = False
    """A list per sample."""
    weighted: bool = False
    """Whether each value has a weight."""
    weight: str | None = None
    """Column that holds the weights; None where there are none, or where they stand beside the values."""
    separator: str | None = None
    """CSV: what parts the values of a field, where it holds several."""
    weight_separator: str | None = None
    """CSV: what parts a value from its weight."""
    buckets: BucketRule | None = None
    """For numbers that are cut into buckets."""
    cross: tuple[str, ...] = ()
    """Columns whose values are joined to one."""
    column: str | None = None
    """The raw column, where the feature has another name."""
    is_empty: bool = False
    """Whether no sample has a value: see NO_CATEGORY."""

    @property
    def has_row_ids(self) -> bool:
        """Whether its values are rows of its table already, and neither hashed nor looked up."""
        return self.is_empty or self.buckets is not None

    @property
    def raw_column(self) -> str:
        """The raw column of a feature that is neither cut into buckets nor a cross."""
        return self.column or self.name

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that it is made of, apart from that of the weights."""
        if self.is_empty:
            return ()
        return (self.buckets.column,) if self.buckets else self.cross or (self.raw_column,)

    @property
    def made_of(self) -> tuple[str, ...]:
        """Those columns where the feature has another name."""
        return () if self.columns == (self.name,) else self.columns


NO_CATEGORY = SparseColumn(name="no_category", multi_valued=True, is_empty=True)
"""The feature of data without categories: all bags are empty, so that it adds nothing to any model, and models, plans
and checkpoints need no case for data without tables."""


@dataclass(frozen=True, kw_only=True)
class RawLayout:
    """Columns of the raw files: names of labels, dense and sparse features, and of what a sample has beside."""

    labels: tuple[str, ...]
    """Names of the labels: raw columns, except for those with a rule."""
    dense: tuple[str, ...]
    sparse: tuple[SparseColumn, ...]
    label_rules: tuple[LabelRule, ...] = ()
    """How the labels that are not columns of labels are made."""
    signed: tuple[str, ...] = ()
    """Dense columns whose negative values count; those of others are taken for 0."""
    whole_numbers: tuple[str, ...] = ()
    """Raw columns of categories or of the group in which every spelling of a whole number is one value."""
    number_format: NumberFormat | None = None
    """How text spells numbers; `None`: as 1234.5."""
    weight: str | None = None
    """Weights of the samples."""
    group: str | None = None
    """Group of each sample, such as a user or a request; it may be a feature too."""
    time: str | None = None
    """When it happened."""
    surveyed_columns: tuple[str, ...] = ()
    """Columns of which the numbers themselves are wanted, before anything is known of them."""
    ignored: tuple[str, ...] = field(default=(), compare=False)
    """Columns that are not read."""
    other_times: tuple[str, ...] = field(default=(), compare=False)
    """Ignored columns of times, each of which `--time` can make the one that splits go by; inferred."""
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Why a column was taken for what it is, where that was inferred."""
    delimiter: str = field(default=",", compare=False)
    """Of the first CSV file, for the schema that is printed."""
    header: tuple[str, ...] = field(default=(), compare=False)
    """Names of the columns of text that has no header, for that schema as well."""
    encoding: str | None = field(default=None, compare=False)
    """Encoding of the text; `None`: its bytes are taken as they are, as former versions did."""

    partition_keys: tuple[str, ...] = field(default=(), compare=False)
    """Columns that folders such as `date=2026-01-31` make."""

    @property
    def labels_without_rule(self) -> list[str]:
        """The labels that are raw columns of labels."""
        return [name for name in self.labels if self.label_rule(name) is None]

    @property
    def raw_label_columns(self) -> list[str]:
        """The raw columns that labels are made from, once."""
        rules = {name: self.label_rule(name) for name in self.labels}
        return list(dict.fromkeys(name if rule is None else rule.column for name, rule in rules.items()))

    @property
    def columns(self) -> list[str]:
        """Every raw column that is read, once."""
        samples = [name for name in (*self.raw_label_columns, self.weight, self.group, self.time) if name is not None]
        return list(dict.fromkeys([*samples, *self.feature_columns, *self.surveyed_columns]))

    @property
    def numeric_columns(self) -> list[str]:
        """The raw columns that are read as numbers."""
        buckets = [column.buckets.column for column in self.sparse if column.buckets]
        weight = [] if self.weight is None else [self.weight]
        return list(dict.fromkeys([*self.raw_label_columns, *weight, *self.dense, *buckets, *self.surveyed_columns]))

    @property
    def text_columns(self) -> list[str]:
        """The raw columns that are read as text, some of them as numbers too."""
        parts = [name for column in self.encoded_features for name in column.columns if self.get_buckets(name) is None]
        return [name for name in (self.group, self.time, *parts) if name is not None]

    @property
    def encoded_features(self) -> list[SparseColumn]:
        """The sparse features whose values are hashed or looked up."""
        return [column for column in self.sparse if not column.has_row_ids]

    @property
    def feature_names(self) -> list[str]:
        """Names of the features, the dense ones first."""
        return [*self.dense, *(column.name for column in self.sparse if not column.is_empty)]

    @property
    def feature_columns(self) -> list[str]:
        """The raw columns that features are made of, once, with those of the weights of ids."""
        sparse = [name for column in self.sparse for name in column.columns]
        weights = [column.weight for column in self.sparse if column.weight is not None]
        return list(dict.fromkeys([*self.dense, *sparse, *weights]))

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Columns of the labels in the dataset."""
        return ("label",) if len(self.labels) == 1 else self.labels

    @property
    def group_column(self) -> str | None:
        """Column of the group in the dataset, beside a feature of the same name."""
        return f"{self.group}.group" if self.group in self.feature_names else self.group

    @property
    def sample_columns(self) -> list[str]:
        """Columns of the dataset that are no features."""
        return [name for name in (*self.label_columns, self.weight, self.group_column, self.time) if name is not None]

    def label_rule(self, name: str) -> LabelRule | None:
        """Return how a label is made; None if it is a raw column of labels."""
        return next((rule for rule in self.label_rules if rule.name == name), None)

    def get_buckets(self, column: str) -> BucketRule | None:
        """How a raw column is cut, if it is."""
        return self._buckets.get(column)

    def is_signed(self, dense: str) -> bool:
        """Whether negative values of a dense column count."""
        return dense in self._signed

    def has_whole_numbers(self, column: str) -> bool:
        """Whether every spelling of a whole number in a raw column is one value."""
        return column in self._whole_numbers

    # Asked once for each of thousands of columns.
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
        """The same with the boundaries of each column's quantiles."""
        sparse = tuple(
            replace(
                column, buckets=BucketRule(column=column.buckets.column, boundaries=boundaries[column.buckets.column])
            )
            if column.buckets and column.buckets.column in boundaries
            else column
            for column in self.sparse
        )
        return replace(self, sparse=sparse)
