"""Parquet files, whose columns have names and types and are read by row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from meseta.data.formats.encodings import UTF_8
from meseta.data.formats.format import (
    Block,
    ColumnRequest,
    FileHead,
    FilePosition,
    RawFormat,
    Source,
    TextDialect,
    wrap_source_errors,
)
from meseta.data.formats.parquet_files import (
    BLOCK_ROWS,
    open_parquet,
    parquet_schema,
    read_batches,
    sample_parquet,
    source_schema,
)
from meseta.data.formats.parquet_layout import infer_parquet_layout, parquet_layout_from_schema
from meseta.data.formats.parquet_types import is_list
from meseta.data.formats.parse_parquet import cast_key_column, parse_parquet
from meseta.data.layout import RawLayout
from meseta.data.raw_rows import RawRows
from meseta.data.row_queue import RowQueue
from meseta.data.schema.schema import Schema, check_names
from meseta.spec import MesetaError


class Parquet(RawFormat):
    """Parquet, detected by its magic bytes or its file name."""

    name = "parquet"
    title = "Parquet"

    def detect(self, head: FileHead) -> TextDialect | None:
        return TextDialect() if head.magic == b"PAR1" or head.path.endswith(".parquet") else None
        # A .parquet file without the magic bytes is damaged. Opening it raises an error that says so.

    def columns(self, source: Source) -> tuple[str, ...]:
        return tuple(parquet_schema(source).names)

    def layout(self, sources: Sequence[Source], asked: ColumnRequest) -> RawLayout:
        if asked.schema and (asked.schema.header or asked.schema.delimiter):
            raise MesetaError(
                "prepare: header and delimiter of the --schema file apply only to text; remove them for Parquet files"
            )
        # Text files may be added to this dataset later, so categories must be valid text.
        return replace(infer_parquet_layout(sources, asked.named_columns, asked.schema), encoding=UTF_8)

    def blocks(self, source: Source, columns: Sequence[str], start: FilePosition) -> Iterator[Block]:
        """Yield blocks of `BLOCK_ROWS` rows from `start` on. Row groups before `start` are not read."""
        with closing(ParquetCursor(source, columns)) as cursor:
            if not cursor.num_rows:
                raise MesetaError(f"source {source.path!r} contains no rows; leave it out, or fetch it again")
            while start.row < cursor.num_rows:
                yield (block := cursor.read(start, FilePosition(row=min(start.row + BLOCK_ROWS, cursor.num_rows))))
                start = block.end

    def cursor(self, source: Source, columns: Sequence[str]) -> ParquetCursor:
        return ParquetCursor(source, columns)

    def is_seekable(self, source: Source) -> bool:
        return True

    def row_position(self, block: Block, row: int) -> FilePosition:
        return FilePosition(row=block.first_row + row)

    def parse(self, block: Block, layout: RawLayout) -> RawRows:
        return parse_parquet(block, _batch(block), layout)

    def filter_rows(self, block: Block, mask: NDArray[np.bool_]) -> Block:
        rows = _batch(block).filter(pa.array(mask))
        return replace(block, raw=rows, num_rows=rows.num_rows)

    def row_ends(self, block: Block) -> Sequence[int]:
        return range(1, block.num_rows + 1)

    def key_schema(self, where: str, source: Source, names: Sequence[str]) -> pa.Schema:
        """Return the types as they are stored."""
        schema = parquet_schema(source)
        check_names(where, names, schema.names)
        return pa.schema([schema.field(name) for name in names])

    def key_columns(self, block: Block, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        """Return stored values, converted to the types common to all files."""
        batch = _batch(block).select(list(names))
        arrays = [cast_key_column(block, name, batch.column(name), schema.field(name).type) for name in names]
        return pa.record_batch(arrays, schema)

    def find_empty_columns(self, sources: Sequence[Source], names: Sequence[str]) -> set[str]:
        """Return the columns that are null in all sampled rows. NaN counts as null."""
        sample = sample_parquet(sources, names)
        return {name for name, arrays in sample.items() if any(map(len, arrays)) and all(map(_has_only_nulls, arrays))}

    def check_types(self, source: Source, layout: RawLayout, earlier_dir: Path) -> None:
        """Raise MesetaError unless lists are still lists, with or without weights as before, and numbers are
        numbers."""
        plain = [column for column in layout.encoded_features if not column.cross]
        schema = Schema.model_construct(
            labels=layout.raw_label_columns,
            weight=layout.weight,
            group=layout.group,
            time=layout.time,
            dense=list(layout.dense),
            signed=list(layout.signed),
            categorical=[column.raw_column for column in plain],
            **({} if layout.number_format is None else asdict(layout.number_format)),
            weights={column.raw_column: column.weight for column in plain if column.weight is not None},
            buckets={c.buckets.column: list(c.buckets.boundaries) for c in layout.sparse if c.buckets},
            crosses={column.name: list(column.cross) for column in layout.sparse if column.cross},
        )
        present = parquet_layout_from_schema(source, schema)
        for now, before in zip(present.sparse, layout.sparse, strict=True):
            if (now.multi_valued, now.weighted) != (before.multi_valued, before.weighted):
                kind = source_schema(source).field(before.raw_column).type
                # A column without values fits either kind.
                if pa.types.is_null(kind) or (
                    before.multi_valued and is_list(kind) and pa.types.is_null(kind.value_type)
                ):
                    continue
                kinds = {True: "lists", False: "single values"}
                how = "with weights" if before.weighted else "without weights"
                raise MesetaError(
                    f"source {source.path!r}: column {before.raw_column!r} must hold {kinds[before.multi_valued]} "
                    f"{how}, "
                    f"as in dataset {str(earlier_dir)!r}"
                )


class ParquetCursor:
    """Reader of some columns of a file, sequential within a row group.

    Seeking backwards, or forward to another row group, starts at the beginning of the target row group.
    """

    def __init__(self, source: Source, columns: Sequence[str]) -> None:
        self.row = 0
        self._source, self._columns = source, source.file_columns(columns)
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._decoded = RowQueue()
        with ExitStack() as stack, wrap_source_errors(source.path):
            self._file = stack.enter_context(open_parquet(source.path))
            sizes = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
            self._group_ends = np.cumsum(sizes, dtype=np.int64)
            # Reading at least one column gives the number of rows.
            self._columns = self._columns or self._file.schema_arrow.names[:1]
            self._resources = stack.pop_all()
        self.num_rows = self._file.metadata.num_rows

    def read(self, start: FilePosition, stop: FilePosition) -> Block:
        if stop.row > self.num_rows:
            raise MesetaError(
                f"source {self._source.path!r} has {self.num_rows:,} rows, but row {stop.row:,} was requested; fetch "
                "the file again"
            )
        with wrap_source_errors(self._source.path):
            self._seek(start.row)
            rows = self._take(stop.row - start.row)
        return Block(
            source=self._source,
            first_row=start.row,
            num_rows=rows.num_rows,
            raw=rows,
            end=stop,
            position_bytes=self._source.size_bytes * stop.row // self.num_rows,
        )

    def close(self) -> None:
        self._resources.close()

    def _seek(self, row: int) -> None:
        here, group = (int(np.searchsorted(self._group_ends, place, side="right")) for place in (self.row, row))
        if row < self.row or group > here or self._batches is None:
            self.row = int(self._group_ends[group - 1]) if group else 0
            groups = list(range(group, self._group_ends.size))
            self._batches = read_batches(self._file, groups, self._columns)
            self._decoded = RowQueue()
        while self.row < row:
            self._decode(1)
            passed = self._decoded.take(min(row - self.row, self._decoded.num_rows))
            self.row += passed.num_rows

    def _take(self, num_rows: int) -> pa.RecordBatch:
        self._decode(num_rows)
        self.row += num_rows
        [rows] = self._decoded.take(num_rows).combine_chunks().to_batches()
        return rows

    def _decode(self, num_rows: int) -> None:
        while self._decoded.num_rows < num_rows:
            batch = next(self._batches or iter(()), None)
            if batch is None:
                raise MesetaError(f"source {self._source.path!r} is truncated or damaged; fetch it again")
            self._decoded.add(batch)


def _batch(block: Block) -> pa.RecordBatch:
    assert isinstance(block.raw, pa.RecordBatch)
    return block.raw


def _has_only_nulls(column: pa.Array) -> bool:
    is_number = pa.types.is_floating(column.type)
    return bool(pc.all(pc.is_null(column, nan_is_null=is_number)).as_py())
