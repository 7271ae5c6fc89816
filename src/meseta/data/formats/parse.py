"""One block of raw rows to numbers and strings, with errors that name file, line and field."""

from __future__ import annotations

import re
from dataclasses import replace

import pyarrow as pa

from meseta.data.formats.parse_csv import parse_csv
from meseta.data.formats.parse_parquet import parse_parquet
from meseta.data.formats.parse_svm import parse_svm
from meseta.data.formats.parse_tsv import parse_tsv
from meseta.data.layout import RawLayout
from meseta.data.prepare.sources import Block
from meseta.data.raw_rows import RawRows, is_label
from meseta.data.schema.find import CRITEO
from meseta.errors import one_line
from meseta.spec import MesetaError

_COLUMN_TYPES = {
    **{name: pa.float32() for name in CRITEO.labels},
    **{name: pa.int64() for name in CRITEO.dense},
    **{column.name: pa.binary() for column in CRITEO.sparse},
}
_INTEGER = re.compile(rb"-?\d{1,18}")


def parse_block(block: Block, layout: RawLayout) -> RawRows:
    """Parse and check every row. Raises MesetaError naming the file, the line or row, and the field."""
    if not isinstance(block.raw, bytes):
        return parse_parquet(block, block.raw, layout)
    if block.source.kind == "csv":
        return parse_csv(block, block.raw, layout)
    has_labels = bool(layout.labels)
    sign = b"\t" if block.source.kind == "tsv" else b" "
    raw = block.raw if has_labels else _with_first_field(block.raw, b"0" + sign)
    if block.source.kind == "tsv":
        rows = _parse_tsv(block, raw, has_labels=has_labels)
    else:
        rows = parse_svm(block, raw, layout)
    return rows if has_labels else replace(rows, labels=[])


def _with_first_field(lines: bytes, field: bytes) -> bytes:
    """Lines with something more in front of each, such as the label that their parser expects."""
    return field + lines[:-1].replace(b"\n", b"\n" + field) + b"\n"


def _parse_tsv(block: Block, raw: bytes, *, has_labels: bool) -> RawRows:
    try:
        rows = parse_tsv(raw, block.num_rows, _COLUMN_TYPES)
    except pa.ArrowInvalid as error:
        raise _explain_tsv(block, raw, one_line(error), has_labels=has_labels) from None
    [label] = rows.labels
    if len(label) != block.num_rows:
        raise _explain_tsv(block, raw, f"{block.num_rows} lines gave {len(label)} rows", has_labels=has_labels)
    if not is_label(label).all():
        raise _explain_tsv(block, raw, "a label is outside 0..1", has_labels=has_labels)
    return rows


def _explain_tsv(block: Block, raw: bytes, detail: str, *, has_labels: bool) -> MesetaError:
    """Go through the lines of a block that did not parse and name the first bad field."""
    names = list(_COLUMN_TYPES)
    left_out = 0 if has_labels else 1
    for number, line in enumerate(raw.split(b"\n")[:-1], start=block.first_row + 1):
        where = f"source {str(block.source.path)!r}, line {number}"
        fields = line.rstrip(b"\r").split(b"\t")
        if len(fields) != len(names):
            return MesetaError(
                f"{where}: {len(fields) - left_out} tab-separated fields, expected {len(names) - left_out}: "
                f"{'label, ' if has_labels else ''}13 integers, 26 categories; fix or remove the line"
            )
        for index in range(1 + len(CRITEO.dense)):
            problem = _field_problem(fields[index], is_label=index == 0)
            if problem:
                shown = fields[index][:40].decode(errors="replace")
                return MesetaError(
                    f"{where}, field {index + 1 - left_out} ({names[index]}): {shown!r} {problem}; "
                    "fix or remove the line"
                )
    return MesetaError(f"source {str(block.source.path)!r}, after line {block.first_row}: {detail}")


def _field_problem(field: bytes, *, is_label: bool) -> str | None:
    if not is_label:
        return None if not field or _INTEGER.fullmatch(field) else "is not an integer"
    try:
        return None if 0 <= float(field) <= 1 else "is outside 0..1"
    except ValueError:
        return "is not a label 0..1"
