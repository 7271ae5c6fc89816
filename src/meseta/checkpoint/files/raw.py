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

from meseta.checkpoint.failures import broken_file, reading, writing
from meseta.checkpoint.files.rate import WriteRate
from meseta.machine.files import open_regular
from meseta.machine.remote import Location, RemotePath

PAGE_BYTES = 4096
"""Memory, positions and lengths of a direct transfer are multiples of this."""
DIRECT_BYTES = 1 << 20
"""Smaller files go through the page cache: a direct transfer waits for the disk."""
TRANSFER_BYTES = 1 << 20
"""Transferred at a time: more would be no faster, and rows that a batch waits for would wait behind it."""
COPIED_BYTES = 16 << 20
"""Copied at a time from one store to another."""
Use = Literal["file", "block"]
"""What memory is for: the file that is written or read at the moment, or a block that files are put together in."""
T = TypeVar("T")
_own = threading.local()


def scratch(num_bytes: int, use: Use = "file") -> memoryview:
    """Writable memory of this thread, of `num_bytes` rounded up to whole pages; the next call for this use gives it
    again."""
    size = -(-max(num_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
    buffer: mmap.mmap | None = getattr(_own, use, None)
    if buffer is None or len(buffer) < size:
        buffer = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            buffer.madvise(mmap.MADV_HUGEPAGE)
        setattr(_own, use, buffer)
    return memoryview(buffer)[:size]


def write_whole(path: Location, content: memoryview, num_bytes: int, rate: WriteRate | None = None) -> None:
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
            whole = _whole_pages(num_bytes) if direct else 0
            done = 0
            while done < whole:
                start = _whole_pages(done)
                piece = content[start : min(start + _whole_pages(_piece_bytes(rate, TRANSFER_BYTES)), whole)]
                with _in_turn(rate, len(piece)):
                    count = os.pwrite(descriptor, piece, start)
                if start + count <= done:
                    raise OSError(errno.EINVAL, "a direct transfer ended inside a page")
                done = start + count
            # The rest of the last page goes through the page cache. To write all of the page and cut the file to its
            # length would read the page back, behind all that the disk is still to write.
            if direct:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~direct)
            _write_cached(descriptor, content[:num_bytes], done, rate)
        finally:
            os.close(descriptor)

    _directly(num_bytes, write)


def write_cached(path: Location, content: bytes | memoryview, rate: WriteRate | None = None) -> None:
    """Make a file of any memory, through the page cache, and sync it; raises OSError. At a URL it must be new."""
    if isinstance(path, RemotePath):
        path.create(content)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_cached(descriptor, memoryview(content), 0, rate)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_cached(descriptor: int, content: memoryview, done: int, rate: WriteRate | None) -> None:
    """Write what follows the first `done` bytes."""
    while done < len(content):
        piece = content[done : done + _piece_bytes(rate, len(content))]
        with _in_turn(rate, len(piece)):
            done += os.pwrite(descriptor, piece, done)
            if rate is not None:
                os.fdatasync(descriptor)


def _piece_bytes(rate: WriteRate | None, most: int) -> int:
    return most if rate is None else rate.piece_bytes(most)


def _in_turn(rate: WriteRate | None, num_bytes: int) -> AbstractContextManager[None]:
    return nullcontext() if rate is None else rate.piece(num_bytes)


def read_whole(path: Location, num_bytes: int, use: Use = "file") -> memoryview:
    """The first `num_bytes` of a file, fewer when it ends before, in this thread's `scratch`; raises OSError."""
    if isinstance(path, RemotePath):
        return memoryview(path.read(0, num_bytes))
    content = scratch(num_bytes, use)

    def read(direct: int) -> int:
        descriptor = open_regular(path, direct)
        try:
            done = 0
            while done < num_bytes:
                start = _whole_pages(done) if direct else done
                if start + (count := os.preadv(descriptor, [content[start : start + TRANSFER_BYTES]], start)) <= done:
                    break
                done = start + count
            return done
        finally:
            os.close(descriptor)

    return content[: min(_directly(num_bytes, read), num_bytes)]


def copy_whole(source: Location, target: Location, num_bytes: int) -> None:
    """Make a file of another one, of `num_bytes`. Raises OSError where the target cannot be written, DamagedCheckpoint
    where the source is no regular file or has another size: of a stranger's, no more is read. Raises StorageError where
    the source cannot be read."""
    content = _read_parts(source, num_bytes + 1)
    if isinstance(target, RemotePath):
        whole = b"".join(content)
        _check_copied(source, num_bytes, len(whole))
        with writing(target):
            target.create(whole)
        return
    with target.open("xb") as file:
        copied = sum(file.write(part) for part in content)
        _check_copied(source, num_bytes, copied)
        os.fsync(file.fileno())


def parts(source: Location, start: int, stop: int) -> Iterator[bytes]:
    """Yield bytes start..stop-1 of a file, fewer if it ends before, COPIED_BYTES at a time. Raises OSError."""
    if isinstance(source, Path):
        with os.fdopen(open_regular(source), "rb") as file:
            file.seek(start)
            while start < stop and (part := file.read(min(stop - start, COPIED_BYTES))):
                yield part
                start += len(part)
        return
    stop = min(source.num_bytes(), stop)
    while start < stop and (part := source.read(start, min(start + COPIED_BYTES, stop))):
        yield part
        start += len(part)


def _read_parts(source: Location, num_bytes: int) -> Iterator[bytes]:
    """`parts` from the beginning, with the errors of reading a checkpoint."""
    with reading(source):
        yield from parts(source, 0, num_bytes)


def _check_copied(source: Location, num_bytes: int, copied: int) -> None:
    if copied != num_bytes:
        has = f"has {copied}" if copied < num_bytes else "goes on"
        raise broken_file(source, f"must have {num_bytes} bytes, but {has}")


def _whole_pages(done: int) -> int:
    """Where to go on after a transfer that was cut short inside a page: at its beginning."""
    return done // PAGE_BYTES * PAGE_BYTES


def _directly(num_bytes: int, transfer: Callable[[int], T]) -> T:
    """Call with the flag for direct transfers; without it for small files, and where the file system knows none."""
    if num_bytes >= DIRECT_BYTES:
        try:
            return transfer(getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return transfer(0)
