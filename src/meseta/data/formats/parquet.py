"""Parquet: columns by name and type, read by row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from meseta.data.formats.format import AskedColumns, Block, FileHead, FilePosition, RawFormat, Source, TextForm
from meseta.data.formats.parquet_files import open_parquet, parquet_sample, parquet_schema
from meseta.data.formats.parquet_layout import parquet_layout, parquet_layout_of
from meseta.data.formats.parse_parquet import parse_parquet
from meseta.data.layout import RawLayout
from meseta.data.raw_rows import RawRows
from meseta.data.schema.schema import Schema, check_names
from meseta.spec import MesetaError

BLOCK_ROWS = 32_768
"""Rows of a block."""


class Parquet(RawFormat):
    """Told by its magic or its name."""

    name = "parquet"
    title = "Parquet"

    def tell(self, head: FileHead) -> TextForm | None:
        """By the first four bytes; a file named so that begins otherwise is a damaged one."""
        return TextForm() if head.magic == b"PAR1" or head.path.endswith(".parquet") else None

    def columns(self, source: Source) -> tuple[str, ...]:
        """Those at the top."""
        return tuple(parquet_schema(source).names)

    def layout(self, sources: Sequence[Source], asked: AskedColumns) -> RawLayout:
        """As the schema says, else as named, else by types, names and a sample of the rows."""
        if asked.schema and (asked.schema.header or asked.schema.delimiter):
            raise MesetaError(
                "prepare: header and delimiter of the --schema file are for text; leave them out for Parquet"
            )
        return parquet_layout(sources, asked.named, asked.schema)

    def blocks(self, source: Source, columns: Sequence[str], start: FilePosition) -> Iterator[Block]:
        """Row groups before the one with `start` are passed over."""
        with open_parquet(source.path) as file:
            num_rows = file.metadata.num_rows
            if not num_rows:
                raise MesetaError(f"source {source.path!r} holds no rows; leave it out, or fetch it again")
            first_row = group = 0
            while group < file.num_row_groups and first_row + file.metadata.row_group(group).num_rows <= start.row:
                first_row += file.metadata.row_group(group).num_rows
                group += 1
            groups = list(range(group, file.num_row_groups))
            for batch in file.iter_batches(BLOCK_ROWS, row_groups=groups, columns=list(columns)):
                done = first_row + batch.num_rows
                if done > start.row:
                    rows = batch.slice(max(start.row - first_row, 0))
                    yield Block(
                        source=source,
                        first_row=done - rows.num_rows,
                        num_rows=rows.num_rows,
                        raw=rows,
                        end=FilePosition(row=done),
                        position_bytes=source.size_bytes * done // num_rows,
                    )
                first_row = done

    def parse(self, block: Block, layout: RawLayout) -> RawRows:
        """As described by `RawFormat.parse`."""
        return parse_parquet(block, _batch(block), layout)

    def row_ends(self, block: Block) -> Sequence[int]:
        """Rows."""
        return range(1, block.num_rows + 1)

    def key_schema(self, where: str, source: Source, names: Sequence[str]) -> pa.Schema:
        """As they are stored."""
        schema = parquet_schema(source)
        check_names(where, names, schema.names)
        return pa.schema([schema.field(name) for name in names])

    def key_columns(self, block: Block, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        """Values as they are stored, in the types common to all files."""
        return _batch(block).select(list(names)).cast(schema)

    def empty_columns(self, sources: Sequence[Source], names: Sequence[str]) -> set[str]:
        """Those with nulls alone, of numbers NaN too."""
        table = parquet_sample(sources, names)
        columns = {name: table.column(name).combine_chunks() for name in table.column_names}
        return {name for name, column in columns.items() if len(column) and _is_empty(column)}

    def check_types(self, source: Source, layout: RawLayout, earlier_dir: Path) -> None:
        """Lists stay lists, with or without weights, and numbers numbers."""
        plain = [column for column in layout.values if not column.cross]
        schema = Schema.model_construct(
            labels=list(layout.labels),
            weight=layout.weight,
            group=layout.group,
            time=layout.time,
            dense=list(layout.dense),
            signed=list(layout.signed),
            categorical=[column.raw for column in plain],
            weights={column.raw: column.weight for column in plain if column.weight is not None},
            buckets={c.buckets.column: list(c.buckets.boundaries) for c in layout.sparse if c.buckets},
            crosses={column.name: list(column.cross) for column in layout.sparse if column.cross},
        )
        present = parquet_layout_of(source, schema)
        for now, before in zip(present.sparse, layout.sparse, strict=True):
            if (now.multi_valued, now.weighted) != (before.multi_valued, before.weighted):
                kinds = {True: "lists", False: "single values"}
                how = "with weights" if before.weighted else "without weights"
                raise MesetaError(
                    f"source {source.path!r}: column {before.raw!r} must hold {kinds[before.multi_valued]} {how}, "
                    f"as in dataset {str(earlier_dir)!r}"
                )


def _batch(block: Block) -> pa.RecordBatch:
    assert isinstance(block.raw, pa.RecordBatch)
    return block.raw


def _is_empty(column: pa.Array) -> bool:
    is_number = pa.types.is_floating(column.type)
    return bool(pc.all(pc.is_null(column, nan_is_null=is_number)).as_py())
