"""Parser of one block of Parquet. Its errors name the file, row and column."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from meseta.data.formats.encodings import find_invalid_utf8
from meseta.data.formats.format import Block
from meseta.data.formats.normalize_numbers import normalize_numbers_strictly
from meseta.data.formats.parquet_files import decode_values
from meseta.data.formats.parquet_types import is_fractional, is_list, is_string, is_text
from meseta.data.formats.table_rows import convert_rows
from meseta.data.formats.values import replace_label_words
from meseta.data.layout import RawLayout, SparseColumn
from meseta.data.number_format import NumberFormat
from meseta.data.raw_rows import RawRows, RawSparse, find_value_row
from meseta.data.schema.infer import MISSING_TEXTS, NULL_TEXTS, parse_number
from meseta.data.whole_numbers import respell_whole_numbers
from meseta.errors import error_summary
from meseta.spec import MesetaError


def parse_parquet(block: Block, batch: pa.RecordBatch, layout: RawLayout) -> RawRows:
    """Check and convert all rows. Raises MesetaError naming the file, the row and the column."""
    return convert_rows(_ParquetColumns(block, batch, layout), layout, block)


@dataclass(frozen=True)
class _ParquetColumns:
    """Columns of one batch, as `convert_rows` reads them."""

    block: Block
    batch: pa.RecordBatch
    layout: RawLayout

    def numbers(self, name: str) -> pa.Array:
        column = self._values(name)
        # The layout accepts text for labels, and for all numbers if there is a number format.
        if is_text(column.type):
            number_format = self.layout.number_format
            if name in self.layout.labels_without_rule:
                return _parse_numbers(_as_strings(column), number_format)
            plain = normalize_numbers_strictly(number_format or NumberFormat(), column)
            texts = [text.decode(errors="replace") for text in plain.to_pylist()]
            numbers = [None if text in NULL_TEXTS else parse_number(text) for text in texts]
            for row, (text, number) in enumerate(zip(texts, numbers, strict=True)):
                if number is None and text not in NULL_TEXTS:
                    raise self.error(row, name, "is not a number")
            return pa.array(numbers, pa.float64())
        return column.cast(pa.float64(), safe=False)

    def times(self, name: str) -> pa.Array:
        column = self._values(name)
        return column.cast(pa.float64()) if pa.types.is_null(column.type) else column

    def texts(self, name: str) -> pa.Array:
        texts, place = _to_texts(self._values(name), is_exact=self.layout.has_whole_numbers(name))
        if place is not None:
            raise self.error(place, name, "is not a whole number")
        return texts

    def sparse(self, column: SparseColumn) -> RawSparse:
        if not column.multi_valued:
            return RawSparse(self.texts(column.raw_column))
        array = self._lists(column.raw_column)
        lengths = _list_lengths(array)
        values = array.flatten()
        if not column.weighted:
            return RawSparse(self._texts_of_lists(column.raw_column, values, lengths), lengths)
        weight_name = column.weight or column.name
        if column.weight is None:
            if not pa.types.is_struct(values.type):
                values = values.cast(pa.struct([("id", pa.string()), ("weight", pa.float64())]))
            values, weights = pc.struct_field(values, [0]), pc.struct_field(values, [1])
        else:
            weight_array = self._lists(column.weight)
            unequal = np.flatnonzero(lengths != _list_lengths(weight_array))
            if unequal.size:
                problem = f"a list must be as long as the list of {column.name!r}"
                raise self._error(int(unequal[0]), weight_name, problem)
            weights = weight_array.flatten()
        with np.errstate(over="ignore"):  # Overflow yields infinity, which is rejected below.
            numbers = _to_float64(decode_values(weights)).astype(np.float32)
        if not np.isfinite(numbers).all():
            owner = find_value_row(int(np.flatnonzero(~np.isfinite(numbers))[0]), lengths)
            raise self._error(owner, weight_name, "a weight is missing or not finite")
        return RawSparse(self._texts_of_lists(column.raw_column, values, lengths), lengths, numbers)

    def error(self, row: int, name: str, problem: str) -> MesetaError:
        value = self.batch.column(name)[row]
        shown = "a missing value" if not value.is_valid else _format_value(value)[:40]
        return self._error(row, name, f"{shown} {problem}")

    def _values(self, name: str) -> pa.Array:
        array = decode_values(self.batch.column(name))
        self._check_text(name, array)
        return array

    def _lists(self, name: str) -> pa.Array:
        array = self.batch.column(name)
        return array if is_list(array.type) else array.cast(pa.list_(pa.null()))  # All values of a file may be null.

    def _texts_of_lists(self, name: str, values: pa.Array, lengths: NDArray[np.int64]) -> pa.Array:
        values = decode_values(values)
        self._check_text(name, values, lengths)
        texts, place = _to_texts(values, is_exact=self.layout.has_whole_numbers(name))
        if place is not None:
            owner = find_value_row(place, lengths)
            raise self._error(owner, name, f"{values[place].as_py()} in a list is not a whole number")
        return texts

    def _check_text(self, name: str, values: pa.Array, lengths: NDArray[np.int64] | None = None) -> None:
        if is_string(values.type) and (fault := find_invalid_utf8(values)):
            row = find_value_row(fault.position, lengths)
            raise self._error(row, name, f"{fault.preview} is not valid UTF-8, as Parquet strings must be")

    def _error(self, row: int, name: str, problem: str) -> MesetaError:
        where = f"source {str(self.block.source.path)!r}, row {self.block.first_row + row + 1}"
        return MesetaError(f"{where}, column {name!r}: {problem}", remedy="fix the row")


def cast_key_column(block: Block, name: str, array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert values to the type common to all files.

    Raises MesetaError if the type cannot represent a value, or if text is not valid UTF-8.
    """
    try:
        values = array if array.type == kind else decode_values(array).cast(kind)
        values.validate(full=True)
    except pa.ArrowInvalid as error:
        where = f"source {block.source.path!r}, from row {block.first_row + 1} on, column {name!r}"
        raise MesetaError(f"keys: {where}: {error_summary(error)}; leave the column out") from None
    return values


