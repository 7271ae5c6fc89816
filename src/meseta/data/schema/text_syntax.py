"""Rule for the delimiter of text files."""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ConfigDict

from meseta.errors import MesetaError

MAX_DELIMITER_LENGTH = 8


def invalid_delimiter_reason(delimiter: str) -> str | None:
    """Return the rule that the delimiter violates, or `None` if it is valid."""
    is_text = not any("\ud800" <= sign <= "\udfff" for sign in delimiter)
    if 0 < len(delimiter) <= MAX_DELIMITER_LENGTH and not set(delimiter) & set('"\r\n') and is_text:
        return None
    return f"must be 1 to {MAX_DELIMITER_LENGTH} characters without a quote or a line end"


_SPACES = (" ", "\t", "\u00a0", "\u202f")
_MAX_NUMBER_LENGTH = 100
_MIN_PARSED_SHARE = 0.95
_MIN_CANDIDATE_SHARE = 0.8
_NUM_FIRST_VALUES, _MAX_HINT_VALUES = 20, 500
"""Number of distinct values checked before the formats are tried, and at most while they are tried."""
_DECIMAL_SIGNS = (".", ",")
_THOUSANDS_SEPARATORS = ("", ".", ",", "'", "\u2019", " ", "\u00a0", "\u202f")
_NUMBER_CHARACTERS = {*_DECIMAL_SIGNS, *_THOUSANDS_SEPARATORS, *"+-eE"}


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Characters with which text spells numbers, if they differ from those in 1234.5."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    decimal: str = "."
    """Decimal sign, before the fraction."""
    thousands: str = ""
    """Separator of groups of digits. The last group has three digits. Empty means none."""
    strip: str = ""
    """Characters that are ignored around a number, such as currency signs, in addition to spaces."""

    def __post_init__(self) -> None:
        """Raise ValueError if the value of a number would be ambiguous."""
        for key in ("decimal", "thousands"):
            sign = getattr(self, key)
            if len(sign) > 1 or (key == "decimal" and not sign) or sign.isalnum() or sign in tuple('+-"\r\n\x1f'):
                raise ValueError(
                    f"{key!r}: {sign!r} must be one character other than a letter, digit, sign, quote or line end"
                )
        if self.decimal in _SPACES:
            raise ValueError(f"'decimal': {self.decimal!r} must not be a space; use a comma or a point")
        if self.decimal == self.thousands:
            raise ValueError(f"'thousands': {self.thousands!r} is also the decimal sign; use another 'decimal'")
        for sign in self.strip:
            if sign.isdigit() or sign in (*'+-"\r\n\x1f', self.decimal, self.thousands):
                raise ValueError(f"'strip': {self.strip!r} has {sign!r}, which can be part of a number; remove it")

    @property
    def schema_lines(self) -> list[str]:
        """Lines of a schema file that define this format."""
        usual = asdict(NumberFormat())
        return [
            f"{key}: {json.dumps(sign, ensure_ascii=False)}" for key, sign in asdict(self).items() if sign != usual[key]
        ]

    def is_number(self, text: str) -> bool:
        """Whether `text` is a number in this format."""
        # The time of Python's re is quadratic in the number of spaces.
        return len(text) <= _MAX_NUMBER_LENGTH and self._compiled.fullmatch(text) is not None

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.ASCII)

    @cached_property
    def pattern(self) -> str:
        """Regular expression for a whole text, valid in Python and RE2. Its groups are sign, integer part, fraction,
        fraction alone and exponent."""
        # Match the characters of `strip` as alternatives, not as a class, so that multi-byte characters also match in
        # bytes.
        around = f"(?:{'|'.join(map(re.escape, (*_SPACES, *dict.fromkeys(self.strip))))})*"
        separator, decimal = re.escape(self.thousands), re.escape(self.decimal)
        groups = rf"\d{{1,3}}(?:{separator}\d{{2,3}})*{separator}\d{{3}}|" if self.thousands else ""
        digits = rf"(?:({groups}\d+)(?:{decimal}(\d*))?|{decimal}(\d+))"
        return rf"^{around}([+-]?){around}{digits}((?:[eE][+-]?\d+)?){around}$"


def format_hint(values: Sequence[str]) -> str | None:
    """Return the keys of a schema file with which almost all of these texts are numbers, or `None`.

    `values` are not missing. `None` also means that no format makes more of them numbers than the default.
    """
    distinct = list(dict.fromkeys(values))
    chosen = distinct[:: -(-len(distinct) // _MAX_HINT_VALUES)]
    first = chosen[:_NUM_FIRST_VALUES]
    if sum(map(_looks_numeric, first)) < _MIN_CANDIDATE_SHARE * len(first):
        return None
    signs = {sign for value in chosen for sign in value}
    strip = "".join(sorted(filter(_is_strippable, signs)))
    formats = [
        NumberFormat(decimal=decimal, thousands=thousands, strip=strip)
        for thousands in _THOUSANDS_SEPARATORS
        for decimal in _DECIMAL_SIGNS
        if decimal != thousands and signs.issuperset(thousands)
    ]
    counts = {one: sum(map(one.is_number, chosen)) for one in formats}
    most = max(counts.values())
    if most < _MIN_PARSED_SHARE * len(chosen) or most <= sum(map(NumberFormat().is_number, chosen)):
        return None
    best = [one for one in formats if counts[one] == most]
    fewest = min(len(one.schema_lines) for one in best)
    return " or ".join(", ".join(one.schema_lines) for one in best if len(one.schema_lines) == fewest)


def _is_strippable(sign: str) -> bool:
    return sign in "%‰" or unicodedata.category(sign) == "Sc"


def _looks_numeric(value: str) -> bool:
    rest = [sign for sign in value if not sign.isdigit()]
    return len(rest) < len(value) and all(sign in _NUMBER_CHARACTERS or _is_strippable(sign) for sign in rest)


# Replaces the decimal sign while thousands separators are removed, because a separator may be a point.
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


_HOST_NAME_CODECS = ("idna", "punycode")


def check_encoding(name: str) -> str:
    """Return Python's name of a text encoding. Raises MesetaError if it is unknown, or no encoding of files."""
    advice = "use one such as latin-1, cp1252, utf-16 or shift_jis"
    try:
        codec = codecs.lookup(name)
        with suppress(UnicodeDecodeError):
            b"a".decode(name)
    except (LookupError, ValueError):  # Python raises LookupError also for a codec that is no text encoding.
        raise MesetaError(f"encoding {name!r} is not a text encoding of Python; {advice}") from None
    if codec.name in _HOST_NAME_CODECS or codec.incrementaldecoder is None:
        raise MesetaError(f"encoding {name!r} cannot decode files; {advice}")
    return codec.name
