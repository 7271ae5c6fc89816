"""What a column is likely to be, by its name and a sample of its values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from meseta.data.number_format import format_hint
from meseta.data.weights import MAX_WEIGHT, MIN_WEIGHT

Role = Literal["dense", "categorical", "both", "weight", "group", "time", "ignore"]


class ColumnRole(NamedTuple):
    """What a column was taken for."""

    role: Role
    """'both': a category and a measurement."""
    reason: str
    """In a few words, on one line."""
    is_named: bool = False
    """Whether an option says so."""
    is_time: bool = False
    """Whether its values are times, which splits can go by."""


UNNAMED_COLUMN = ColumnRole("ignore", "it has no name")

MISSING_TEXTS = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "\\N")
"""Texts that mean a missing number."""
NULL_TEXTS = tuple(text for text in MISSING_TEXTS if text.lower() != "nan")
"""Those of them that say no more than that; the others are counted with what is infinite."""
TRUE_WORDS, FALSE_WORDS = ("true", "t", "yes", "y"), ("false", "f", "no", "n")
"""Words that labels may be, in any case."""
LABEL_NAMES = (
    *("label", "click", "clicked", "is_click", "is_clicked", "target", "y"),
    *("conversion", "converted", "is_attributed", "purchase", "purchased", "is_purchase"),
)
"""Names of labels, the likeliest first; case does not matter."""

MAX_SAMPLE_ROWS = 20_000
"""Rows of all files that values are judged by, fewer where there are many columns."""
SECONDARY_LABEL_NAMES = frozenset({*LABEL_NAMES} - {"label", "target", "y"})
"""A second column of such a name is an outcome too: as a feature it would give the answer away."""
WEIGHT_NAMES = ("sample_weight", "example_weight", "instance_weight", "row_weight", "weight")
TIME_NAMES = ("timestamp", "event_timestamp", "datetime", "event_time", "time", "date", "ts", "unixtime", "unix_time")
GROUP_NAMES = ("qid",)

_MIN_TIMESTAMP_S = 1e8
"""Numbers are taken for times from March 1973 on: smaller ones under such a name are likelier durations or days."""
MIN_EVIDENCE_ROWS = 50
"""Fewer rows prove neither a constant nor a key."""
_MIN_KEY_SHARE = 0.995
"""A share of distinct values from which on a column is a key, unless its name is that of a category."""
_MAX_EXACT_INTEGER = 2**53
"""Beyond it float64 has gaps between whole numbers."""
_MIN_DISTINCT_SHARE = 0.5
"""A share of distinct values above which whole numbers are taken for measurements, if they crowd together."""
_MAX_IQR_RATIO = 0.25
"""Of the range, what the middle half of crowded values takes; that of evenly spread ones takes a half."""

_ROW_NUMBER_NAME = re.compile(r"(row_?)?(id|index|number|no)|unnamed: 0|row", re.IGNORECASE)
_TIME_PATTERN = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?)?(Z|[+-]\d\d:?\d\d)?")
_ZERO_PADDED = re.compile(r"-?0\d+")

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+")
_CATEGORY_WORDS = re.compile(
    r"ad|advertiser|airport|app|artist|author|banner|brand|browser|campaign|carrier|cat|category|"
    r"channel|city|class|cluster|code|codes|country|creative|currency|customer|device|domain|dow|"
    r"gender|genre|group|hash|hour|id|ids|item|job|key|kind|lang|language|locale|make|manufacturer|"
    r"member|merchant|month|movie|network|occupation|operator|os|page|platform|postcode|product|"
    r"publisher|region|segment|seller|sex|shop|site|sku|slot|song|state|station|status|store|team|"
    r"track|type|types|user|video|visitor|weekday|zip"
)
"""Last words of the names of categories."""
_MEASUREMENT_WORDS = re.compile(
    r"age|amount|amt|area|avg|average|balance|bid|budget|bytes|clicks|cnt|comments|cost|count|"
    r"counts|ctr|days|depth|dist|distance|duration|fee|followers|frequency|friends|height|hours|"
    r"impressions|income|kb|lat|latitude|len|length|likes|lon|longitude|mb|mean|median|min|minutes|"
    r"ms|num|orders|pct|percent|percentage|points|price|prob|probability|purchases|qty|quantity|rate|"
    r"ratio|recency|revenue|salary|sales|score|sec|seconds|sessions|shares|size|speed|spend|std|sum|"
    r"tax|temp|temperature|tenure|total|value|views|visits|volume|weight|weeks|width|years"
)
"""Last words of the names of measurements, and first ones of such as num_clicks and days_since."""
_MEASUREMENT_PREFIXES = re.compile(r"avg|count|days|hours|max|mean|min|minutes|n|nb|num|pct|ratio|seconds|sum|total")
_SERIES_PREFIXES = {
    "c": "categorical",
    "cat": "categorical",
    "categorical": "categorical",
    "i": "dense",
    "int": "dense",
}
"""Words with a number behind them, as C14 and I3 of Criteo's logs."""


