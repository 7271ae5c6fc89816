"""Limit of the write rate of saves, over all ranks of a run."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal, TypeVar

from meseta.checkpoint.failures import damaged_file_error, wrap_read_errors, wrap_write_errors
from meseta.errors import MesetaError
from meseta.system.files import open_regular
from meseta.system.remote import Location, RemotePath

# A rank writes one chunk at a time, and starts the next one after the time that the last one takes at 0.95 of the
# rank's share. In any second, all chunks except the first and the last therefore have at most 0.95 of the share, even
# if a write is late. If the shares change within the second, the total is at most 0.95 + 4/128 of the limit.
CHUNKS_PER_S = 128
"""Number of chunks of each rank per second."""
# Share of the limit that the distances of chunks allow. The rest is for the first and last chunk of a second.
TARGET_SHARE = 0.95
# Minimum share of each rank. At this rate, chunks are whole pages, and a block takes half a minute.
MIN_BYTES_PER_S = 1_000_000


class WriteRateLimiter:
    """Thread-safe limiter of one rank's writes, so that all ranks write at most `max_bytes_per_s` in any second."""

    def __init__(
        self,
        max_bytes_per_s: float,
        *,
        is_disabled: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Create a limiter for a single writing rank.

        Args:
            max_bytes_per_s: Limit for all ranks together.
            is_disabled: Called before each chunk. Once it returns true, writes are not limited anymore.
            clock: Function that returns the time in seconds.
            sleep: Function that sleeps for a number of seconds.

        Raises MesetaError if the limit is below `MIN_BYTES_PER_S`.
        """
        self._max_bytes_per_s = max_bytes_per_s
        self.set_num_writers(1)
        self._is_disabled, self._clock, self._sleep = is_disabled, clock, sleep
        self._next_write_s = clock()
        self._lock = threading.Lock()

    def set_num_writers(self, num_writers: int) -> None:
        """Set the number of ranks that share the limit. Raises MesetaError if a share is below `MIN_BYTES_PER_S`."""
        self._rank_bytes_per_s = self._max_bytes_per_s / num_writers
        if not self._rank_bytes_per_s >= MIN_BYTES_PER_S:
            raise MesetaError(
                f"checkpoint: a limit of {self._max_bytes_per_s:,.0f} bytes per second is too low for {num_writers} "
                f"writing ranks; allow at least {MIN_BYTES_PER_S:,} for each"
            )

    def chunk_bytes(self, most: int) -> int:
        """Return the number of bytes to write at a time, at most `most`."""
        return most if self._is_disabled() else min(most, int(self._rank_bytes_per_s / CHUNKS_PER_S))

    @contextmanager
    def throttle(self, num_bytes: int) -> Iterator[None]:
        """Context manager to write a chunk of at most `chunk_bytes`. Waits first until the chunk may start."""
        if self._is_disabled():
            yield
            return
        with self._lock:
            while (wait_s := self._next_write_s - self._clock()) > 0 and not self._is_disabled():
                self._sleep(wait_s)
            self._next_write_s = self._clock() + num_bytes / (TARGET_SHARE * self._rank_bytes_per_s)
            yield


# Copying through the page cache costs a core several times the time of a direct transfer. With few cores, this time is
# missing for checksums. Buffers live as long as their thread, because allocating memory costs more than using it.
PAGE_BYTES = 4096
"""Alignment of memory, positions and lengths in direct transfers."""
# Smaller files use the page cache, because a direct transfer waits for the disk.
MIN_DIRECT_BYTES = 1 << 20
# Larger transfers are not faster, and would delay reads of rows for training.
MAX_TRANSFER_BYTES = 1 << 20
COPY_CHUNK_BYTES = 16 << 20
BufferName = Literal["file", "block"]
"""Use of a buffer: 'file' for a file that is read or written, 'block' for a block merged from files."""
T = TypeVar("T")
_thread_buffers = threading.local()


def scratch_buffer(num_bytes: int, use: BufferName = "file") -> memoryview:
    """Return writable memory of this thread, of `num_bytes` rounded up to whole pages. The next call for this use
    returns the same memory."""
    size = -(-max(num_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
    buffer: mmap.mmap | None = getattr(_thread_buffers, use, None)
    if buffer is None or len(buffer) < size:
        buffer = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        setattr(_thread_buffers, use, buffer)
    return memoryview(buffer)[:size]


def write_direct(path: Location, content: memoryview, num_bytes: int, rate: WriteRateLimiter | None = None) -> None:
    """Write the first `num_bytes` of `content`, a scratch buffer, to a file. At a URL it must not exist. Raises
    OSError.

    The file is not synced, because one sync per file would wait for the journal each time. With a `rate`, each chunk is
    sent to the disk before the next one, so that none accumulate in the page cache.
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
            # The rest of the last page uses the page cache. Writing the complete page and truncating the file would
            # read the page back, after all pending writes of the disk.
            if direct:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~direct)
            _write_buffered(descriptor, content[:num_bytes], done, rate)
        finally:
            os.close(descriptor)

    _with_direct_io(num_bytes, write)


def write_buffered(path: Location, content: bytes | memoryview, rate: WriteRateLimiter | None = None) -> None:
    """Write memory to a file through the page cache, and sync it. At a URL the file must not exist. Raises OSError."""
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
    """Read the first `num_bytes` of a file, or fewer if it is shorter, into this thread's scratch buffer. Raises
    OSError."""
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
    """Copy a file of `num_bytes`.

    Raises OSError if the target cannot be written, DamagedCheckpoint if the source is not a regular file or has another
    size, and StorageError if it cannot be read.
    """
    # Of an untrusted source, read no more than shows that its size is wrong.
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
    """Yield bytes start..stop-1 of a file, if it has them, in chunks of `COPY_CHUNK_BYTES`. Raises OSError."""
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
    with wrap_read_errors(source):
        yield from read_chunks(source, 0, num_bytes)


def _check_copied_bytes(source: Location, num_bytes: int, copied: int) -> None:
    if copied != num_bytes:
        has = f"has {copied}" if copied < num_bytes else "has more"
        raise damaged_file_error(source, f"must have {num_bytes} bytes, but {has}")


def _round_down_to_page(done: int) -> int:
    return done // PAGE_BYTES * PAGE_BYTES


def _with_direct_io(num_bytes: int, transfer: Callable[[int], T]) -> T:
    # Small files, and file systems without direct I/O, use the page cache: `transfer` gets the flag 0.
    if num_bytes >= MIN_DIRECT_BYTES:
        try:
            return transfer(getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return transfer(0)
