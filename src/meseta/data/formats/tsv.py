"""Criteo click logs (Kaggle and 1TB): tab-separated label, 13 integers and 26 categories, without a header."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from meseta.data.formats.csv import read_texts
from meseta.data.formats.format import FIX_LINE, Block, ColumnRequest, FileHead, RawFormat, Source, TextDialect
from meseta.data.formats.text import CRITEO_FIELD_COUNTS, TextFormat, prepend_field, raw_text, read_first_line
from meseta.data.parse_tsv import parse_tsv
from meseta.data.schema.layout import RawLayout, RawRows, SparseColumn, is_label
from meseta.errors import error_summary
from meseta.spec import MesetaError

NUM_DENSE = 13
NUM_SPARSE = 26
_DENSE_NAMES = tuple(f"int_{i}" for i in range(NUM_DENSE))
_SPARSE_NAMES = tuple(f"cat_{i}" for i in range(NUM_SPARSE))
CRITEO_LAYOUT = RawLayout(
    labels=("label",),
    dense=_DENSE_NAMES,
    sparse=tuple(SparseColumn(name=name) for name in _SPARSE_NAMES),
    delimiter="\t",
    header=("label", *_DENSE_NAMES, *_SPARSE_NAMES),
)
"""Layout of both Criteo click logs, Kaggle and 1TB."""
_COLUMN_TYPES = {
    **{name: pa.float32() for name in CRITEO_LAYOUT.labels},
    **{name: pa.int64() for name in CRITEO_LAYOUT.dense},
    **{column.name: pa.binary() for column in CRITEO_LAYOUT.sparse},
}
_INTEGER = re.compile(rb"-?\d{1,18}")


class CriteoTsv(TextFormat):
    """Criteo click logs, the fallback for all other text. The first line must have 40 or 39 fields."""

    name = "tsv"
    title = "tab-separated text"

    def detect(self, head: FileHead) -> TextDialect | None:
        return TextDialect()

    def columns(self, source: Source) -> tuple[str, ...]:
        """Return the columns, with or without a label. Raises MesetaError if the number of fields differs."""
        num_fields = read_first_line(source).count(b"\t") + 1
        if num_fields not in CRITEO_FIELD_COUNTS:
            raise MesetaError(
                f"source {source.path!r} has {num_fields} tab-separated fields in its first line, expected 40 with a "
                "label, or 39 without"
            )
        return CRITEO_LAYOUT.header[-num_fields:]

    def layout(self, sources: Sequence[Source], asked: ColumnRequest) -> RawLayout:
        """Return the layout of Criteo logs. Raises MesetaError if options or schema require another one, or a first
        line does not have 40 fields."""
        for source in sources:
            _check_first_line(source)
        if asked.named_columns or asked.schema:
            raise MesetaError(
                "prepare: --label, --dense, --sparse, --multi-valued, --ignore and --time do not apply to Criteo logs, "
                "whose columns are fixed; to change their roles, use a --schema file that lists all names under "
                "header, as --print-schema prints it; for other TSV with a header, use a --schema file with a delimiter"
            )
        return replace(CRITEO_LAYOUT, encoding=sources[0].encoding)

    def can_hold(self, layout: RawLayout, earlier: RawFormat | None) -> bool:
        """Whether the rows of `layout` have the columns of Criteo logs."""
        return earlier in (self, None) and replace(layout, labels=CRITEO_LAYOUT.labels) == CRITEO_LAYOUT

    def parse(self, block: Block, layout: RawLayout) -> RawRows:
        has_labels = bool(layout.labels)
        raw = raw_text(block) if has_labels else prepend_field(raw_text(block), b"0\t")
        # The parser requires a label.
        rows = self.check_text(block, _parse_tsv(block, raw, has_labels=has_labels), layout)
        return rows if has_labels else replace(rows, labels=[])

    def key_columns(self, block: Block, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        raw = raw_text(block)
        header = CRITEO_LAYOUT.header[-(raw.partition(b"\n")[0].count(b"\t") + 1) :]
        return pa.record_batch(read_texts(raw, header, names), schema)


def _check_first_line(source: Source) -> None:
    with_label, without = CRITEO_FIELD_COUNTS
    num_fields = read_first_line(source).count(b"\t") + 1
    if num_fields == without:
        raise MesetaError(
            f"source {str(source.path)!r} has 39 fields in its first line: rows without a label, as in the test.txt of "
            "the Kaggle contest, cannot be used for training or evaluation; use files with a label (40 fields), or "
            "let a trained model score these: meseta predict RUN --data"
        )
    if num_fields != with_label:
        raise MesetaError(
            f"source {str(source.path)!r} has {num_fields} tab-separated fields in its first line, expected 40: "
            "label, 13 integers, 26 categories; is it a Criteo click log? Other data may be Parquet, JSON lines, "
            "libsvm, libffm, or CSV or TSV with a header in files named *.csv or *.tsv. A --schema file can specify "
            "the delimiter and header of files with other names"
        )


def _parse_tsv(block: Block, raw: bytes, *, has_labels: bool) -> RawRows:
    try:
        rows = parse_tsv(raw, block.num_rows, _COLUMN_TYPES)
    except pa.ArrowInvalid as error:
        raise _locate_error(block, raw, error_summary(error), has_labels=has_labels) from None
    [label] = rows.labels
    if len(label) != block.num_rows:
        raise _locate_error(block, raw, f"{block.num_rows} lines gave {len(label)} rows", has_labels=has_labels)
    if not is_label(label).all():
        raise _locate_error(block, raw, "a label is outside 0..1", has_labels=has_labels)
    return rows


def _locate_error(block: Block, raw: bytes, detail: str, *, has_labels: bool) -> MesetaError:
    names = list(_COLUMN_TYPES)
    left_out = 0 if has_labels else 1
    for number, line in enumerate(raw.split(b"\n")[:-1], start=block.first_row + 1):
        where = f"source {str(block.source.path)!r}, line {number}"
        fields = line.rstrip(b"\r").split(b"\t")
        if len(fields) != len(names):
            return MesetaError(
                f"{where}: {len(fields) - left_out} tab-separated fields, expected {len(names) - left_out}: "
                f"{'label, ' if has_labels else ''}13 integers, 26 categories",
                remedy=FIX_LINE,
            )
        for index in range(1 + len(CRITEO_LAYOUT.dense)):
            problem = _invalid_field_reason(fields[index], is_label=index == 0)
            if problem:
                shown = fields[index][:40].decode(errors="replace")
                return MesetaError(
                    f"{where}, field {index + 1 - left_out} ({names[index]}): {shown!r} {problem}", remedy=FIX_LINE
                )
    return MesetaError(f"source {str(block.source.path)!r}, after line {block.first_row}: {detail}")


def _invalid_field_reason(field: bytes, *, is_label: bool) -> str | None:
    if not is_label:
        return None if not field or _INTEGER.fullmatch(field) else "is not an integer"
    try:
        return None if 0 <= float(field) <= 1 else "is outside 0..1"
    except ValueError:
        return "is not a label 0..1"
