"""One file of rows: an Arrow IPC file with one record batch, of all rows of a block or of some."""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from meseta.checkpoint.failures import (
    check_checksum,
    damaged_file_error,
    locate_file,
    read_with_retry,
    wrap_write_errors,
)
from meseta.checkpoint.files import digest
from meseta.checkpoint.files.direct_io import BufferName, read_direct, scratch_buffer, write_direct
from meseta.checkpoint.files.layout import ID, BlockSchema
from meseta.checkpoint.files.quantization import StoredRows, decode_rows, quantized_schema
from meseta.checkpoint.files.rate_limit import WriteRateLimiter
from meseta.errors import error_summary, format_value
from meseta.machine.files import sync
from meseta.machine.remote import Location
from meseta.spec import MesetaError

_MESSAGE_HEADER, _BATCH_COMPRESSION = 2, 3
"""Numbers of these fields in Arrow's tables Message and RecordBatch."""
_HASH_CHUNK_BYTES = 1 << 19
"""Values that are copied and summed at a time: they stay in the processor's cache."""
Values = dict[str, np.ndarray]
"""Columns of a block by name: [rows, D], or [rows] for what a row has one of."""


def write_block(
    root: Location, path: str, schema: BlockSchema, first_row: int, values: Values, rate: WriteRateLimiter | None = None
) -> dict[str, Any]:
    """Write one block, for `sync_block`; returns its entry in the manifest. Raises MesetaError, as on a full disk."""
    num_rows = len(next(iter(values.values())))
    ids, columns = np.arange(first_row, first_row + num_rows, dtype=np.int64), _contiguous_columns(schema, values)
    content, checksum = _build_arrow_file(schema.to_arrow(), schema, ids, columns, hashed=columns)
    return _write(root, path, content, rate, first_row=first_row, num_rows=num_rows, checksum=checksum)


def write_rows(
    root: Location,
    path: str,
    schema: BlockSchema,
    first_row: int,
    ids: np.ndarray,
    rows: StoredRows,
    rate: WriteRateLimiter | None = None,
) -> dict[str, Any]:
    """Write some rows of a block that begins at `first_row`: `ids`, uint32 [n] ascending, count from there. As
    `write_block`; the checksum is over the ids too, and the columns as they are stored."""
    columns = _contiguous_columns(schema, rows.values)
    content, checksum = _build_arrow_file(
        quantized_schema(schema, rows.formats), schema, ids, columns, hashed=[ids, *columns]
    )
    entry = _write(root, path, content, rate, first_row=first_row, num_rows=len(ids), checksum=checksum)
    return {**entry, "codes": rows.formats, "error": rows.errors} if rows.formats else entry


def _write(
    root: Location, path: str, content: memoryview, rate: WriteRateLimiter | None, **known: Any
) -> dict[str, Any]:
    """Write what `scratch` holds; its entry in the manifest, in the order that entries have always had."""
    with wrap_write_errors(root / path):
        write_direct(root / path, content, len(content), rate)
    checksum = known.pop("checksum")
    return {"path": path, **known, "num_bytes": len(content), "checksum": checksum}


def sync_block(root: Location, path: str) -> None:
    """Wait until a block is on the disk, which at a URL it is once it is written; raises MesetaError."""
    if isinstance(root, Path):
        with wrap_write_errors(root / path):
            sync(root / path)


def _contiguous_columns(schema: BlockSchema, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    return [np.ascontiguousarray(values[column.name]) for column in schema.columns]


def _build_arrow_file(
    fields: pa.Schema,
    schema: BlockSchema,
    ids: np.ndarray,
    columns: Sequence[np.ndarray],
    *,
    hashed: Sequence[np.ndarray],
) -> tuple[memoryview, str]:
    """A file of one record batch of these fields, in this thread's `scratch`, and the checksum of `hashed`, which are
    the last of its columns."""
    arrays = [pa.array(ids)]
    for column, field, values in zip(schema.columns, list(fields)[1:], columns, strict=True):
        flat = pa.array(values.reshape(-1))  # shares memory, so every bit pattern survives
        arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type) if column.kind == "element" else flat)
    batch = pa.RecordBatch.from_arrays(arrays, schema=fields)
    content = scratch_buffer(pa.ipc.get_record_batch_size(batch) + schema.max_frame_bytes)
    sink = _HashingSink(content, hashed)
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return content[: sink.tell()], sink.checksum()


class _HashingSink(io.RawIOBase):
    """Where Arrow writes a file to memory. Values are summed as they are copied: from memory they would come once more,
    which takes a third of the time of the sum."""

    def __init__(self, content: memoryview, summed: Sequence[np.ndarray]) -> None:
        self._buffer = np.frombuffer(content, np.uint8)
        self._size = 0
        self._hashed_arrays = summed
        self._hash = hashlib.sha256()
        self._pending_buffers = [(array.ctypes.data, array.nbytes) for array in summed if array.nbytes]

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, written: Any) -> int:
        """Bytes around the values, or a buffer of values where they lie."""
        values = memoryview(written)
        if not values.nbytes:
            return 0
        source = np.frombuffer(values, np.uint8)
        is_next = self._pending_buffers[:1] == [(source.ctypes.data, len(source))]
        for at in range(0, len(source), _HASH_CHUNK_BYTES):
            piece = source[at : at + _HASH_CHUNK_BYTES]
            target = self._buffer[self._size :][: len(piece)]
            np.copyto(target, piece)
            if is_next:
                self._hash.update(target.data)
            self._size += len(piece)
        if is_next:
            self._pending_buffers.pop(0)
        return len(source)

    def checksum(self) -> str:
        """Of all values; summed anew where Arrow has not written them from where they lie."""
        return digest.hash_arrays(self._hashed_arrays) if self._pending_buffers else self._hash.hexdigest()


