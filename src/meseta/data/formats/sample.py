"""A sample of the rows of raw files, from places all over them, by which columns are judged."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator, Sequence

import pyarrow as pa

from meseta.data.formats.csv_records import read_header
from meseta.data.prepare.sources import (
    BLOCK_BYTES,
    ByteLines,
    Source,
    csv_names,
    named_errors,
    open_parquet,
    open_text,
)
from meseta.data.schema.guess import SAMPLE_ROWS
from meseta.machine.remote import is_url
from meseta.spec import MesetaError

_MAX_FIELDS = 4_000_000
"""Fields that are looked at: of wide files, fewer rows."""
_LEAST_ROWS = 2000
_FILES = 8
_PIECES = 8
"""Places of a file that rows are taken from, where it can be read from any."""
_SMALL_BYTES = 4 << 20
"""Files up to this size are read from their beginning alone."""


def csv_header(source: Source) -> tuple[str, ...]:
    """Names of the columns of a CSV file. Raises MesetaError for a damaged file."""
    if source.header:
        return source.header
    with named_errors(source.path), open_text(source.path) as (stream, _):
        return _read_header(source, stream)[0]


def csv_sample(sources: Sequence[Source], names: Sequence[str]) -> dict[str, list[str]]:
    """Column -> its fields in the sampled rows of CSV files that have it, in the order of the rows; `names` are those
    of the first file.

    Raises MesetaError for a damaged file.
    """
    num_rows = _num_rows(len(names))
    chosen = _spread(sources)
    columns: dict[str, list[str]] = {name: [] for name in names}
    for source in chosen:
        header, rows = _csv_rows(source, -(-num_rows // len(chosen)))
        places = {name: place for place, name in reversed(list(enumerate(header)))}
        for name, values in columns.items():
            place = places.get(name)
            values.extend([] if place is None else [row[place] for row in rows if place < len(row)])
    return columns


def first_rows(source: Source, num_rows: int) -> tuple[tuple[str, ...], list[list[str]]]:
    """The first record of a CSV file, whatever it is, and so many after it. Raises MesetaError for a damaged file."""
    with named_errors(source.path), open_text(source.path) as (stream, _):
        return _read_header(source, stream)[0], _records(source, _lines(stream, None), num_rows)


def parquet_sample(sources: Sequence[Source], columns: Sequence[str]) -> pa.Table:
    """Some columns in the sampled rows of Parquet files that have them. Raises MesetaError for a damaged file."""
    num_rows = _num_rows(len(columns))
    chosen = _spread(sources)
    tables = [_parquet_rows(source, columns, -(-num_rows // len(chosen))) for source in chosen]
    return pa.concat_tables(tables, promote_options="permissive")


def _num_rows(num_columns: int) -> int:
    return max(_LEAST_ROWS, min(SAMPLE_ROWS, _MAX_FIELDS // max(num_columns, 1)))


def _spread(sources: Sequence[Source]) -> list[Source]:
    """The first file, and others at equal distances."""
    number = min(len(sources), _FILES)
    return [sources[place * len(sources) // number] for place in range(number)]


def _read_header(source: Source, stream: ByteLines) -> tuple[tuple[str, ...], int]:
    """Names of the columns, and where the rows begin; `stream` stands there then."""
    if source.header:
        return source.header, 0
    raw = read_header(stream.readline)
    return csv_names(source, raw), len(raw)


def _csv_rows(source: Source, num_rows: int) -> tuple[tuple[str, ...], list[list[str]]]:
    """The header, and rows of pieces that begin all over a file; of one that is zipped, remote or small, from its
    beginning."""
    with named_errors(source.path), open_text(source.path) as (stream, stored):
        header, begin = _read_header(source, stream)
        size = source.size_bytes
        if stream is not stored or is_url(source.path) or size <= _SMALL_BYTES:
            return header, _records(source, _lines(stream, None), num_rows)
        found: list[list[str]] = []
        starts = [begin + place * (size - begin) // _PIECES for place in range(_PIECES)]
        for start, stop in itertools.pairwise([*starts, size]):
            stream.seek(start)
            if start > begin:
                stream.seek(start - 1)
                stream.readline(BLOCK_BYTES)
            try:
                rows = _records(source, _lines(stream, stop), -(-num_rows // _PIECES))
            except MesetaError:
                if start == begin:
                    raise
                continue
            # A piece that begins within a quoted field is cut wrongly.
            if start == begin or all(len(row) == len(header) for row in rows):
                found += rows
        return header, found


def _lines(stream: ByteLines, stop: int | None) -> Iterator[str]:
    """Lines that begin before `stop`."""
    place = 0 if stop is None else stream.tell()
    while (stop is None or place < stop) and (line := stream.readline(BLOCK_BYTES)):
        place += len(line)
        yield line.decode(errors="replace")


def _records(source: Source, lines: Iterator[str], num_rows: int) -> list[list[str]]:
    try:
        return list(itertools.islice(csv.reader(lines, delimiter=source.delimiter), num_rows))
    except csv.Error as error:
        raise MesetaError(
            f"source {source.path!r}: a field among the sampled rows is no CSV ({error}); is a quote not closed?"
        ) from None


def _parquet_rows(source: Source, columns: Sequence[str], num_rows: int) -> pa.Table:
    """From row groups at equal distances."""
    with named_errors(source.path), open_parquet(source.path) as file:
        schema = file.schema_arrow
        names = [name for name in columns if name in schema.names]
        number = min(file.num_row_groups, _PIECES)
        tables = [pa.schema([schema.field(name) for name in names]).empty_table()]
        for piece in range(number):
            group = piece * file.num_row_groups // number
            batches = file.iter_batches(-(-num_rows // number), row_groups=[group], columns=names)
            tables += [pa.Table.from_batches([batch]).select(names) for batch in itertools.islice(batches, 1)]
        return pa.concat_tables(tables)
