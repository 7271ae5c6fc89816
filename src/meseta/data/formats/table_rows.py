"""Conversion of rows with named columns to the values that a layout requires, with checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.data.formats.format import Block
from meseta.data.formats.normalize_numbers import normalize_formatted_numbers, normalize_number
from meseta.data.formats.parquet_types import is_text
from meseta.data.formats.partitions import Partition
from meseta.data.formats.values import (
    bucket_rows,
    column_to_seconds,
    cross_columns,
    find_invalid_time,
    group_keys,
    replace_label_words,
)
from meseta.data.layout import RawLayout, SparseColumn
from meseta.data.raw_rows import LABEL_RULE, RawRows, RawSparse, is_label, log_transform
from meseta.data.schema.infer import MISSING_TEXTS, parse_number
from meseta.data.schema.labels import apply_label_rule
from meseta.data.weights import WEIGHT_RULE, is_weight
from meseta.data.whole_numbers import respell_whole_numbers
from meseta.spec import MesetaError


@runtime_checkable  # beartype asks for it where the tests check every call
class BlockColumns(Protocol):
    """Columns of one block of n rows."""

    def numbers(self, name: str) -> pa.Array:
        """Return float64 [n] with missing values as null. Invalid numbers may be infinite, or raise MesetaError."""

    def times(self, name: str) -> pa.Array:
        """Return text, numbers or timestamps [n]."""

    def texts(self, name: str) -> pa.Array:
        """Return strings or binary [n] with missing values as empty strings."""

    def sparse(self, column: SparseColumn) -> RawSparse:
        """Return the values of a feature that is stored in one column, with an optional column of weights."""

    def error(self, row: int, name: str, problem: str) -> MesetaError:
        """Return an error for a value. `row` counts from 0 in the block, and `problem` follows the value in the
        message."""


@dataclass(frozen=True)
class _PartitionedColumns:
    """Columns of a block, together with those from the folders of its file."""

    columns: BlockColumns
    block: Block
    layout: RawLayout

    @property
    def partition(self) -> Partition:
        return self.block.source.partition

    def numbers(self, name: str) -> pa.Array:
        if name not in self.partition:
            return self.columns.numbers(name)
        text = self.partition[name] or ""
        if name in self.layout.labels_without_rule:
            text = replace_label_words(pa.array([text]))[0].as_py()
        if self.layout.number_format is not None:
            text = normalize_number(self.layout.number_format, text)
        number = None if text in MISSING_TEXTS else parse_number(text)
        if number is None and text not in MISSING_TEXTS:
            raise self.error(0, name, "is not a number")
        return self._repeat(pa.scalar(number, pa.float64()))

    def times(self, name: str) -> pa.Array:
        return self.texts(name) if name in self.partition else self.columns.times(name)

    def texts(self, name: str) -> pa.Array:
        if name not in self.partition:
            return self.columns.texts(name)
        return self._repeat(pa.scalar((self.partition[name] or "").encode(), pa.binary()))

    def sparse(self, column: SparseColumn) -> RawSparse:
        return (
            RawSparse(self.texts(column.raw_column))
            if column.raw_column in self.partition
            else self.columns.sparse(column)
        )

    def error(self, row: int, name: str, problem: str) -> MesetaError:
        if name not in self.partition:
            return self.columns.error(row, name, problem)
        value = self.partition[name]
        shown = "a missing value" if value is None else repr(value)[:40]
        return MesetaError(f"source {self.block.source.path!r}, folder {name!r}: {shown} {problem}; rename the folder")

    def _repeat(self, value: pa.Scalar) -> pa.Array:
        return pa.repeat(value, self.block.num_rows)


def convert_rows(columns: BlockColumns, layout: RawLayout, block: Block) -> RawRows:
    """Convert and check the rows of a block. Raises MesetaError naming the file, the row or line, and the column."""
    if block.source.partition:
        columns = _PartitionedColumns(columns, block, layout)
    dense = [_dense(columns, layout, name) for name in layout.dense]
    return RawRows(
        labels=[_label(columns, layout, name) for name in layout.labels],
        dense=[logarithms for logarithms, _ in dense],
        num_non_finite=tuple(number for _, number in dense),
        sparse=[_sparse(columns, layout, column, block.num_rows) for column in layout.sparse],
        weight=None if layout.weight is None else _weight(columns, layout.weight),
        group=None if layout.group is None else group_keys(_texts(columns, layout, layout.group)),
        time=None if layout.time is None else _time(columns, layout, layout.time),
        surveyed_values=[_read_finite(columns, name) for name in layout.surveyed_columns],
    )


def _label(columns: BlockColumns, layout: RawLayout, name: str) -> NDArray[np.float32]:
    rule = layout.label_rule(name)
    values = _to_float64(columns.numbers(name if rule is None else rule.column))
    if rule is None:
        labels, requirement = values, LABEL_RULE
    else:
        labels, requirement = apply_label_rule(rule, values)
    is_good = is_label(labels)
    # With several labels, any of them may be missing.
    if len(layout.labels) > 1:
        is_good |= np.isnan(values)
    bad = np.flatnonzero(~is_good)
    if bad.size:
        first = int(bad[0])
        problem = f"is not a label: labels must be {requirement}"
        if rule is None and np.isfinite(values[first]):
            condition = f"{name} >= {values[first]:.6g}"
            problem = f"is outside 0..1; if the column holds ratings, specify a condition such as --label {condition!r}"
        raise columns.error(first, name if rule is None else rule.column, problem)
    return labels.astype(np.float32)


def _to_float64(numbers: pa.Array) -> NDArray[np.float64]:
    """Return numbers with missing values as NaN."""
    return numbers.to_numpy(zero_copy_only=False)


def _dense(columns: BlockColumns, layout: RawLayout, name: str) -> tuple[NDArray[np.float32], int]:
    """Return (logarithms [n], number of values that are not finite). Missing values do not count."""
    numbers = columns.numbers(name)
    values = _non_finite_to_nan(_to_float64(numbers))
    num_not_finite = int(np.count_nonzero(np.isnan(values))) - numbers.null_count
    return log_transform(values, signed=layout.is_signed(name)), num_not_finite


def _non_finite_to_nan(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a copy in which missing and non-finite values are NaN."""
    return np.where(np.isfinite(values), values, np.nan)