def read_block(root: Location, schema: BlockSchema, entry: Mapping[str, Any], buffer: BufferName = "file") -> Values:
    """Read one block and check everything that its entry in the manifest says.

    The values lie in memory that this thread's next call for this `buffer` uses again: to keep them, copy them. They
    may be written to, where they are not from a URL.
    Raises DamagedCheckpoint, naming the file, when it is missing, truncated, no Arrow file, has other columns or rows
    than expected, or other content than its checksum says; StorageError when it cannot be read.
    """
    path = locate_file(root, entry)
    memory = read_with_retry(root, path, lambda: read_direct(path, entry["num_bytes"], buffer))
    ids, values = _parse(path, memory, schema.to_arrow(), schema, entry)
    first, stop = entry["first_row"], entry["first_row"] + entry["num_rows"]
    if not np.array_equal(ids, np.arange(first, stop)):
        raise damaged_file_error(path, f"must hold the rows {first}..{stop - 1} in order, but its ids are others")
    check_checksum(path, entry["checksum"], digest.hash_arrays(values[column.name] for column in schema.columns))
    return values


def read_rows(
    root: Location, schema: BlockSchema, entry: Mapping[str, Any], block_rows: int, buffer: BufferName = "file"
) -> tuple[np.ndarray, Values]:
    """Some rows of a block of `block_rows`: ids, uint32 [n] ascending, and their values; checked, and kept, as those of
    `read_block` are."""
    path, codes = locate_file(root, entry), entry.get("codes") or {}
    memory = read_with_retry(root, path, lambda: read_direct(path, entry["num_bytes"], buffer))
    ids, values = _parse(path, memory, quantized_schema(schema, codes), schema, entry)
    if not (ids[1:] > ids[:-1]).all() or ids[-1] >= block_rows:
        raise damaged_file_error(path, f"must have ids that rise and are below {block_rows}, but its ids are others")
    checksum = digest.hash_arrays([ids, *(values[column.name] for column in schema.columns)])
    check_checksum(path, entry["checksum"], checksum)
    return ids, decode_rows(schema, values, codes)


def _parse(
    path: Location, memory: memoryview, fields: pa.Schema, schema: BlockSchema, entry: Mapping[str, Any]
) -> tuple[np.ndarray, Values]:
    """Ids and values in the content of a file with these fields and as many rows as its entry says."""
    try:
        content = pa.py_buffer(memory)
        with pa.ipc.open_file(pa.BufferReader(content)) as reader:
            num_batches = reader.num_record_batches
            _check_schema(path, fields, reader.schema)
            batch = pa.ipc.read_record_batch(_read_batch_message(path, content), reader.schema)
        batch.validate()
        _check_num_rows(path, batch, entry["num_rows"], num_batches)
        values = {column.name: _to_numpy(batch.column(column.name), memory) for column in schema.columns}
        return batch.column(ID).to_numpy(), values
    except MesetaError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError, struct.error) as error:
        raise damaged_file_error(path, f"is not a whole Arrow file ({error_summary(error)})") from None


def _read_batch_message(path: Location, content: pa.Buffer) -> pa.Message:
    """The record batch of an Arrow file, not decoded: it lies behind the magic number and the schema.

    Raises MesetaError for a compressed one, which takes as much memory as it says; nothing here writes such.
    """
    messages = pa.ipc.MessageReader.open_stream(content[8:])
    try:
        messages.read_next_message()
        message = messages.read_next_message()
    except StopIteration:
        raise damaged_file_error(path, "is not a whole Arrow file (it has no record batch)") from None
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
        raise damaged_file_error(path, "must not be compressed, but is")
    return message


def _check_schema(path: Location, fields: pa.Schema, stored: pa.Schema) -> None:
    """Raise MesetaError unless names and types of the columns are those expected."""
    is_coded = any(b"codes" in (field.metadata or {}) for field in fields)
    if not stored.equals(fields, check_metadata=is_coded):
        expected, found = (", ".join(f"{f.name} {f.type}" for f in s) for s in (fields, stored))
        raise damaged_file_error(path, f"must have the columns [{expected}], but has {format_value(f'[{found}]')}")


def _check_num_rows(path: Location, batch: pa.RecordBatch, num_rows: int, num_batches: int) -> None:
    """Raise MesetaError unless the number of rows is that expected, and each has all its values."""
    if num_batches != 1 or batch.num_rows != num_rows:
        found = f"{num_batches} record batches, the first of {batch.num_rows} rows"
        raise damaged_file_error(path, f"must have 1 record batch of {num_rows} rows, but has {found}")
    if any(array.null_count for array in batch.columns):
        raise damaged_file_error(path, "must have a value everywhere, but some are missing")


def _to_numpy(array: pa.Array, memory: memoryview) -> np.ndarray:
    """The values of a column as [rows, D] or [rows], where they lie in the memory of a file: Arrow's own may not
    be written to."""
    is_list = pa.types.is_fixed_size_list(array.type)
    values: np.ndarray = (array.flatten() if is_list else array).to_numpy()
    if values.nbytes:
        place = values.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data
        values = np.frombuffer(memory, values.dtype, len(values), place)
    return values.reshape(len(array), array.type.list_size) if is_list else values
