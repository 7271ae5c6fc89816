"""Text without quotes, and with a delimiter of several characters such as `::`."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.data.formats.csv import Csv
from meseta.data.formats.csv_records import MAX_HEADER_BYTES
from meseta.data.formats.delimiters import UNIT_SEPARATOR, convert_to_csv, find_delimiter
from meseta.data.formats.format import Block, FileHead, Source, TextDialect
from meseta.data.formats.text import TextFormat, raw_text
from meseta.data.layout import RawLayout
from meseta.data.raw_rows import RawRows


class DelimitedText(Csv):
    """Text whose lines are split at a delimiter of several characters. Blocks are converted to CSV for parsing."""

    name = "delimited"
    title = "text with a delimiter of several characters"
    unterminated_row_hint = "does it have lines?"

    def detect(self, head: FileHead) -> TextDialect | None:
        delimiter = head.delimiter
        if delimiter is None and find_delimiter(head.text) == "::":
            # The delimiter `::` may also occur inside the fields of a .csv file with another delimiter.
            first = head.text.partition(b"\n")[0]
            is_other_csv = head.has_suffix((".csv", ".tsv", ".tab")) and any(sign in first for sign in b",\t;|")
            delimiter = None if is_other_csv else "::"
        return None if delimiter is None or len(delimiter.encode()) == 1 else self.text_dialect(head, delimiter)

    def read_header(self, source: Source, read_line: Callable[[int], bytes]) -> tuple[tuple[str, ...], bytes]:
        if source.header:
            return source.header, b""
        raw = read_line(MAX_HEADER_BYTES)
        converted = convert_to_csv(raw, source.delimiter)
        return super().read_header(_as_csv_source(source), io.BytesIO(converted).readline)[0], raw

    def read_records(self, source: Source, lines: Iterator[str], num_rows: int) -> list[list[str]]:
        return [line.rstrip("\r\n").split(source.delimiter) for line in itertools.islice(lines, num_rows)]

    def parse(self, block: Block, layout: RawLayout) -> RawRows:
        rows = super().parse(_as_csv_block(block), replace(layout, encoding=None))
        return self.check_text(block, rows, layout)

    def key_columns(self, block: Block, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        return super().key_columns(_as_csv_block(block), names, schema)

    def count_rows(self, raw: bytes) -> int:
        # A row is a line, because quotes have no meaning here.
        return TextFormat.count_rows(self, raw)

    def split_complete_rows(self, before: bytes, data: bytes) -> tuple[bytes, bytes]:
        return TextFormat.split_complete_rows(self, before, data)

    def row_ends(self, block: Block) -> Sequence[int]:
        return TextFormat.row_ends(self, block)

    def parsed_row_ends(self, block: Block) -> NDArray[np.int64]:
        return TextFormat.parsed_row_ends(self, block)


def _as_csv_source(source: Source) -> Source:
    return replace(source, delimiter=UNIT_SEPARATOR.decode())


def _as_csv_block(block: Block) -> Block:
    raw = convert_to_csv(raw_text(block), block.source.delimiter)
    return replace(block, raw=raw, source=_as_csv_source(block.source))
