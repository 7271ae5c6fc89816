"""Parser of one block of JSON lines. Its errors name the file, line and column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from meseta.data.formats.format import FIX_LINE, Block
from meseta.data.formats.json_records import JsonRowDecoder, NumberLiteral, describe_kind, scalar_text, scalar_texts
from meseta.data.formats.normalize_numbers import normalize_numbers_strictly
from meseta.data.formats.parse_csv import CsvColumns, invalid_number_reason
from meseta.data.formats.table_rows import convert_rows
from meseta.data.layout import RawLayout, SparseColumn
from meseta.data.number_format import NumberFormat
from meseta.data.raw_rows import RawRows, RawSparse
from meseta.spec import MesetaError


def parse_json_lines(block: Block, raw: bytes, layout: RawLayout) -> RawRows:
    """Parse and check all rows. Raises MesetaError naming the file, the line and the column."""
    lists = list_columns(layout)
    names = block.source.file_columns(layout.columns)
    number_format = layout.number_format
    columns = decode_columns(block, raw, names, lists, JsonRowDecoder(str if number_format is None else NumberLiteral))
    numbers: dict[str, pa.Array] = {}
    if number_format is not None:
        for name in block.source.file_columns(layout.numeric_columns):
            numbers[name] = to_binary_array(block, name, _normalize_numbers(columns[name], number_format))
        for weight in (column.weight for column in layout.encoded_features if column.weight is not None):
            columns[weight] = [_normalize_numbers(texts, number_format) for texts in columns[weight]]
    singles = [name for name in names if name not in lists]
    table = pa.table({name: to_binary_array(block, name, columns[name]) for name in singles})
    places = {name: name for name in singles}
    lists_of = {name: columns[name] for name in lists}
    # JSON numbers do not follow the number format, and numbers in strings were normalized above.
    plain = replace(layout, number_format=None)
    return convert_rows(_JsonColumns(block, raw, plain, table, places, lists_of, numbers), layout, block)


def _normalize_numbers(texts: Sequence[str], number_format: NumberFormat) -> list[str]:
    # JSON numbers are unchanged, because they do not follow the format.
    spelled = pa.array([text.encode(errors="surrogatepass") for text in texts], pa.binary())
    plain = normalize_numbers_strictly(number_format, spelled).to_pylist()
    return [
        text if isinstance(text, NumberLiteral) else number.decode(errors="surrogatepass")
        for text, number in zip(texts, plain, strict=True)
    ]


def list_columns(layout: RawLayout) -> list[str]:
    """Return the columns of a layout whose values are JSON lists."""
    lists = [column for column in layout.encoded_features if column.multi_valued and column.separator is None]
    return [name for column in lists for name in (column.raw_column, column.weight) if name is not None]


def decode_columns(
    block: Block, raw: bytes, names: Sequence[str], lists: Sequence[str], decoder: JsonRowDecoder
) -> dict[str, list[Any]]:
    """Return the values of each column: a text per row or, for `lists`, a list of texts per row.

    A key that a row lacks is a missing value. Raises MesetaError naming the file and the line. If a value has the wrong
    kind, the message also names the column.
    """
    decode, partition = decoder.decode, block.source.partition
    columns: dict[str, list[Any]] = {name: [] for name in names}
    takers = [(name, scalar_texts if name in lists else scalar_text, columns[name]) for name in names]
    for number, line in enumerate(raw.split(b"\n")[:-1], start=block.first_line + 1):
        try:
            row = decode(line)
        except MesetaError as error:
            raise _error(block, number, str(error)) from None
        for name in partition:
            if name in row:
                raise _error(block, number, f"column {name!r} is also a folder of this file")
        for name, take, values in takers:
            value = take(row.get(name))
            if value is None:
                rule = "must be a list of single values" if name in lists else "must be a single value"
                raise _error(block, number, f"column {name!r} {rule}, but is {describe_kind(row[name])}")
            values.append(value)
    return columns


def to_binary_array(block: Block, name: str, texts: Sequence[str]) -> pa.Array:
    """Return texts as a binary array. Raises MesetaError if a text cannot be encoded in UTF-8."""
    try:
        return pa.array(texts, pa.binary())
    except UnicodeEncodeError:
        for number, text in enumerate(texts, start=block.first_line + 1):
            if any("\ud800" <= sign <= "\udfff" for sign in text):
                raise _error(block, number, f"column {name!r}: {text[:40]!a} is not valid Unicode") from None
        raise


@dataclass(frozen=True)
class _JsonColumns(CsvColumns):
    """Columns of one block, as `convert_rows` reads them."""

    lists: dict[str, list[list[str]]]
    # The texts of each list, by column and row.
    number_texts: dict[str, pa.Array]
    """Binary [n] array of numbers for each column whose spelling differs from the file."""

    def raw_numbers(self, name: str) -> pa.Array:
        return self.number_texts[name] if name in self.number_texts else super().raw_numbers(name)

    def sparse(self, column: SparseColumn) -> RawSparse:
        if column.raw_column not in self.lists:
            return super().sparse(column)
        rows = self.lists[column.raw_column]
        lengths = np.array([len(row) for row in rows], np.int64)
        values = self._flatten(column.raw_column)
        if column.weight is None:
            return RawSparse(values, lengths)
        unequal = np.flatnonzero(lengths != [len(row) for row in self.lists[column.weight]])
        if unequal.size:
            raise self.error(int(unequal[0]), column.weight, f"must be as long as the list of {column.name!r}")
        owner = np.repeat(np.arange(len(rows)), lengths)
        return RawSparse(values, lengths, self.weights(column.weight, self._flatten(column.weight), owner))

    def _flatten(self, name: str) -> pa.Array:
        rows = self.lists[name]
        try:
            return pa.array([text for row in rows for text in row], pa.binary())
        except UnicodeEncodeError:
            to_binary_array(self.block, name, ["".join(row) for row in rows])  # Raises an error with the line.
            raise

    def error(self, row: int, name: str, problem: str) -> MesetaError:
        value = self.lists[name][row] if name in self.lists else self.texts(name)[row].as_py().decode()
        number = self.block.first_line + row + 1
        return _error(self.block, number, f"column {name!r}: {repr(value)[:40]} {problem}")

    def locate_error(self, detail: str) -> MesetaError:
        for name in self.block.source.file_columns(self.layout.numeric_columns):
            texts = zip(self.texts(name).to_pylist(), self.raw_numbers(name).to_pylist(), strict=True)
            for row, (text, number) in enumerate(texts):
                is_label = name in self.layout.labels_without_rule
                if invalid_number_reason(number.decode(), is_label=is_label, number_format=None):
                    rule = (
                        invalid_number_reason(text.decode(), is_label=is_label, number_format=None) or "is not a number"
                    )
                    return self.error(row, name, rule)
        return _error(self.block, self.block.first_line + 1, f"or a later one: {detail}")


def _error(block: Block, number: int, problem: str) -> MesetaError:
    return MesetaError(f"source {block.source.path!r}, line {number}, {problem}", remedy=FIX_LINE)
