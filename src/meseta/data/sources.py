"""Raw files: finding them, telling their kind, and cutting them into blocks that workers parse."""

from __future__ import annotations

import glob
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from meseta.spec import MesetaError

BLOCK_BYTES = 8 << 20
"""Bytes of text read at once; a block ends with the last whole line in it."""
BLOCK_ROWS = 32_768
"""Rows of a Parquet block."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One raw file."""

    path: Path
    split: Literal["train", "test", "both"]
    """Where its rows go; 'both': by a seeded fraction."""
    kind: Literal["tsv", "parquet"]
    size_bytes: int
    """As stored, compressed or not."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive rows of one file."""

    source: Source
    first_row: int
    """Rows of the file before this block; in a TSV also the lines before it."""
    num_rows: int
    raw: bytes | pa.RecordBatch
    """Whole lines, or columns of a Parquet file."""
    position_bytes: int
    """How far the stored file has been read, for progress."""


def find_sources(patterns: Sequence[str], test_patterns: Sequence[str], *, by_fraction: bool) -> tuple[Source, ...]:
    """Files in the given order, what a pattern matches in order of name; files of `test_patterns` go to the test split.

    Raises MesetaError for a missing, unreadable, empty or doubled file, for a folder, and for TSV beside Parquet.
    """
    test_paths = _expand(test_patterns)
    paths = [path for path in _expand(patterns) if path not in test_paths]
    if not paths:
        raise MesetaError("prepare: no source is left for training; every file is named by --test-files")
    train_split: Literal["train", "both"] = "both" if by_fraction else "train"
    sources = tuple([_identify(path, train_split) for path in paths] + [_identify(path, "test") for path in test_paths])
    kinds = {source.kind: source.path for source in sources}
    if len(kinds) > 1:
        raise MesetaError(
            f"prepare: {str(kinds['tsv'])!r} is text and {str(kinds['parquet'])!r} is Parquet; give one kind at a time"
        )
    return sources


def read_blocks(source: Source, columns: Sequence[str]) -> Iterator[Block]:
    """Blocks of one file in order; `columns` are those wanted of a Parquet file.

    Raises MesetaError for a truncated or damaged file.
    """
    with _named_errors(source.path):
        yield from _tsv_blocks(source) if source.kind == "tsv" else _parquet_blocks(source, columns)


def first_line(source: Source) -> bytes:
    """The first line of a text file, without its end. Raises MesetaError for a damaged file."""
    with _named_errors(source.path), _open(source.path) as (stream, _):
        return stream.readline(BLOCK_BYTES).rstrip(b"\r\n")


def parquet_schema(source: Source) -> pa.Schema:
    """Columns of a Parquet file. Raises MesetaError for a damaged file."""
    with _named_errors(source.path), pq.ParquetFile(source.path) as file:
        return file.schema_arrow


def _expand(patterns: Sequence[str]) -> list[Path]:
    paths: list[Path] = []
    for pattern in patterns:
        # A name that exists is itself, even where it holds the signs of a pattern.
        found = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise MesetaError(f"source {pattern!r}: no such file, and no file matches it as a pattern")
        for name in found:
            if Path(name) in paths:
                raise MesetaError(f"source {name!r} is given twice; its rows would count double")
            paths.append(Path(name))
    return paths


def _identify(path: Path, split: Literal["train", "test", "both"]) -> Source:
    if path.is_dir():
        raise MesetaError(f"source {str(path)!r} is a folder; give files or a pattern such as '{path}/*.tsv'")
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise MesetaError(f"source {str(path)!r}: {error.strerror}") from None
    if not size_bytes:
        raise MesetaError(f"source {str(path)!r} is empty; leave it out, or fetch it again")
    kind: Literal["tsv", "parquet"] = "parquet" if magic == b"PAR1" or path.suffix == ".parquet" else "tsv"
    return Source(path=path, split=split, kind=kind, size_bytes=size_bytes)


def _tsv_blocks(source: Source) -> Iterator[Block]:
    """Holds back one block, so that blank lines at the very end of the file can be dropped."""
    first_row = 0
    held = b""
    rest = b""
    position_bytes = 0

    def block(raw: bytes) -> Block:
        rows = raw.count(b"\n")
        return Block(source=source, first_row=first_row, num_rows=rows, raw=raw, position_bytes=position_bytes)

    with _open(source.path) as (stream, stored):
        while data := stream.read(BLOCK_BYTES):
            cut = data.rfind(b"\n") + 1
            if not cut:
                rest += data
                if len(rest) > 4 * BLOCK_BYTES:
                    raise MesetaError(
                        f"source {str(source.path)!r}, line {first_row + held.count(10) + 1}: no line end within "
                        f"{len(rest):,} bytes; this is not a tab-separated file"
                    )
                continue
            if held and not held.isspace():
                yield (ready := block(held))
                first_row += ready.num_rows
                held = b""
            position_bytes = stored.tell()
            held, rest = held + rest + data[:cut], data[cut:]
        held = (held + rest).rstrip(b"\r\n")
        if held:
            yield block(held + b"\n")
        elif not first_row:
            raise MesetaError(f"source {str(source.path)!r} holds no rows; leave it out, or fetch it again")


def _parquet_blocks(source: Source, columns: Sequence[str]) -> Iterator[Block]:
    first_row = 0
    with pq.ParquetFile(source.path) as file:
        num_rows = file.metadata.num_rows
        if not num_rows:
            raise MesetaError(f"source {str(source.path)!r} holds no rows; leave it out, or fetch it again")
        for batch in file.iter_batches(BLOCK_ROWS, columns=list(columns)):
            done = first_row + batch.num_rows
            yield Block(
                source=source,
                first_row=first_row,
                num_rows=batch.num_rows,
                raw=batch,
                position_bytes=source.size_bytes * done // num_rows,
            )
            first_row = done


@contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes] | io.BufferedIOBase, IO[bytes]]]:
    """The text of a file, unzipped where it begins as gzip does, and the stored file under it."""
    with path.open("rb") as stored:
        zipped = stored.read(2) == b"\x1f\x8b"
        stored.seek(0)
        yield (gzip.GzipFile(fileobj=stored) if zipped else stored), stored


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Turn what the readers of gzip and Parquet raise into an error that names the file."""
    try:
        yield
    except MesetaError:
        raise
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise MesetaError(f"source {str(path)!r} is truncated or damaged ({error}); fetch it again") from None
    except (pa.ArrowException, OSError) as error:
        detail = str(error).splitlines()[0]
        raise MesetaError(f"source {str(path)!r} cannot be read ({detail}); fetch it again") from None
