"""Functions that open the Parquet files of a dataset. All code uses them."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from meseta.errors import error_summary, reading_error

PART_ERRORS = (pa.ArrowException, OSError)
"""Exceptions that reading a damaged or missing file raises."""


def open_part(path: Path, metadata: pq.FileMetaData | None = None, *, checks_pages: bool = False) -> pq.ParquetFile:
    """Open a file for reading. Use the result as a context manager to close it.

    `metadata` is the footer, if it was read before. `checks_pages` verifies the checksums of pages. Raises PART_ERRORS,
    as reading from the file does.
    """
    return pq.ParquetFile(path, metadata=metadata, page_checksum_verification=checks_pages)


class _TimedFile(io.BufferedReader):
    """File that reports the seconds of each read."""

    def __init__(self, path: Path, on_read: Callable[[float], None]) -> None:
        super().__init__(io.FileIO(path))
        self._on_read = on_read

    def read(self, size: int | None = -1, /) -> bytes:
        begin_s = time.perf_counter()
        content = super().read(size)
        self._on_read(time.perf_counter() - begin_s)
        return content


@contextmanager
def open_part_or_raise(
    path: Path, metadata: pq.FileMetaData | None = None, on_read: Callable[[float], None] | None = None
) -> Iterator[pq.ParquetFile]:
    """Context manager that opens a file for reading. Raises MesetaError that names the file if it cannot be read.

    `on_read` receives the seconds of each read. Calls do not overlap, but may come from any thread.
    """
    try:
        if on_read is None:
            with open_part(path, metadata) as file:
                yield file
        else:
            with _TimedFile(path, on_read) as source, pq.ParquetFile(source, metadata=metadata) as file:
                yield file
    except PART_ERRORS as error:
        text = f"dataset file {str(path)!r} cannot be read ({error_summary(error)}); prepare the dataset again"
        raise reading_error(error, text) from None
