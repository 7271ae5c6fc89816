"""Compressed files and archives, detected by their first bytes and decompressed as streams in bounded memory."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from typing import IO, Any, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from meseta.data.schema.layout import RawLayout, RawRows, find_value_row
from meseta.errors import MesetaError, error_summary, format_value

# A file compressed by `xz -9` needs 65 MB.
MAX_XZ_BYTES = 256 << 20
"""Memory limit of an xz decoder."""
# The directory of an archive with one member takes less than 200 KB.
_MAX_ZIP_DIRECTORY_BYTES = 4 << 20
_CHUNK_BYTES = 256 << 10
_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zstd", ".zip")
_MAGIC_NUMBERS = (
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
    (b"PK\x07\x08", "zip"),
)
_UNPACK = "unpack it and give the files in it"
_TO_PARQUET = "convert it to Parquet or CSV"
_RECOMPRESS = "decompress it, or compress it with gzip, bz2, xz or zstd"
# (first bytes, description, remedy) of formats that are recognized in order to reject them.
_UNSUPPORTED_FORMATS = (
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (b"MSCF\x00\x00\x00\x00", "a CAB archive", _UNPACK),
    (b"!<arch>\n", "an ar archive", _UNPACK),
    (b"\x04\x22\x4d\x18", "compressed with lz4", _RECOMPRESS),
    (b"\x1f\x9d", "compressed with compress", _RECOMPRESS),
    (b"LZIP\x01", "compressed with lzip", _RECOMPRESS),
    (b"\x89LZO\x00\r\n\x1a\n", "compressed with lzop", _RECOMPRESS),
    (b"\xff\x06\x00\x00sNaPpY", "compressed with snappy", _RECOMPRESS),
    (b"Obj\x01", "an Avro file", _TO_PARQUET),
    (b"ARROW1\x00\x00", "an Arrow IPC (Feather) file", _TO_PARQUET),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", _TO_PARQUET),
    (b"SQLite format 3\x00", "a SQLite database", _TO_PARQUET),
    (b"\x93NUMPY", "a NumPy file", _TO_PARQUET),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a Microsoft Office document", _TO_PARQUET),
)

DECOMPRESSION_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""Errors other than OSError that decompressors raise for truncated or damaged content."""


@runtime_checkable  # beartype asks for it where the tests check every call
class ByteStream(Protocol):
    """Decompressed content of a text file."""

    def read(self, size: int = -1, /) -> bytes:
        """Read up to `size` bytes, or all remaining ones if `size` is negative."""

    def readline(self, size: int = -1, /) -> bytes:
        """Read a line including its line break, or its first `size` bytes. Returns no bytes at the end."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to `offset` in the decompressed content, and return the new position."""

    def tell(self) -> int:
        """Return the position in the decompressed content."""


class DecompressedContent(NamedTuple):
    """Content of a file that may be compressed."""

    stream: ByteStream
    """Decompressed content. If the file is not compressed, this is the stored file itself."""
    member: str = ""
    """Name of the file in a zip archive, never used as a path. Empty for all other files."""


def decompress(path: str, stored: IO[bytes]) -> DecompressedContent:
    """Return the decompressed content of `stored`, the file at `path`.

    Raises MesetaError if a zip archive does not contain exactly one file, stored or deflated and not encrypted. Damaged
    content raises OSError or one of `DECOMPRESSION_ERRORS`, here or while the content is read.
    """
    kind = _detect_compression(stored.read(10))
    stored.seek(0)
    if kind == "gzip":
        return DecompressedContent(gzip.GzipFile(fileobj=stored))
    if kind == "bz2":
        return DecompressedContent(restartable_stream(lambda: _MemberReader(stored, bz2.BZ2Decompressor).read))
    if kind == "xz":
        return DecompressedContent(restartable_stream(lambda: _xz_reader(path, stored)))
    if kind == "zstd":
        return DecompressedContent(restartable_stream(lambda: _zstd_reader(path, stored)))
    if kind == "zip":
        return _open_zip_member(path, stored)
    return DecompressedContent(stored)


def _detect_compression(magic: bytes) -> str | None:
    """Return the name of the compression, or `None`. `magic` is the first 10 bytes of the file."""
    if magic.startswith(b"BZh") and magic[4:] in (b"1AY&SY", b"\x17rE8P\x90"):
        return "bz2"
    # Other frames may follow a skippable frame.
    if magic[1:4] == b"\x2a\x4d\x18" and 0x50 <= magic[0] <= 0x5F:
        return "zstd"
    return next((name for start, name in _MAGIC_NUMBERS if magic.startswith(start)), None)


def strip_compression_suffix(path: str) -> str:
    """Return `path` without a suffix such as .gz."""
    ending = next((ending for ending in _SUFFIXES if path.lower().endswith(ending)), "")
    return path[: len(path) - len(ending)]


