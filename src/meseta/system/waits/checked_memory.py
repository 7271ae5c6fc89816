"""Records in memory that several processes map.

Each record ends in a CRC-32, with which a reader detects a partly written record.
"""

from __future__ import annotations

import struct
from typing import Any
from zlib import crc32

from meseta.system.files import has_control_characters

CHECKSUM_BYTES = 4


def append_checksum(content: bytes) -> bytes:
    """Return `content` followed by its CRC-32."""
    return content + crc32(content).to_bytes(CHECKSUM_BYTES, "little")


def unpack_checked(memory: bytes, at: int, layout: struct.Struct) -> tuple[Any, ...] | None:
    """Return the fields of the record at byte `at`, or `None` if it is partly written or was never written."""
    content = memory[at : at + layout.size]
    if int.from_bytes(memory[at + layout.size : at + layout.size + CHECKSUM_BYTES], "little") != crc32(content):
        return None
    return layout.unpack(content) if any(content) else None


def encode_text(text: str, num_bytes: int) -> bytes:
    """Encode a text as UTF-8. A text of more than `num_bytes` bytes is truncated and ends in '...'."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= num_bytes:
        return encoded
    return encoded[: num_bytes - 3].decode(errors="ignore").encode() + b"..."


def decode_text(field: bytes) -> str:
    """Decode a text field. Control characters become question marks, because they may come from untrusted input."""
    text = field.rstrip(b"\0").decode(errors="replace")
    return (
        text if not has_control_characters(text) else "".join(c if not has_control_characters(c) else "?" for c in text)
    )
