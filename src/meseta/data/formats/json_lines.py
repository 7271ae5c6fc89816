"""Decoder of JSON lines. It uses Python's json module with stricter rules."""

from __future__ import annotations

import itertools
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from meseta.data.formats.csv import CsvColumns, invalid_number_reason
from meseta.data.formats.format import (
    FIX_LINE,
    MAX_SAMPLED_FIELDS,
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
from meseta.data.formats.partitions import check_partition, infer_partition_role, sample_partitions
from meseta.data.formats.table_rows import convert_rows
from meseta.data.formats.text import (
    BLOCK_BYTES,
    TextFormat,
    add_list_columns,
    infer_text_layout,
    raw_text,
    text_layout_from_schema,
)
from meseta.data.schema.infer import MISSING_TEXTS, ColumnRole, add_whole_numbers, secondary_label_role
from meseta.data.schema.layout import RawLayout, RawRows, RawSparse, SparseColumn
from meseta.data.schema.schema import Schema, add_signed_labels, check_names
from meseta.data.schema.text_syntax import NumberFormat, normalize_numbers_strictly
from meseta.data.whole_numbers import are_whole_numbers
from meseta.spec import MesetaError
from meseta.system.remote import is_url

# A decoded row takes up to 30 times as much memory.
MAX_ROW_BYTES = 1 << 20
_MIN_INTEGER, _MAX_INTEGER = -(1 << 63), (1 << 64) - 1


class NumberLiteral(str):
    """Text of a number with a fraction or an exponent, as spelled in the file."""


class JsonRowDecoder:
    """Decoder of rows. Numbers keep their spelling as in CSV, true and false become bool, and null becomes `None`."""

    def __init__(self, fraction: Callable[[str], str] = str) -> None:
        """Create a decoder. `fraction` is the type of numbers with a fraction or an exponent."""
        self._decode = json.JSONDecoder(
            object_pairs_hook=_build_row,
            parse_int=_check_integer,
            parse_float=fraction,
            parse_constant=lambda name: fraction(name.lower().replace("infinity", "inf")),
        ).decode

    def decode(self, line: bytes) -> dict[str, Any]:
        """Return the object in a line. Raises MesetaError if there is none. The message does not name the line."""
        if len(line) > MAX_ROW_BYTES:
            raise MesetaError(f"the row has {len(line):,} bytes, but at most {MAX_ROW_BYTES:,} are allowed")
        try:
            row = self._decode(line.decode())
        except MesetaError:
            raise
        except UnicodeDecodeError as error:
            raise MesetaError(f"byte {error.start + 1} is not UTF-8") from None
        except json.JSONDecodeError as error:
            raise MesetaError(f"column {error.colno}: the row is not valid JSON ({error.msg})") from None
        except RecursionError:
            raise MesetaError("the values of the row are nested too deeply") from None
        if not isinstance(row, dict):
            raise MesetaError(f"the row must be an object, but is {describe_kind(row)}")
        return row


def describe_kind(value: Any) -> str:
    """Return the kind of a decoded value for messages."""
    if isinstance(value, dict):
        keys = ", ".join(ascii(key[:20]) for key in list(value)[:3])
        return f"an object with {keys or 'no keys'}; write its values as keys of the row"
    if isinstance(value, list):
        return "a list"
    return "null" if value is None else "a single value"


def scalar_text(value: Any) -> str | None:
    """Return a single value as its text in CSV, or `None` if it is a list or an object."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return None


def scalar_texts(value: Any) -> list[str] | None:
    """Return the texts of a list of single values, or `None` for any other value except null. null is an empty list."""
    if value is None:
        return []
    if not isinstance(value, list):
        return None
    texts = [scalar_text(item) for item in value]
    return None if None in texts else texts  # type: ignore[return-value]


def _build_row(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise MesetaError(f"key {twice[:40]!r} occurs twice")
    return row


def _check_integer(text: str) -> str:
    # Most integers have at most 18 digits, which need no conversion.
    if len(text) > 18 and (len(text) > 20 or not _MIN_INTEGER <= int(text) <= _MAX_INTEGER):
        raise MesetaError(f"the integer {text[:40]} needs more than 64 bits; write it as a string")
    return text


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


_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jsonlines")
# Keys that a row lacks take no bytes in the file, but memory in a block. So files with many keys must not be sparser
# than this share of keys per row.
_MAX_SPARSE_KEYS = 200
_MIN_DENSITY = 0.02
# Items of a list that show whether it contains whole numbers.
_MAX_SAMPLED_ITEMS = 50
# Blocks are smaller than those of other text, because rows are decoded to Python objects.
_MAX_BLOCK_BYTES = 1 << 20
_ONE_PER_LINE_REMEDY = "write one object a line, as by jq -c"


class JsonLines(TextFormat):
    """JSON lines, detected by an object at the beginning of the file or by the name of the file."""

    name = "jsonl"
    title = "JSON lines"
    unterminated_row_hint = _ONE_PER_LINE_REMEDY

    @property
    def block_bytes(self) -> int:
        return min(_MAX_BLOCK_BYTES, super().block_bytes)

    def detect(self, head: FileHead) -> TextDialect | None:
        if head.delimiter is None and not head.header and head.has_suffix(_SUFFIXES):
            return TextDialect()
        # A list of objects is detected as well, so that `check_content` can explain what to do.
        begin = head.text.removeprefix(BOM_UTF8)[:4096].translate(None, b" \t\r\n")
        return TextDialect() if begin.startswith((b'{"', b"{}", b"[{")) else None

    def check_content(self, head: FileHead) -> None:
        super().check_content(head)
        text = head.text.removeprefix(BOM_UTF8).lstrip()
        if text.startswith(b"["):
            raise MesetaError(f"source {head.path!r} is a single JSON list; {_ONE_PER_LINE_REMEDY} '.[]'")
        if text.partition(b"\n")[0].strip() == b"{":
            raise MesetaError(f"source {head.path!r} has objects that span several lines; {_ONE_PER_LINE_REMEDY} .")

    def columns(self, source: Source) -> tuple[str, ...]:
        """Return the keys of the sampled rows."""
        return tuple(self._sample([replace(source, partition={})]).texts)

    def layout(self, sources: Sequence[Source], asked: ColumnRequest) -> RawLayout:
        where = f"source {sources[0].path!r}"
        sample = self._sample(sources)
        names = list(sample.texts)
        if asked.schema:
            layout = _layout_from_schema(where, asked.schema, sample)
        else:
            known = {key: infer_partition_role(key, sample.texts[key]) for key in sources[0].partition}
            known |= sample.inferred_roles()
            for name in asked.named_columns.separators(where, names):
                if name in sample.lists or name in sample.objects:
                    raise MesetaError(
                        f"{where}: column {name!r} for --multi-valued contains lists or objects, which have no "
                        "separators; leave it out of --multi-valued"
                    )
            layout = infer_text_layout(where, sample.texts, asked.named_columns, has_names=True, known=known)
            layout = add_list_columns(layout, dict.fromkeys(sample.lists))
            layout = add_whole_numbers(layout, {**sample.texts, **sample.items})
        check_names(where, layout.columns, names)
        layout = add_signed_labels(layout, sample.texts)
        used = {*layout.columns}
        return replace(layout, ignored=tuple(name for name in names if name not in used), encoding=sources[0].encoding)

    def read_header(self, source: Source, read_line: Callable[[int], bytes]) -> tuple[tuple[str, ...], bytes]:
        # There is no header, but a byte order mark has to be skipped.
        start = read_line(len(BOM_UTF8))
        return (), start if start == BOM_UTF8 else b""

    def parse(self, block: Block, layout: RawLayout) -> RawRows:
        return parse_json_lines(block, raw_text(block), layout)

    def key_columns(self, block: Block, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        """Return single values as text, and lists and objects as JSON."""
        decode = JsonRowDecoder().decode
        rows = [decode(line) for line in raw_text(block).split(b"\n")[:-1]]
        columns = [[_key_text(row.get(name)) for row in rows] for name in names]
        arrays = [to_binary_array(block, name, texts) for name, texts in zip(names, columns, strict=True)]
        return pa.record_batch([array.cast(pa.string()) for array in arrays], schema)

    def find_empty_columns(self, sources: Sequence[Source], names: Sequence[str]) -> set[str]:
        """Return the columns that are null or missing in all sampled rows, or hold a word for a missing value."""
        texts = self._sample(sources).texts
        return {name for name in names if name in texts and all(value in MISSING_TEXTS for value in texts[name])}

    def _sample(self, sources: Sequence[Source]) -> _JsonSample:
        """Return a sample of all files. Raises MesetaError if a file is damaged, or no sampled row is a JSON object."""
        sample = _JsonSample()
        chosen = sample_sources(sources)
        for source in chosen:
            fault: MesetaError | None = None
            budget = sample.num_fields + MAX_SAMPLED_FIELDS // len(chosen)
            for line in self._sample_lines(source, rows_per_file(1, len(chosen))):
                try:
                    row = _SAMPLE_DECODER.decode(line)
                except MesetaError as error:
                    fault = fault or error
                else:
                    check_partition(f"source {source.path!r}", source.partition, row)
                    sample.add(row)
                if sample.num_fields > budget:
                    break
            if fault and not sample.num_rows:
                raise MesetaError(
                    f"source {source.path!r}: no sampled row is a JSON object: {fault}; {_ONE_PER_LINE_REMEDY}"
                )
        sample.finish(f"source {sources[0].path!r}")
        sample.texts |= sample_partitions([source.partition for source in sources])
        return sample

    def _sample_lines(self, source: Source, num_rows: int) -> Iterator[bytes]:
        # A compressed, remote or small file is read only from its beginning.
        with wrap_source_errors(source.path), open_text(source) as (stream, stored):
            begin, size = len(self.read_header(source, stream.readline)[1]), source.size_bytes
            stream.seek(begin)
            lines = iter(lambda: stream.readline(BLOCK_BYTES), b"")
            if stream is not stored or is_url(source.path) or size <= MAX_SMALL_FILE_BYTES:
                yield from itertools.islice(lines, num_rows)
                return
            for _, stop in seek_pieces(stream, begin, size):
                place = stream.tell()
                for line in itertools.islice(lines, -(-num_rows // NUM_PIECES)):
                    yield line
                    place += len(line)
                    if place >= stop:
                        break


_SAMPLE_DECODER = JsonRowDecoder(NumberLiteral)


@dataclass
class _JsonSample:
    """Values of sampled rows by column, in the order in which their keys first occur."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    """Single values by column, one per row. Empty for lists, objects and missing values."""
    lists: dict[str, bool] = field(default_factory=dict)
    """Whether all values are ids, for each column with lists."""
    # Dictionaries serve as ordered sets.
    items: dict[str, dict[str, None]] = field(default_factory=dict)
    """First distinct items of the lists, for each column with lists."""
    objects: dict[str, str] = field(default_factory=dict)
    """Description of a nested object or list, for each column that contains one."""
    num_rows: int = 0
    num_values: int = 0

    def add(self, row: dict[str, Any]) -> None:
        """Add a row. Keys that only this row or only earlier rows have are missing values in the other rows."""
        for name, value in row.items():
            texts = self.texts.setdefault(name, [])
            texts += [""] * (self.num_rows - len(texts))
            text = scalar_text(value)
            texts.append(text or "")
            if text is None:
                self._add_nested(name, value)
        self.num_rows += 1
        self.num_values += len(row)

    @property
    def num_fields(self) -> int:
        """Number of fields of all rows and columns, including missing values."""
        return self.num_rows * len(self.texts)

    def finish(self, where: str) -> _JsonSample:
        """Complete columns that the last rows lack. Raises MesetaError if rows have only a small share of the keys."""
        if len(self.texts) > _MAX_SPARSE_KEYS and self.num_values < _MIN_DENSITY * self.num_fields:
            raise MesetaError(
                f"{where} has {len(self.texts):,} different keys in {self.num_rows:,} sampled rows, but a row has only "
                f"{self.num_values / self.num_rows:.1f} of them on average; store varying data as values "
                "instead of keys"
            )
        for texts in self.texts.values():
            texts.extend([""] * (self.num_rows - len(texts)))
        return self

    def inferred_roles(self) -> dict[str, ColumnRole]:
        """Return the roles of columns that contain lists or objects."""
        guesses = {}
        for name, holds_ids in self.lists.items():
            if any(self.texts[name]):
                guesses[name] = ColumnRole("ignore", "lists in some rows, and single values in others")
            elif holds_ids:
                guesses[name] = secondary_label_role(name) or ColumnRole("categorical", "lists of ids")
            else:
                guesses[name] = ColumnRole(
                    "ignore", "no feature holds such lists; take ids, or a column for each number"
                )
        for name, kind in self.objects.items():
            guesses[name] = ColumnRole("ignore", f"it holds {kind}")
        return guesses

    def _add_nested(self, name: str, value: Any) -> None:
        items = value if isinstance(value, list) else [value]
        nested = next((item for item in items if isinstance(item, dict | list)), None)
        if nested is not None:
            self.objects.setdefault(name, describe_kind(nested))
        if isinstance(value, list):
            has_fractions = any(isinstance(item, NumberLiteral) for item in value)
            texts = [text for item in value if (text := scalar_text(item)) is not None]
            holds_ids = nested is None and (not has_fractions or are_whole_numbers(texts))
            self.lists[name] = self.lists.get(name, True) and holds_ids
            self.items.setdefault(name, {}).update(dict.fromkeys(texts[:_MAX_SAMPLED_ITEMS]))


def _layout_from_schema(where: str, schema: Schema, sample: _JsonSample) -> RawLayout:
    if schema.header or schema.delimiter:
        raise MesetaError("prepare: header and delimiter of the --schema file do not apply to JSON; remove them")
    for name, weight in schema.weights.items():
        check_names(where, [weight], list(sample.texts))
        if name not in sample.lists or weight not in sample.lists:
            raise MesetaError(
                f"{where}: weights: columns {name!r} and {weight!r} must contain lists of the same length"
            )
    for name in schema.multi_valued:
        if name in sample.lists:
            raise MesetaError(f"{where}: column {name!r} already contains lists; remove it from multi_valued")
    layout = text_layout_from_schema(where, schema.model_copy(update={"weights": {}}), list(sample.texts))
    layout = add_list_columns(layout, dict.fromkeys(sample.lists))
    sparse = tuple(
        replace(column, weighted=True, weight=schema.weights[column.raw_column])
        if column.raw_column in schema.weights
        else column
        for column in layout.sparse
    )
    return replace(layout, sparse=sparse)


def _key_text(value: Any) -> str:
    text = scalar_text(value)
    return json.dumps(value, separators=(",", ":")) if text is None else text
