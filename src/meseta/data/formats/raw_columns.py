"""Raw columns of files that identify rows, such as user ids."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from meseta.data.formats.format import Block, Source
from meseta.data.formats.parquet_types import ColumnTypes


class RawKeyColumns:
    """Selected columns of files of one format. Values are fields of text, or stored values of Parquet."""

    def __init__(self, sources: Sequence[Source], names: Sequence[str]) -> None:
        """Determine the types. Raises MesetaError if a file lacks a column or has it twice, or if types are
        incompatible."""
        self._names = list(dict.fromkeys(names))
        types = ColumnTypes()
        for source in sources:
            file_columns = source.file_columns(self._names)
            schema = source.format.key_schema(f"keys: source {source.path!r}", source, file_columns)
            made = [pa.field(name, pa.string()) for name in self._names if name in source.partition]
            types.add(source.path, pa.schema([*schema, *made]))
        for name in self._names:
            types.check_compatible(name)
        self.schema = pa.schema([types.common_schema.field(name) for name in self._names])

    def extract(self, block: Block) -> pa.RecordBatch:
        """Return the columns of a block, with the types of `schema`."""
        file_columns, partition = block.source.file_columns(self._names), block.source.partition
        if len(file_columns) == len(self._names):
            return block.source.format.key_columns(block, file_columns, self.schema)
        schema = pa.schema([self.schema.field(name) for name in file_columns])
        batch = block.source.format.key_columns(block, file_columns, schema)
        columns = [
            batch[name]
            if name in file_columns
            else pa.repeat(pa.scalar(partition[name], self.schema.field(name).type), block.num_rows)
            for name in self._names
        ]
        return pa.record_batch(columns, self.schema)
