"""What a column is likely to be, by its name and a sample of its values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

Role = Literal["dense", "categorical", "ignore"]

MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "\\N")
"""Texts that mean a missing number."""
LABELS = (
    *("label", "click", "clicked", "is_click", "is_clicked", "target", "y"),
    *("conversion", "converted", "is_attributed", "purchase", "purchased", "is_purchase"),
)
"""Names of labels, the likeliest first; case does not matter."""

_MIN_DISTINCT_ROWS = 50
_ROW_NUMBER = re.compile(r"(row_?)?(id|index|number|no)|unnamed: 0|row", re.IGNORECASE)
_CODE = re.compile(r"(.*[_ .-])?(ids?|codes?|types?|cat|category|class|zip)|(c|cat|categorical)[_-]?\d+", re.IGNORECASE)
_CAMEL_ID = re.compile(r".*[a-z]I[dD]")
_TIME = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?)?(Z|[+-]\d\d:?\d\d)?")
_INTEGER = re.compile(r"-?\d+")


def guess_label(names: Sequence[str]) -> str | None:
    """The likeliest label among the columns, or None."""
    by_name = {name.lower(): name for name in reversed(names)}
    return next((by_name[name] for name in LABELS if name in by_name), None)


def is_code(name: str) -> bool:
    """Whether whole numbers in a column of this name are likely to be categories: user_id, zip, C1."""
    return _CODE.fullmatch(name) is not None or _CAMEL_ID.fullmatch(name) is not None


def guess_text_column(name: str, values: Sequence[str]) -> tuple[Role, str]:
    """The role of a column of text, from the values [n] of a sample, and the reason in a few words."""
    present = [value for value in values if value not in MISSING]
    if not name:
        return "ignore", "it has no name"
    if not present:
        return "ignore", f"no value in {len(values)} rows"
    distinct = len(set(present))
    if _ROW_NUMBER.fullmatch(name) and distinct == len(values) >= _MIN_DISTINCT_ROWS:
        return "ignore", f"a number of the row: no value comes again in {distinct} rows"
    if all(_TIME.fullmatch(value) for value in present):
        return "ignore", f"a time, as {present[0]!r}"
    shown = _shown(present)
    if all(map(_is_number, present)):
        if is_code(name) and all(map(_INTEGER.fullmatch, present)):
            return "categorical", f"whole numbers with the name of a code: {shown}"
        return "dense", f"numbers: {shown}"
    return "categorical", f"text: {shown}"


def _shown(values: Sequence[str]) -> str:
    """The first two distinct values, on one line."""
    first = list(dict.fromkeys(values))[:2]
    return ", ".join(repr(value if len(value) <= 20 else value[:17] + "...") for value in first)


def _is_number(value: str) -> bool:
    try:
        return "_" not in value and math.isfinite(float(value))
    except ValueError:
        return False
