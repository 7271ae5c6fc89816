"""Formats of numbers in text: decimal comma, thousands separators, currency signs."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from pydantic import ConfigDict

_SPACES = (" ", "\t", "\u00a0", "\u202f")
_MAX_NUMBER_LENGTH = 100
_MIN_PARSED_SHARE = 0.95
_MIN_CANDIDATE_SHARE = 0.8
_NUM_FIRST_VALUES, _MAX_HINT_VALUES = 20, 500
"""Number of distinct values that are checked before the formats are tried, and at most while they are tried."""
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
    """Characters around a number that are ignored, such as currency signs. Spaces are always ignored."""

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
    """Whether `value` consists of digits and of characters that occur in numbers."""
    rest = [sign for sign in value if not sign.isdigit()]
    return len(rest) < len(value) and all(sign in _NUMBER_CHARACTERS or _is_strippable(sign) for sign in rest)
