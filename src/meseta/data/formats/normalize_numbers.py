"""Conversion of numbers in text columns from a number format to plain decimal notation."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from meseta.data.number_format import NumberFormat

# Stands for the decimal sign while thousands separators are removed, because a separator may be a point.
_POINT_PLACEHOLDER = "\x1f"


def normalize_formatted_numbers(number_format: NumberFormat, texts: pa.Array) -> pa.Array:
    """Return texts [n] as large_binary, with numbers in the format spelled as 1234.5. Nulls become empty."""
    texts = _as_binary(texts)
    return pc.if_else(pc.match_substring_regex(texts, number_format.pattern), _convert(number_format, texts), texts)


def normalize_numbers_strictly(number_format: NumberFormat, texts: pa.Array) -> pa.Array:
    """Return texts [n] as `normalize_formatted_numbers` does, but replace all other texts that contain a digit.

    The replacement is not a number, so that numbers in a different format are rejected later.
    """
    texts = _as_binary(texts)
    others = pc.if_else(pc.match_substring_regex(texts, r"\d"), b"?", texts)
    return pc.if_else(pc.match_substring_regex(texts, number_format.pattern), _convert(number_format, texts), others)


def normalize_number(number_format: NumberFormat, text: str) -> str:
    """Return one text as `normalize_numbers_strictly` does."""
    strings = pa.array([text.encode(errors="replace")], pa.large_binary())
    number: bytes = normalize_numbers_strictly(number_format, strings)[0].as_py()
    return number.decode()


def _convert(number_format: NumberFormat, texts: pa.Array) -> pa.Array:
    numbers = pc.replace_substring_regex(texts, number_format.pattern, rf"\1\2{_POINT_PLACEHOLDER}\3\4\5")
    if number_format.thousands:
        numbers = pc.replace_substring(numbers, number_format.thousands, "")
    # A decimal sign without a fraction is dropped.
    numbers = pc.replace_substring_regex(numbers, rf"{_POINT_PLACEHOLDER}(\D|$)", r"\1")
    return pc.replace_substring(numbers, _POINT_PLACEHOLDER, ".")


def _as_binary(texts: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    return texts.cast(pa.large_binary()).fill_null(b"")