def check_content(path: str, head: bytes) -> None:
    """Raise MesetaError if `head`, decompressed, begins an archive or a known binary format that cannot be read."""
    where = f"source {path!r}"
    for magic, what, remedy in _UNSUPPORTED_FORMATS:
        if head.startswith(magic):
            raise MesetaError(f"{where} is {what}, which is not supported; {remedy}")
    if head.startswith(b"PAR1"):
        raise MesetaError(f"{where} contains compressed Parquet, which is not supported; decompress it")
    if _detect_compression(head[:10]):
        raise MesetaError(f"{where} is compressed twice; decompress it once")
    try:
        tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return
    raise MesetaError(f"{where} is a tar archive, which is not supported; {_UNPACK}")


@runtime_checkable  # beartype asks for it where the tests check every call
class _Decompressor(Protocol):
    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _MemberReader:
    """Sequential reader over all members of a bz2 or xz file. Zero bytes after a member are padding."""

    def __init__(self, stored: IO[bytes], make: Callable[[], Any]) -> None:
        stored.seek(0)
        self._stored, self._make = stored, make
        self._member: _Decompressor = make()

    def read(self, size: int) -> bytes:
        while True:
            data = b""
            if self._member.eof:
                data = self._member.unused_data.lstrip(b"\0")
                while not data:
                    if not (chunk := self._stored.read(_CHUNK_BYTES)):
                        return b""
                    data = chunk.lstrip(b"\0")
                self._member = self._make()
            elif self._member.needs_input and not (data := self._stored.read(_CHUNK_BYTES)):
                raise EOFError("it ends before its end-of-stream marker")
            if part := self._member.decompress(data, size):
                return part


def _xz_reader(path: str, stored: IO[bytes]) -> Callable[[int], bytes]:
    members = _MemberReader(stored, lambda: lzma.LZMADecompressor(memlimit=MAX_XZ_BYTES))

    def read(size: int) -> bytes:
        try:
            return members.read(size)
        except lzma.LZMAError as error:
            if "limit" not in str(error):
                raise
            raise MesetaError(
                f"source {path!r} needs more than {MAX_XZ_BYTES >> 20} MB for decompression; compress it with a "
                "smaller dictionary, such as that of xz -9"
            ) from None

    return read


def _zstd_reader(path: str, stored: IO[bytes]) -> Callable[[int], bytes]:
    stored.seek(0)
    # Arrow closes its input file, but seeking back reads this one again.
    stream = pa.CompressedInputStream(pa.PythonFile(_UnclosableFile(stored), mode="r"), "zstd")

    def read(size: int) -> bytes:
        try:
            return bytes(stream.read(size))
        except OSError as error:
            if "too much memory" not in str(error):
                raise
            raise MesetaError(
                f"source {path!r} was compressed by zstd with a window of more than 128 MB; compress it again with "
                "--long=27 or less"
            ) from None

    return read


class _UnclosableFile(io.RawIOBase):
    """View of a file whose `close` does not close the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class _ZipFile(_UnclosableFile):
    """Stored zip archive that rejects a large directory before zipfile loads it into memory."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        super().__init__(file)
        self._path = path
        self.has_read_directory = False
        """Whether zipfile has read the directory. Later reads are content of the member, and the caller limits their
        size."""

    def read(self, size: int = -1) -> bytes:
        if self.has_read_directory:
            return self._file.read(size)
        data = self._file.read(_MAX_ZIP_DIRECTORY_BYTES + 1 if size < 0 else min(size, _MAX_ZIP_DIRECTORY_BYTES + 1))
        if len(data) > _MAX_ZIP_DIRECTORY_BYTES:
            raise MesetaError(f"source {self._path!r} is a zip archive with too many files; {_UNPACK}")
        return data


