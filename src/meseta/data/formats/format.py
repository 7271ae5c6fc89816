"""What a raw format is: how its files are told, sampled, laid out, cut into blocks, parsed and explained.

`registry` lists all formats, each in a module of its own; nothing outside of this folder asks which one a file has.
"""

from __future__ import annotations

import io
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

from meseta.data.dataset.dataset import SourceSplit
from meseta.data.formats.compression import (
    DECOMPRESSION_ERRORS,
    ByteStream,
    check_content,
    decompress,
    strip_compression_suffix,
)
from meseta.data.formats.encodings import UTF_8, detect_bom_encoding, transcode_to_utf8
from meseta.data.formats.partitions import Partition, check_partition
from meseta.data.layout import RawLayout
from meseta.data.raw_rows import RawRows
from meseta.data.schema.roles import NamedColumns
from meseta.data.schema.schema import Schema
from meseta.errors import MesetaError, error_summary, reading_error
from meseta.machine.remote import is_url, open_file, wrap_remote_errors

MAX_HEAD_BYTES = 64 << 10
"""Bytes of text that a format is told by."""
FIX_LINE = "fix or remove the line"
"""Remedy of errors that name a line of text."""

ScanProgress = Callable[[int, float], None]
"""Called with the rows scanned so far, and the share of the bytes that they take, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One raw file."""

    path: str
    """As found: a path on this machine, or a URL."""
    split: SourceSplit
    """Where its rows go."""
    format: RawFormat
    size_bytes: int
    """As stored, compressed or not."""
    changed: str
    """When it was written last, as its file system tells."""
    delimiter: str = ","
    """What separates the fields of a line, where the format leaves that open."""
    header: tuple[str, ...] = ()
    """Names of the columns of text that could begin with them and does not."""
    is_typed: bool = False
    """Whether the names in its header have types, as `user_id:token`, which are no part of them."""
    encoding: str = UTF_8
    """Of its text."""
    partition: Partition = field(default_factory=dict, hash=False)
    """Columns that the folders of the file make, with their values."""

    def file_columns(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that are not made by folders."""
        return [name for name in names if name not in self.partition]


@dataclass(frozen=True, kw_only=True)
class FilePosition:
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
    first_offset: int = 0
    """Bytes of text before this block, unzipped."""
    num_rows: int
    raw: bytes | pa.RecordBatch
    """Whole lines (of CSV, whole records), or columns of a Parquet file."""
    header: tuple[str, ...] = ()
    """Names of the columns of a file that begins with them, or of which they were given."""
    end: FilePosition
    """Where the next row begins."""
    position_bytes: int
    """How far the stored file has been read, for progress."""

    @property
    def start(self) -> FilePosition:
        """Where its first row begins."""
        return FilePosition(row=self.first_row, line=self.first_line, offset=self.first_offset)


@runtime_checkable  # beartype asks for it where the tests check every call
class RowCursor(Protocol):
    """An open file, of which some rows are read, and then others; dearer where these stand before the former ones. One
    thread at a time may use it."""

    row: int
    """Of the file, before which it stands."""

    def read(self, start: FilePosition, stop: FilePosition) -> Block:
        """The rows from one position to another, where both lie in one block of `RawFormat.blocks`. Raises MesetaError
        where the file ends before, and what `wrap_source_errors` turns into one."""

    def close(self) -> None:
        """Close the file."""


@dataclass
class FileHead:
    """What a format is told by: the beginning of a file, its name, and what the options say of it."""

    path: str
    magic: bytes
    """The first four bytes as stored."""
    delimiter: str | None = None
    """That of its fields, where the options give one."""
    header: tuple[str, ...] = ()
    """Names of its columns, where the options give them."""
    requested_encoding: str | None = None
    """That of its text, if the options give one."""

    @cached_property
    def text(self) -> bytes:
        """The first 64 KiB, decompressed, in UTF-8. Raises MesetaError for a damaged file."""
        return self._content[0]

    @property
    def encoding(self) -> str:
        """That of its text: as the options say, else by its byte order mark."""
        return self._content[2]

    @cached_property
    def _content(self) -> tuple[bytes, str, str]:
        """The text, the name of the file in a zip archive, and the encoding."""
        with wrap_source_errors(self.path), open_file(self.path) as stored:
            stream, member = decompress(self.path, stored)
            head = stream.read(MAX_HEAD_BYTES)
            encoding = self.requested_encoding or detect_bom_encoding(head)
            return transcode_to_utf8(io.BytesIO(head), encoding).read(MAX_HEAD_BYTES), member, encoding

    def has_suffix(self, endings: tuple[str, ...]) -> bool:
        """Whether the name of the file, or of that in a zip archive, ends so before .gz and the like, in any case."""
        names = (strip_compression_suffix(self.path), self._content[1])
        return any(name.lower().endswith(endings) for name in names)

    @property
    def is_declared_csv(self) -> bool:
        """Whether the options or the name of the file leave no other text."""
        return self.delimiter is not None or bool(self.header) or self.has_suffix((".csv",))

    def check_text(self) -> None:
        """Raise MesetaError if the content is not text of lines: an archive, or lines that end in CR alone."""
        if not self.text:
            raise MesetaError(f"source {self.path!r} holds no rows; leave it out, or fetch it again")
        check_content(self.path, self.text)
        if b"\n" not in self.text and self.text.rstrip(b"\r").count(b"\r"):
            raise MesetaError(
                f"source {self.path!r} has lines that end in CR alone, as old Macs wrote them; convert them, as by "
                "tr '\\r' '\\n'"
            )


@dataclass(frozen=True)
class TextDialect:
    """How a file writes its columns, where the format leaves that open."""

    delimiter: str = ","
    header: tuple[str, ...] = ()
    """As `Source.header`."""
    is_typed: bool = False
    """As `Source.is_typed`."""


@dataclass(frozen=True)
class ColumnRequest:
    """What options say of the columns, and how the rows may be looked at."""

    named_columns: NamedColumns = field(default_factory=NamedColumns)
    schema: Schema | None = None
    on_scan: ScanProgress = lambda rows, share: None
    skip_bad_rows: bool = False
    """Whether a row that cannot be parsed is passed over."""


class RawFormat(ABC):
    """One raw format; it has no state. What a method raises for a file is a MesetaError that names it."""

    name: ClassVar[str] = ""
    """As dataset.json has it."""
    title: ClassVar[str] = ""
    """For people."""
    is_delimited: ClassVar[bool] = False
    """Whether its files choose a delimiter, may leave names out, and write several values into one field."""
    is_text: ClassVar[bool] = False
    """Whether its files have an encoding."""
    has_named_columns: ClassVar[bool] = True
    """Whether values stand in named columns, so that another format with such columns may hold the same rows."""

    @abstractmethod
    def detect(self, head: FileHead) -> TextDialect | None:
        """How the file writes its columns, or None where it is of another format."""

    def check_content(self, head: FileHead) -> None:
        """Raise MesetaError for a file of this format by its name, or for want of another, that cannot be read."""
        return

    @abstractmethod
    def columns(self, source: Source) -> tuple[str, ...]:
        """Names of the columns of a file."""

    def all_columns(self, source: Source) -> tuple[str, ...]:
        """Names of the columns of a file and of those that its folders make. Raises MesetaError if one is both."""
        names = self.columns(source)
        check_partition(f"source {source.path!r}", source.partition, names)
        return (*names, *source.partition)

    @abstractmethod
    def layout(self, sources: Sequence[Source], asked: ColumnRequest) -> RawLayout:
        """The common layout of all files: as asked, else inferred."""

    @abstractmethod
    def blocks(self, source: Source, columns: Sequence[str], start: FilePosition) -> Iterator[Block]:
        """Blocks of one file in order, from `start` on, which is where one ends; at least `columns` of them are read.

        Where a block ends is a function of the file alone, and not of where the reading began."""

    @abstractmethod
    def cursor(self, source: Source, columns: Sequence[str]) -> RowCursor:
        """Opens one file, to read rows anywhere in it; at least `columns` of them are read. Raises as a cursor does."""

    @abstractmethod
    def is_seekable(self, source: Source) -> bool:
        """Whether rows in the middle of a file can be read without those before them."""

    @abstractmethod
    def row_position(self, block: Block, row: int) -> FilePosition:
        """Where a row of a block begins, counted from 0; the block was parsed."""

    @abstractmethod
    def parse(self, block: Block, layout: RawLayout) -> RawRows:
        """Parse and check every row of a block. Raises MesetaError naming the file, the line or row, and the field."""

    @abstractmethod
    def row_ends(self, block: Block) -> Sequence[int]:
        """Where each row of a block ends: in bytes of text, or in rows [num_rows]."""

    @abstractmethod
    def filter_rows(self, block: Block, mask: NDArray[np.bool_]) -> Block:
        """Those rows of a block without bad ones for which `mask` [num_rows] is set; where they stand is not told."""

    @abstractmethod
    def key_schema(self, where: str, source: Source, names: Sequence[str]) -> pa.Schema:
        """Types of some columns as they stand in a file. Raises MesetaError, beginning with `where`, for one that it
        lacks or has twice."""

    @abstractmethod
    def key_columns(self, block: Block, names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
        """Those columns of a block that was parsed, with `schema`."""

    def with_header(self, sources: Sequence[Source]) -> tuple[Source, ...]:
        """The same files; where the first begins with a row instead of names, all get such."""
        return tuple(sources)

    def with_header_from(self, source: Source, layout: RawLayout) -> Source:
        """The same file with the names that an earlier `layout` gave to columns that had none."""
        return source

    def columns_for(self, source: Source, layout: RawLayout) -> Sequence[str]:
        """Columns that rows of a file may have, those of `layout` where the file does not name its own."""
        return self.columns(source)

    def can_hold(self, layout: RawLayout, earlier: RawFormat | None) -> bool:
        """Whether files of this format can hold rows of a `layout` whose first files were of the format `earlier`, None
        where that is not known."""
        has_lists = any(column.multi_valued and not column.is_empty for column in layout.sparse)
        return earlier is self or (not has_lists and (earlier is None or earlier.has_named_columns))

    def find_empty_columns(self, sources: Sequence[Source], names: Sequence[str]) -> set[str]:
        """Those of some columns that have no value in a sample of the rows."""
        return set()

    def check_types(self, source: Source, layout: RawLayout, earlier_dir: Path) -> None:
        """Raise MesetaError where types of columns do not fit their roles in the `layout` of an earlier dataset."""
        return


def read_blocks(source: Source, columns: Sequence[str], start: FilePosition | None = None) -> Iterator[Block]:
    """Blocks of one file in order, from `start` on; `columns` are those wanted of a file that can be read by columns.

    Raises MesetaError for a truncated or damaged file.
    """
    with wrap_source_errors(source.path):
        yield from source.format.blocks(source, columns, start or FilePosition())


@contextmanager
def open_text(source: Source) -> Iterator[tuple[ByteStream, IO[bytes]]]:
    """Context manager that opens a text file. It yields the decompressed content in UTF-8 and the stored file under
    it, which are one object if nothing is to be converted."""
    with open_file(source.path) as stored:
        yield transcode_to_utf8(decompress(source.path, stored).stream, source.encoding), stored


@contextmanager
def wrap_source_errors(path: str) -> Iterator[None]:
    """Context manager that turns errors of decompressors, Parquet and file systems into one that names the file."""
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
        if not is_url(path):
            raise
        with wrap_remote_errors("source", path, "read"):
            raise