def infer_label(names: Sequence[str]) -> str | None:
    """The likeliest label among the columns, or None."""
    by_name = {name.lower(): name for name in reversed(names)}
    return next((by_name[name] for name in LABEL_NAMES if name in by_name), None)


def is_header(first: Sequence[str], rows: Sequence[Sequence[str]] = ()) -> bool:
    """Whether the first record of CSV names the columns, beside the records that follow it.

    It does where it holds no number, or numbers that count the columns, or is alone and names a label. Else numbers in
    all columns that hold numbers further down make it a row like the others.
    """
    if not rows and infer_label(first) is not None:
        return True
    numbers = [parse_number(field) for field in first]
    if not any(number is not None for number in numbers):
        return True
    if numbers in ([*range(len(first))], [*range(1, len(first) + 1)]):
        return True
    columns = [[row[place] for row in rows if place < len(row)] for place in range(len(first))]
    return any(
        number is None and field not in MISSING_TEXTS and _are_all_numbers(column)
        for field, number, column in zip(first, numbers, columns, strict=True)
    )


def infer_label_from_values(columns: Mapping[str, Sequence[str]]) -> str | None:
    """Of columns without names of their own, one that holds 0 and 1 alone: the first, else the last, else the only."""
    names = list(columns)
    binary = [name for name in names if columns[name] and {parse_number(text) for text in columns[name]} <= {0.0, 1.0}]
    return next((name for name in (names[0], names[-1]) if name in binary), binary[0] if len(binary) == 1 else None)


def has_negative(values: Sequence[str]) -> bool:
    """Whether any value is a negative number."""
    signed = [value for value in values if value.startswith("-")] if "\n-" in "\n" + "\n".join(values) else []
    return any((number := parse_number(value)) is not None and number < 0 for value in signed)


def role_from_name(name: str) -> Literal["categorical", "dense"] | None:
    """What whole numbers in a column of this name are: user_id, zip, C1 are categories, age and num_clicks are
    measurements; None where the name does not tell."""
    words = [word.lower() for word in _WORDS.findall(name)]
    spoken = [word for word in words if not word.isdigit()]
    if not spoken:
        return None
    if len(spoken) == 1 and len(words) == 2 and words[1].isdigit() and words[0] in _SERIES_PREFIXES:
        return "categorical" if _SERIES_PREFIXES[words[0]] == "categorical" else "dense"
    if spoken[-3:] == ["day", "of", "week"]:
        return "categorical"
    if len(spoken) > 1 and _MEASUREMENT_PREFIXES.fullmatch(spoken[0]):
        return "dense"
    if _CATEGORY_WORDS.fullmatch(spoken[-1]):
        return "categorical"
    return "dense" if _MEASUREMENT_WORDS.fullmatch(spoken[-1]) else None


def secondary_label_role(name: str) -> ColumnRole | None:
    """Says of a second label that it is ignored, and why; None for other columns."""
    if name.lower() not in SECONDARY_LABEL_NAMES:
        return None
    return ColumnRole("ignore", "the name of a label; to learn it too, list both under labels")