class _RestartableStream(io.RawIOBase):
    """Seekable stream over a forward-only reader. Seeking back starts the reader again."""

    def __init__(self, start: Callable[[], Callable[[int], bytes]]) -> None:
        self._start = start
        self._read, self._offset = start(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def readinto(self, buffer: Any) -> int:
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        self._offset += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == io.SEEK_CUR:
            offset += self._offset
        elif whence != io.SEEK_SET:
            raise io.UnsupportedOperation("the size of compressed content is not known")
        if offset < self._offset:
            self._read, self._offset = self._start(), 0
        while self._offset < offset and (data := self._read(min(_CHUNK_BYTES, offset - self._offset))):
            self._offset += len(data)
        return self._offset


def restartable_stream(start: Callable[[], Callable[[int], bytes]]) -> ByteStream:
    """Return a seekable stream over content that can only be read forward. Seeking back starts again.

    `start` begins at the first byte and returns a function that reads up to `size` bytes, and no bytes at the end of
    the content.
    """
    return io.BufferedReader(_RestartableStream(start), _CHUNK_BYTES)


def _open_zip_member(path: str, stored: IO[bytes]) -> DecompressedContent:
    where = f"source {path!r}"
    try:
        file = _ZipFile(stored, path)
        archive = zipfile.ZipFile(file)
        file.has_read_directory = True
        # macOS adds a folder of metadata.
        members = [m for m in archive.infolist() if not m.is_dir() and not m.filename.startswith("__MACOSX/")]
        if len(members) != 1:
            names = ", ".join(format_value(member.filename) for member in members[:3])
            names += ", ..." if len(members) > 3 else ""
            what = f"{len(members):,} files ({names})" if members else "no file"
            raise MesetaError(f"{where} is a zip archive with {what}, but must contain exactly one; {_UNPACK}")
        [member] = members
        name = format_value(member.filename)
        # Bit 0 marks encryption, bit 6 strong encryption.
        if member.flag_bits & 0x41:
            raise MesetaError(f"{where}: {name} in this zip archive is encrypted; decrypt it")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise MesetaError(
                f"{where}: {name} in this zip archive has compression method {member.compress_type}, but must be "
                "stored or deflated; unpack it"
            )
        return DecompressedContent(archive.open(member), member.filename)
    except MesetaError:
        raise
    # zipfile raises these for damaged archives.
    except (NotImplementedError, struct.error, ValueError, OverflowError, RuntimeError) as error:
        raise zipfile.BadZipFile(error_summary(error)) from None


UTF_8 = "utf-8"
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Replaces bytes that the encoding does not define. UTF-8 never contains this byte, so the row becomes a bad one.
_INVALID_BYTE = b"\xff"
_ERROR_HANDLER = "meseta.invalid"


def detect_bom_encoding(head: bytes) -> str:
    """Return the encoding of the byte order mark at the beginning of `head`, or UTF-8."""
    return next((name for bom, name in _BYTE_ORDER_MARKS if head.startswith(bom)), UTF_8)


def transcode_to_utf8(stream: ByteStream, encoding: str) -> ByteStream:
    """Return the text as a UTF-8 stream, `stream` itself if it is UTF-8. Undefined bytes become 0xff (invalid)."""
    return stream if encoding == UTF_8 else restartable_stream(lambda: _utf8_reader(stream, encoding))


def check_text(rows: RawRows, raw: bytes, layout: RawLayout, error: Callable[[int, str, str], MesetaError]) -> None:
    """Check that the categories of parsed rows are valid text, unless the dataset keeps raw bytes.

    Raises `error(row, column, problem)` for the first invalid value. `raw` is the text of the rows.
    """
    # Datasets of former versions keep bytes as they are. They have no encoding.
    if layout.encoding is None or raw.isascii():
        return
    for column, values in zip(layout.sparse, rows.sparse, strict=True):
        if column.has_row_ids:
            continue
        if fault := find_invalid_utf8(values.values):
            row = find_value_row(fault.position, values.lengths)
            problem = f"{fault.preview} is not UTF-8"
            if layout.encoding != UTF_8:
                problem = f"the value has bytes that {layout.encoding} does not define"
            problem += "; name the encoding of the file with --encoding, or as encoding in a --schema file"
            raise error(row, "', '".join(column.columns), problem)


class InvalidUtf8(NamedTuple):
    """Value that is not valid UTF-8."""

    position: int
    preview: str
    """First 40 bytes of the value, escaped for error messages."""


def find_invalid_utf8(values: pa.Array) -> InvalidUtf8 | None:
    """Return the first invalid value of a string or binary array, or `None` if all are valid UTF-8."""
    is_large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    contents = values.cast(pa.large_binary() if is_large else pa.binary())
    try:
        contents.cast(pa.large_string() if is_large else pa.string())
    except pa.ArrowInvalid:
        places = enumerate(contents.to_pylist())
        return next(InvalidUtf8(at, repr(value[:40])[1:]) for at, value in places if value and not _is_utf8(value))
    return None


def decode_sample(value: bytes) -> str:
    """Decode sampled text. Different bytes stay different, also if they are not UTF-8."""
    return value.decode(errors="backslashreplace")


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _utf8_reader(stream: ByteStream, encoding: str) -> Callable[[int], bytes]:
    stream.seek(0)
    decoder = codecs.getincrementaldecoder(encoding)(_ERROR_HANDLER)
    rest, ended = b"", False

    def read(size: int) -> bytes:
        nonlocal rest, ended
        while not rest and not ended:
            chunk = stream.read(_CHUNK_BYTES)
            ended = not chunk
            rest = decoder.decode(chunk, ended).encode("utf-8", _ERROR_HANDLER)
        part, rest = rest[:size], rest[size:]
        return part

    return read


def _replace_invalid(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeDecodeError):
        return "\udcff", error.end
    if isinstance(error, UnicodeEncodeError):
        return _INVALID_BYTE, error.end
    raise error


codecs.register_error(_ERROR_HANDLER, _replace_invalid)
