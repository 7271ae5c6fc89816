"""Conversion of column values to times, group keys, buckets and crosses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from meseta.data.hash_categories import hash_categories
from meseta.data.schema.infer import FALSE_WORDS, MISSING_TEXTS, TRUE_WORDS

# The ASCII unit separator, which click logs do not contain.
CROSS_SEPARATOR = "\x1f"

# (smallest absolute value, units per second) of numbers that are nano-, micro- and milliseconds. As seconds, the
# smallest one would be after the year 5138.
_TIME_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
_INTEGER_PATTERN = r"^(0|-?[1-9][0-9]{0,17})$"
_ZONED_PATTERN = r":.*(Z|[+-]\d\d(:?\d\d)?)$"


def to_seconds(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert times [n] to seconds since 1970. NaN is unchanged.

    The size of a number determines whether it is in seconds, milli-, micro- or nanoseconds.
    """
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

    Times without a zone are in UTC, and missing values become NaN. Raises pyarrow.ArrowInvalid if a text is neither, or
    if both kinds are mixed.
    """
    texts = texts.cast(pa.string())
    present = pc.if_else(pc.is_in(texts, pa.array(MISSING_TEXTS)), None, texts)
    try:
        numbers = present.cast(pa.float64())
    except pa.ArrowInvalid:
        return _parse_iso_times(present)
    values = numbers.to_numpy(zero_copy_only=False)
    if np.isinf(values).any():
        raise pa.ArrowInvalid("a time is infinite")
    return to_seconds(values)


def column_to_seconds(column: pa.Array) -> NDArray[np.float64]:
    """Return seconds since 1970-01-01 UTC [n] for numbers, timestamps, dates or text.

    Raises pyarrow.ArrowInvalid as `parse_times` does.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_timestamp_or_date(column):
        return _timestamps_to_seconds(column.cast(_nanosecond_type(column)))
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return to_seconds(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
    return parse_times(column.fill_null("") if column.null_count else column)


def find_invalid_time(column: pa.Array) -> int:
    """Return the index of the value that caused an error of `column_to_seconds`.

    This is the first value that is not a time, or whose kind differs from earlier ones.
    """
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
    """Return int64 keys [n]. An integer of at most 18 digits is its own key, and any other text is hashed (XXH64, seed
    0)."""
    keys = hash_categories(texts).view(np.int64)
    whole = pc.match_substring_regex(texts, _INTEGER_PATTERN)
    if not pc.any(whole).as_py():
        return keys
    digits = pc.if_else(whole, texts.cast(pa.large_binary()), pa.scalar(b"0", pa.large_binary()))
    numbers = digits.cast(pa.large_string()).cast(pa.int64()).to_numpy()
    return np.where(whole.to_numpy(zero_copy_only=False), numbers, keys)


def bucket_rows(values: NDArray[np.float64], boundaries: Sequence[float]) -> pa.Array:
    """Return int32 rows [n]: 0 for a missing value, otherwise 1 plus the number of boundaries <= value."""
    rows = np.searchsorted(np.array(boundaries, np.float64), values, side="right").astype(np.int32) + 1
    return pa.array(np.where(np.isnan(values), np.int32(0), rows))


def cross_columns(columns: Sequence[pa.Array]) -> pa.Array:
    """Join the values of several text, binary or integer columns [n] into one binary value per row [n]."""
    texts = [(c.cast(pa.string()) if pa.types.is_integer(c.type) else c).cast(pa.binary()) for c in columns]
    return pc.binary_join_element_wise(*texts, CROSS_SEPARATOR.encode())


def _is_timestamp_or_date(column: pa.Array) -> bool:
    return pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)


def _nanosecond_type(column: pa.Array) -> pa.DataType:
    return pa.timestamp("ns", getattr(column.type, "tz", None))


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
