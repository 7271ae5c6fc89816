"""Columns of raw files as they stand there, for those who want to know whose row it is."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from meseta.data.formats.format import Block, Source
from meseta.data.formats.parquet_types import ColumnTypes


class RawColumns:
    """Some columns of files of one format: of text the fields, of Parquet the values."""

    def __init__(self, sources: Sequence[Source], names: Sequence[str]) -> None:
        """Raises MesetaError for a column that a file lacks or has twice, and for types without a common one."""
        self._names = list(dict.fromkeys(names))
        types = ColumnTypes()
        for source in sources:
            types.add(source.path, source.format.key_schema(f"keys: source {source.path!r}", source, self._names))
        for name in self._names:
            types.check(name)
        self.schema = types.common.remove_metadata()

    def of(self, block: Block) -> pa.RecordBatch:
        """The rows of a block, with `schema`."""
        return block.source.format.key_columns(block, self._names, self.schema)
