"""Text encodings: text that is not UTF-8 is converted to it as a stream, before it is split into fields."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa

from meseta.data.formats.compression import ByteLines, restarting
from meseta.data.layout import RawLayout
from meseta.data.raw_rows import RawRows, row_of_value
from meseta.errors import MesetaError

UTF_8 = "utf-8"
_CHUNK_BYTES = 256 << 10
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_OF_HOST_NAMES = ("idna", "punycode")
_INVALID = b"\xff"
"""Takes the place of bytes that an encoding does not define: it is never part of UTF-8, so that its row is bad."""
_HANDLER = "meseta.invalid"


def check_encoding(name: str) -> str:
    """Return Python's name of a text encoding. Raises MesetaError for an unknown one, and for a codec that is none."""
    advice = "give one such as latin-1, cp1252, utf-16 or shift_jis"
    try:
        known = codecs.lookup(name)
        with suppress(UnicodeDecodeError):
            b"a".decode(name)
    except (LookupError, ValueError):  # a codec that is none of text, or an unknown one
        raise MesetaError(f"encoding {name!r} is no encoding of text that Python knows; {advice}") from None
    if known.name in _OF_HOST_NAMES or known.incrementaldecoder is None:
        raise MesetaError(f"encoding {name!r} does not encode files; {advice}")
    return known.name


def encoding_by_mark(head: bytes) -> str:
    """Return the encoding of a file that begins so: that of its byte order mark, else UTF-8."""
    return next((name for mark, name in _MARKS if head.startswith(mark)), UTF_8)


def as_utf8(stream: ByteLines, encoding: str) -> ByteLines:
    """Return a stream of the same text in UTF-8, in which bytes that the encoding does not define are 0xff.

    The stream itself if it is in UTF-8.
    """
    return stream if encoding == UTF_8 else restarting(lambda: _converter(stream, encoding))


def check_text(rows: RawRows, raw: bytes, layout: RawLayout, error: Callable[[int, str, str], MesetaError]) -> None:
    """Raise `error(row, column, problem)` for the first category among rows parsed of `raw` that is not text.

    Datasets of former versions take bytes as they are.
    """
    if layout.encoding is None or raw.isascii():
        return
    for column, values in zip(layout.sparse, rows.sparse, strict=True):
        if column.has_rows:
            continue
        if fault := first_not_utf8(values.values):
            row = row_of_value(fault.place, values.lengths)
            problem = f"{fault.shown} is not UTF-8"
            if layout.encoding != UTF_8:
                problem = f"it has bytes that {layout.encoding} does not define"
            problem += "; name the encoding of the file with --encoding, or as encoding in a --schema file"
            raise error(row, "', '".join(column.columns), problem)


class NotUtf8(NamedTuple):
    """A value that is not UTF-8."""

    place: int
    shown: str
    """Its beginning, for messages."""


def first_not_utf8(values: pa.Array) -> NotUtf8 | None:
    """Return the first of strings or binary [n] that is not UTF-8, `None` if all are."""
    is_large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    contents = values.cast(pa.large_binary() if is_large else pa.binary())
    try:
        contents.cast(pa.large_string() if is_large else pa.string())
    except pa.ArrowInvalid:
        places = enumerate(contents.to_pylist())
        return next(NotUtf8(at, repr(value[:40])[1:]) for at, value in places if value and not _is_utf8(value))
    return None


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _converter(stream: ByteLines, encoding: str) -> Callable[[int], bytes]:
    stream.seek(0)
    decoder = codecs.getincrementaldecoder(encoding)(_HANDLER)
    rest, ended = b"", False

    def read(size: int) -> bytes:
        nonlocal rest, ended
        while not rest and not ended:
            chunk = stream.read(_CHUNK_BYTES)
            ended = not chunk
            rest = decoder.decode(chunk, ended).encode("utf-8", _HANDLER)
        part, rest = rest[:size], rest[size:]
        return part

    return read


def _mark_invalid(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeDecodeError):
        return "\udcff", error.end
    if isinstance(error, UnicodeEncodeError):
        return _INVALID, error.end
    raise error


codecs.register_error(_HANDLER, _mark_invalid)
