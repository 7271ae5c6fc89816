"""How many rows of raw files are sampled, by which columns are judged, and from where: places all over them."""

from __future__ import annotations

from collections.abc import Sequence

from meseta.data.formats.format import Source
from meseta.data.schema.guess import SAMPLE_ROWS

_MAX_FIELDS = 4_000_000
"""Fields that are looked at: of wide files, fewer rows."""
_LEAST_ROWS = 2000
_FILES = 8
NUM_PIECES = 8
"""Places of a file that rows are taken from, where it can be read from any."""
SMALL_BYTES = 4 << 20
"""Files up to this size are read from their beginning alone."""


def rows_per_file(num_columns: int, num_files: int) -> int:
    """Rows to take of each of so many files with so many columns."""
    num_rows = max(_LEAST_ROWS, min(SAMPLE_ROWS, _MAX_FIELDS // max(num_columns, 1)))
    return -(-num_rows // num_files)


def spread(sources: Sequence[Source]) -> list[Source]:
    """The first file, and others at equal distances."""
    number = min(len(sources), _FILES)
    return [sources[place * len(sources) // number] for place in range(number)]
