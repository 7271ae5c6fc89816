"""How many rows of raw files are sampled, by which columns are judged, and from where: places all over them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from meseta.data.formats.compression import ByteStream
from meseta.data.formats.format import Source
from meseta.data.schema.infer import MAX_SAMPLE_ROWS

MAX_SAMPLED_FIELDS = 4_000_000
"""Fields that are looked at: of wide files, fewer rows."""
_MIN_ROWS = 2000
_MAX_FILES = 8
NUM_PIECES = 8
"""Places of a file that rows are taken from, where it can be read from any."""
MAX_SAMPLE_BYTES = 64 << 20
"""Text of all files from which rows are sampled; of long rows, fewer are."""
_MAX_LINE_BYTES = 8 << 20
MAX_SMALL_FILE_BYTES = 4 << 20
"""Files up to this size are read from their beginning alone."""


def rows_per_file(num_columns: int, num_files: int) -> int:
    """Rows to take of each of so many files with so many columns."""
    num_rows = max(_MIN_ROWS, min(MAX_SAMPLE_ROWS, MAX_SAMPLED_FIELDS // max(num_columns, 1)))
    return -(-num_rows // num_files)


def seek_pieces(stream: ByteStream, begin: int, size: int) -> Iterator[tuple[bool, int]]:
    """Move a stream to the first line of each piece of a file of `size` bytes, whose rows start at `begin`.

    Yields whether the piece is the first, and where it ends. A piece that starts within a record is not recognized."""
    starts = [begin + place * (size - begin) // NUM_PIECES for place in range(NUM_PIECES)]
    for start, stop in itertools.pairwise([*starts, size]):
        stream.seek(start)
        if start > begin:
            stream.seek(start - 1)
            stream.readline(_MAX_LINE_BYTES)
        yield start == begin, stop


def sample_sources(sources: Sequence[Source]) -> list[Source]:
    """The first file, and others at equal distances."""
    number = min(len(sources), _MAX_FILES)
    return [sources[place * len(sources) // number] for place in range(number)]
