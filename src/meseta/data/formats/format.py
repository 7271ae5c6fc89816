"""Base class of raw formats, and the files, blocks and positions that they work on.

`registry` lists all formats, each defined in its own module. No code outside this folder depends on the format of a
file.
"""

from __future__ import annotations

import io
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, ClassVar, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from meseta.data.dataset.records import SourceSplit
from meseta.data.formats.encodings import (
    DECOMPRESSION_ERRORS,
    UTF_8,
    ByteStream,
    check_content,
    decompress,
    detect_bom_encoding,
    strip_compression_suffix,
    transcode_to_utf8,
)
from meseta.data.formats.partitions import Partition, check_partition
from meseta.data.schema.infer import MAX_SAMPLE_ROWS
from meseta.data.schema.layout import RawLayout, RawRows
from meseta.data.schema.roles import NamedColumns
from meseta.data.schema.schema import Schema
from meseta.errors import MesetaError, error_summary, reading_error
from meseta.system.remote import is_url, open_file, wrap_remote_errors

MAX_HEAD_BYTES = 64 << 10
"""Maximum number of bytes of decompressed text from which a format is detected."""
FIX_LINE = "fix or remove the line"
"""Remedy of errors that name a line of a text file."""

ScanProgress = Callable[[int, float], None]
"""Callback that receives the number of rows scanned so far, and the scanned share of all bytes (0 to 1)."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Raw file with its format and dialect."""

    path: str
    """Path of a local file, or a URL."""
    split: SourceSplit
    """Split that receives the rows of this file, or the rule by which they are distributed."""
    format: RawFormat
    size_bytes: int
    """Size of the stored file, which may be compressed."""
    changed: str
    """Modification time as the file system reports it."""
    delimiter: str = ","
    """Separator of the fields of a line, in delimited formats."""
    header: tuple[str, ...] = ()
    """Column names of a text file without a header. Empty if the file has one."""
    is_typed: bool = False
    """Whether names in the header have a type, as in `user_id:token`, which is not part of the column name."""
    encoding: str = UTF_8
    partition: Partition = field(default_factory=dict, hash=False)
    """Columns from the folders of the file, with their values."""

    def file_columns(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that are columns of the file itself. The others come from its folders."""
        return [name for name in names if name not in self.partition]


@dataclass(frozen=True, kw_only=True)
class FilePosition:
    """Position of the beginning of a row in a file."""

    row: int = 0
    """Number of rows before this one."""
    line: int = 0
    """Number of lines before this row. 0 if the file is not text."""
    offset: int = 0
    """Offset of this row in the decompressed text, in bytes."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive rows of one file."""

    source: Source
    first_row: int
    """Number of rows of the file before this block."""
    first_line: int = 0
    """Number of lines of a text file before this block."""
    first_offset: int = 0
    """Offset of this block in the decompressed text, in bytes."""
    num_rows: int
    raw: bytes | pa.RecordBatch
    """Complete lines of text (in CSV, complete records), or columns of a Parquet file."""
    header: tuple[str, ...] = ()
    """Column names of a CSV or TSV file. Empty for other formats."""
    end: FilePosition
    """Position of the row after this block."""
    position_bytes: int
    """Bytes of the stored file read up to the end of this block, to report progress."""

    @property
    def start(self) -> FilePosition:
        """Position of the first row of this block."""
        return FilePosition(row=self.first_row, line=self.first_line, offset=self.first_offset)


@runtime_checkable  # beartype asks for it where the tests check every call
class RowCursor(Protocol):
    """Open file from which ranges of rows are read, cheapest in ascending order. Not thread-safe."""

    row: int
    """Index of the next row that can be read without seeking."""

    def read(self, start: FilePosition, stop: FilePosition) -> Block:
        """Read the rows from `start` up to `stop`, both within one block of `RawFormat.blocks`.

        Raises MesetaError if the file ends before `stop`, or if an error occurs that `wrap_source_errors` converts.
        """

    def close(self) -> None:
        """Close the file."""


@dataclass
class FileHead:
    """Beginning of a file, its name and the options for it, from which its format is detected."""

    path: str
    magic: bytes
    """First four bytes of the stored file."""
    delimiter: str | None = None
    """Delimiter from the options, if any."""
    header: tuple[str, ...] = ()
    """Column names from the options, if any."""
    requested_encoding: str | None = None
    """Encoding from the options, if any."""

    @cached_property
    def text(self) -> bytes:
        """First 64 KiB of the content, decompressed and in UTF-8. Raises MesetaError if the file is damaged."""
        return self._content[0]

    @property
    def encoding(self) -> str:
        """Encoding from the options, or else from the byte order mark."""
        return self._content[2]

    @cached_property
    def _content(self) -> tuple[bytes, str, str]:
        with wrap_source_errors(self.path), open_file(self.path) as stored:
            stream, member = decompress(self.path, stored)
            head = stream.read(MAX_HEAD_BYTES)
            encoding = self.requested_encoding or detect_bom_encoding(head)
            return transcode_to_utf8(io.BytesIO(head), encoding).read(MAX_HEAD_BYTES), member, encoding

    def has_suffix(self, endings: tuple[str, ...]) -> bool:
        """Whether the name of the file, or of its member in a zip archive, has one of these suffixes. Ignores case and
        suffixes of compression such as .gz."""
        names = (strip_compression_suffix(self.path), self._content[1])
        return any(name.lower().endswith(endings) for name in names)

    @property
    def is_declared_csv(self) -> bool:
        """Whether the options or the name of the file exclude all text formats other than CSV."""
        return self.delimiter is not None or bool(self.header) or self.has_suffix((".csv",))

    def check_text(self) -> None:
        """Raise MesetaError if the content is empty or binary, or if its lines end with a carriage return alone."""
        if not self.text:
            raise MesetaError(f"source {self.path!r} contains no rows; leave it out, or fetch it again")
        check_content(self.path, self.text)
        if b"\n" not in self.text and self.text.rstrip(b"\r").count(b"\r"):
            raise MesetaError(
                f"source {self.path!r} has lines that end with a carriage return alone, as on old Macs; convert them, "
                "for example with tr '\\r' '\\n'"
            )


@dataclass(frozen=True)
class TextDialect:
    """Conventions by which a text file stores its columns."""

    delimiter: str = ","
    header: tuple[str, ...] = ()
    """Same as `Source.header`."""
    is_typed: bool = False
    """Same as `Source.is_typed`."""


@dataclass(frozen=True)
class ColumnRequest:
    """Options for the columns of raw files, and for scanning their rows."""

    named_columns: NamedColumns = field(default_factory=NamedColumns)
    schema: Schema | None = None
    on_scan: ScanProgress = lambda rows, share: None
    skip_bad_rows: bool = False


class RawFormat(ABC):
    """Stateless base class of raw formats. Errors about a file are raised as MesetaError and name the file."""

    name: ClassVar[str] = ""
    """Name of the format in dataset.json."""
    title: ClassVar[str] = ""
    """Name of the format in messages."""
    is_delimited: ClassVar[bool] = False
    """Whether files choose a delimiter, may have no header, and may hold several values in one field."""
    is_text: ClassVar[bool] = False
    """Whether files have a text encoding."""
    has_named_columns: ClassVar[bool] = True
    """Whether files have named columns, so that another format with named columns can contain the same rows."""

    @abstractmethod
    def detect(self, head: FileHead) -> TextDialect | None:
        """Return the dialect of a file of this format, or `None` if the file has another format."""

    def check_content(self, head: FileHead) -> None:
        """Raise MesetaError if a file cannot be read, although its name or the lack of alternatives selects this
        format."""
        return  # Only some formats have something to check.

    @abstractmethod
    def columns(self, source: Source) -> tuple[str, ...]:
        """Return the column names of a file."""

    def all_columns(self, source: Source) -> tuple[str, ...]:
        """Return the columns of a file, then those from its folders. Raises MesetaError if a column is in both."""
        names = self.columns(source)
        check_partition(f"source {source.path!r}", source.partition, names)
        return (*names, *source.partition)

    @abstractmethod
    def layout(self, sources: Sequence[Source], asked: ColumnRequest) -> RawLayout:
        """Return the common layout of all files. Roles come from the schema or options in `asked`, or are inferred."""

    @abstractmethod
    def blocks(self, source: Source, columns: Sequence[str], start: FilePosition) -> Iterator[Block]:
        """Yield the blocks of a file in order, beginning at `start`, which must be the end of a block.

        Blocks contain at least `columns`. Their boundaries depend only on the file, not on `start`.
        """

    @abstractmethod
    def cursor(self, source: Source, columns: Sequence[str]) -> RowCursor:
        """Open a file to read ranges of rows with at least `columns`. Raises MesetaError as `RowCursor.read` does."""

    @abstractmethod
    def is_seekable(self, source: Source) -> bool:
        """Whether rows in the middle of a file can be read without reading the rows before them."""

    @abstractmethod
    def row_position(self, block: Block, row: int) -> FilePosition:
        """Return the position of a row in a parsed block. `row` counts from 0."""

    @abstractmethod
    def parse(self, block: Block, layout: RawLayout) -> RawRows:
        """Parse and check all rows of a block. Raises MesetaError naming the file, the line or row, and the field."""

    @abstractmethod
    def row_ends(self, block: Block) -> Sequence[int]:
        """Return the end of each row of a block [num_rows]: a byte offset in text, or a row index in Parquet."""

    @abstractmethod
    def filter_rows(self, block: Block, mask: NDArray[np.bool_]) -> Block:
        """Return the rows of a block without bad rows for which `mask` [num_rows] is set, without their positions."""

    @abstractmethod
    def key_schema(self, where: str, source: Source, names: Sequence[str]) -> pa.Schema:
        """Return the stored types of the columns `names`. Raises MesetaError with the prefix `where` if the file lacks
        a column or has it twice."""

    @abstractmethod
    def key_columns(self, block: Block, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        """Return the columns `names` of a parsed block, with the types of `schema`."""

    def with_header(self, sources: Sequence[Source]) -> tuple[Source, ...]:
        """Return the files with column names if the first one has no header, otherwise unchanged."""
        return tuple(sources)

    def with_header_from(self, source: Source, layout: RawLayout) -> Source:
        """Return the file with column names from an earlier `layout`, if the file has no header."""
        return source

    def columns_for(self, source: Source, layout: RawLayout) -> Sequence[str]:
        """Return the columns of a file. If it does not name its columns, these are the columns of `layout`."""
        return self.columns(source)

    def can_hold(self, layout: RawLayout, earlier: RawFormat | None) -> bool:
        """Whether files can hold rows of `layout`. `earlier` is the format of the dataset's first files, if known."""
        has_lists = any(column.multi_valued and not column.is_empty for column in layout.sparse)
        return earlier is self or (not has_lists and (earlier is None or earlier.has_named_columns))

    def find_empty_columns(self, sources: Sequence[Source], names: Sequence[str]) -> set[str]:
        """Return those of the columns `names` that have no value in a sample of rows."""
        return set()

    def check_types(self, source: Source, layout: RawLayout, earlier_dir: Path) -> None:
        """Raise MesetaError if the types of columns do not fit their roles in the `layout` of an earlier dataset."""
        return  # Text has no types.


def read_blocks(source: Source, columns: Sequence[str], start: FilePosition | None = None) -> Iterator[Block]:
    """Yield the blocks of one file in order, beginning at `start`.

    Formats that store columns separately read only `columns`. Raises MesetaError if the file is truncated or damaged.
    """
    with wrap_source_errors(source.path):
        yield from source.format.blocks(source, columns, start or FilePosition())


@contextmanager
def open_text(source: Source) -> Iterator[tuple[ByteStream, IO[bytes]]]:
    """Context manager that opens a text file and yields (content, stored file).

    The content is decompressed and in UTF-8. Both are the same object if the file needs no conversion.
    """
    with open_file(source.path) as stored:
        yield transcode_to_utf8(decompress(source.path, stored).stream, source.encoding), stored


@contextmanager
def wrap_source_errors(path: str) -> Iterator[None]:
    """Context manager that converts errors of decompressors, Arrow and file systems into a MesetaError that names the
    file."""
    try:
        yield
    except MesetaError:
        raise
    except DECOMPRESSION_ERRORS as error:
        raise MesetaError(f"source {path!r} is truncated or damaged ({error_summary(error)}); fetch it again") from None
    except (pa.ArrowException, OSError) as error:
        text = f"source {path!r} cannot be read ({error_summary(error)}); fetch it again"
        raise reading_error(error, text) from None
    except Exception:
        # Libraries for remote files raise other classes of errors.
        if not is_url(path):
            raise
        with wrap_remote_errors("source", path, "read"):
            raise


# Fewer rows are sampled from files with many columns.
MAX_SAMPLED_FIELDS = 4_000_000
_MIN_ROWS = 2000
_MAX_FILES = 8
NUM_PIECES = 8
"""Number of places from which rows of a seekable file are sampled."""
# Limits the number of long rows.
MAX_SAMPLE_BYTES = 64 << 20
"""Maximum number of bytes of text to sample from all files."""
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
