"""Boundaries of CSV records. A line break inside quotes does not end a record (RFC 4180)."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

# A field may be as long as a block: see text.BLOCK_BYTES.
csv.field_size_limit(max(csv.field_size_limit(), 1 << 30))

MAX_HEADER_BYTES = 8 << 20
"""Maximum size of a header. A header whose quotes are not closed within it is rejected."""
_QUOTE, _NEWLINE = ord('"'), ord("\n")


def complete_records_size(data: bytes) -> int:
    """Return the size of the complete records at the beginning of `data`, 0 if there are none.

    `data` must begin at the start of a record.
    """
    if b'"' not in data:
        return data.rfind(b"\n") + 1
    ends = record_ends(data)
    return int(ends[-1]) if ends.size else 0


def count_records(data: bytes) -> int:
    """Return the number of complete records in `data`, which must begin at the start of a record."""
    return data.count(b"\n") if b'"' not in data else int(record_ends(data).size)


def read_header(read_line: Callable[[int], bytes]) -> bytes:
    """Read the first record with its line break. `read_line` is the `readline` of a stream, which then is after it."""
    header = read_line(MAX_HEADER_BYTES)
    while header.count(b'"') % 2 and len(header) < MAX_HEADER_BYTES and (line := read_line(MAX_HEADER_BYTES)):
        header += line
    return header


def parse_header(header: bytes, delimiter: str) -> list[str]:
    """Return the names in the first record, stripped of spaces. Raises ValueError or csv.Error if it is not valid
    CSV."""
    rows = list(csv.reader(io.StringIO(header.decode("utf-8-sig"), newline=""), delimiter=delimiter))
    if len(rows) > 1:
        raise csv.Error("a quote is not closed, or it is inside a field without quotes")
    return [name.strip() for name in rows[0]] if rows else []


def iter_records(data: bytes, delimiter: str) -> Iterator[tuple[int, bytes, list[str]]]:
    """Yield (index of the first line, bytes, fields) for each record. Raises csv.Error if a field is too long."""
    lines = data.split(b"\n")[:-1]
    reader = csv.reader((line.decode(errors="replace") + "\n" for line in lines), delimiter=delimiter)
    first = 0
    for fields in reader:
        yield first, b"\n".join(lines[first : reader.line_num]), fields
        first = reader.line_num


def is_record(data: bytes, delimiter: str, num_fields: int) -> bool:
    """Whether `data` is exactly one complete record with `num_fields` fields."""
    try:
        rows = list(
            csv.reader(io.StringIO(data.decode(errors="replace"), newline=""), delimiter=delimiter, strict=True)
        )
    except csv.Error:
        return False
    return len(rows) == 1 and len(rows[0]) == num_fields


def record_ends(data: bytes) -> NDArray[np.int64]:
    """Return the end offsets of the complete records in `data`, which must begin at the start of a record."""
    array = np.frombuffer(data, np.uint8)
    newlines = np.flatnonzero(array == _NEWLINE)
    # A quote inside quotes is doubled. So a line break is outside of quotes if an even number of quotes precedes it.
    quotes_before = np.searchsorted(np.flatnonzero(array == _QUOTE), newlines)
    ends: NDArray[np.int64] = newlines[quotes_before % 2 == 0] + 1
    return ends
