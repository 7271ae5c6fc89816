"""One block of JSON lines to numbers and strings, with errors that name file, line and column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from meseta.data.formats.format import Block
from meseta.data.formats.json_records import RowDecoder, kind_of, text_of, texts_of
from meseta.data.formats.parse_csv import CsvColumns, rule_broken
from meseta.data.formats.table_rows import read_rows
from meseta.data.layout import RawLayout, SparseColumn
from meseta.data.raw_rows import RawRows, RawSparse
from meseta.spec import MesetaError


def parse_json_lines(block: Block, raw: bytes, layout: RawLayout) -> RawRows:
    """Parse and check every row. Raises MesetaError naming the file, the line and the column."""
    lists = list_columns(layout)
    names = block.source.own_columns(layout.columns)
    columns = decoded_columns(block, raw, names, lists)
    singles = [name for name in names if name not in lists]
    table = pa.table({name: as_array(block, name, columns[name]) for name in singles})
    places = {name: name for name in singles}
    lists_of = {name: columns[name] for name in lists}
    return read_rows(_JsonColumns(block, raw, layout, table, places, lists_of), layout, block)


def list_columns(layout: RawLayout) -> list[str]:
    """Return the columns of a layout whose values are lists of JSON."""
    lists = [column for column in layout.values if column.multi_valued and column.separator is None]
    return [name for column in lists for name in (column.raw, column.weight) if name is not None]


def decoded_columns(block: Block, raw: bytes, names: Sequence[str], lists: Sequence[str]) -> dict[str, list[Any]]:
    """Return the texts [num_rows] of each column, or a list of texts for each row; a key that a row lacks is missing.

    Raises MesetaError naming the file, the line and, of a value of another kind, the column.
    """
    decode, partition = RowDecoder().decode, block.source.partition
    columns: dict[str, list[Any]] = {name: [] for name in names}
    takers = [(name, texts_of if name in lists else text_of, columns[name]) for name in names]
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
                raise _error(block, number, f"column {name!r} {rule}, and is {kind_of(row[name])}")
            values.append(value)
    return columns


def as_array(block: Block, name: str, texts: Sequence[str]) -> pa.Array:
    """Return texts as binary. Raises MesetaError for one that UTF-8 cannot hold."""
    try:
        return pa.array(texts, pa.binary())
    except UnicodeEncodeError:
        for number, text in enumerate(texts, start=block.first_line + 1):
            if any("\ud800" <= sign <= "\udfff" for sign in text):
                raise _error(block, number, f"column {name!r}: {text[:40]!a} is not Unicode") from None
        raise


@dataclass(frozen=True)
class _JsonColumns(CsvColumns):
    """The columns of one block, for `read_rows`."""

    lists: dict[str, list[list[str]]]

    def sparse(self, column: SparseColumn) -> RawSparse:
        if column.raw not in self.lists:
            return super().sparse(column)
        rows = self.lists[column.raw]
        lengths = np.array([len(row) for row in rows], np.int64)
        values = self._flat(column.raw)
        if column.weight is None:
            return RawSparse(values, lengths)
        unequal = np.flatnonzero(lengths != [len(row) for row in self.lists[column.weight]])
        if unequal.size:
            raise self.error(int(unequal[0]), column.weight, f"must be as long as that of {column.name!r}")
        owner = np.repeat(np.arange(len(rows)), lengths)
        return RawSparse(values, lengths, self.weights(column.weight, self._flat(column.weight), owner))

    def _flat(self, name: str) -> pa.Array:
        rows = self.lists[name]
        try:
            return pa.array([text for row in rows for text in row], pa.binary())
        except UnicodeEncodeError:
            as_array(self.block, name, ["".join(row) for row in rows])
            raise

    def error(self, row: int, name: str, problem: str) -> MesetaError:
        value = self.lists[name][row] if name in self.lists else self.texts(name)[row].as_py().decode()
        number = self.block.first_line + row + 1
        return _error(self.block, number, f"column {name!r}: {repr(value)[:40]} {problem}")

    def explain(self, detail: str) -> MesetaError:
        for name in self.block.source.own_columns(self.layout.numbers):
            for row, text in enumerate(self.texts(name).to_pylist()):
                if rule := rule_broken(text.decode(), is_label=name in self.layout.plain_labels):
                    return self.error(row, name, rule)
        return _error(self.block, self.block.first_line + 1, f"or a later one: {detail}")


def _error(block: Block, number: int, problem: str) -> MesetaError:
    return MesetaError(f"source {block.source.path!r}, line {number}, {problem}; fix or remove the line")
