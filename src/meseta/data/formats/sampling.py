"""Numbers and places of the rows that are sampled from raw files to infer the roles of columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from meseta.data.formats.compression import ByteStream
from meseta.data.formats.format import Source
from meseta.data.schema.infer import MAX_SAMPLE_ROWS

MAX_SAMPLED_FIELDS = 4_000_000
"""Maximum number of sampled fields. Fewer rows are sampled from files with many columns."""
_MIN_ROWS = 2000
_MAX_FILES = 8
NUM_PIECES = 8
"""Number of places from which rows of a seekable file are sampled."""
MAX_SAMPLE_BYTES = 64 << 20
"""Maximum number of bytes of text to sample from all files. Limits the number of long rows."""
_MAX_LINE_BYTES = 8 << 20
MAX_SMALL_FILE_BYTES = 4 << 20
"""Maximum size of files that are sampled only from their beginning."""


def rows_per_file(num_columns: int, num_files: int) -> int:
    """Return the number of rows to sample from each of `num_files` files with `num_columns` columns."""
    num_rows = max(_MIN_ROWS, min(MAX_SAMPLE_ROWS, MAX_SAMPLED_FIELDS // max(num_columns, 1)))
    return -(-num_rows // num_files)


def seek_pieces(stream: ByteStream, begin: int, size: int) -> Iterator[tuple[bool, int]]:
    """Move a stream to the first line of each piece of a file, and yield (whether it is the first piece, end of the
    piece).

    A position within a multi-line record is not detected. `size` is the size of the file, and `begin` is the position
    of the first row.
    """
    starts = [begin + place * (size - begin) // NUM_PIECES for place in range(NUM_PIECES)]
    for start, stop in itertools.pairwise([*starts, size]):
        stream.seek(start)
        if start > begin:
            # The piece may begin at the start of a line, so search for a line break from one byte before it.
            stream.seek(start - 1)
            stream.readline(_MAX_LINE_BYTES)
        yield start == begin, stop


def sample_sources(sources: Sequence[Source]) -> list[Source]:
    """Return a subset of equally spaced files, including the first one."""
    number = min(len(sources), _MAX_FILES)
    return [sources[place * len(sources) // number] for place in range(number)]
