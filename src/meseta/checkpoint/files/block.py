"""Arrow IPC files with one record batch, which has all rows of a block or some of them."""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file
from torch import Tensor

from meseta.checkpoint.failures import (
    check_checksum,
    damaged_file_error,
    locate_file,
    read_with_retry,
    wrap_write_errors,
)
from meseta.checkpoint.files import digest
from meseta.checkpoint.files.direct_io import (
    BufferName,
    WriteRateLimiter,
    read_direct,
    scratch_buffer,
    write_buffered,
    write_direct,
)
from meseta.checkpoint.files.layout import ID, BlockSchema
from meseta.checkpoint.files.paths import is_block_path
from meseta.checkpoint.files.quantization import StoredRows, decode_rows, quantized_schema
from meseta.errors import error_summary, format_value
from meseta.ops.memory import empty
from meseta.spec import MesetaError
from meseta.system.files import has_control_characters, read_bounded, sync
from meseta.system.remote import Location, RemotePath

# Field numbers in Arrow's flatbuffer tables Message and RecordBatch.
_MESSAGE_HEADER, _BATCH_COMPRESSION = 2, 3
# Chunks that are copied and hashed at a time fit in the processor's cache.
_HASH_CHUNK_BYTES = 1 << 19
Values = dict[str, np.ndarray]
"""Columns of a block by name, of shape [rows, D], or [rows] for columns with one value per row."""


def write_block(
    root: Location, path: str, schema: BlockSchema, first_row: int, values: Values, rate: WriteRateLimiter | None = None
) -> dict[str, Any]:
    """Write a complete block without syncing it, and return its manifest entry. Raises MesetaError if writing fails."""
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
    """Write some rows of the block that starts at `first_row`, and return the file's entry in the manifest.

    `ids` is an ascending uint32 array of shape [n], and counts from `first_row`. The checksum covers the ids and the
    columns as stored. Raises MesetaError if writing fails. The file is not synced.
    """
    columns = _contiguous_columns(schema, rows.values)
    content, checksum = _build_arrow_file(
        quantized_schema(schema, rows.formats), schema, ids, columns, hashed=[ids, *columns]
    )
    entry = _write(root, path, content, rate, first_row=first_row, num_rows=len(ids), checksum=checksum)
    return {**entry, "codes": rows.formats, "error": rows.errors} if rows.formats else entry


def _write(
    root: Location, path: str, content: memoryview, rate: WriteRateLimiter | None, **known: Any
) -> dict[str, Any]:
    # `content` is this thread's scratch buffer.
    with wrap_write_errors(root / path):
        write_direct(root / path, content, len(content), rate)
    checksum = known.pop("checksum")  # The order of keys is part of the format.
    return {"path": path, **known, "num_bytes": len(content), "checksum": checksum}


def sync_block(root: Location, path: str) -> None:
    """Sync a written block to disk. At a URL there is nothing to do. Raises MesetaError if syncing fails."""
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
    """Return (file with one record batch in this thread's scratch buffer, checksum of `hashed`, its last columns)."""
    arrays = [pa.array(ids)]
    for column, field, values in zip(schema.columns, list(fields)[1:], columns, strict=True):
        flat = pa.array(values.reshape(-1))  # Shares memory, so that all bit patterns are preserved.
        arrays.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type) if column.kind == "element" else flat)
    batch = pa.RecordBatch.from_arrays(arrays, schema=fields)
    content = scratch_buffer(pa.ipc.get_record_batch_size(batch) + schema.max_frame_bytes)
    sink = _HashingSink(content, hashed)
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return content[: sink.tell()], sink.checksum()


# Hashing after the copy would load the values from memory again, which takes a third of the time of hashing.
class _HashingSink(io.RawIOBase):
    """Memory file that Arrow writes to. It hashes values while it copies them."""

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
        # Arrow writes metadata too, which is not hashed.
        if is_next:
            self._pending_buffers.pop(0)
        return len(source)

    def checksum(self) -> str:
        """Return the checksum of all values. If Arrow has copied a buffer before it wrote it, all values are hashed
        again."""
        return digest.hash_arrays(self._hashed_arrays) if self._pending_buffers else self._hash.hexdigest()


def read_block(root: Location, schema: BlockSchema, entry: Mapping[str, Any], buffer: BufferName = "file") -> Values:
    """Read a complete block and check it against its entry in the manifest.

    The next call of this thread for the same `buffer` overwrites the values. They are writable unless they come from a
    URL.

    Raises DamagedCheckpoint if the file is missing, truncated, not an Arrow file, or has other columns, rows or content
    than expected. Raises StorageError if it cannot be read.
    """
    path = locate_file(root, entry)
    memory = read_with_retry(root, path, lambda: read_direct(path, entry["num_bytes"], buffer))
    ids, values = _parse(path, memory, schema.to_arrow(), schema, entry)
    first, stop = entry["first_row"], entry["first_row"] + entry["num_rows"]
    if not np.array_equal(ids, np.arange(first, stop)):
        raise damaged_file_error(path, f"must have the rows {first}..{stop - 1} in order, but has other ids")
    check_checksum(path, entry["checksum"], digest.hash_arrays(values[column.name] for column in schema.columns))
    return values


