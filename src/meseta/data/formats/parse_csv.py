"""Parser of one block of CSV. Its errors name the file, line and column."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv

from meseta.data.formats.csv_records import iter_records, parse_header, read_header
from meseta.data.formats.encodings import decode_sample
from meseta.data.formats.format import FIX_LINE, Block
from meseta.data.formats.normalize_numbers import normalize_number, normalize_numbers_strictly
from meseta.data.formats.table_rows import convert_rows
from meseta.data.formats.values import replace_label_words
from meseta.data.layout import RawLayout, SparseColumn
from meseta.data.number_format import NumberFormat, format_hint
from meseta.data.raw_rows import LABEL_RULE, RawRows, RawSparse
from meseta.data.schema.infer import FALSE_WORDS, MISSING_TEXTS, NULL_TEXTS, TRUE_WORDS
from meseta.errors import error_summary
from meseta.spec import MesetaError


def parse_csv(block: Block, raw: bytes, layout: RawLayout) -> RawRows:
    """Parse and check all rows. Raises MesetaError naming the file, the line and the column."""
    # Address columns by position, because names of unused columns may be empty or occur twice.
    first = {name: place for place, name in reversed(list(enumerate(block.header)))}
    columns = block.source.file_columns(layout.columns) or block.header[:1]
    places = {name: f"f{first[name]}" for name in columns}
    words = _has_word_label(block, raw, layout)
    try:
        try:
            table = _read(block, raw, layout, places, labels_are_words=words)
        except pa.ArrowInvalid:
            if words or not layout.labels_without_rule:
                raise
            # A later label may be a word, although the first one is a number.
            table = _read(block, raw, layout, places, labels_are_words=True)
    except pa.ArrowInvalid as error:
        raise _locate_error(block, raw, layout, error_summary(error)) from None
    if table.num_rows != block.num_rows + 1 or table.column(0)[-1].as_py() not in (None, b""):
        raise _locate_error(block, raw, layout, f"{block.num_rows} records gave {table.num_rows - 1} rows")
    return convert_rows(CsvColumns(block, raw, layout, table.slice(0, block.num_rows), places), layout, block)


def _read(block: Block, raw: bytes, layout: RawLayout, places: dict[str, str], *, labels_are_words: bool) -> pa.Table:
    """Return the columns of a block, followed by one row of missing values. Raises pyarrow.ArrowInvalid."""
    texts = {*layout.text_columns, *(layout.labels_without_rule if labels_are_words else ())}
    texts.update(() if layout.number_format is None else layout.numeric_columns)
    numbers = {*layout.numeric_columns} - texts
    types = {place: pa.float64() if name in numbers else pa.binary() for name, place in places.items()}
    # The added row proves that the last record ends at the end of the block. A quote in an unquoted field may move
    # block boundaries, and the parser accepts a quoted field that is never closed.
    delimiter = block.source.delimiter
    guarded = raw + delimiter.encode() * (len(block.header) - 1) + b"\n"
    return arrow_csv.read_csv(
        pa.BufferReader(guarded),
        # One block per call: the caller divides the file, and parallel calls use all cores.
        arrow_csv.ReadOptions(
            use_threads=False, block_size=len(guarded) + 1, column_names=[f"f{i}" for i in range(len(block.header))]
        ),
        arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, ignore_empty_lines=False),
        arrow_csv.ConvertOptions(
            column_types=types, include_columns=list(types), null_values=NULL_TEXTS, strings_can_be_null=False
        ),
    ).combine_chunks()


def read_texts(
    raw: bytes, header: Sequence[str], names: Sequence[str], *, delimiter: str = "\t", is_quoted: bool = False
) -> list[pa.Array]:
    """Return the fields of the columns `names` as text, one string array [n] per column.

    `raw` has lines, or records of CSV, that were parsed before. `header` has the names of all columns. `is_quoted`
    means that quotes have a meaning, as in CSV. Bytes that are not UTF-8 become question marks.
    """
    # The first of several columns with the same name counts.
    first = {name: place for place, name in reversed(list(enumerate(header)))}
    places = [f"f{first[name]}" for name in names]
    table = arrow_csv.read_csv(
        pa.BufferReader(raw),
        arrow_csv.ReadOptions(
            use_threads=False, block_size=len(raw) + 1, column_names=[f"f{i}" for i in range(len(header))]
        ),
        arrow_csv.ParseOptions(
            delimiter=delimiter,
            quote_char='"' if is_quoted else False,
            newlines_in_values=is_quoted,
            ignore_empty_lines=False,
        ),
        arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(places, pa.binary()), include_columns=places, strings_can_be_null=False
        ),
    ).combine_chunks()
    return [_as_text(table.column(place).chunk(0)) for place in places]


def _as_text(column: pa.Array) -> pa.Array:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([decode_sample(value) for value in column.to_pylist()], pa.string())


@dataclass(frozen=True)
class CsvColumns:
    """Columns of one parsed block, as `convert_rows` reads them."""

    block: Block
    raw: bytes
    layout: RawLayout
    table: pa.Table
    table_names: dict[str, str]

    def numbers(self, name: str) -> pa.Array:
        column = self.raw_numbers(name)
        if not pa.types.is_binary(column.type):
            return column
        try:
            texts = column.cast(pa.string())
            if name in self.layout.labels_without_rule:
                texts = replace_label_words(texts)
            texts = self.normalize_numbers(texts)
            return pc.if_else(pc.is_in(texts, pa.array(NULL_TEXTS)), None, texts).cast(pa.float64())
        except pa.ArrowInvalid as error:
            raise self.locate_error(error_summary(error)) from None

    def raw_numbers(self, name: str) -> pa.Array:
        """Return numbers as float64 [n], or as binary [n] in the spelling of the file."""
        return self.table.column(self.table_names[name]).chunk(0)

    def normalize_numbers(self, texts: pa.Array) -> pa.Array:
        """Return number texts [n] in plain decimal notation."""
        number_format = self.layout.number_format
        return texts if number_format is None else normalize_numbers_strictly(number_format, texts).cast(pa.string())

    def times(self, name: str) -> pa.Array:
        return self.texts(name)

    def texts(self, name: str) -> pa.Array:
        return self.table.column(self.table_names[name]).chunk(0)

    def sparse(self, column: SparseColumn) -> RawSparse:
        texts = self.texts(column.raw_column)
        if column.separator is None:
            return RawSparse(texts)
        lists = pc.split_pattern(texts, column.separator)
        values = lists.flatten()
        owner = np.repeat(np.arange(len(texts)), pc.list_value_length(lists).to_numpy())
        # An empty text between separators, or an empty field, is not a value.
        present = pc.not_equal(values, pa.scalar(b"", values.type))
        values, owner = values.filter(present), owner[present.to_numpy(zero_copy_only=False)]
        lengths = np.bincount(owner, minlength=len(texts)).astype(np.int64)
        if column.weight_separator is None:
            return RawSparse(values, lengths)
        parts = pc.split_pattern(values, column.weight_separator, max_splits=1, reverse=True)
        alone = np.flatnonzero(pc.list_value_length(parts).to_numpy() != 2)
        if alone.size:
            raise self.error(
                int(owner[alone[0]]), column.name, f"contains a value without {column.weight_separator!r} and a weight"
            )
        flat = parts.flatten()
        return RawSparse(flat[0::2], lengths, self.weights(column.name, flat[1::2], owner))

    def weights(self, name: str, texts: pa.Array, owner: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return finite weights, one per value [nnz]. `owner` [nnz] has the row of each value, for errors."""
        try:
            texts = self.normalize_numbers(texts.cast(pa.string()))
            numbers = texts.cast(pa.float64()).to_numpy()
        except pa.ArrowInvalid:
            numbers = np.array([_parse_number(text) for text in texts.cast(pa.binary()).to_pylist()], np.float64)
        with np.errstate(over="ignore"):  # Overflow yields infinity, which is rejected below.
            weights = numbers.astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(weights))
        if bad.size:
            raise self.error(int(owner[bad[0]]), name, "has a weight that is not a finite number")
        return weights

    def locate_error(self, detail: str) -> MesetaError:
        """Return an error that names the first value that is not a number."""
        return _locate_error(self.block, self.raw, self.layout, detail)

    def error(self, row: int, name: str, problem: str) -> MesetaError:
        """Return an error for a value. Reads all records up to `row` to find its line."""
        source, place = f"source {str(self.block.source.path)!r}", int(self.table_names[name][1:])
        with contextlib.suppress(csv.Error):  # A field may be too long for the csv module.
            for line, _, fields in itertools.islice(iter_records(self.raw, self.block.source.delimiter), row, row + 1):
                where = f"{source}, line {self.block.first_line + line + 1}"
                if len(fields) != len(self.block.header):  # A blank line is parsed as missing values.
                    return MesetaError(f"{where}: {_field_count_reason(self.block, fields)}", remedy=FIX_LINE)
                return MesetaError(f"{where}, column {name!r}: {fields[place][:40]!r} {problem}", remedy=FIX_LINE)
        where = f"{source}, row {row + 1} after line {self.block.first_line}"
        return MesetaError(f"{where}, column {name!r}: the value {problem}", remedy="fix or remove the row")


