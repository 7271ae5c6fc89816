"""CSV (RFC 4180) with any delimiter, with or without a header."""

from __future__ import annotations

import csv
import itertools
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.data.formats.compression import ByteStream
from meseta.data.formats.csv_records import (
    complete_records_size,
    count_records,
    is_record,
    parse_header,
    read_header,
    record_ends,
)
from meseta.data.formats.delimiters import find_delimiter, is_typed_header, strip_types, typed_header_roles
from meseta.data.formats.encodings import decode_sample
from meseta.data.formats.format import (
    Block,
    ColumnRequest,
    FileHead,
    Source,
    TextDialect,
    open_text,
    wrap_source_errors,
)
from meseta.data.formats.parse_csv import parse_csv, read_texts
from meseta.data.formats.partitions import infer_partition_role, sample_partitions
from meseta.data.formats.sampling import (
    MAX_SAMPLE_BYTES,
    MAX_SMALL_FILE_BYTES,
    NUM_PIECES,
    rows_per_file,
    sample_sources,
    seek_pieces,
)
from meseta.data.formats.text import BLOCK_BYTES, TextFormat, line_ends, raw_text
from meseta.data.formats.text_columns import add_list_columns, infer_text_layout, text_layout_from_schema
from meseta.data.formats.tsv import CRITEO_FIELD_COUNTS
from meseta.data.layout import RawLayout
from meseta.data.raw_rows import RawRows
from meseta.data.schema.infer import MISSING_TEXTS, ColumnRole, is_header
from meseta.data.schema.labels import add_signed_labels
from meseta.data.schema.number_spelling import add_whole_numbers
from meseta.data.schema.schema import check_names
from meseta.spec import MesetaError
from meseta.system.remote import is_url

MAX_RECORD_LINES = 1000
"""Maximum number of lines of a record in a block with bad rows."""
# Rows with which the first line is compared to decide whether it is a header.
_NUM_HEADER_CHECK_ROWS = 100
_DELIMITERS = (",", "\t", ";", "|")
_TSV_SUFFIXES = (".tsv", ".tab")