def keep_one_per_role(guesses: Mapping[str, ColumnRole]) -> dict[str, ColumnRole]:
    """The same, but a sample has one weight, one group and one time: further columns of such a name are ignored."""
    taken: dict[Role, str] = {guess.role: name for name, guess in guesses.items() if guess.is_named}
    result: dict[str, ColumnRole] = {}
    for name, guess in guesses.items():
        first = taken.setdefault(guess.role, name) if guess.role in ("weight", "group", "time") else name
        reason = f"another {guess.role}, beside {first!r}: {guess.reason}"
        result[name] = guess if first == name else ColumnRole("ignore", reason, is_time=guess.is_time)
    return result


def infer_numeric_role(name: str, values: Sequence[float]) -> ColumnRole | None:
    """Whether numbers [n] of a sample are weights, times or groups by their name and size; None where they are not."""
    shown = _format_examples([f"{value:.15g}" for value in values])
    known = name.lower()
    if known in WEIGHT_NAMES and values and all(v == 0 or MIN_WEIGHT <= v <= MAX_WEIGHT for v in values):
        return ColumnRole("weight", f"the name of a weight of samples: {shown}; if it is a feature, put it under dense")
    if known in TIME_NAMES and values and all(v >= _MIN_TIMESTAMP_S for v in values):
        return ColumnRole("time", f"the name of a time, in {_time_unit(values[0])}: {shown}", is_time=True)
    if known in GROUP_NAMES and all(v == int(v) for v in values if math.isfinite(v)):
        return ColumnRole("group", f"the name of a group: {shown}")
    return None


def infer_time_role(name: str, shown: str) -> ColumnRole:
    """The role of a column of times; `shown` follows "a time"."""
    if name.lower() in TIME_NAMES:
        return ColumnRole("time", f"a time{shown}; only for splits", is_time=True)
    return ColumnRole("ignore", f"a time{shown}; --time {name} makes it the one that splits go by", is_time=True)


def infer_role(name: str, values: Sequence[str]) -> ColumnRole:
    """The role of a column by its name and its values [n] in a sample of the rows, in their order, as text."""
    present = [value for value in values if value not in MISSING_TEXTS]
    if not name:
        return UNNAMED_COLUMN
    if not present:
        return ColumnRole("ignore", f"no value in {len(values):,} rows")
    outcome = secondary_label_role(name)
    if outcome is not None:
        return outcome
    distinct = dict.fromkeys(present)
    if all(map(_TIME_PATTERN.fullmatch, distinct)):
        return infer_time_role(name, f", as {present[0]!r}")
    if name.lower() in GROUP_NAMES:
        return ColumnRole("group", f"the name of a group: {_format_examples(present)}")
    numbers = {text: number for text in distinct if (number := parse_number(text)) is not None}
    column = _ColumnSample(name, values, present, {text: n for text, n in numbers.items() if math.isfinite(n)})
    if len(numbers) == len(distinct):
        return _infer_role_of_numbers(column)
    guess = column.uninformative_role or ColumnRole("categorical", f"text: {_format_examples(present)}")
    hint = format_hint(present)
    return guess if hint is None else guess._replace(reason=f"{guess.reason}; numbers if a --schema file says {hint}")


@dataclass(frozen=True)
class _ColumnSample:
    """A column with a value in some sampled rows."""

    name: str
    values: Sequence[str]
    present: Sequence[str]
    """Those that are not missing."""
    finite_numbers: Mapping[str, float]
    """Distinct texts of finite numbers, and these."""

    @cached_property
    def num_distinct(self) -> int:
        return len(set(self.present))

    @property
    def uninformative_role(self) -> ColumnRole | None:
        """What says that it is a constant or a key, if it is, whatever it holds."""
        num_rows, num_present = len(self.values), len(self.present)
        if num_rows < MIN_EVIDENCE_ROWS:
            return None
        if self.num_distinct == 1 and num_present == num_rows:  # missing values among equal ones tell something
            return ColumnRole("ignore", f"the same in {num_rows:,} rows: {_format_examples(self.present)}")
        has_name = role_from_name(self.name) is not None and not _ROW_NUMBER_NAME.fullmatch(self.name)
        if num_present < MIN_EVIDENCE_ROWS or self.num_distinct <= _MIN_KEY_SHARE * num_present:
            return None
        if self.num_distinct < num_present and has_name:
            return None
        return ColumnRole("ignore", f"a key: {self.num_distinct:,} different values in {num_present:,} rows")

    @property
    def numbers(self) -> list[float]:
        """The finite values [n], in the order of the rows."""
        return [self.finite_numbers[text] for text in self.present if text in self.finite_numbers]


