"""One block file: an Arrow IPC file with one record batch of consecutive logical rows."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from meseta.checkpoint import digest
from meseta.checkpoint.failures import broken_file, check_checksum, file_of, writing
from meseta.checkpoint.layout import ID, BlockSchema
from meseta.checkpoint.raw import read_whole, scratch, write_whole
from meseta.errors import one_line, shown
from meseta.machine.files import sync
from meseta.spec import MesetaError

_MESSAGE_HEADER, _BATCH_COMPRESSION = 2, 3
"""Numbers of these fields in Arrow's tables Message and RecordBatch."""
Values = dict[str, np.ndarray]
"""Columns of a block by name: [rows, D], or [rows] for what a row has one of."""


def write_block(root: Path, path: str, schema: BlockSchema, first_row: int, values: Values) -> dict[str, Any]:
    """Write one block, for `sync_block`; returns its entry in the manifest. Raises MesetaError, as on a full disk."""
    num_rows = len(next(iter(values.values())))
    arrays = [pa.array(np.arange(first_row, first_row + num_rows, dtype=np.int64))]
    for column, field in zip(schema.columns, list(schema.to_arrow())[1:], strict=True):
        flat = pa.array(values[column.name].reshape(-1))  # shares memory, so every bit pattern survives
        arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type) if column.kind == "element" else flat)
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow())
    with writing(root / path):
        num_bytes = _write_arrow(root / path, batch)
    return {
        "path": path,
        "first_row": first_row,
        "num_rows": num_rows,
        "num_bytes": num_bytes,
        "checksum": digest.of_arrays(values[column.name] for column in schema.columns),
    }


def sync_block(root: Path, path: str) -> None:
    """Wait until a block is on the disk; raises MesetaError."""
    with writing(root / path):
        sync(root / path)


def _write_arrow(path: Path, batch: pa.RecordBatch) -> int:
    """One record batch as a file; returns its bytes. Raises OSError."""
    schema_bytes: int = batch.schema.serialize().size  # It stands at the beginning, and in the footer again.
    content = scratch(pa.ipc.get_record_batch_size(batch) + 2 * schema_bytes + 4096)
    sink = pa.FixedSizeBufferWriter(pa.py_buffer(content))
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    num_bytes: int = sink.tell()
    write_whole(path, content, num_bytes)
    return num_bytes


def read_block(root: Path, schema: BlockSchema, entry: Mapping[str, Any]) -> Values:
    """Read one block and check everything that its entry in the manifest says.

    The values lie in memory that this thread's next call uses again: to keep them, copy them.
    Raises MesetaError, naming the file, when it is missing, truncated, no Arrow file, has other columns or rows than
    expected, or other content than its checksum says.
    """
    path = file_of(root, entry)
    try:
        content = pa.py_buffer(read_whole(path, entry["num_bytes"]))
        with pa.ipc.open_file(pa.BufferReader(content)) as reader:
            num_batches = reader.num_record_batches
            _check_schema(path, schema, reader.schema)
            batch = pa.ipc.read_record_batch(_batch_message(path, content), reader.schema)
        batch.validate()
        _check_rows(path, batch, entry, num_batches)
        values = {c.name: _to_numpy(batch.column(c.name), schema.shape(c, batch.num_rows)) for c in schema.columns}
    except MesetaError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError, struct.error) as error:
        raise broken_file(path, f"is not a whole Arrow file ({one_line(error)})") from None
    check_checksum(path, entry["checksum"], digest.of_arrays(values[column.name] for column in schema.columns))
    return values


def _batch_message(path: Path, content: pa.Buffer) -> pa.Message:
    """The record batch of an Arrow file, not decoded: it lies behind the magic number and the schema.

    Raises MesetaError for a compressed one, which takes as much memory as it says; nothing here writes such.
    """
    messages = pa.ipc.MessageReader.open_stream(content[8:])
    try:
        messages.read_next_message()
        message = messages.read_next_message()
    except StopIteration:
        raise broken_file(path, "is not a whole Arrow file (it has no record batch)") from None
    metadata = memoryview(message.metadata)

    def number(kind: str, at: int) -> int:
        return int(struct.unpack_from(f"<{kind}", metadata, at)[0])

    def field(table: int, number_of_field: int) -> int:
        """Where a field of a flatbuffer's table is; 0 where it is absent."""
        places = table - number("i", table)
        at = 4 + 2 * number_of_field
        offset = number("H", places + at) if at < number("H", places) else 0
        return table + offset if offset else 0

    header = field(number("I", 0), _MESSAGE_HEADER)
    if field(header + number("I", header), _BATCH_COMPRESSION):
        raise broken_file(path, "must not be compressed, but is")
    return message


def _check_schema(path: Path, schema: BlockSchema, stored: pa.Schema) -> None:
    """Raise MesetaError unless names and types of the columns are those expected."""
    if not stored.equals(schema.to_arrow()):
        expected, found = (", ".join(f"{f.name} {f.type}" for f in s) for s in (schema.to_arrow(), stored))
        raise broken_file(path, f"must have the columns [{expected}], but has {shown(f'[{found}]')}")


def _check_rows(path: Path, batch: pa.RecordBatch, entry: Mapping[str, Any], num_batches: int) -> None:
    """Raise MesetaError unless ids and the number of rows are those expected."""
    first, num_rows = entry["first_row"], entry["num_rows"]
    if num_batches != 1 or batch.num_rows != num_rows:
        found = f"{num_batches} record batches, the first of {batch.num_rows} rows"
        raise broken_file(path, f"must have 1 record batch of {num_rows} rows, but has {found}")
    if any(array.null_count for array in batch.columns):
        raise broken_file(path, "must have a value everywhere, but some are missing")
    if not np.array_equal(batch.column(ID).to_numpy(), np.arange(first, first + num_rows)):
        raise broken_file(path, f"must hold the rows {first}..{first + num_rows - 1} in order, but its ids are others")


def _to_numpy(array: pa.Array, shape: tuple[int, ...]) -> np.ndarray:
    """The values of a column as [rows, D] or [rows], without a copy."""
    return (array.flatten() if pa.types.is_fixed_size_list(array.type) else array).to_numpy().reshape(shape)