def read_rows(
    root: Location, schema: BlockSchema, entry: Mapping[str, Any], block_rows: int, buffer: BufferName = "file"
) -> tuple[np.ndarray, Values]:
    """Read some rows of a block with `block_rows` rows. Return their ids, uint32 of shape [n] in ascending order, and
    values.

    The next call of this thread for the same `buffer` may overwrite the result. Raises the errors of `read_block`.
    """
    path, codes = locate_file(root, entry), entry.get("codes") or {}
    memory = read_with_retry(root, path, lambda: read_direct(path, entry["num_bytes"], buffer))
    ids, values = _parse(path, memory, quantized_schema(schema, codes), schema, entry)
    if not (ids[1:] > ids[:-1]).all() or ids[-1] >= block_rows:
        raise damaged_file_error(path, f"must have ascending ids below {block_rows}, but has other ids")
    checksum = digest.hash_arrays([ids, *(values[column.name] for column in schema.columns)])
    check_checksum(path, entry["checksum"], checksum)
    return ids, decode_rows(schema, values, codes)


def _parse(
    path: Location, memory: memoryview, fields: pa.Schema, schema: BlockSchema, entry: Mapping[str, Any]
) -> tuple[np.ndarray, Values]:
    """Return (ids, values) of a file. Its number of rows must be that of its entry."""
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
        raise damaged_file_error(path, f"is not a complete Arrow file ({error_summary(error)})") from None


def _read_batch_message(path: Location, content: pa.Buffer) -> pa.Message:
    # The encoded record batch of an Arrow file follows the magic number and the schema.
    messages = pa.ipc.MessageReader.open_stream(content[8:])
    try:
        messages.read_next_message()
        message = messages.read_next_message()
    except StopIteration:
        raise damaged_file_error(path, "is not a complete Arrow file (it has no record batch)") from None
    metadata = memoryview(message.metadata)

    def number(kind: str, at: int) -> int:
        return int(struct.unpack_from(f"<{kind}", metadata, at)[0])

    def field(table: int, number_of_field: int) -> int:
        places = table - number("i", table)
        at = 4 + 2 * number_of_field
        offset = number("H", places + at) if at < number("H", places) else 0
        return table + offset if offset else 0

    header = field(number("I", 0), _MESSAGE_HEADER)
    # Decompression allocates as much memory as the file requests. Blocks are never written compressed.
    if field(header + number("I", header), _BATCH_COMPRESSION):
        raise damaged_file_error(path, "must not be compressed, but is")
    return message


def _check_schema(path: Location, fields: pa.Schema, stored: pa.Schema) -> None:
    is_coded = any(b"codes" in (field.metadata or {}) for field in fields)
    if not stored.equals(fields, check_metadata=is_coded):
        expected, actual = (", ".join(f"{f.name} {f.type}" for f in s) for s in (fields, stored))
        raise damaged_file_error(path, f"must have the columns [{expected}], but has {format_value(f'[{actual}]')}")


def _check_num_rows(path: Location, batch: pa.RecordBatch, num_rows: int, num_batches: int) -> None:
    if num_batches != 1 or batch.num_rows != num_rows:
        actual = f"{num_batches} record batches, the first of {batch.num_rows} rows"
        raise damaged_file_error(path, f"must have 1 record batch of {num_rows} rows, but has {actual}")
    if any(array.null_count for array in batch.columns):
        raise damaged_file_error(path, "must have a value everywhere, but some are missing")


def _to_numpy(array: pa.Array, memory: memoryview) -> np.ndarray:
    is_list = pa.types.is_fixed_size_list(array.type)
    values: np.ndarray = (array.flatten() if is_list else array).to_numpy()
    # Arrow's arrays are read-only. A view of the buffer may be writable.
    if values.nbytes:
        place = values.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data
        values = np.frombuffer(memory, values.dtype, len(values), place)
    return values.reshape(len(array), array.type.list_size) if is_list else values


# Example of a chain:
#
# block-00003.arrow of step 500     all rows of the block
# rows-00003.arrow of step 600      rows changed since then
# rows-00003.arrow of step 700      rows changed since then; the newest version of each row is valid
#
# The first file of a block has all its rows. If they are quantized, its name also starts with rows-. A full checkpoint
# without quantization has one block-... file per block.
FileEntry = Mapping[str, Any]


def group_files_by_block(table: Mapping[str, Any]) -> list[list[FileEntry]]:
    """Return the files of each block, oldest first, from a table's entry in a manifest."""
    return [list(files) for _, files in groupby(table["blocks"], key=lambda entry: entry["first_row"])]


