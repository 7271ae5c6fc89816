"""Records in memory that several processes map. Each ends in a CRC-32, so that a reader detects a half-written one."""

from __future__ import annotations

import struct
from typing import Any
from zlib import crc32

from meseta.machine.files import has_control_characters

CHECKSUM_BYTES = 4


def append_checksum(content: bytes) -> bytes:
    """Return the record to write."""
    return content + crc32(content).to_bytes(CHECKSUM_BYTES, "little")


def unpack_checked(memory: bytes, at: int, layout: struct.Struct) -> tuple[Any, ...] | None:
    """Return the fields of the record at byte `at`; None if it is half-written, or was never written."""
    content = memory[at : at + layout.size]
    if int.from_bytes(memory[at + layout.size : at + layout.size + CHECKSUM_BYTES], "little") != crc32(content):
        return None
    return layout.unpack(content) if any(content) else None


def encode_text(text: str, num_bytes: int) -> bytes:
    """Return a text in at most `num_bytes` of UTF-8; a longer one ends in '...'."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= num_bytes:
        return encoded
    return encoded[: num_bytes - 3].decode(errors="ignore").encode() + b"..."


def decode_text(field: bytes) -> str:
    """Return the text of a field; control characters, which may come from untrusted input, become question marks."""
    text = field.rstrip(b"\0").decode(errors="replace")
    return (
        text if not has_control_characters(text) else "".join(c if not has_control_characters(c) else "?" for c in text)
    )
