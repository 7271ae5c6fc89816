"""How text spells numbers: decimal comma, thousands separators, currency signs."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ConfigDict

_SPACES = (" ", "\t", "\u00a0", "\u202f")
_POINT = "\x1f"
"""Stands for the decimal sign while thousands separators are removed, which may be points."""
_ALMOST_ALL = 0.95
_FIRST_VALUES, _HINT_VALUES = 50, 2000
"""Distinct values that are looked at before and while formats of numbers are tried."""
_DECIMALS = (".", ",")
_THOUSANDS = ("", ".", ",", "'", "\u2019", " ", "\u00a0", "\u202f")
_SIGNS = {*_DECIMALS, *_THOUSANDS, *"+-eE"}


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """The signs with which text spells numbers, where it is not as in 1234.5."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    decimal: str = "."
    """Before the fraction."""
    thousands: str = ""
    """Between groups of digits, of which the last has three; empty: none."""
    strip: str = ""
    """Characters around a number that are left out, such as currency signs; spaces always are."""

    def __post_init__(self) -> None:
        """Raises ValueError for signs that leave the value of a number open."""
        for key in ("decimal", "thousands"):
            sign = getattr(self, key)
            if len(sign) > 1 or (key == "decimal" and not sign) or sign.isalnum() or sign in tuple('+-"\r\n\x1f'):
                raise ValueError(f"{key!r}: {sign!r} must be one character, no letter, digit, sign, quote or line end")
        if self.decimal in _SPACES:
            raise ValueError(f"'decimal': {self.decimal!r} must not be a space; give a comma or a point")
        if self.decimal == self.thousands:
            raise ValueError(f"'thousands': {self.thousands!r} is the decimal sign too; give another 'decimal'")
        for sign in self.strip:
            if sign.isdigit() or sign in (*'+-"\r\n\x1f', self.decimal, self.thousands):
                raise ValueError(f"'strip': {self.strip!r} has {sign!r}, which is a part of numbers; leave it out")

    @property
    def keys(self) -> list[str]:
        """Lines of a schema file that ask for this format."""
        usual = asdict(NumberFormat())
        return [
            f"{key}: {json.dumps(sign, ensure_ascii=False)}" for key, sign in asdict(self).items() if sign != usual[key]
        ]

    def plain(self, texts: pa.Array) -> pa.Array:
        """Return n strings, large_binary [n], of which those in this format are spelled as 1234.5; a null is empty."""
        texts = _as_binary(texts)
        return pc.if_else(pc.match_substring_regex(texts, self._pattern), self._converted(texts), texts)

    def plain_numbers(self, texts: pa.Array) -> pa.Array:
        """Return the same, in which others that have digits, such as numbers in another format, are no numbers."""
        texts = _as_binary(texts)
        others = pc.if_else(pc.match_substring_regex(texts, r"\d"), b"?", texts)
        return pc.if_else(pc.match_substring_regex(texts, self._pattern), self._converted(texts), others)

    def plain_number(self, text: str) -> str:
        """As `plain_numbers`, of one text."""
        return self.plain_numbers(pa.array([text.encode(errors="replace")], pa.large_binary()))[0].as_py().decode()

    def is_number(self, text: str) -> bool:
        """Whether a text is a number in this format."""
        return self._compiled.fullmatch(text) is not None

    def _converted(self, texts: pa.Array) -> pa.Array:
        numbers = pc.replace_substring_regex(texts, self._pattern, rf"\1\2{_POINT}\3\4\5")
        if self.thousands:
            numbers = pc.replace_substring(numbers, self.thousands, "")
        numbers = pc.replace_substring_regex(numbers, rf"{_POINT}(\D|$)", r"\1")
        return pc.replace_substring(numbers, _POINT, ".")

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self._pattern, re.ASCII)

    @cached_property
    def _pattern(self) -> str:
        """Of a whole text, for Python and RE2, with groups: sign, integer part, fraction, fraction alone, exponent.

        Signs are alternatives, not classes, so that those of several bytes are matched in bytes too.
        """
        around = f"(?:{'|'.join(map(re.escape, (*_SPACES, *dict.fromkeys(self.strip))))})*"
        separator, decimal = re.escape(self.thousands), re.escape(self.decimal)
        groups = rf"\d{{1,3}}(?:{separator}\d{{2,3}})*{separator}\d{{3}}|" if self.thousands else ""
        digits = rf"(?:({groups}\d+)(?:{decimal}(\d*))?|{decimal}(\d+))"
        return rf"^{around}([+-]?){around}{digits}((?:[eE][+-]?\d+)?){around}$"


def format_hint(values: Sequence[str]) -> str | None:
    """Return the keys of a schema file with which almost all of these texts are numbers, or `None`.

    `values` are not missing. `None` also if no key makes more of them numbers.
    """
    chosen = list(dict.fromkeys(values))[:_HINT_VALUES]
    if sum(map(_may_be_number, chosen[:_FIRST_VALUES])) < _ALMOST_ALL * len(chosen[:_FIRST_VALUES]):
        return None
    strip = "".join(sorted({sign for value in chosen for sign in value if _is_stripped(sign)}))
    formats = [
        NumberFormat(decimal=decimal, thousands=thousands, strip=sign)
        for sign in dict.fromkeys(("", strip))
        for thousands in _THOUSANDS
        for decimal in _DECIMALS
        if decimal != thousands
    ]
    counts = {one: sum(map(one.is_number, chosen)) for one in formats}
    most = max(counts.values())
    if most < _ALMOST_ALL * len(chosen) or counts[NumberFormat()] == most:
        return None
    best = [one for one in formats if counts[one] == most]
    fewest = min(len(one.keys) for one in best)
    return " or ".join(", ".join(one.keys) for one in best if len(one.keys) == fewest)


def _is_stripped(sign: str) -> bool:
    return sign in "%‰" or unicodedata.category(sign) == "Sc"


def _may_be_number(value: str) -> bool:
    """Whether it has digits, and besides them nothing but signs that numbers have."""
    rest = [sign for sign in value if not sign.isdigit()]
    return len(rest) < len(value) and all(sign in _SIGNS or _is_stripped(sign) for sign in rest)


def _as_binary(texts: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    return texts.cast(pa.large_binary()).fill_null(b"")