def read_chain(
    root: Location,
    schema: BlockSchema,
    files: Sequence[FileEntry],
    is_changed: NDArray[np.bool_] | None = None,
    *,
    copy: bool = False,
) -> Values:
    """Read all rows of a block from its files, which are ordered from oldest to newest.

    Without `copy`, the next call of this thread may overwrite the result. If `is_changed` of shape [rows] is passed, it
    is set to true for each row in a file after the first. Raises the errors of `read_block`.
    """
    block = _read_full_file(root, schema, files[0])
    num_rows = files[0]["num_rows"]
    # Values read from a URL are read-only, but later files overwrite rows.
    if copy or (len(files) > 1 and not all(value.flags.writeable for value in block.values())):
        values = block
        block = {
            column.name: allocate_transient(schema.shape(column, num_rows), column.stored_dtype)
            for column in schema.columns
        }
        for name, value in values.items():
            np.copyto(block[name], value)
    for entry in files[1:]:
        ids, some = read_rows(root, schema, entry, num_rows)
        if is_changed is not None:
            is_changed[ids] = True
        for name, value in some.items():
            block[name][ids] = value
    return block


def _read_full_file(root: Location, schema: BlockSchema, entry: FileEntry) -> Values:
    if is_block_path(entry["path"]):
        return read_block(root, schema, entry, buffer="block")
    # The ids are not needed: num_rows ascending ids below num_rows are all rows.
    return read_rows(root, schema, entry, entry["num_rows"], buffer="block")[1]


def allocate_transient(shape: tuple[int, ...], stored: str) -> np.ndarray:
    """Allocate an array outside the caching allocator, so that its memory is returned to the OS when it is freed."""
    array: np.ndarray = empty(shape, getattr(torch, stored), keep=False).numpy()
    return array


DenseFileName = Literal["dense.safetensors"]
DENSE_PATH: DenseFileName = "dense.safetensors"
PrefetchedFileName = Literal["carried.safetensors"]
PREFETCHED_PATH: PrefetchedFileName = "carried.safetensors"
# Parsing the header with names, types and shapes takes a multiple of its size in memory.
_MAX_HEADER_BYTES = 16 << 20


def write_tensors(
    root: Location,
    name: DenseFileName | PrefetchedFileName,
    tensors: Mapping[str, Tensor],
    rate: WriteRateLimiter | None = None,
) -> dict[str, Any]:
    """Write and sync a file of tensors, and return its entry in the manifest. Raises MesetaError if writing fails."""
    # The format rejects tensors that share memory, so clone all.
    clones = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}
    path = root / name
    if isinstance(path, RemotePath):
        content = save(clones)
        with wrap_write_errors(path):
            path.create(content)
        return {"path": name, "num_bytes": len(content), "checksum": digest.hash_tensors(clones)}
    try:
        if rate is None:
            save_file(clones, path)
            sync(path)
        else:  # The library cannot limit the rate. Serializing first takes more memory.
            write_buffered(path, save(clones), rate)
        num_bytes = path.stat().st_size
    except (SafetensorError, OSError) as error:
        raise MesetaError(f"checkpoint file {str(path)!r} cannot be written ({error}); make room there") from None
    return {"path": name, "num_bytes": num_bytes, "checksum": digest.hash_tensors(clones)}


def read_tensors(root: Location, entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the tensors of a file by name, on the CPU. Raises DamagedCheckpoint if it is missing, truncated or changed,
    StorageError if unreadable."""
    path = locate_file(root, entry)
    try:
        tensors = _parse_tensors(read_with_retry(root, path, lambda: _read_content(path, entry["num_bytes"])))
    except MesetaError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError, MemoryError) as error:
        raise damaged_file_error(path, f"is not a whole safetensors file ({error_summary(error)})") from None
    if any(has_control_characters(name) for name in tensors):
        raise damaged_file_error(path, "has a tensor whose name has control characters")
    check_checksum(path, entry["checksum"], digest.hash_tensors(tensors))
    return tensors


def check_header(path: Path) -> None:
    """Raise ValueError if the header of a file is too long."""
    with path.open("rb") as file:
        _check_header_bytes(file.read(8))


def _check_header_bytes(begin: bytes) -> None:
    header_bytes = int.from_bytes(begin, "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise ValueError(f"its header has {header_bytes:,} bytes, more than the limit of {_MAX_HEADER_BYTES:,}")


def _read_content(path: Location, num_bytes: int) -> bytes:
    # With a memory map, an unreadable page would kill the process.
    return read_bounded(path, num_bytes) if isinstance(path, Path) else path.read(0, num_bytes)


def _parse_tensors(content: bytes) -> dict[str, Tensor]:
    _check_header_bytes(content[:8])
    # `load` returns tensors in an order that differs between processes, but ranks exchange them one by one.
    return dict(sorted(load(content).items()))
