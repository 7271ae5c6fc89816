"""Number formats of text: decimal comma, thousands separators, currency signs."""

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
# Number of distinct values to check before formats are tried, and while they are tried.
_NUM_FIRST_VALUES, _MAX_HINT_VALUES = 20, 500
_DECIMAL_SIGNS = (".", ",")
_THOUSANDS_SEPARATORS = ("", ".", ",", "'", "\u2019", " ", "\u00a0", "\u202f")
_NUMBER_CHARACTERS = {*_DECIMAL_SIGNS, *_THOUSANDS_SEPARATORS, *"+-eE"}


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """Spelling of numbers in text. The default is plain decimal notation such as 1234.5."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    decimal: str = "."
    """Decimal sign."""
    thousands: str = ""
    """Separator between groups of digits. The last group has three digits. Empty if there is no separator."""
    strip: str = ""
    """Characters to remove around a number, such as currency signs. Spaces are always removed."""

    def __post_init__(self) -> None:
        """Raise ValueError if the characters make numbers ambiguous."""
        for key in ("decimal", "thousands"):
            sign = getattr(self, key)
            if len(sign) > 1 or (key == "decimal" and not sign) or sign.isalnum() or sign in tuple('+-"\r\n\x1f'):
                raise ValueError(
                    f"{key!r}: {sign!r} must be one character, but not a letter, digit, plus, minus, "
                    "quote or line break"
                )
        if self.decimal in _SPACES:
            raise ValueError(f"'decimal': {self.decimal!r} must not be a space; use a comma or a point")
        if self.decimal == self.thousands:
            raise ValueError(f"'thousands': {self.thousands!r} is also the decimal sign; choose another 'decimal'")
        for sign in self.strip:
            if sign.isdigit() or sign in (*'+-"\r\n\x1f', self.decimal, self.thousands):
                raise ValueError(f"'strip': {self.strip!r} has {sign!r}, which is part of numbers; remove it")

    @property
    def schema_lines(self) -> list[str]:
        """Lines of a schema file that specify this format."""
        usual = asdict(NumberFormat())
        return [
            f"{key}: {json.dumps(sign, ensure_ascii=False)}" for key, sign in asdict(self).items() if sign != usual[key]
        ]

    def is_number(self, text: str) -> bool:
        """Whether a text is a number in this format."""
        # Python's re needs quadratic time if there are many spaces.
        return len(text) <= _MAX_NUMBER_LENGTH and self._compiled.fullmatch(text) is not None

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.ASCII)

    @cached_property
    def pattern(self) -> str:
        """Regular expression for a whole text, valid in Python and RE2.

        Its groups are sign, integer part, fraction, fraction without integer part, and exponent.
        """
        # Alternatives instead of character classes, so that characters of several bytes match in bytes too.
        around = f"(?:{'|'.join(map(re.escape, (*_SPACES, *dict.fromkeys(self.strip))))})*"
        separator, decimal = re.escape(self.thousands), re.escape(self.decimal)
        groups = rf"\d{{1,3}}(?:{separator}\d{{2,3}})*{separator}\d{{3}}|" if self.thousands else ""
        digits = rf"(?:({groups}\d+)(?:{decimal}(\d*))?|{decimal}(\d+))"
        return rf"^{around}([+-]?){around}{digits}((?:[eE][+-]?\d+)?){around}$"


def format_hint(values: Sequence[str]) -> str | None:
    """Return the keys of a schema file with which almost all values are numbers, or `None`.

    `values` must not contain missing values. Returns `None` if the keys do not make more values numbers than the
    default.
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
    """Whether a text has digits, and otherwise only characters that occur in numbers."""
    rest = [sign for sign in value if not sign.isdigit()]
    return len(rest) < len(value) and all(sign in _NUMBER_CHARACTERS or _is_strippable(sign) for sign in rest)
