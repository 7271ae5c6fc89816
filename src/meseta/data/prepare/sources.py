"""Raw files: finding them, telling their kind, and cutting them into blocks that workers parse."""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq

from meseta.data.dataset.dataset import SourceSplit
from meseta.data.formats.csv_records import count_records, cut_records, header_names, read_header
from meseta.data.schema.guess import is_header
from meseta.errors import one_line
from meseta.machine.remote import find, is_url, open_file, remote_errors, status
from meseta.spec import MesetaError

Kind = Literal["tsv", "csv", "libsvm", "libffm", "parquet"]

KIND_NAMES: dict[Kind, str] = {
    "tsv": "tab-separated text",
    "csv": "CSV",
    "libsvm": "libsvm text",
    "libffm": "libffm text",
    "parquet": "Parquet",
}
_PAIR: dict[Kind, re.Pattern[bytes]] = {
    "libsvm": re.compile(rb"(-?\d+|qid):[^:]+"),
    "libffm": re.compile(rb"-?\d+:-?\d+:[^:]+"),
}
_HEAD_BYTES = 64 << 10
FIELDS_OF_CRITEO = (40, 39)
"""Fields of a line of Criteo's logs, with a label and without."""
_DELIMITERS = (",", "\t", ";", "|")
_CSV_NAMES = (".csv", ".csv.gz")
_TSV_NAMES = (".tsv", ".tsv.gz", ".tab", ".tab.gz")
BLOCK_BYTES = 8 << 20
"""Bytes of text read at once; a block ends with the last whole line in it."""
BLOCK_ROWS = 32_768
"""Rows of a Parquet block."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One raw file."""

    path: str
    """As found: a path on this machine, or a URL."""
    split: SourceSplit
    """Where its rows go."""
    kind: Kind
    size_bytes: int
    """As stored, compressed or not."""
    changed: str
    """When it was written last, as its file system tells."""
    delimiter: str = ","
    """What parts the fields of CSV."""
    header: tuple[str, ...] = ()
    """Names of the columns of CSV, where it does not begin with them."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a row of a file begins."""

    row: int = 0
    """Rows before it."""
    line: int = 0
    """Lines before it, in a text file."""
    offset: int = 0
    """Bytes of text before it, unzipped."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive rows of one file."""

    source: Source
    first_row: int
    """Rows of the file before this block."""
    first_line: int = 0
    """Lines of a text file before this block."""
    num_rows: int
    raw: bytes | pa.RecordBatch
    """Whole lines (of CSV, whole records), or columns of a Parquet file."""
    header: tuple[str, ...] = ()
    """Names of the columns of a CSV file."""
    end: Place
    """Where the next row begins."""
    position_bytes: int
    """How far the stored file has been read, for progress."""


def find_sources(
    patterns: Sequence[str],
    files_of_splits: Mapping[Literal["valid", "test"], Sequence[str]],
    *,
    rest_is_parted: bool,
    delimiter: str | None = None,
    header: Sequence[str] = (),
) -> tuple[Source, ...]:
    """Files in the given order, what a pattern matches in order of name; those of `files_of_splits` go there as a whole
    and come last, and the rest to training, or is parted row by row.

    Where a `delimiter` is given, all text is CSV with it; where a `header` is, it is CSV without one.
    Raises MesetaError for a missing, unreadable, empty or doubled file, for a folder, and for two kinds of files.
    """
    whole: dict[str, SourceSplit] = {}
    for split, named in files_of_splits.items():
        for path in _expand(named):
            if path in whole:
                raise MesetaError(
                    f"prepare: {path!r} is named by --{whole[path]}-files and by --{split}-files; give it to one"
                )
            whole[path] = split
    rest: SourceSplit = "both" if rest_is_parted else "train"
    splits = {path: rest for path in _expand(patterns) if path not in whole}
    if not splits:
        options = " or ".join(f"--{split}-files" for split, named in files_of_splits.items() if named)
        raise MesetaError(f"prepare: no source is left for training; every file is named by {options}")
    sources = tuple(_identify(path, split, delimiter, tuple(header)) for path, split in (splits | whole).items())
    kinds = {source.kind: source.path for source in sources}
    if len(kinds) > 1:
        shown = " and ".join(f"{path!r} is {KIND_NAMES[kind]}" for kind, path in kinds.items())
        raise MesetaError(f"prepare: {shown}; give one kind at a time")
    return sources


def read_blocks(source: Source, columns: Sequence[str], start: Place | None = None) -> Iterator[Block]:
    """Blocks of one file in order, from `start` on; `columns` are those wanted of a Parquet file.

    Raises MesetaError for a truncated or damaged file.
    """
    with named_errors(source.path):
        start = start or Place()
        yield from (
            _parquet_blocks(source, columns, start.row) if source.kind == "parquet" else _text_blocks(source, start)
        )


