"""Rows in memory as Arrow streams and as Parquet files, and predictions in the form of the rows."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from meseta.spec import MesetaError
from meseta.system.files import move

Rows = Any
"""Rows in memory: pyarrow Table, RecordBatch or RecordBatchReader, data with `__arrow_c_stream__` such as frames of
pandas and polars and relations of DuckDB, or a dict of columns."""
BLOCK_ROWS = 65_536
"""Number of rows that are hashed and written at a time."""
MIN_FREE_BYTES = 1 << 30
"""Free disk space that spooled rows leave to others."""


def as_paths(data: Any) -> list[str] | None:
    """Return `data` as a list of files, patterns or URLs, or `None` if it has rows."""
    paths = [data] if isinstance(data, (str, Path)) else data
    if isinstance(paths, Sequence) and paths and all(isinstance(path, (str, Path)) for path in paths):
        return [str(path) for path in paths]
    return None


def file_paths(data: Any, folder: Path) -> list[str]:
    """Return `data` as a list of files, patterns or URLs. Rows in memory are spooled to `folder`."""
    paths = as_paths(data)
    return [str(spool_rows(open_stream(data), folder))] if paths is None else paths


def open_stream(data: Rows) -> pa.RecordBatchReader:
    """Open rows as an Arrow stream. The index of a pandas frame is no column.

    Raises MesetaError if `data` has no rows in a known form.
    """
    try:
        if isinstance(data, Mapping):
            data = pa.table(dict(data))
        elif _is_frame_of(data, "pandas"):
            data = pa.Table.from_pandas(data, preserve_index=False)
        elif isinstance(data, pa.RecordBatch):
            data = pa.Table.from_batches([data])
        if isinstance(data, pa.RecordBatchReader):
            return data
        if hasattr(data, "__arrow_c_stream__"):
            return pa.RecordBatchReader.from_stream(data)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise MesetaError(f"data: {type(data).__name__} cannot be converted to Arrow: {error}") from None
    raise MesetaError(
        f"data: {type(data).__name__} has no rows; pass files, a dict of columns, or a table or frame of pyarrow, "
        "pandas, polars or DuckDB"
    )


def spool_rows(stream: pa.RecordBatchReader, folder: Path) -> Path:
    """Write rows to a Parquet file in `folder`, and return its path. The name is a hash of schema and values.

    One block of rows is in memory at a time. Equal rows give a file with the same path, size and change time.
    Raises MesetaError if there are no rows, Parquet lacks a type, or the disk has too little space, and errors of the
    stream unchanged.
    """
    schema = pa.schema([pa.field(field.name, _stored_type(field.type)) for field in stream.schema])
    digest, num_rows = hashlib.sha256(repr([(field.name, str(field.type)) for field in schema]).encode()), 0
    temporary = folder / ".rows.tmp"
    try:
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            writer = pq.ParquetWriter(temporary, schema)
        for block in _blocks(stream, schema):
            with storage_errors(folder):
                _check_free_space(folder, block.nbytes, num_rows)
                writer.write_batch(block)
            # A copy has no bytes of other rows, and zeros in place of nulls.
            digest.update(block.take(np.arange(block.num_rows)).serialize())
            num_rows += block.num_rows
        if not num_rows:
            raise MesetaError("data: there are no rows; pass at least one")
        path = folder / f"{digest.hexdigest()[:32]}.parquet"
        with storage_errors(folder):
            writer.close()
            os.utime(temporary, (0, 0))  # Preparation knows files by path, size and change time.
            move(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Context manager that raises errors of writing rows to `folder` as a MesetaError."""
    try:
        yield
    except pa.ArrowException as error:
        raise MesetaError(f"data: rows cannot be stored as Parquet: {error}") from None
    except OSError as error:
        raise MesetaError(f"{str(folder)!r} cannot be written: {error.strerror or error}; choose another") from None


def _check_free_space(folder: Path, num_bytes: int, num_rows: int) -> None:
    if (free := shutil.disk_usage(folder).free) < MIN_FREE_BYTES + num_bytes:
        raise MesetaError(
            f"data: {free / 1e9:.1f} GB are free in {str(folder.parent)!r} after {num_rows:,} rows; free space, choose "
            "another run_dir, or pass files, which are not copied"
        )


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column in a file. Categories and views become plain values."""
    if pa.types.is_dictionary(kind):
        return _stored_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def _blocks(stream: pa.RecordBatchReader, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield rows in blocks of BLOCK_ROWS, independent of the batches of the stream."""
    pending, num_pending = list[pa.RecordBatch](), 0
    for batch in stream:
        first = 0
        while first < batch.num_rows:
            pending.append(batch.slice(first, BLOCK_ROWS - num_pending))
            first += pending[-1].num_rows
            num_pending += pending[-1].num_rows
            if num_pending == BLOCK_ROWS:
                yield from _join(pending, schema)
                pending, num_pending = [], 0
    if pending:
        yield from _join(pending, schema)


def _join(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> list[pa.RecordBatch]:
    """Return one batch, or several if a column has more than 2 GB of text."""
    table = pa.Table.from_batches([_with_plain_categories(batch) for batch in batches])
    return table.cast(schema).combine_chunks().to_batches()


def _with_plain_categories(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch without string views in dictionaries, which Arrow cannot decode. Frames of polars have them."""
    columns = [
        pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(_stored_type(column.type)))
        if pa.types.is_dictionary(column.type)
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def like_rows(predictions: pa.Table, data: Any) -> Any:
    """Return predictions in the form of the rows `data`: a frame of pandas with its index, a frame of polars, a dict of
    NumPy arrays, or a pyarrow Table for everything else."""
    if isinstance(data, Mapping):
        return {name: predictions[name].to_numpy() for name in predictions.column_names}
    if _is_frame_of(data, "pandas"):
        return predictions.to_pandas().set_axis(data.index)
    if _is_frame_of(data, "polars"):
        return sys.modules["polars"].from_arrow(predictions)
    return predictions


def _is_frame_of(data: Any, package: str) -> bool:
    """Whether `data` is a frame of a package, without importing it."""
    module = sys.modules.get(package)
    return module is not None and isinstance(data, module.DataFrame)
