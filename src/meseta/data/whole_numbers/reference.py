"""Reference for the normal form of whole numbers, with Python's decimal arithmetic."""

from __future__ import annotations

import decimal
import re
from collections.abc import Sequence
from decimal import Decimal

_NUMBER = re.compile(rb"[+-]?(\d*)(?:\.\d*)?(?:[eE][+-]?\d+)?", re.ASCII)
_MAX_DIGITS = 20


def respell_whole_numbers(strings: Sequence[bytes]) -> list[bytes]:
    """Return the strings with 64-bit whole numbers replaced by their sign and digits."""
    return [_respell(string) for string in strings]


def _respell(string: bytes) -> bytes:
    text = string.strip()
    match = _NUMBER.fullmatch(text)
    if match is None or (len(match[1]) > 1 and match[1].startswith(b"0")):
        return string
    try:
        number = Decimal(text.decode())
    except decimal.InvalidOperation:  # No digits, or an exponent of more than 18 digits.
        digits = re.match(rb"[+-]?([\d.]*)", text)
        return b"0" if digits and digits[1].strip(b".") and not digits[1].strip(b"0.") else string
    if number and number.adjusted() >= _MAX_DIGITS:
        return string
    if number != number.to_integral_value() or not -(2**63) <= number < 2**64:
        return string
    return b"%d" % int(number)