class Csv(TextFormat):
    """Text with a single-character delimiter and quotes as in RFC 4180.

    The options, the name of the file or a common delimiter of its first lines identify it. A .tsv file is CSV unless it
    has the form of a Criteo log.
    """

    name = "csv"
    title = "CSV"
    is_delimited = True
    unterminated_row_hint = "is a quote not closed?"

    def detect(self, head: FileHead) -> TextDialect | None:
        if head.delimiter is not None:
            return self.text_dialect(head, head.delimiter)
        if head.is_declared_csv:
            # Delimiters inside quotes do not count.
            first = re.sub(rb'"[^"]*"', b"", head.text).partition(b"\n")[0]
            delimiter = max(_DELIMITERS, key=lambda sign: first.count(sign.encode()))  # The first one wins a tie.
            return self.text_dialect(head, delimiter)
        if head.has_suffix(_TSV_SUFFIXES):
            fields = head.text.partition(b"\n")[0].rstrip(b"\r").decode(errors="replace").split("\t")
            if len(fields) > 1 and (is_header(fields) or len(fields) not in CRITEO_FIELD_COUNTS):
                return self.text_dialect(head, "\t")
            return None
        common_delimiter = find_delimiter(head.text)
        return None if common_delimiter is None else self.text_dialect(head, common_delimiter)

    def text_dialect(self, head: FileHead, delimiter: str) -> TextDialect:
        """Return the dialect of a file with this delimiter, including whether its header has column types."""
        first = head.text.removeprefix(BOM_UTF8).partition(b"\n")[0].rstrip(b"\r").decode(errors="replace")
        is_typed = not head.header and is_typed_header(first.split(delimiter))
        return TextDialect(delimiter, head.header, is_typed)

    def columns(self, source: Source) -> tuple[str, ...]:
        if source.header:
            return source.header
        with wrap_source_errors(source.path), open_text(source) as (stream, _):
            return self.read_header(source, stream.readline)[0]

    def layout(self, sources: Sequence[Source], asked: ColumnRequest) -> RawLayout:
        source = sources[0]
        where = f"source {str(source.path)!r}"
        names = self.columns(source)
        if len(names) < 2:
            raise MesetaError(
                f"{where}, line 1: the header has {len(names)} column, but CSV needs at least two; separate them by "
                "commas, tabs, ';' or '|', or name the delimiter in a --schema file"
            )
        names = self.all_columns(source)
        if asked.schema:
            layout = text_layout_from_schema(where, asked.schema, names)
            check_names(where, layout.columns, names)
            # Only labels without a rule need values. All other roles are in the schema.
            sample = self._sample(sources, layout.labels_without_rule) if layout.labels_without_rule else {}
        else:
            sample = self._sample(sources, names)
            known, lists = self._typed_roles(source, sample)
            known = {**known, **{key: infer_partition_role(key, sample[key]) for key in source.partition}}
            layout = infer_text_layout(where, sample, asked.named_columns, has_names=not source.header, known=known)
            layout = add_whole_numbers(add_list_columns(layout, dict.fromkeys(lists, " ")), sample)
            check_names(where, layout.columns, names)
        layout = add_signed_labels(layout, sample)
        columns = layout.columns
        used = {*columns}
        ignored = tuple(name for name in names if name not in used)
        for later in sources[1:]:
            check_names(f"source {str(later.path)!r}", columns, self.all_columns(later))
        return replace(
            layout, ignored=ignored, delimiter=source.delimiter, header=source.header, encoding=source.encoding
        )

    def parse(self, block: Block, layout: RawLayout) -> RawRows:
        return self.check_text(block, parse_csv(block, raw_text(block), layout), layout)

    def with_header(self, sources: Sequence[Source]) -> tuple[Source, ...]:
        first = sources[0]
        if first.header:
            return tuple(sources)
        with wrap_source_errors(first.path), open_text(first) as (stream, _):
            record = self.read_header(first, stream.readline)[0]
            rows = self.read_records(first, _read_lines(stream, MAX_SAMPLE_BYTES), _NUM_HEADER_CHECK_ROWS)
        if is_header(record, rows):
            return tuple(sources)
        header = tuple(f"column_{number}" for number in range(1, len(record) + 1))
        return tuple(replace(source, header=header) for source in sources)

    def with_header_from(self, source: Source, layout: RawLayout) -> Source:
        """Return `source` with column names from `layout` if it has no header.

        The file then has all columns of the earlier files, or all except the labels.
        """
        columns = source.file_columns(layout.feature_columns)
        # Datasets of former versions keep the types of a header as part of the names.
        if source.is_typed and not set(columns) <= set(self.columns(source)):
            source = replace(source, is_typed=False)
        if not layout.header:
            return source
        first = self.columns(source)
        if set(columns) <= set(first):
            return source
        rest = tuple(name for name in layout.header if name not in layout.raw_label_columns)
        for header in (layout.header, rest):
            if len(header) == len(first):
                return replace(source, header=header)
        raise MesetaError(
            f"source {source.path!r} has {len(first)} columns without names, but the earlier files had "
            f"{len(layout.header)}, or {len(rest)} without the label"
        )

    def key_schema(self, where: str, source: Source, names: Sequence[str]) -> pa.Schema:
        check_names(where, names, self.columns(source))
        return pa.schema([pa.field(name, pa.string()) for name in names])

    def key_columns(self, block: Block, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        """Return fields as text without their quotes."""
        texts = read_texts(raw_text(block), block.header, names, delimiter=block.source.delimiter, is_quoted=True)
        return pa.record_batch(texts, schema)

    def find_empty_columns(self, sources: Sequence[Source], names: Sequence[str]) -> set[str]:
        """Return the columns whose sampled values are all empty or a word for a missing value."""
        texts = self._sample(sources, names)
        return {name for name, values in texts.items() if values and all(value in MISSING_TEXTS for value in values)}

    def read_header(self, source: Source, read_line: Callable[[int], bytes]) -> tuple[tuple[str, ...], bytes]:
        """Return (names, bytes read). The names come from `source`, or else from the first record.

        Names may be empty or repeated. The layout checks those that it uses.
        """
        if source.header:
            return source.header, b""
        raw = read_header(read_line)
        try:
            names = tuple(parse_header(raw, source.delimiter))
            return strip_types(names) if source.is_typed else names, raw
        except (ValueError, csv.Error) as error:
            advice = "; name the encoding of the file with --encoding" if isinstance(error, UnicodeError) else ""
            raise MesetaError(
                f"source {source.path!r}, line 1: the header is not UTF-8 CSV ({error}){advice}"
            ) from None

    def count_rows(self, raw: bytes) -> int:
        return count_records(raw)

    def split_complete_rows(self, before: bytes, data: bytes) -> tuple[bytes, bytes]:
        data = before + data
        end = complete_records_size(data)
        return data[:end], data[end:]

    def parsed_row_ends(self, block: Block) -> NDArray[np.int64]:
        ends = record_ends(raw_text(block))
        # Quotes are balanced unless the block was cut out from among bad rows.
        return ends if ends.size == block.num_rows else np.array(self.row_ends(block), np.int64)

    def row_ends(self, block: Block) -> Sequence[int]:
        raw = raw_text(block)
        ends = line_ends(raw)
        if b'"' not in raw:
            return ends
        # A stray quote joins the lines up to the next quote into one apparent record. If that record is not
        # well-formed, take its first line as a row and continue with the next line.
        record_ends = []
        at = 0
        while at < len(ends):
            start = ends[at - 1] if at else 0
            last = at
            quotes = raw.count(b'"', start, ends[at])
            while quotes % 2 and last + 1 < min(len(ends), at + MAX_RECORD_LINES):
                last += 1
                quotes += raw.count(b'"', ends[last - 1], ends[last])
            if last > at and not is_record(raw[start : ends[last]], block.source.delimiter, len(block.header)):
                last = at
            record_ends.append(ends[last])
            at = last + 1
        return record_ends

    def _typed_roles(
        self, source: Source, sample: Mapping[str, Sequence[str]]
    ) -> tuple[Mapping[str, ColumnRole], Sequence[str]]:
        if not source.is_typed:
            return {}, ()
        return typed_header_roles(self.columns(replace(source, is_typed=False)), sample)

    def _sample(self, sources: Sequence[Source], names: Sequence[str]) -> dict[str, list[str]]:
        """Return the sampled fields of each column, in row order.

        `names` are the columns of the first file. Raises MesetaError for a damaged file.
        """
        chosen = sample_sources(sources)
        columns: dict[str, list[str]] = {name: [] for name in names}
        for source in chosen:
            header, rows = self._sampled_rows(source, rows_per_file(len(names), len(chosen)), len(chosen))
            # The first of several columns with the same name counts.
            places = {name: place for place, name in reversed(list(enumerate(header)))}
            for name, values in columns.items():
                place = places.get(name)
                values.extend([] if place is None else [row[place] for row in rows if place < len(row)])
        partitions = sample_partitions([source.partition for source in sources])
        return columns | {name: partitions[name] for name in names if name in partitions}

    def _sampled_rows(self, source: Source, num_rows: int, num_files: int) -> tuple[tuple[str, ...], list[list[str]]]:
        # A compressed, remote or small file is read only from its beginning.
        with wrap_source_errors(source.path), open_text(source) as (stream, stored):
            header, raw_header = self.read_header(source, stream.readline)
            begin, size = len(raw_header), source.size_bytes
            num_bytes = MAX_SAMPLE_BYTES // num_files
            if stream is not stored or is_url(source.path) or size <= MAX_SMALL_FILE_BYTES:
                return header, self.read_records(source, _read_lines(stream, num_bytes), num_rows)
            sampled: list[list[str]] = []
            for is_first, stop in seek_pieces(stream, begin, size):
                try:
                    rows = self.read_records(
                        source, _read_lines(stream, num_bytes // NUM_PIECES, stop), -(-num_rows // NUM_PIECES)
                    )
                # A later piece may begin within a quoted field.
                except MesetaError:
                    if is_first:
                        raise
                    continue
                # A piece that begins within a quoted field splits records at the wrong places.
                if is_first or all(len(row) == len(header) for row in rows):
                    sampled += rows
            return header, sampled

    def read_records(self, source: Source, lines: Iterator[str], num_rows: int) -> list[list[str]]:
        """Return the fields of up to `num_rows` records. Raises MesetaError if a field is not valid CSV."""
        try:
            return list(itertools.islice(csv.reader(lines, delimiter=source.delimiter), num_rows))
        except csv.Error as error:
            raise MesetaError(
                f"source {source.path!r}: a sampled field is not valid CSV ({error}); is a quote not closed?"
            ) from None


def _read_lines(stream: ByteStream, num_bytes: int, stop: int | None = None) -> Iterator[str]:
    place = 0 if stop is None else stream.tell()
    last = place + num_bytes if stop is None else min(stop, place + num_bytes)
    while place < last and (line := stream.readline(BLOCK_BYTES)):
        place += len(line)
        yield decode_sample(line)
