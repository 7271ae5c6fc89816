"""Conversion of column values to times, group keys, buckets and crosses."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from meseta.data.dataset.records import TimeAge, TimePart
from meseta.data.formats.format import Block
from meseta.data.formats.parquet_files import is_text
from meseta.data.formats.partitions import Partition
from meseta.data.hash_categories import hash_categories
from meseta.data.schema.infer import FALSE_WORDS, MISSING_TEXTS, TRUE_WORDS, parse_number
from meseta.data.schema.layout import (
    LABEL_RULE,
    WEIGHT_RULE,
    RawLayout,
    RawRows,
    RawSparse,
    SparseColumn,
    is_label,
    is_weight,
    log_transform,
)
from meseta.data.schema.schema import apply_label_rule
from meseta.data.schema.text_syntax import normalize_formatted_numbers, normalize_number
from meseta.data.whole_numbers import respell_whole_numbers
from meseta.spec import MesetaError

# The ASCII unit separator, which click logs do not contain.
CROSS_SEPARATOR = "\x1f"

# (smallest absolute value, units per second) of numbers that are nano-, micro- and milliseconds. As seconds, the
# smallest one would be after the year 5138.
_TIME_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
_FIRST_WEEKDAY = 3
"""Weekday of 1970-01-01, a Thursday."""
_INTEGER_PATTERN = r"^(0|-?[1-9][0-9]{0,17})$"
_ZONED_PATTERN = r":.*(Z|[+-]\d\d(:?\d\d)?)$"
# (pattern, replacement) pairs of RE2, in which \10 is group 1 and a zero. They change dates with slashes and parts of
# one digit to ISO 8601.
_ISO_REPLACEMENTS = (
    (r"^(\d{4})/(\d{1,2})/(\d{1,2})($|[ T])", r"\1-\2-\3\4"),
    (r"^(\d{4})-(\d)-", r"\1-0\2-"),
    (r"^(\d{4}-\d\d)-(\d)($|[ T])", r"\1-0\2\3"),
    (r"^(\d{4}-\d\d-\d\d[ T])(\d):", r"\10\2:"),
)


def to_seconds(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert times [n] to seconds since 1970. Their size determines the unit (s, ms, us or ns). NaN is unchanged."""
    result = numbers.copy()
    size = np.abs(numbers)
    for least, per_second in reversed(_TIME_UNITS):
        large = size >= least
        result[large] = numbers[large] / per_second
    return result


def replace_label_words(texts: pa.Array) -> pa.Array:
    """Return texts [n] in which words for a label of 1 or 0, such as true or no, are replaced by that digit."""
    words = pc.utf8_lower(pc.utf8_trim_whitespace(texts))
    numbers = pc.if_else(pc.is_in(words, pa.array(TRUE_WORDS)), "1", texts)
    return pc.if_else(pc.is_in(words, pa.array(FALSE_WORDS)), "0", numbers)


def parse_times(texts: pa.Array) -> NDArray[np.float64]:
    """Return seconds since 1970-01-01 UTC [n] for texts that are all ISO 8601 times or all numbers.

    Dates may have slashes, and months, days and hours one digit, as in 2026/1/31 9:30. Times without a zone are in UTC,
    and missing values become NaN. Raises pyarrow.ArrowInvalid if a text is neither, or if both kinds are mixed.
    """
    texts = texts.cast(pa.string())
    present = pc.if_else(pc.is_in(texts, pa.array(MISSING_TEXTS)), None, texts)
    try:
        numbers = present.cast(pa.float64())
    except pa.ArrowInvalid:
        return _parse_dates(present)
    values = numbers.to_numpy(zero_copy_only=False)
    if np.isinf(values).any():
        raise pa.ArrowInvalid("a time is infinite")
    return to_seconds(values)


def column_to_seconds(column: pa.Array) -> NDArray[np.float64]:
    """Return seconds since 1970-01-01 UTC [n] of numbers, timestamps, dates or text. Raises as `parse_times` does."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_timestamp_or_date(column):
        return _timestamps_to_seconds(column.cast(_nanosecond_type(column)))
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return to_seconds(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
    return parse_times(column.fill_null("") if column.null_count else column)


def find_invalid_time(column: pa.Array) -> int:
    """Return the index of the value behind an error of `column_to_seconds`: no time, or of another kind than before."""
    first: type | None = None
    # The range of int64 nanoseconds is the years 1677 to 2262.
    if _is_timestamp_or_date(column):
        wrapped = column.cast(_nanosecond_type(column), safe=False).cast(column.type, safe=False)
        return int(pc.index(pc.not_equal(wrapped, column), True).as_py())
    for place, value in enumerate(column.to_pylist()):
        kind = _time_kind(value)
        if kind is None or (first is not None and kind not in (first, type(None))):
            return place
        first = first or (None if kind is type(None) else kind)
    return 0


def group_keys(texts: pa.Array) -> NDArray[np.int64]:
    """Return int64 keys [n]. An integer of up to 18 digits is its own key, other text is hashed (XXH64, seed 0)."""
    keys = hash_categories(texts).view(np.int64)
    whole = pc.match_substring_regex(texts, _INTEGER_PATTERN)
    if not pc.any(whole).as_py():
        return keys
    digits = pc.if_else(whole, texts.cast(pa.large_binary()), pa.scalar(b"0", pa.large_binary()))
    numbers = digits.cast(pa.large_string()).cast(pa.int64()).to_numpy()
    return np.where(whole.to_numpy(zero_copy_only=False), numbers, keys)


def split_texts(texts: pa.Array, separator: str) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return (values [nnz], row of each value [nnz]) of texts [n] of several values. Empty values are left out."""
    lists = pc.split_pattern(texts, separator)
    values = lists.flatten()
    rows = np.repeat(np.arange(len(texts)), pc.list_value_length(lists).to_numpy())
    present = pc.not_equal(values, pa.scalar("", pa.string()).cast(values.type))
    return values.filter(present), rows[present.to_numpy(zero_copy_only=False)]