def _read_finite(columns: BlockColumns, name: str) -> NDArray[np.float64]:
    return _non_finite_to_nan(_to_float64(columns.numbers(name)))


def _weight(columns: BlockColumns, name: str) -> NDArray[np.float32]:
    weight = _to_float64(columns.numbers(name))
    bad = np.flatnonzero(~is_weight(weight))
    if bad.size:
        rule = f"is not a sample weight: weights must be {WEIGHT_RULE}"
        raise columns.error(int(bad[0]), name, rule)
    return weight.astype(np.float32)


def _time(columns: BlockColumns, layout: RawLayout, name: str) -> NDArray[np.float64]:
    column = columns.times(name)
    try:
        if layout.number_format is not None and is_text(column.type):
            return column_to_seconds(normalize_formatted_numbers(layout.number_format, column))
        return column_to_seconds(column)
    except pa.ArrowInvalid:
        rule = "is not a time: write times as 2026-01-31 23:59:59, or all of them as numbers, or list the column "
        rule += "under ignore in a --schema file"
        raise columns.error(find_invalid_time(column), name, rule) from None


def _sparse(columns: BlockColumns, layout: RawLayout, column: SparseColumn, num_rows: int) -> RawSparse:
    if column.buckets is not None:
        return RawSparse(bucket_rows(_read_finite(columns, column.buckets.column), column.buckets.boundaries))
    if column.is_empty:
        return RawSparse(pa.array([], pa.int32()), np.zeros(num_rows, np.int64))
    # Only `NO_CATEGORY` has no values.
    if column.cross:
        return RawSparse(cross_columns([_read_crossed(columns, layout, name) for name in column.cross]))
    sparse = columns.sparse(column)
    if not layout.has_whole_numbers(column.raw_column):
        return sparse
    return replace(sparse, values=_respell(sparse.values, layout))


def _read_crossed(columns: BlockColumns, layout: RawLayout, name: str) -> pa.Array:
    buckets = layout.get_buckets(name)
    if buckets is None:
        return _texts(columns, layout, name)
    return bucket_rows(_read_finite(columns, name), buckets.boundaries)


def _texts(columns: BlockColumns, layout: RawLayout, name: str) -> pa.Array:
    texts = columns.texts(name)
    return _respell(texts, layout) if layout.has_whole_numbers(name) else texts


def _respell(texts: pa.Array, layout: RawLayout) -> pa.Array:
    return respell_whole_numbers(
        texts if layout.number_format is None else normalize_formatted_numbers(layout.number_format, texts)
    )
