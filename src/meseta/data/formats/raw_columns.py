"""Columns of raw files as they stand there, for those who want to know whose row it is."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa

from meseta.data.formats.parse_csv import read_texts
from meseta.data.formats.parse_svm import QID
from meseta.data.prepare.sources import Block, Source, parquet_schema
from meseta.data.schema.find import column_names
from meseta.data.schema.schema import check_names
from meseta.spec import MesetaError


class RawColumns:
    """Some columns of files of one kind: of text the fields, of Parquet the values."""

    def __init__(self, sources: Sequence[Source], names: Sequence[str]) -> None:
        """Raises MesetaError for a column that a file lacks or has twice, and for types without a common one."""
        self._names = list(dict.fromkeys(names))
        self._header = column_names(sources[0]) if sources[0].kind == "tsv" else ()
        schemas = [_schema(source, self._names) for source in sources]
        try:
            self.schema = pa.unify_schemas(schemas, promote_options="permissive").remove_metadata()
        except pa.ArrowException as error:
            raise MesetaError(f"keys: {error}; leave that column out") from None

    def of(self, block: Block) -> pa.RecordBatch:
        """The rows of a block, with `schema`."""
        if not isinstance(block.raw, bytes):
            return block.raw.select(self._names).cast(self.schema)
        if block.source.kind == "libsvm":
            return pa.record_batch([_groups(block, block.raw) for _ in self._names], self.schema)
        header = block.header if block.source.kind == "csv" else self._header
        return pa.record_batch(read_texts(block, block.raw, header, self._names), self.schema)


def _schema(source: Source, names: Sequence[str]) -> pa.Schema:
    where = f"keys: source {source.path!r}"
    if source.kind == "parquet":
        schema = parquet_schema(source)
        check_names(where, names, schema.names)
        return pa.schema([schema.field(name) for name in names])
    if source.kind in ("libsvm", "libffm"):
        if source.kind == "libffm" or set(names) != {QID}:
            raise MesetaError(f"{where} has no columns to hand through; of libsvm there is {QID!r}")
        return pa.schema([pa.field(name, pa.int64()) for name in names])
    check_names(where, names, column_names(source))
    return pa.schema([pa.field(name, pa.string()) for name in names])


def _groups(block: Block, raw: bytes) -> pa.Array:
    """What stands behind qid: in each row."""
    found = re.findall(rb"^(?:[^\s#]+[ \t]+)?qid:(-?\d+)", raw, re.MULTILINE)
    if len(found) != block.num_rows:
        raise MesetaError(f"keys: source {block.source.path!r}: not every row has a qid; leave it out of the keys")
    return pa.array([int(one) for one in found], pa.int64())