def first_line(source: Source) -> bytes:
    """The first line of a text file, without its end. Raises MesetaError for a damaged file."""
    with named_errors(source.path), open_text(source.path) as (stream, _):
        return stream.readline(BLOCK_BYTES).rstrip(b"\r\n")


def parquet_schema(source: Source) -> pa.Schema:
    """Columns of a Parquet file. Raises MesetaError for a damaged file."""
    with named_errors(source.path), open_parquet(source.path) as file:
        return file.schema_arrow


def _expand(patterns: Sequence[str]) -> list[str]:
    paths: list[str] = []
    for pattern in patterns:
        found = find(pattern)
        if not found:
            raise MesetaError(f"source {pattern!r}: no such file, and no file matches it as a pattern")
        for name in found:
            path = name if is_url(name) else str(Path(name))
            if path in paths:
                raise MesetaError(f"source {name!r} is given twice; its rows would count double")
            paths.append(path)
    return paths


def _identify(path: str, split: SourceSplit, delimiter: str | None, header: tuple[str, ...]) -> Source:
    try:
        found = status(path)
        if found.is_folder:
            raise MesetaError(f"source {path!r} is a folder; give files or a pattern such as '{path}/*.tsv'")
        if found.size_bytes == 0:
            raise MesetaError(f"source {path!r} is empty; leave it out, or fetch it again")
        with named_errors(path), open_file(path) as file:
            magic = file.read(4)
    except OSError as error:
        raise MesetaError(f"source {path!r}: {error.strerror}") from None
    kind: Kind = "parquet"
    parted_by = ","
    if magic != b"PAR1" and not path.endswith(".parquet"):
        kind, parted_by = _text_form(path, delimiter, has_names=bool(header))
    return Source(
        path=path,
        split=split,
        kind=kind,
        size_bytes=found.size_bytes or 1,
        changed=found.changed,
        delimiter=parted_by,
        header=header if kind == "csv" else (),
    )


def _text_form(path: str, delimiter: str | None, *, has_names: bool) -> tuple[Kind, str]:
    """The kind, and the delimiter of CSV: as given, else by the first line, where the columns have names or the name of
    the file is that of CSV or TSV."""
    if delimiter is not None:
        return "csv", delimiter
    with named_errors(path), open_text(path) as (stream, _):
        head = stream.read(_HEAD_BYTES)
    name = path.lower()
    if has_names or name.endswith(_CSV_NAMES):
        header = re.sub(rb'"[^"]*"', b"", head).partition(b"\n")[0]
        return "csv", max(_DELIMITERS, key=lambda sign: header.count(sign.encode()))  # the first of equals
    kind = _kind_by_content(head)
    if kind == "tsv" and name.endswith(_TSV_NAMES):
        fields = head.partition(b"\n")[0].rstrip(b"\r").decode(errors="replace").split("\t")
        if len(fields) > 1 and (is_header(fields) or len(fields) not in FIELDS_OF_CRITEO):
            return "csv", "\t"
    return kind, ","


def _kind_by_content(head: bytes) -> Kind:
    """libsvm and libffm by the first pair, since their files have no usual names; else TSV."""
    for line in head.splitlines():
        tokens = line.partition(b"#")[0].split()
        if len(tokens) > 1:  # a label alone is a row without pairs
            return next((kind for kind, pair in _PAIR.items() if pair.fullmatch(tokens[1])), "tsv")
    return "tsv"


def csv_names(source: Source, header: bytes) -> tuple[str, ...]:
    """Names of the columns; one that is used must be there once, which the layout checks."""
    try:
        names = header_names(header, source.delimiter)
    except (ValueError, csv.Error) as error:
        raise MesetaError(f"source {source.path!r}, line 1: the header is not UTF-8 CSV ({error})") from None
    return tuple(names)


