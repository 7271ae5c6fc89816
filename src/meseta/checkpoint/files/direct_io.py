"""Files of many megabytes, written and read through one buffer per thread and past the page cache.

Copying through the page cache costs a core several times what a direct transfer does, and on few cores that time is
missing for the checksums. The buffers live as long as their thread: new memory costs more than what is done with it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal, TypeVar

from meseta.checkpoint.failures import damaged_file_error, wrap_read_errors, wrap_write_errors
from meseta.checkpoint.files.rate_limit import WriteRateLimiter
from meseta.machine.files import open_regular
from meseta.machine.remote import Location, RemotePath

PAGE_BYTES = 4096
"""Memory, positions and lengths of a direct transfer are multiples of this."""
MIN_DIRECT_BYTES = 1 << 20
"""Smaller files go through the page cache: a direct transfer waits for the disk."""
MAX_TRANSFER_BYTES = 1 << 20
"""Transferred at a time: more would be no faster, and rows that a batch waits for would wait behind it."""
COPY_CHUNK_BYTES = 16 << 20
"""Copied at a time from one store to another."""
BufferName = Literal["file", "block"]
"""What memory is for: the file that is written or read at the moment, or a block that files are put together in."""
T = TypeVar("T")
_thread_buffers = threading.local()


def scratch_buffer(num_bytes: int, use: BufferName = "file") -> memoryview:
    """Writable memory of this thread, of `num_bytes` rounded up to whole pages; the next call for this use gives it
    again."""
    size = -(-max(num_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
    buffer: mmap.mmap | None = getattr(_thread_buffers, use, None)
    if buffer is None or len(buffer) < size:
        buffer = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        setattr(_thread_buffers, use, buffer)
    return memoryview(buffer)[:size]


def write_direct(path: Location, content: memoryview, num_bytes: int, rate: WriteRateLimiter | None = None) -> None:
    """Make a file of the first `num_bytes` of `content`, which `scratch` gave; raises OSError. At a URL it must be new.

    It is not synced: a sync per file waits for the journal, time and again, and `sync` of all of them waits once. What
    a `rate` lets through is on its way to the disk when the next piece begins, so that none piles up in the page cache.
    """

    if isinstance(path, RemotePath):
        path.create(content[:num_bytes])
        return

    def write(direct: int) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | direct, 0o666)
        try:
            whole = _round_down_to_page(num_bytes) if direct else 0
            done = 0
            while done < whole:
                start = _round_down_to_page(done)
                piece = content[start : min(start + _round_down_to_page(_chunk_bytes(rate, MAX_TRANSFER_BYTES)), whole)]
                with _throttle(rate, len(piece)):
                    count = os.pwrite(descriptor, piece, start)
                if start + count <= done:
                    raise OSError(errno.EINVAL, "a direct transfer ended inside a page")
                done = start + count
            # The rest of the last page goes through the page cache. To write all of the page and cut the file to its
            # length would read the page back, behind all that the disk is still to write.
            if direct:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~direct)
            _write_buffered(descriptor, content[:num_bytes], done, rate)
        finally:
            os.close(descriptor)

    _with_direct_io(num_bytes, write)


def write_buffered(path: Location, content: bytes | memoryview, rate: WriteRateLimiter | None = None) -> None:
    """Make a file of any memory, through the page cache, and sync it; raises OSError. At a URL it must be new."""
    if isinstance(path, RemotePath):
        path.create(content)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_buffered(descriptor, memoryview(content), 0, rate)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_buffered(descriptor: int, content: memoryview, done: int, rate: WriteRateLimiter | None) -> None:
    """Write what follows the first `done` bytes."""
    while done < len(content):
        piece = content[done : done + _chunk_bytes(rate, len(content))]
        with _throttle(rate, len(piece)):
            done += os.pwrite(descriptor, piece, done)
            if rate is not None:
                os.fdatasync(descriptor)


def _chunk_bytes(rate: WriteRateLimiter | None, most: int) -> int:
    return most if rate is None else rate.chunk_bytes(most)


def _throttle(rate: WriteRateLimiter | None, num_bytes: int) -> AbstractContextManager[None]:
    return nullcontext() if rate is None else rate.throttle(num_bytes)


def read_direct(path: Location, num_bytes: int, use: BufferName = "file") -> memoryview:
    """The first `num_bytes` of a file, fewer when it ends before, in this thread's `scratch`; raises OSError."""
    if isinstance(path, RemotePath):
        return memoryview(path.read(0, num_bytes))
    content = scratch_buffer(num_bytes, use)

    def read(direct: int) -> int:
        descriptor = open_regular(path, direct)
        try:
            done = 0
            while done < num_bytes:
                start = _round_down_to_page(done) if direct else done
                if (
                    start + (count := os.preadv(descriptor, [content[start : start + MAX_TRANSFER_BYTES]], start))
                    <= done
                ):
                    break
                done = start + count
            return done
        finally:
            os.close(descriptor)

    return content[: min(_with_direct_io(num_bytes, read), num_bytes)]


def copy_file(source: Location, target: Location, num_bytes: int) -> None:
    """Make a file of another one, of `num_bytes`. Raises OSError where the target cannot be written, DamagedCheckpoint
    where the source is no regular file or has another size: of a stranger's, no more is read. Raises StorageError where
    the source cannot be read."""
    content = _read_checkpoint_chunks(source, num_bytes + 1)
    if isinstance(target, RemotePath):
        whole = b"".join(content)
        _check_copied_bytes(source, num_bytes, len(whole))
        with wrap_write_errors(target):
            target.create(whole)
        return
    with target.open("xb") as file:
        copied = sum(file.write(part) for part in content)
        _check_copied_bytes(source, num_bytes, copied)
        os.fsync(file.fileno())


def read_chunks(source: Location, start: int, stop: int) -> Iterator[bytes]:
    """Yield bytes start..stop-1 of a file, fewer if it ends before, COPY_CHUNK_BYTES at a time. Raises OSError."""
    if isinstance(source, Path):
        with os.fdopen(open_regular(source), "rb") as file:
            file.seek(start)
            while start < stop and (part := file.read(min(stop - start, COPY_CHUNK_BYTES))):
                yield part
                start += len(part)
        return
    stop = min(source.num_bytes(), stop)
    while start < stop and (part := source.read(start, min(start + COPY_CHUNK_BYTES, stop))):
        yield part
        start += len(part)


def _read_checkpoint_chunks(source: Location, num_bytes: int) -> Iterator[bytes]:
    """`parts` from the beginning, with the errors of reading a checkpoint."""
    with wrap_read_errors(source):
        yield from read_chunks(source, 0, num_bytes)


def _check_copied_bytes(source: Location, num_bytes: int, copied: int) -> None:
    if copied != num_bytes:
        has = f"has {copied}" if copied < num_bytes else "goes on"
        raise damaged_file_error(source, f"must have {num_bytes} bytes, but {has}")


def _round_down_to_page(done: int) -> int:
    """Where to go on after a transfer that was cut short inside a page: at its beginning."""
    return done // PAGE_BYTES * PAGE_BYTES


def _with_direct_io(num_bytes: int, transfer: Callable[[int], T]) -> T:
    """Call with the flag for direct transfers; without it for small files, and where the file system knows none."""
    if num_bytes >= MIN_DIRECT_BYTES:
        try:
            return transfer(getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return transfer(0)
