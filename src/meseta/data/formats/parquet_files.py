"""Raw Parquet files: opening them, their columns and a sample of their rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from meseta.data.formats.format import Source, named_errors
from meseta.data.formats.sample import NUM_PIECES, rows_per_file, spread
from meseta.data.schema.guess import SAMPLE_ROWS
from meseta.machine.remote import is_url, open_file


@contextmanager
def open_parquet(path: str) -> Iterator[pq.ParquetFile]:
    """A local file is opened by Arrow itself, whose threads then read it without Python."""
    if not is_url(path):
        with pq.ParquetFile(path) as file:
            yield file
        return
    with open_file(path) as stored, pq.ParquetFile(stored) as file:
        yield file


def parquet_schema(source: Source) -> pa.Schema:
    """Columns of a file. Raises MesetaError for a damaged one."""
    with named_errors(source.path), open_parquet(source.path) as file:
        return file.schema_arrow


def parquet_sample(sources: Sequence[Source], columns: Sequence[str], max_rows: int = SAMPLE_ROWS) -> pa.Table:
    """Some columns in the sampled rows of files that have them. Raises MesetaError for a damaged file."""
    chosen = spread(sources)
    num_rows = min(rows_per_file(len(columns), len(chosen)), -(-max_rows // len(chosen)))
    tables = [_sampled_rows(source, columns, num_rows) for source in chosen]
    return pa.concat_tables(tables, promote_options="permissive")


def _sampled_rows(source: Source, columns: Sequence[str], num_rows: int) -> pa.Table:
    """From row groups at equal distances."""
    with named_errors(source.path), open_parquet(source.path) as file:
        schema = file.schema_arrow
        present = {*schema.names}
        names = [name for name in columns if name in present]
        number = min(file.num_row_groups, NUM_PIECES)
        wanted = {*names}
        tables = [pa.schema([field for field in schema if field.name in wanted]).empty_table().select(names)]
        for piece in range(number):
            group = piece * file.num_row_groups // number
            batches = file.iter_batches(-(-num_rows // number), row_groups=[group], columns=names)
            tables += [pa.Table.from_batches([batch]).select(names) for batch in itertools.islice(batches, 1)]
        return pa.concat_tables(tables)
