"""Boundaries of CSV records. A line break inside quotes does not end a record (RFC 4180)."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv

from meseta.data.formats.encodings import ByteStream, decode_sample
from meseta.data.formats.format import (
    FIX_LINE,
    MAX_SAMPLE_BYTES,
    MAX_SMALL_FILE_BYTES,
    NUM_PIECES,
    Block,
    ColumnRequest,
    FileHead,
    Source,
    TextDialect,
    open_text,
    rows_per_file,
    sample_sources,
    seek_pieces,
    wrap_source_errors,
)
from meseta.data.formats.partitions import infer_partition_role, sample_partitions
from meseta.data.formats.table_rows import convert_rows, replace_label_words, split_texts
from meseta.data.formats.text import (
    BLOCK_BYTES,
    CRITEO_FIELD_COUNTS,
    TextFormat,
    add_list_columns,
    infer_text_layout,
    line_ends,
    raw_text,
    text_layout_from_schema,
)
from meseta.data.schema.infer import (
    FALSE_WORDS,
    MISSING_TEXTS,
    NULL_TEXTS,
    TRUE_WORDS,
    ColumnRole,
    add_whole_numbers,
    infer_role,
    is_header,
)
from meseta.data.schema.layout import LABEL_RULE, RawLayout, RawRows, RawSparse, SparseColumn
from meseta.data.schema.schema import add_signed_labels, check_names
from meseta.data.schema.text_syntax import NumberFormat, format_hint, normalize_number, normalize_numbers_strictly
from meseta.errors import error_summary
from meseta.spec import MesetaError
from meseta.system.remote import is_url

# A field may be as long as a block: see text.BLOCK_BYTES.
csv.field_size_limit(max(csv.field_size_limit(), 1 << 30))

MAX_HEADER_BYTES = 8 << 20
_QUOTE, _NEWLINE = ord('"'), ord("\n")


def complete_records_size(data: bytes) -> int:
    """Return the size of the complete records at the beginning of `data`, which must be the start of a record."""
    if b'"' not in data:
        return data.rfind(b"\n") + 1
    ends = record_ends(data)
    return int(ends[-1]) if ends.size else 0


def count_records(data: bytes) -> int:
    """Return the number of complete records in `data`, which must begin at the start of a record."""
    return data.count(b"\n") if b'"' not in data else int(record_ends(data).size)


def read_header(read_line: Callable[[int], bytes]) -> bytes:
    """Read the first record with its line break, through the `readline` of a stream."""
    header = read_line(MAX_HEADER_BYTES)
    while header.count(b'"') % 2 and len(header) < MAX_HEADER_BYTES and (line := read_line(MAX_HEADER_BYTES)):
        header += line
    return header


def parse_header(header: bytes, delimiter: str) -> list[str]:
    """Return the names in the first record, stripped of spaces. Raises ValueError or csv.Error if it is invalid."""
    rows = list(csv.reader(io.StringIO(header.decode("utf-8-sig"), newline=""), delimiter=delimiter))
    if len(rows) > 1:
        raise csv.Error("a quote is not closed, or it is inside a field without quotes")
    return [name.strip() for name in rows[0]] if rows else []


def iter_records(data: bytes, delimiter: str) -> Iterator[tuple[int, bytes, list[str]]]:
    """Yield (index of the first line, bytes, fields) for each record. Raises csv.Error if a field is too long."""
    lines = data.split(b"\n")[:-1]
    reader = csv.reader((line.decode(errors="replace") + "\n" for line in lines), delimiter=delimiter)
    first = 0
    for fields in reader:
        yield first, b"\n".join(lines[first : reader.line_num]), fields
        first = reader.line_num


def is_record(data: bytes, delimiter: str, num_fields: int) -> bool:
    """Whether `data` is exactly one complete record with `num_fields` fields."""
    try:
        rows = list(
            csv.reader(io.StringIO(data.decode(errors="replace"), newline=""), delimiter=delimiter, strict=True)
        )
    except csv.Error:
        return False
    return len(rows) == 1 and len(rows[0]) == num_fields


def record_ends(data: bytes) -> NDArray[np.int64]:
    """Return the end offsets of the complete records in `data`, which must begin at the start of a record."""
    array = np.frombuffer(data, np.uint8)
    newlines = np.flatnonzero(array == _NEWLINE)
    # A quote inside quotes is doubled. So a line break is outside of quotes if an even number of quotes precedes it.
    quotes_before = np.searchsorted(np.flatnonzero(array == _QUOTE), newlines)
    ends: NDArray[np.int64] = newlines[quotes_before % 2 == 0] + 1
    return ends


UNIT_SEPARATOR = b"\x1f"
"""Delimiter of the CSV to which text with a longer delimiter is converted."""
_CANDIDATES = (b"::", b"\t", b";", b"|", b",", b" ")
_MAX_LINES = 50
_TYPED_NAME = re.compile(r"(.+):(token|token_seq|float|float_seq)")
_QUOTED = re.compile(rb'"[^"]*"')


def find_delimiter(head: bytes) -> str | None:
    """Return the delimiter of the lines at the beginning of a file, or `None`.

    At least two lines must contain the delimiter equally often. Returns `None` for Criteo logs, which have no header.
    """
    lines = [_QUOTED.sub(b"", line) for line in head.split(b"\n")[:_MAX_LINES]]
    lines = lines[:-1]  # The last element is empty, or an incomplete line.
    if len(lines) < 2:
        return None
    for sign in _CANDIDATES:
        counts = {line.count(sign) for line in lines}
        if len(counts) == 1 and (count := counts.pop()):
            return None if sign == b"\t" and count + 1 in CRITEO_FIELD_COUNTS else sign.decode()
    return None


def typed_header_roles(
    names: Sequence[str], columns: Mapping[str, Sequence[str]]
) -> tuple[dict[str, ColumnRole], list[str]]:
    """Return (roles, list columns) of a typed header. Roles are by column name without its type.

    `columns` has sampled values of each column. A column recognized as time, weight or group by its name keeps that
    role.
    """
    types = {name.rpartition(":")[0]: name.rpartition(":")[2] for name in names}
    guesses = {}
    for name, kind in types.items():
        role = infer_role(name, columns[name]).role
        if kind == "float_seq":
            guesses[name] = ColumnRole("ignore", "float_seq, by the header: no feature holds lists of numbers")
        elif kind == "float" and role not in ("time", "weight", "group"):
            guesses[name] = ColumnRole("dense", "float, by the header")
        elif kind in ("token", "token_seq"):
            guesses[name] = ColumnRole("categorical", f"{kind}, by the header")
    return guesses, [name for name, kind in types.items() if kind == "token_seq"]


def convert_to_csv(lines: bytes, delimiter: str) -> bytes:
    """Convert complete lines to CSV with the delimiter `UNIT_SEPARATOR`. Quotes in the lines have no meaning."""
    sign = delimiter.encode()
    if b"\r" in lines:
        lines = lines.replace(b"\r\n", b"\n")
    if not any(special in lines for special in (b'"', b"\r", UNIT_SEPARATOR)):
        return lines.replace(sign, UNIT_SEPARATOR)
    return b"\n".join(UNIT_SEPARATOR.join(map(_quote_field, line.split(sign))) for line in lines.split(b"\n"))


def _quote_field(field: bytes) -> bytes:
    if any(special in field for special in (b'"', b"\r", UNIT_SEPARATOR)):
        return b'"' + field.replace(b'"', b'""') + b'"'
    return field


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
        values, owner = split_texts(texts, column.separator)
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
        names = first.split(delimiter)
        # Names of RecBole's atomic files have types, such as `user_id:token`.
        is_typed = not head.header and len(names) > 1 and all(map(_TYPED_NAME.fullmatch, names))
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
        """Return `source` with names of `layout` if it has no header: all of them, or all except the labels."""
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

    def key_columns(self, block: Block, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        """Return fields as text without their quotes."""
        texts = read_texts(raw_text(block), block.header, names, delimiter=block.source.delimiter, is_quoted=True)
        return pa.record_batch(texts, schema)

    def find_empty_columns(self, sources: Sequence[Source], names: Sequence[str]) -> set[str]:
        """Return the columns whose sampled values are all empty or a word for a missing value."""
        texts = self._sample(sources, names)
        return {name for name, values in texts.items() if values and all(value in MISSING_TEXTS for value in values)}

    def read_header(self, source: Source, read_line: Callable[[int], bytes]) -> tuple[tuple[str, ...], bytes]:
        """Return (names, bytes read). Names of `source`, or else of the first record, may be empty or repeated."""
        if source.header:
            return source.header, b""
        raw = read_header(read_line)
        try:
            names = tuple(parse_header(raw, source.delimiter))
            if source.is_typed:
                names = tuple(name.rpartition(":")[0] for name in names)
            return names, raw
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
        """Return the sampled fields of the columns `names`, in row order. Raises MesetaError for a damaged file."""
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
