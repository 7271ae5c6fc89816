"""The one way to open the Parquet files of a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from meseta.errors import one_line
from meseta.spec import MesetaError

PART_ERRORS = (pa.ArrowException, OSError)
"""What reading a damaged or missing file raises."""


def open_part(path: Path, metadata: pq.FileMetaData | None = None, *, checks_pages: bool = False) -> pq.ParquetFile:
    """A file to read from, which closes as a context; `metadata`: its footer, where that was read before. With
    `checks_pages` what is read is held against its checksums. Raises PART_ERRORS, as reading from it does."""
    return pq.ParquetFile(path, metadata=metadata, page_checksum_verification=checks_pages)


@contextmanager
def opened_part(path: Path, metadata: pq.FileMetaData | None = None) -> Iterator[pq.ParquetFile]:
    """As `open_part`, where what cannot be read is a MesetaError that names the file."""
    try:
        with open_part(path, metadata) as file:
            yield file
    except PART_ERRORS as error:
        raise MesetaError(
            f"dataset file {str(path)!r} cannot be read ({one_line(error)}); prepare the dataset again"
        ) from None