def _has_word_label(block: Block, raw: bytes, layout: RawLayout) -> bool:
    # If the first label is a word, later labels most likely are words too.
    with contextlib.suppress(csv.Error, ValueError):
        fields = parse_header(read_header(io.BytesIO(raw).readline), block.source.delimiter)
        if len(fields) == len(block.header):
            return any(_is_label_word(fields[block.header.index(name)]) for name in layout.labels_without_rule)
    return False


def _is_label_word(text: str) -> bool:
    return text.strip().lower() in (*TRUE_WORDS, *FALSE_WORDS)


def _parse_number(text: bytes) -> float:
    try:
        return math.nan if b"_" in text else float(text)
    except ValueError:
        return math.nan


def _locate_error(block: Block, raw: bytes, layout: RawLayout, detail: str) -> MesetaError:
    source = f"source {str(block.source.path)!r}"
    first = block.first_line + 1
    try:
        for line, record, fields in iter_records(raw, block.source.delimiter):
            first = block.first_line + line + 1
            problem = _invalid_record_reason(block, layout, record, fields)
            if problem:
                return MesetaError(f"{source}, line {first}{problem}", remedy=FIX_LINE)
    except csv.Error as error:
        return MesetaError(f"{source}, at or after line {first}: {error}; is a quote not closed?")
    return MesetaError(f"{source}, after line {block.first_line}: {detail}")


