"""Decoder of JSON lines. It uses Python's json module with stricter rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from meseta.spec import MesetaError

MAX_ROW_BYTES = 1 << 20
"""Maximum size of one row. A decoded row takes up to 30 times as much memory."""
_MIN_INTEGER, _MAX_INTEGER = -(1 << 63), (1 << 64) - 1


class NumberLiteral(str):
    """Text of a number with a fraction or an exponent, as spelled in the file."""


class JsonRowDecoder:
    """Decoder of rows. Numbers keep their spelling as in CSV, true and false become bool, and null becomes `None`."""

    def __init__(self, fraction: Callable[[str], str] = str) -> None:
        """Create a decoder. `fraction` is the type of numbers with a fraction or an exponent."""
        self._decode = json.JSONDecoder(
            object_pairs_hook=_build_row,
            parse_int=_check_integer,
            parse_float=fraction,
            parse_constant=lambda name: fraction(name.lower().replace("infinity", "inf")),
        ).decode

    def decode(self, line: bytes) -> dict[str, Any]:
        """Return the object in a line. Raises MesetaError if there is none. The message does not name the line."""
        if len(line) > MAX_ROW_BYTES:
            raise MesetaError(f"the row has {len(line):,} bytes, but at most {MAX_ROW_BYTES:,} are allowed")
        try:
            row = self._decode(line.decode())
        except MesetaError:
            raise
        except UnicodeDecodeError as error:
            raise MesetaError(f"byte {error.start + 1} is not UTF-8") from None
        except json.JSONDecodeError as error:
            raise MesetaError(f"column {error.colno}: the row is not valid JSON ({error.msg})") from None
        except RecursionError:
            raise MesetaError("the values of the row are nested too deeply") from None
        if not isinstance(row, dict):
            raise MesetaError(f"the row must be an object, but is {describe_kind(row)}")
        return row


def describe_kind(value: Any) -> str:
    """Return the kind of a decoded value for messages."""
    if isinstance(value, dict):
        keys = ", ".join(ascii(key[:20]) for key in list(value)[:3])
        return f"an object with {keys or 'no keys'}; write its values as keys of the row"
    if isinstance(value, list):
        return "a list"
    return "null" if value is None else "a single value"


def scalar_text(value: Any) -> str | None:
    """Return a single value as its text in CSV, or `None` if it is a list or an object."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return None


def scalar_texts(value: Any) -> list[str] | None:
    """Return the texts of a list of single values, or `None` for any other value except null. null is an empty list."""
    if value is None:
        return []
    if not isinstance(value, list):
        return None
    texts = [scalar_text(item) for item in value]
    return None if None in texts else texts  # type: ignore[return-value]


def _build_row(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise MesetaError(f"key {twice[:40]!r} occurs twice")
    return row


def _check_integer(text: str) -> str:
    # Most integers have at most 18 digits, which need no conversion.
    if len(text) > 18 and (len(text) > 20 or not _MIN_INTEGER <= int(text) <= _MAX_INTEGER):
        raise MesetaError(f"the integer {text[:40]} needs more than 64 bits; write it as a string")
    return text
