"""One block of CSV to numbers and strings, with errors that name file, line and column."""

from __future__ import annotations

import csv
import math

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

from meseta.data.csv_records import records
from meseta.data.guess import MISSING
from meseta.data.raw_rows import RawRows, RawSparse, is_label, log1p
from meseta.data.schema import Layout
from meseta.data.sources import Block
from meseta.spec import MesetaError


def parse_csv(block: Block, raw: bytes, layout: Layout) -> RawRows:
    """Parse and check every row. Raises MesetaError naming the file, the line and the column."""
    # Columns go by place: names of columns that are not read may be empty, or come twice.
    places = {name: f"f{block.header.index(name)}" for name in layout.columns}
    sparse = [column.name for column in layout.sparse]
    types = {places[name]: pa.binary() if name in sparse else pa.float64() for name in layout.columns}
    # A row of missing values at the end shows that the last one ends where the block does: a quote in a field without
    # quotes misleads the cut, and the parser takes a field that is never closed for one that is.
    guarded = raw + b"," * (len(block.header) - 1) + b"\n"
    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(guarded),
            # One block per call: the caller has cut the file, and parallel calls use the cores.
            arrow_csv.ReadOptions(
                use_threads=False, block_size=len(guarded) + 1, column_names=[f"f{i}" for i in range(len(block.header))]
            ),
            arrow_csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
            arrow_csv.ConvertOptions(
                column_types=types, include_columns=list(types), null_values=MISSING, strings_can_be_null=False
            ),
        ).combine_chunks()
    except pa.ArrowInvalid as error:
        raise _explain(block, raw, layout, str(error).splitlines()[0]) from None
    if table.num_rows != block.num_rows + 1 or table.column(places[layout.label])[-1].is_valid:
        raise _explain(block, raw, layout, f"{block.num_rows} records gave {table.num_rows - 1} rows")
    table = table.slice(0, block.num_rows)
    label = _numbers(table, places[layout.label])
    dense = [_numbers(table, places[name]) for name in layout.dense]
    if not is_label(label).all() or any(np.isinf(values).any() for values in dense):
        raise _explain(block, raw, layout, "a label is outside 0..1, or a number infinite")
    return RawRows(
        label.astype(np.float32),
        [log1p(values) for values in dense],
        [RawSparse(table.column(places[name]).chunk(0)) for name in sparse],
    )


def _numbers(table: pa.Table, place: str) -> np.ndarray:
    """float64 [n], missing as NaN."""
    return table.column(place).to_numpy()


def _explain(block: Block, raw: bytes, layout: Layout, detail: str) -> MesetaError:
    """Go through the records of a block that did not parse and name the first bad field."""
    source = f"source {str(block.source.path)!r}"
    first = block.first_line + 1
    try:
        for line, record, fields in records(raw):
            first = block.first_line + line + 1
            problem = _problem(block, layout, record, fields)
            if problem:
                return MesetaError(f"{source}, line {first}{problem}; fix or remove the line")
    except csv.Error as error:
        return MesetaError(f"{source}, at or after line {first}: {error}; is a quote not closed?")
    return MesetaError(f"{source}, after line {block.first_line}: {detail}")


def _problem(block: Block, layout: Layout, record: bytes, fields: list[str]) -> str | None:
    """What is wrong with a record, to follow the number of its line, or None."""
    if record.count(b'"') % 2:
        return ": a quote is not closed, or stands in a field that is not quoted"
    if len(fields) != len(block.header):
        return f": {len(fields)} fields, but the header has {len(block.header)}"
    for name in (layout.label, *layout.dense):
        text = fields[block.header.index(name)]
        rule = _rule_broken(text, is_label=name == layout.label)
        if rule:
            return f", column {name!r}: {text[:40]!r} {rule}"
    return None


def _rule_broken(text: str, *, is_label: bool) -> str | None:
    if text in MISSING:
        return "is no label: it must be a number from 0 to 1" if is_label else None
    try:
        number = float(text)
    except ValueError:
        number = None
    if number is None or "_" in text:
        if is_label:
            return "is no label: it must be a number from 0 to 1"
        return "is not a number; if the column holds categories, say so in a --schema file"
    if is_label and not 0 <= number <= 1:
        return "is outside 0..1"
    return "is infinite" if math.isinf(number) else None