def bucket_rows(values: NDArray[np.float64], boundaries: Sequence[float]) -> pa.Array:
    """Return int32 rows [n]: 0 for a missing value, otherwise 1 plus the number of boundaries <= value."""
    rows = np.searchsorted(np.array(boundaries, np.float64), values, side="right").astype(np.int32) + 1
    return pa.array(np.where(np.isnan(values), np.int32(0), rows))


def time_part_rows(times: NDArray[np.float64], part: TimePart) -> pa.Array:
    """Return int32 rows [n]: 0 for a missing time, otherwise 1 plus the hour (0 to 23) or weekday (Monday is 0) in UTC.

    `times` [n] are seconds since 1970.
    """
    present = np.nan_to_num(times)
    if part == "hour":
        values = np.floor_divide(present, 3600) % 24
    else:
        values = (np.floor_divide(present, 86400) + _FIRST_WEEKDAY) % 7
    return pa.array(np.where(np.isnan(times), 0, values + 1).astype(np.int32))


def time_age(times: NDArray[np.float64], age: TimeAge) -> NDArray[np.float64]:
    """Return the share of the training period that had passed at `times` [n], 0 to 1. NaN (missing) is unchanged."""
    if age.last <= age.origin:
        return np.where(np.isnan(times), np.nan, 0.0)
    return np.clip((times - age.origin) / (age.last - age.origin), 0.0, 1.0)


def cross_columns(columns: Sequence[pa.Array]) -> pa.Array:
    """Join the values of several text, binary or integer columns [n] into one binary value per row [n]."""
    texts = [(c.cast(pa.string()) if pa.types.is_integer(c.type) else c).cast(pa.binary()) for c in columns]
    return pc.binary_join_element_wise(*texts, CROSS_SEPARATOR.encode())


def _is_timestamp_or_date(column: pa.Array) -> bool:
    return pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)


def _nanosecond_type(column: pa.Array) -> pa.DataType:
    return pa.timestamp("ns", getattr(column.type, "tz", None))


def _parse_dates(texts: pa.Array) -> NDArray[np.float64]:
    with contextlib.suppress(pa.ArrowInvalid):
        return _parse_iso_times(texts)
    for pattern, replacement in _ISO_REPLACEMENTS:
        texts = pc.replace_substring_regex(texts, pattern, replacement)
    return _parse_iso_times(texts)


def _parse_iso_times(texts: pa.Array) -> NDArray[np.float64]:
    zoned = pc.fill_null(pc.match_substring_regex(texts, _ZONED_PATTERN), False)
    nothing = pa.scalar(None, pa.string())
    in_utc = _timestamps_to_seconds(pc.if_else(zoned, nothing, texts).cast(pa.timestamp("ns")))
    with_zone = _timestamps_to_seconds(pc.if_else(zoned, texts, nothing).cast(pa.timestamp("ns", "UTC")))
    return np.where(zoned.to_numpy(zero_copy_only=False), with_zone, in_utc)


def _timestamps_to_seconds(column: pa.Array) -> NDArray[np.float64]:
    whole = column.cast(pa.int64())
    values = pc.fill_null(whole, 0).to_numpy().astype(np.float64) / 1e9
    values[pc.is_null(whole).to_numpy(zero_copy_only=False)] = np.nan
    return values


def _time_kind(value: object) -> type | None:
    """Return float (number), str (ISO 8601), NoneType (missing), or `None` if the value is not a time."""
    text = value if isinstance(value, str | bytes) else str(value)
    try:
        if np.isnan(parse_times(pa.array([text]))[0]):
            return type(None)
    except pa.ArrowInvalid:
        return None
    try:
        return type(float(text))
    except ValueError:
        return str


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
        """Return an error for a value. `row` counts from 0 in the block, and `problem` follows the value."""


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
    times = {name: _time(columns, layout, name) for name in layout.time_columns}
    ages = {age.name: (log_transform(time_age(times[age.column], age)), 0) for age in layout.ages}
    dense = [ages[name] if name in ages else _dense(columns, layout, name) for name in layout.dense]
    return RawRows(
        labels=[_label(columns, layout, name) for name in layout.labels],
        dense=[logarithms for logarithms, _ in dense],
        num_non_finite=tuple(number for _, number in dense),
        sparse=[
            RawSparse(time_part_rows(times[column.raw_column], column.time_part))
            if column.time_part is not None
            else _sparse(columns, layout, column, block.num_rows)
            for column in layout.sparse
        ],
        weight=None if layout.weight is None else _weight(columns, layout.weight),
        group=None if layout.group is None else group_keys(_texts(columns, layout, layout.group)),
        time=None if layout.time is None else times[layout.time],
        surveyed_values=[_read_finite(columns, name) for name in layout.surveyed_columns],
        surveyed_times=[times[name].copy() for name in layout.surveyed_times],
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
    return numbers.to_numpy(zero_copy_only=False)


def _dense(columns: BlockColumns, layout: RawLayout, name: str) -> tuple[NDArray[np.float32], int]:
    """Return (logarithms [n], number of values that are not finite). Missing values do not count."""
    numbers = columns.numbers(name)
    values = _non_finite_to_nan(_to_float64(numbers))
    num_not_finite = int(np.count_nonzero(np.isnan(values))) - numbers.null_count
    return log_transform(values, signed=layout.is_signed(name)), num_not_finite


def _non_finite_to_nan(values: NDArray[np.float64]) -> NDArray[np.float64]:
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
