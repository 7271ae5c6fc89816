"""JSON lines: one object per line, whose keys are column names."""

from __future__ import annotations

import itertools
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from meseta.data.formats.format import (
    Block,
    ColumnRequest,
    FileHead,
    Source,
    TextDialect,
    open_text,
    wrap_source_errors,
)
from meseta.data.formats.json_records import JsonRowDecoder, NumberLiteral, describe_kind, scalar_text
from meseta.data.formats.parse_json_lines import parse_json_lines, to_binary_array
from meseta.data.formats.partitions import check_partition, infer_partition_role, sample_partitions
from meseta.data.formats.sampling import (
    MAX_SAMPLED_FIELDS,
    MAX_SMALL_FILE_BYTES,
    NUM_PIECES,
    rows_per_file,
    sample_sources,
    seek_pieces,
)
from meseta.data.formats.text import BLOCK_BYTES, TextFormat, raw_text
from meseta.data.formats.text_columns import add_list_columns, infer_text_layout, text_layout_from_schema
from meseta.data.layout import RawLayout
from meseta.data.raw_rows import RawRows
from meseta.data.schema.infer import MISSING_TEXTS, ColumnRole, secondary_label_role
from meseta.data.schema.labels import add_signed_labels
from meseta.data.schema.number_spelling import add_whole_numbers
from meseta.data.schema.schema import Schema, check_names
from meseta.data.whole_numbers import are_whole_numbers
from meseta.spec import MesetaError
from meseta.system.remote import is_url

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

    def key_schema(self, where: str, source: Source, names: Sequence[str]) -> pa.Schema:
        check_names(where, names, self.columns(source))
        return pa.schema([pa.field(name, pa.string()) for name in names])

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
        """Return a sample of all files.

        Raises MesetaError if a file is damaged, or if none of its sampled rows is a JSON object.
        """
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
        """Complete the columns that the last rows lack. Raises MesetaError if rows have only a small share of the
        keys."""
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
