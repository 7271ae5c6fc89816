"""What a column is likely to be, by its name and a sample of its values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from meseta.spec.weights import LARGEST_WEIGHT, SMALLEST_WEIGHT

Role = Literal["dense", "categorical", "weight", "group", "time", "ignore"]
Guess = tuple[Role, str]
"""A role, and the reason in a few words."""

MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "\\N")
"""Texts that mean a missing number."""
LABELS = (
    *("label", "click", "clicked", "is_click", "is_clicked", "target", "y"),
    *("conversion", "converted", "is_attributed", "purchase", "purchased", "is_purchase"),
)
"""Names of labels, the likeliest first; case does not matter."""

SAMPLE_ROWS = 2000
"""Rows of a file that values are judged by."""
OTHER_LABELS = frozenset({*LABELS} - {"label", "target", "y"})
"""A second column of such a name is an outcome too: as a feature it would give the answer away."""
WEIGHTS = ("sample_weight", "example_weight", "instance_weight", "row_weight", "weight")
TIMES = ("timestamp", "event_timestamp", "datetime", "event_time", "time", "date", "ts", "unixtime", "unix_time")
GROUPS = ("qid",)

_FIRST_TIME_S = 1e8
"""Numbers are taken for times from March 1973 on: smaller ones under such a name are likelier durations or days."""
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


def other_outcome(name: str) -> Guess | None:
    """Says of a second label that it is ignored, and why; None for other columns."""
    if name.lower() not in OTHER_LABELS:
        return None
    return "ignore", "the name of a label; to learn it too, list both under labels"


def only_one_each(guesses: Mapping[str, Guess]) -> dict[str, Guess]:
    """The same, but a sample has one weight, one group and one time: further columns of such a name are ignored."""
    taken: dict[Role, str] = {}
    result: dict[str, Guess] = {}
    for name, (role, reason) in guesses.items():
        first = taken.setdefault(role, name) if role in ("weight", "group", "time") else name
        result[name] = (role, reason) if first == name else ("ignore", f"another {role}, beside {first!r}: {reason}")
    return result


def guess_number_column(name: str, values: Sequence[float]) -> Guess | None:
    """Whether numbers [n] of a sample are weights, times or groups by their name and size; None where they are not."""
    shown = _shown([f"{value:.15g}" for value in values])
    known = name.lower()
    if known in WEIGHTS and values and all(v == 0 or SMALLEST_WEIGHT <= v <= LARGEST_WEIGHT for v in values):
        return "weight", f"the name of a weight of samples: {shown}; if it is a feature, put it under dense"
    if known in TIMES and values and all(v >= _FIRST_TIME_S for v in values):
        return "time", f"the name of a time, in {_unit(values[0])}: {shown}"
    if known in GROUPS and all(v == int(v) for v in values if math.isfinite(v)):
        return "group", f"the name of a group: {shown}"
    return None


def guess_text_column(name: str, values: Sequence[str]) -> Guess:
    """The role of a column of text, from the values [n] of a sample, and the reason in a few words."""
    present = [value for value in values if value not in MISSING]
    if not name:
        return "ignore", "it has no name"
    if not present:
        return "ignore", f"no value in {len(values)} rows"
    outcome = other_outcome(name)
    if outcome is not None:
        return outcome
    distinct = len(set(present))
    if _ROW_NUMBER.fullmatch(name) and distinct == len(values) >= _MIN_DISTINCT_ROWS:
        return "ignore", f"a number of the row: no value comes again in {distinct} rows"
    if all(_TIME.fullmatch(value) for value in present):
        if name.lower() in TIMES:
            return "time", f"a time, as {present[0]!r}; only for splits"
        return "ignore", f"a time, as {present[0]!r}"
    shown = _shown(present)
    if name.lower() in GROUPS:
        return "group", f"the name of a group: {shown}"
    if all(map(_is_number, present)):
        special = guess_number_column(name, [float(value) for value in present])
        if special is not None and (special[0] != "weight" or len(present) == len(values)):
            return special
        if is_code(name) and all(map(_INTEGER.fullmatch, present)):
            return "categorical", f"whole numbers with the name of a code: {shown}"
        return "dense", f"numbers: {shown}"
    return "categorical", f"text: {shown}"


def _unit(number: float) -> str:
    """The unit in which a number of such a size is a time, as `values.seconds` takes it."""
    return next((name for least, name in ((1e17, "ns"), (1e14, "us"), (1e11, "ms")) if number >= least), "seconds")


def _shown(values: Sequence[str]) -> str:
    """The first two distinct values, on one line."""
    first = list(dict.fromkeys(values))[:2]
    return ", ".join(repr(value if len(value) <= 20 else value[:17] + "...") for value in first)


def _is_number(value: str) -> bool:
    try:
        return "_" not in value and math.isfinite(float(value))
    except ValueError:
        return False
