"""One block of raw rows to numbers and strings, with errors that name file, line and field."""

from __future__ import annotations

import re

import pyarrow as pa

from meseta.data.layout import CRITEO
from meseta.data.parse_csv import parse_csv
from meseta.data.parse_parquet import parse_parquet
from meseta.data.parse_svm import parse_svm
from meseta.data.parse_tsv import parse_tsv
from meseta.data.raw_rows import RawRows, is_label
from meseta.data.schema import Layout
from meseta.data.sources import Block
from meseta.spec import MesetaError
from meseta.spec.errors import one_line

_COLUMN_TYPES = {
    **{name: pa.float32() for name in CRITEO.labels},
    **{name: pa.int64() for name in CRITEO.dense},
    **{column.name: pa.binary() for column in CRITEO.sparse},
}
_INTEGER = re.compile(rb"-?\d{1,18}")


def parse_block(block: Block, layout: Layout) -> RawRows:
    """Parse and check every row. Raises MesetaError naming the file, the line or row, and the field."""
    if isinstance(block.raw, bytes):
        if block.source.kind == "csv":
            return parse_csv(block, block.raw, layout)
        return _parse_tsv(block, block.raw) if block.source.kind == "tsv" else parse_svm(block, block.raw, layout)
    return parse_parquet(block, block.raw, layout)


def _parse_tsv(block: Block, raw: bytes) -> RawRows:
    try:
        rows = parse_tsv(raw, block.num_rows, _COLUMN_TYPES)
    except pa.ArrowInvalid as error:
        raise _explain_tsv(block, raw, one_line(error)) from None
    [label] = rows.labels
    if len(label) != block.num_rows:
        raise _explain_tsv(block, raw, f"{block.num_rows} lines gave {len(label)} rows")
    if not is_label(label).all():
        raise _explain_tsv(block, raw, "a label is outside 0..1")
    return rows


def _explain_tsv(block: Block, raw: bytes, detail: str) -> MesetaError:
    """Go through the lines of a block that did not parse and name the first bad field."""
    names = list(_COLUMN_TYPES)
    for number, line in enumerate(raw.split(b"\n")[:-1], start=block.first_row + 1):
        where = f"source {str(block.source.path)!r}, line {number}"
        fields = line.rstrip(b"\r").split(b"\t")
        if len(fields) != len(names):
            return MesetaError(
                f"{where}: {len(fields)} tab-separated fields, expected {len(names)}: label, 13 integers, "
                "26 categories; fix or remove the line"
            )
        for index in range(1 + len(CRITEO.dense)):
            problem = _field_problem(fields[index], is_label=index == 0)
            if problem:
                shown = fields[index][:40].decode(errors="replace")
                return MesetaError(
                    f"{where}, field {index + 1} ({names[index]}): {shown!r} {problem}; fix or remove the line"
                )
    return MesetaError(f"source {str(block.source.path)!r}, after line {block.first_row}: {detail}")


def _field_problem(field: bytes, *, is_label: bool) -> str | None:
    if not is_label:
        return None if not field or _INTEGER.fullmatch(field) else "is not an integer"
    try:
        return None if 0 <= float(field) <= 1 else "is outside 0..1"
    except ValueError:
        return "is not a label 0..1"