def _parse_numbers(texts: pa.Array, number_format: NumberFormat | None) -> pa.Array:
    """Parse texts as float64. Missing values become null or NaN, and invalid texts become infinity."""
    try:
        texts = replace_label_words(texts.cast(pa.string()))
        texts = texts if number_format is None else normalize_numbers_strictly(number_format, texts).cast(pa.string())
        return pc.if_else(pc.is_in(texts, pa.array(NULL_TEXTS)), None, texts).cast(pa.float64())
    except pa.ArrowInvalid:
        if not pa.types.is_string(texts.type):
            texts = pa.array([value.decode(errors="replace") for value in texts.to_pylist()], pa.string())
            return _parse_numbers(texts, number_format)
        numbers = [
            math.nan if text in MISSING_TEXTS else parse_number(text) for text in replace_label_words(texts).to_pylist()
        ]
        return pa.array([math.inf if number is None else number for number in numbers], pa.float64())


def _to_float64(column: pa.Array) -> NDArray[np.float64]:
    return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def _list_lengths(array: pa.Array) -> NDArray[np.int64]:
    return pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _format_value(value: pa.Scalar) -> str:
    try:
        return repr(value.as_py())
    except (ValueError, OverflowError):
        # Python cannot represent all timestamps.
        return str(value.cast(pa.string()).as_py())


def _to_texts(array: pa.Array, *, is_exact: bool) -> tuple[pa.Array, int | None]:
    """Return (values as text, None), or (array, index) of the first number that is not whole.

    Missing values become empty strings. With `is_exact`, doubles up to 2^64 and all digits of decimals are kept.
    """
    # Without `is_exact`, decimals are rounded to double, as former versions did.
    if not is_fractional(array.type):
        return _as_strings(array), None
    values = _to_float64(array)
    is_present = ~np.isnan(values)
    low, high = -(2.0**63), 2.0**64 if is_exact else 2.0**63
    with np.errstate(invalid="ignore"):
        bad = np.flatnonzero(is_present & ~((values == np.trunc(values)) & (values >= low) & (values < high)))
    if bad.size:
        return array, int(bad[0])
    if is_exact and pa.types.is_decimal(array.type):
        texts = respell_whole_numbers(array.cast(pa.string()).cast(pa.large_binary()).fill_null(b""))
        return texts, None
    is_large = values >= 2.0**63
    numbers = pa.array(np.where(is_present & ~is_large, values, 0).astype(np.int64), mask=~is_present)
    texts = numbers.cast(pa.string())
    if is_large.any():
        large = pa.array(np.where(is_large, values, 0).astype(np.uint64)).cast(pa.string())
        texts = pc.if_else(pa.array(is_large), large, texts)
    return texts.fill_null(""), None


def _as_strings(array: pa.Array) -> pa.Array:
    if not is_text(array.type):
        array = array.cast(pa.string())
    return array.fill_null(b"" if "binary" in str(array.type) else "") if array.null_count else array