def _infer_role_of_numbers(column: _ColumnSample) -> ColumnRole:
    """Of a column whose values are all numbers, finite or not."""
    numbers = column.numbers
    shown = _format_examples([text for text in column.present if text in column.finite_numbers])
    if not numbers:
        return ColumnRole("ignore", f"no finite value in {len(column.values):,} rows")
    special = infer_numeric_role(column.name, numbers)
    if special is not None and (special.role != "weight" or len(numbers) == len(column.values)):
        return special
    nothing = column.uninformative_role
    if nothing is not None and column.num_distinct == 1:
        return nothing
    if not all(map(float.is_integer, column.finite_numbers.values())):
        return ColumnRole("dense", f"numbers: {shown}")
    by_name = role_from_name(column.name)
    low, high = min(numbers), max(numbers)
    if by_name == "dense" and not _are_codes(column.finite_numbers, high):
        return ColumnRole("dense", f"numbers, by its name: {shown}")
    if by_name == "categorical":
        return nothing or ColumnRole("categorical", f"whole numbers with the name of a category: {shown}")
    if _are_codes(column.finite_numbers, max(-low, high)):
        return nothing or ColumnRole("categorical", f"codes, by their form: {shown}")
    if column.num_distinct <= 2:
        return ColumnRole("dense", f"numbers, no more than two: {shown}")
    if nothing is not None and (_is_increasing(numbers) or not _is_concentrated(numbers)):
        return nothing
    if column.num_distinct > _MIN_DISTINCT_SHARE * len(numbers) and _is_concentrated(numbers):
        return ColumnRole("dense", f"numbers, spread as measurements are: {shown}")
    return ColumnRole(
        "both",
        f"{column.num_distinct:,} whole numbers, {low:.15g} to {high:.15g}: doubtful, so a category and a measurement; "
        f"--sparse {column.name} or --dense {column.name} decides",
    )


def _are_codes(texts: Collection[str], largest: float) -> bool:
    """Whether whole numbers cannot be measurements: with zeros in front, or too large for float64."""
    return largest > _MAX_EXACT_INTEGER or any(map(_ZERO_PADDED.fullmatch, texts))


def _is_increasing(numbers: Sequence[float]) -> bool:
    """Whether each number is larger than the one before."""
    return all(one < other for one, other in itertools.pairwise(numbers))


def _is_concentrated(numbers: Sequence[float]) -> bool:
    """Whether most values lie close together, beside their range."""
    ordered = sorted(numbers)
    quarter = len(ordered) // 4
    return ordered[-1 - quarter] - ordered[quarter] < _MAX_IQR_RATIO * (ordered[-1] - ordered[0])


def _time_unit(number: float) -> str:
    """The unit in which a number of such a size is a time, as `values.seconds` takes it."""
    return next((name for least, name in ((1e17, "ns"), (1e14, "us"), (1e11, "ms")) if number >= least), "seconds")


def _format_examples(values: Sequence[str]) -> str:
    """The first two distinct values, on one line."""
    first = list(dict.fromkeys(values))[:2]
    return ", ".join(repr(value if len(value) <= 20 else value[:17] + "...") for value in first)


def _are_all_numbers(values: Sequence[str]) -> bool:
    """Whether there are numbers, and nothing else but missing values."""
    present = [value for value in values if value not in MISSING_TEXTS]
    return bool(present) and all(parse_number(value) is not None for value in present)


def parse_number(value: str) -> float | None:
    """Return the number that `value` spells, infinite if it is too large; None if it spells no number."""
    try:
        return None if "_" in value else float(value)
    except ValueError:
        return None
