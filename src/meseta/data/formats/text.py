"""Layout of text with named columns, from a schema or inferred from names and sampled values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.data.formats.encodings import check_text
from meseta.data.formats.format import (
    FIX_LINE,
    Block,
    FileHead,
    FilePosition,
    RawFormat,
    Source,
    open_text,
    wrap_source_errors,
)
from meseta.data.schema.infer import ColumnRole, infer_label_from_values, infer_role, require_label
from meseta.data.schema.layout import RawLayout, RawRows, SparseColumn
from meseta.data.schema.roles import NamedColumns, other_times_of, role_reasons, schema_from_roles
from meseta.data.schema.schema import Schema, check_names, layout_from_schema, raw_label_columns
from meseta.data.schema.separators import resolve_separators
from meseta.errors import join_names
from meseta.spec import MesetaError


def text_layout_from_schema(where: str, schema: Schema, names: Sequence[str]) -> RawLayout:
    """Return the layout that a schema describes for text with the columns `names`.

    Raises MesetaError if a column has weights but is not multi-valued, and as `layout_from_schema` does.
    """
    for name in schema.weights:
        if name not in schema.multi_valued:
            raise MesetaError(
                f"prepare: weights of the --schema file contain {name!r}, which is not multi-valued; list it under "
                "multi_valued, and name under weights the separator between a value and its weight"
            )
    plain = (
        SparseColumn(
            name=name,
            multi_valued=name in schema.multi_valued,
            weighted=name in schema.weights,
            separator=schema.multi_valued.get(name),
            weight_separator=schema.weights.get(name),
        )
        for name in schema.categorical
    )
    return layout_from_schema(where, schema, plain, names)


def infer_text_layout(
    where: str,
    columns: Mapping[str, Sequence[str]],
    named: NamedColumns,
    *,
    has_names: bool,
    known: Mapping[str, ColumnRole] | None = None,
) -> RawLayout:
    """Return the layout of text columns.

    Roles are taken from `named` (the options), then from `known`, and otherwise inferred from names and the sampled
    values in `columns`. `has_names` means that the file has a header. Raises MesetaError if no label can be determined.
    The message starts with `where`.
    """
    names = list(columns)
    if not any(columns.values()):
        raise MesetaError(f"{where} contains no rows; leave it out, or fetch it again")
    labels = named.labels(where, names) or _infer_labels(where, columns, has_names=has_names)
    raw_labels = raw_label_columns(where, labels, names)
    check_names(where, raw_labels, names)
    free = [name for name in names if name not in raw_labels]
    chosen = named.roles(where, free)
    requested = named.separators(where, free)
    separators, list_reasons = resolve_separators(where, requested, columns) if requested else ({}, {})
    guesses = {
        name: chosen.get(name) or (known or {}).get(name) or infer_role(name, values)
        for name, values in columns.items()
        if name in free
    }
    keys = {
        "multi_valued": separators,
        "time_features": named.time_feature_columns(where, free, guesses),
        "buckets": named.bucket_counts(where, guesses, columns),
    }
    schema = schema_from_roles(labels, guesses, columns).model_copy(update=keys)
    reasons = {**role_reasons(guesses), **list_reasons}
    if not has_names and not named.label:
        reasons[labels[0]] = "0 and 1 alone, in a file without names; --label NAME is another"
    return replace(text_layout_from_schema(where, schema, names), reasons=reasons, other_times=other_times_of(guesses))


def add_list_columns(layout: RawLayout, separators: Mapping[str, str | None]) -> RawLayout:
    """Return `layout` with the columns in `separators` multi-valued, unless they are already.

    A separator of `None` means lists of values.
    """
    sparse = tuple(
        replace(column, multi_valued=True, separator=separators[column.raw_column])
        if column.raw_column in separators and not column.has_row_ids and not column.cross and not column.multi_valued
        else column
        for column in layout.sparse
    )
    return replace(layout, sparse=sparse)


def _infer_labels(where: str, columns: Mapping[str, Sequence[str]], *, has_names: bool) -> tuple[str]:
    label = require_label(where, list(columns)) if has_names else infer_label_from_values(columns)
    if label is None:
        raise MesetaError(
            f"{where}: its first line has no names, so its columns are called {join_names([*map(repr, columns)], 10)}; "
            f"no single one of them contains only 0 and 1, so choose the label with --label"
        )
    return (label,)


CRITEO_FIELD_COUNTS = (40, 39)
"""Number of fields in a line of a Criteo log: with a label, and without one."""
BLOCK_BYTES = 8 << 20
"""Number of bytes of text per read. A block ends after the last complete line in them."""


class TextFormat(RawFormat):
    """Text whose rows are lines. Subclasses with other rows or with a header override the methods that differ."""

    is_text = True

    @property
    def block_bytes(self) -> int:
        """Number of bytes of text per read."""
        return BLOCK_BYTES

    @property
    def unterminated_row_hint(self) -> str:
        """Most likely cause if no row ends."""
        return f"this is not {self.title}"

    def check_content(self, head: FileHead) -> None:
        head.check_text()

    def key_schema(self, where: str, source: Source, names: Sequence[str]) -> pa.Schema:
        check_names(where, names, self.columns(source))
        return pa.schema([pa.field(name, pa.string()) for name in names])

    def read_header(self, source: Source, read_line: Callable[[int], bytes]) -> tuple[tuple[str, ...], bytes]:
        """Return (column names, bytes read). `read_line` is the `readline` of the stream at the start of the file."""
        return source.header, b""

    def count_rows(self, raw: bytes) -> int:
        """Return the number of rows in complete lines."""
        return raw.count(b"\n")

    def split_complete_rows(self, before: bytes, data: bytes) -> tuple[bytes, bytes]:
        """Return (complete rows, rest) of the concatenation of `before`, which has no complete row, and `data`."""
        end = data.rfind(b"\n") + 1
        if not end:
            return b"", before + data
        # Avoids a second copy of `data`, which may be large.
        return b"".join((before, memoryview(data)[:end])), data[end:]

    def row_ends(self, block: Block) -> Sequence[int]:
        return line_ends(raw_text(block))

    def parsed_row_ends(self, block: Block) -> NDArray[np.int64]:
        """Return the same as `row_ends` for a parsed block, as an array and faster if possible."""
        return line_end_offsets(raw_text(block))

    def filter_rows(self, block: Block, mask: NDArray[np.bool_]) -> Block:
        raw, ends = raw_text(block), self.parsed_row_ends(block)
        starts = np.concatenate([[0], ends[:-1]])
        rows = [raw[start:end] for start, end in zip(starts[mask].tolist(), ends[mask].tolist(), strict=True)]
        return replace(block, raw=b"".join(rows), num_rows=len(rows))

    def check_text(self, block: Block, rows: RawRows, layout: RawLayout) -> RawRows:
        """Return the rows of a parsed block. Raises MesetaError if a category is not valid text."""

        def error(row: int, column: str, problem: str) -> MesetaError:
            line = self.row_position(block, row).line + 1
            where = f"source {block.source.path!r}, line {line}, column {column!r}"
            return MesetaError(f"{where}: {problem}", remedy=FIX_LINE)

        check_text(rows, raw_text(block), layout, error)
        return rows

    def cursor(self, source: Source, columns: Sequence[str]) -> TextCursor:
        return TextCursor(self, source)

    def is_seekable(self, source: Source) -> bool:
        with wrap_source_errors(source.path), open_text(source) as (stream, stored):
            return stream is stored

    def row_position(self, block: Block, row: int) -> FilePosition:
        end = int(self.parsed_row_ends(block)[row - 1]) if row else 0
        line = block.first_line + raw_text(block).count(b"\n", 0, end)
        return FilePosition(row=block.first_row + row, line=line, offset=block.first_offset + end)

    def blocks(self, source: Source, columns: Sequence[str], start: FilePosition) -> Iterator[Block]:
        held = rest = b""
        # One block is held back, so that blank lines at the very end of the file can be dropped.
        position_bytes = 0

        def block(raw: bytes) -> Block:
            num_rows = self.count_rows(raw)
            line, offset = start.line + raw.count(b"\n"), start.offset + len(held)
            return Block(
                source=source,
                first_row=start.row,
                first_line=start.line,
                first_offset=start.offset,
                num_rows=num_rows,
                raw=raw,
                header=header,
                end=FilePosition(row=start.row + num_rows, line=line, offset=offset),
                position_bytes=position_bytes,
            )

        with open_text(source) as (stream, stored):
            header, raw_header = self.read_header(source, stream.readline)
            if not start.offset:
                start = FilePosition(line=raw_header.count(b"\n"), offset=len(raw_header))
            stream.seek(start.offset)
            at = start.offset
            # Reads end at multiples of the block size, so that block boundaries do not depend on `start`.
            while data := stream.read(self.block_bytes - at % self.block_bytes):
                at += len(data)
                whole, rest = self.split_complete_rows(rest, data)
                if not whole:
                    if len(rest) > 4 * BLOCK_BYTES:
                        line = start.line + held.count(b"\n") + 1
                        raise MesetaError(
                            f"source {source.path!r}, line {line}: no row ends within {len(rest):,} bytes; "
                            f"{self.unterminated_row_hint}"
                        )
                    continue
                if held and not held.isspace():
                    yield (ready := block(held))
                    start = ready.end
                    held = b""
                position_bytes = stored.tell()
                held += whole
            position_bytes = stored.tell()
            held = (held + rest).rstrip(b"\r\n")
            if held:
                yield block(held + b"\n")
            elif not start.row:
                raise MesetaError(f"source {source.path!r} contains no rows; leave it out, or fetch it again")


class TextCursor:
    """Reader of ranges of rows of a text file. A compressed file is decompressed up to the requested rows."""

    def __init__(self, form: TextFormat, source: Source) -> None:
        self.row = 0
        self._format, self._source = form, source
        with ExitStack() as stack, wrap_source_errors(source.path):
            self._stream, self._stored = stack.enter_context(open_text(source))
            self._header, _ = form.read_header(source, self._stream.readline)
            self._resources = stack.pop_all()

    def read(self, start: FilePosition, stop: FilePosition) -> Block:
        with wrap_source_errors(self._source.path):
            self._stream.seek(start.offset)
            raw = self._stream.read(stop.offset - start.offset)
            position_bytes = self._stored.tell()
        if len(raw) != stop.offset - start.offset:
            raise MesetaError(
                f"source {self._source.path!r} ends at byte {start.offset + len(raw):,}, before line {stop.line + 1}; "
                "fetch it again"
            )
        self.row = stop.row
        raw = raw if raw.endswith(b"\n") else raw + b"\n"  # The last line of a file may lack a line break.
        return Block(
            source=self._source,
            first_row=start.row,
            first_line=start.line,
            first_offset=start.offset,
            num_rows=self._format.count_rows(raw),
            raw=raw,
            header=self._header,
            end=stop,
            position_bytes=position_bytes,
        )

    def close(self) -> None:
        self._resources.close()


def raw_text(block: Block) -> bytes:
    """Return the bytes of a text block."""
    assert isinstance(block.raw, bytes)
    return block.raw


def line_ends(raw: bytes) -> list[int]:
    """Return the end offset of each line as a list."""
    ends: list[int] = line_end_offsets(raw).tolist()
    return ends


def line_end_offsets(raw: bytes) -> NDArray[np.int64]:
    """Return the end offset of each line as an array."""
    return np.flatnonzero(np.frombuffer(raw, np.uint8) == ord("\n")) + 1


def read_first_line(source: Source) -> bytes:
    """Return the first line of a text file without its line break. Raises MesetaError if the file is damaged."""
    with wrap_source_errors(source.path), open_text(source) as (stream, _):
        return stream.readline(BLOCK_BYTES).rstrip(b"\r\n")


def prepend_field(lines: bytes, field: bytes) -> bytes:
    """Return `lines` with `field` inserted at the beginning of each line, such as a label that the parser requires."""
    return field + lines[:-1].replace(b"\n", b"\n" + field) + b"\n"
