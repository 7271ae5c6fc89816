"""Text encodings. Text in another encoding is converted to UTF-8 as a stream, before it is split into fields."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa

from meseta.data.formats.compression import ByteStream, restartable_stream
from meseta.data.formats.raw_rows import RawRows, find_value_row
from meseta.data.schema.layout import RawLayout
from meseta.errors import MesetaError

UTF_8 = "utf-8"
_CHUNK_BYTES = 256 << 10
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
    """Return a stream of the same text in UTF-8. If the encoding is UTF-8, this is `stream` itself.

    Bytes that the encoding does not define become 0xff, which is invalid UTF-8.
    """
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
