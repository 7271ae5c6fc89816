"""Where the records of CSV begin and end: a line end inside quotes ends none (RFC 4180)."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

csv.field_size_limit(max(csv.field_size_limit(), 1 << 30))  # a field may be as long as a row: see sources.BLOCK_BYTES

MAX_HEADER_BYTES = 8 << 20
"""Of a header; one whose quotes are not closed before is refused."""
_QUOTE, _NEWLINE = ord('"'), ord("\n")


def complete_records_size(data: bytes) -> int:
    """Bytes of the whole records at the front of `data`, which begins with one; 0 where none is whole.

    A quote within quotes is doubled, so a line end stands outside where the quotes before it are even in number.
    """
    if b'"' not in data:
        return data.rfind(b"\n") + 1
    ends = record_ends(data)
    return int(ends[-1]) if ends.size else 0


def count_records(data: bytes) -> int:
    """Whole records in `data`, which begins with one."""
    return data.count(b"\n") if b'"' not in data else int(record_ends(data).size)


def read_header(read_line: Callable[[int], bytes]) -> bytes:
    """The first record with its line end, from the `readline` of a stream; what follows it is read next."""
    header = read_line(MAX_HEADER_BYTES)
    while header.count(b'"') % 2 and len(header) < MAX_HEADER_BYTES and (line := read_line(MAX_HEADER_BYTES)):
        header += line
    return header


def parse_header(header: bytes, delimiter: str) -> list[str]:
    """Names in the first record, without spaces around them. Raises ValueError or csv.Error where it is no CSV."""
    rows = list(csv.reader(io.StringIO(header.decode("utf-8-sig"), newline=""), delimiter=delimiter))
    if len(rows) > 1:
        raise csv.Error("a quote is not closed, or stands in a field that is not quoted")
    return [name.strip() for name in rows[0]] if rows else []


def iter_records(data: bytes, delimiter: str) -> Iterator[tuple[int, bytes, list[str]]]:
    """The line on which each record begins, from 0, its bytes and its fields. Raises csv.Error for a field too long."""
    lines = data.split(b"\n")[:-1]
    reader = csv.reader((line.decode(errors="replace") + "\n" for line in lines), delimiter=delimiter)
    first = 0
    for fields in reader:
        yield first, b"\n".join(lines[first : reader.line_num]), fields
        first = reader.line_num


def is_record(data: bytes, delimiter: str, num_fields: int) -> bool:
    """Whether `data` is one whole record with so many fields."""
    try:
        rows = list(
            csv.reader(io.StringIO(data.decode(errors="replace"), newline=""), delimiter=delimiter, strict=True)
        )
    except csv.Error:
        return False
    return len(rows) == 1 and len(rows[0]) == num_fields


def record_ends(data: bytes) -> NDArray[np.int64]:
    """Where the whole records in `data`, which begins with one, end: behind the line ends that stand outside quotes."""
    array = np.frombuffer(data, np.uint8)
    newlines = np.flatnonzero(array == _NEWLINE)
    quotes_before = np.searchsorted(np.flatnonzero(array == _QUOTE), newlines)
    ends: NDArray[np.int64] = newlines[quotes_before % 2 == 0] + 1
    return ends