def _text_blocks(source: Source, start: Place) -> Iterator[Block]:
    """Holds back one block, so that blank lines at the very end of the file can be dropped."""
    held = rest = b""
    header = source.header
    position_bytes = 0
    is_csv = source.kind == "csv"

    def block(raw: bytes) -> Block:
        num_lines = raw.count(b"\n")
        num_rows = count_records(raw) if is_csv else num_lines
        line, offset = start.line + num_lines, start.offset + len(held)
        return Block(
            source=source,
            first_row=start.row,
            first_line=start.line,
            num_rows=num_rows,
            raw=raw,
            header=header,
            end=Place(row=start.row + num_rows, line=line, offset=offset),
            position_bytes=position_bytes,
        )

    with open_text(source.path) as (stream, stored):
        if is_csv and not header:
            raw_header = read_header(stream.readline)
            header = csv_names(source, raw_header)
            if not start.offset:
                start = Place(line=raw_header.count(b"\n"), offset=len(raw_header))
        stream.seek(start.offset)
        while data := stream.read(BLOCK_BYTES):
            whole, rest = _cut_csv(rest + data) if is_csv else _cut_lines(rest, data)
            if not whole:
                if len(rest) > 4 * BLOCK_BYTES:
                    raise _endless(source, start.line + held.count(b"\n") + 1, len(rest))
                continue
            if held and not held.isspace():
                yield (ready := block(held))
                start = ready.end
                held = b""
            position_bytes = stored.tell()
            held += whole
        position_bytes = stored.tell()
        held = (held + rest).rstrip(b"\r\n")
        if held:
            yield block(held + b"\n")
        elif not start.row:
            raise MesetaError(f"source {source.path!r} holds no rows; leave it out, or fetch it again")


def _cut_csv(data: bytes) -> tuple[bytes, bytes]:
    """The whole records at the front of `data`, and the rest."""
    cut = cut_records(data)
    return data[:cut], data[cut:]


def _cut_lines(before: bytes, data: bytes) -> tuple[bytes, bytes]:
    """The whole lines of `before`, which has no line end, and `data`; and the rest. Copies a large `data` once."""
    cut = data.rfind(b"\n") + 1
    if not cut:
        return b"", before + data
    return b"".join((before, memoryview(data)[:cut])), data[cut:]


def _endless(source: Source, line: int, num_bytes: int) -> MesetaError:
    cause = "is a quote not closed?" if source.kind == "csv" else f"this is not {KIND_NAMES[source.kind]}"
    return MesetaError(f"source {source.path!r}, line {line}: no row ends within {num_bytes:,} bytes; {cause}")


def _parquet_blocks(source: Source, columns: Sequence[str], start: int) -> Iterator[Block]:
    with open_parquet(source.path) as file:
        num_rows = file.metadata.num_rows
        if not num_rows:
            raise MesetaError(f"source {source.path!r} holds no rows; leave it out, or fetch it again")
        first_row = group = 0
        while group < file.num_row_groups and first_row + file.metadata.row_group(group).num_rows <= start:
            first_row += file.metadata.row_group(group).num_rows
            group += 1
        groups = list(range(group, file.num_row_groups))
        for batch in file.iter_batches(BLOCK_ROWS, row_groups=groups, columns=list(columns)):
            done = first_row + batch.num_rows
            if done > start:
                wanted = batch.slice(max(start - first_row, 0))
                yield Block(
                    source=source,
                    first_row=done - wanted.num_rows,
                    num_rows=wanted.num_rows,
                    raw=wanted,
                    end=Place(row=done),
                    position_bytes=source.size_bytes * done // num_rows,
                )
            first_row = done


@runtime_checkable  # beartype asks for it where the tests check every call
class ByteLines(Protocol):
    """What is read of a file of text, zipped or not."""

    def read(self, size: int = -1, /) -> bytes:
        """So many bytes, or all that are left."""

    def readline(self, size: int | None = -1, /) -> bytes:
        """A line with its end, or so many bytes of it; empty at the end."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Go to a place."""

    def tell(self) -> int:
        """Where it stands."""


@contextmanager
def open_text(path: str) -> Iterator[tuple[ByteLines, IO[bytes]]]:
    """The text of a file, unzipped where it begins as gzip does, and the stored file under it."""
    with open_file(path) as stored:
        zipped = stored.read(2) == b"\x1f\x8b"
        stored.seek(0)
        yield (gzip.GzipFile(fileobj=stored) if zipped else stored), stored


@contextmanager
def open_parquet(path: str) -> Iterator[pq.ParquetFile]:
    """A local file is opened by Arrow itself, whose threads then read it without Python."""
    if not is_url(path):
        with pq.ParquetFile(path) as file:
            yield file
        return
    with open_file(path) as stored, pq.ParquetFile(stored) as file:
        yield file


@contextmanager
def named_errors(path: str) -> Iterator[None]:
    """Turn what the readers of gzip and Parquet, and file systems, raise into an error that names the file."""
    try:
        yield
    except MesetaError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise MesetaError(f"source {path!r} is truncated or damaged ({error}); fetch it again") from None
    except (pa.ArrowException, OSError) as error:
        detail = one_line(error)
        raise MesetaError(f"source {path!r} cannot be read ({detail}); fetch it again") from None
    except Exception:
        if not is_url(path):
            raise
        with remote_errors("source", path, "read"):
            raise