def _invalid_record_reason(block: Block, layout: RawLayout, record: bytes, fields: list[str]) -> str | None:
    """Return the end of an error message for an invalid record, which follows the line number, or `None`."""
    if record.count(b'"') % 2:
        return ": a quote is not closed, or it is inside a field without quotes"
    if len(fields) != len(block.header):
        return f": {_field_count_reason(block, fields)}"
    for name in block.source.file_columns(layout.numeric_columns):
        text = fields[block.header.index(name)]
        rule = invalid_number_reason(
            text, is_label=name in layout.labels_without_rule, number_format=layout.number_format
        )
        if rule:
            return f", column {name!r}: {text[:40]!r} {rule}"
    return None


def _field_count_reason(block: Block, fields: list[str]) -> str:
    return f"{len(fields)} fields, but the header has {len(block.header)}"


def invalid_number_reason(text: str, *, is_label: bool, number_format: NumberFormat | None) -> str | None:
    """Return the rule that a text of a numeric column breaks, or `None`. Does not check the range of numbers."""
    if text in MISSING_TEXTS or (is_label and _is_label_word(text)):
        return None
    plain = text if number_format is None else normalize_number(number_format, text)
    number = _parse_number(plain.encode())
    if math.isnan(number):
        hint = format_hint([text])
        if hint is not None:
            return f"is not a number, unless a --schema file specifies {hint}"
        if is_label:
            return f"is not a label: labels must be {LABEL_RULE}"
        return "is not a number; if the column holds categories, declare it with --sparse or in a --schema file"
    return None
