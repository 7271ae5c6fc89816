"""Columns of raw files as they stand there, for those who want to know whose row it is."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from meseta.data.formats.format import Block, Source
from meseta.data.formats.parquet_types import ColumnTypes


class RawKeyColumns:
    """Some columns of files of one format: of text the fields, of Parquet the values."""

    def __init__(self, sources: Sequence[Source], names: Sequence[str]) -> None:
        """Raises MesetaError for a column that a file lacks or has twice, and for types without a common one."""
        self._names = list(dict.fromkeys(names))
        types = ColumnTypes()
        for source in sources:
            own = source.file_columns(self._names)
            schema = source.format.key_schema(f"keys: source {source.path!r}", source, own)
            made = [pa.field(name, pa.string()) for name in self._names if name in source.partition]
            types.add(source.path, pa.schema([*schema, *made]))
        for name in self._names:
            types.check_compatible(name)
        self.schema = pa.schema([types.common_schema.field(name) for name in self._names])

    def extract(self, block: Block) -> pa.RecordBatch:
        """The rows of a block, with `schema`."""
        own, partition = block.source.file_columns(self._names), block.source.partition
        if len(own) == len(self._names):
            return block.source.format.key_columns(block, own, self.schema)
        schema = pa.schema([self.schema.field(name) for name in own])
        batch = block.source.format.key_columns(block, own, schema)
        columns = [
            batch[name]
            if name in own
            else pa.repeat(pa.scalar(partition[name], self.schema.field(name).type), block.num_rows)
            for name in self._names
        ]
        return pa.record_batch(columns, self.schema)
