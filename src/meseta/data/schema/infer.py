"""Inference of the role of a column from its name and a sample of its values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from meseta.data.schema.layout import MAX_WEIGHT, MIN_WEIGHT, RawLayout
from meseta.data.schema.text_syntax import format_hint
from meseta.data.whole_numbers import are_whole_numbers
from meseta.errors import join_names
from meseta.spec import MesetaError

Role = Literal["dense", "categorical", "both", "weight", "group", "time", "ignore"]


class ColumnRole(NamedTuple):
    """Role of a column, with the reason for it."""

    role: Role
    """Role of the column. "both" means categorical and dense."""
    reason: str
    is_named: bool = False
    """Whether an option specifies the role."""
    is_time: bool = False
    """Whether the values are times, by which rows can be split."""


UNNAMED_COLUMN = ColumnRole("ignore", "it has no name")

MISSING_TEXTS = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "\\N")
"""Texts that are read as a missing number."""
# Texts for a missing number that do not spell NaN. NaN counts as a non-finite number.
NULL_TEXTS = tuple(text for text in MISSING_TEXTS if text.lower() != "nan")
# Words for a label of 1 and of 0, in lower case. Upper case is accepted too.
TRUE_WORDS, FALSE_WORDS = ("true", "t", "yes", "y"), ("false", "f", "no", "n")
# Common names of labels in lower case, most likely first. Upper case is accepted too.
LABEL_NAMES = (
    *("label", "click", "clicked", "is_click", "is_clicked", "target", "y"),
    *("conversion", "converted", "is_attributed", "purchase", "purchased", "is_purchase"),
)

MAX_SAMPLE_ROWS = 20_000
"""Maximum number of sampled rows of all files. Fewer are sampled if there are many columns."""
# Names of further labels. Another column with such a name is an outcome, and would reveal the label as a feature.
SECONDARY_LABEL_NAMES = frozenset({*LABEL_NAMES} - {"label", "target", "y"})
WEIGHT_NAMES = ("sample_weight", "example_weight", "instance_weight", "row_weight", "weight")
TIME_NAMES = ("timestamp", "event_timestamp", "datetime", "event_time", "time", "date", "ts", "unixtime", "unix_time")
GROUP_NAMES = ("qid",)

# Numbers are times only from March 1973 on. Smaller numbers are more likely durations or days.
_MIN_TIMESTAMP_S = 1e8
# Minimum number of rows from which a constant or a key is inferred.
MIN_EVIDENCE_ROWS = 50
# Share of distinct values above which a column is a key, unless it has the name of a category.
_MIN_KEY_SHARE = 0.995
# Above it, float64 does not represent all integers.
_MAX_EXACT_INTEGER = 2**53
# Share of distinct values above which concentrated whole numbers are measurements.
_MIN_DISTINCT_SHARE = 0.5
# Interquartile range of concentrated values, as a share of their range. It is one half for evenly spread values.
_MAX_IQR_RATIO = 0.25

_ROW_NUMBER_NAME = re.compile(r"(row_?)?(id|index|number|no)|unnamed: 0|row", re.IGNORECASE)
_TIME_PATTERN = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d+)?)?)?(Z|[+-]\d\d:?\d\d)?")
# Dates with slashes, and months, days and hours of one digit. Ranges are checked, because codes such as CAS numbers
# have this form too. A year at the end would leave the order of day and month open.
_MONTH, _DAY = r"(0?[1-9]|1[0-2])", r"(0?[1-9]|[12]\d|3[01])"
_LENIENT_TIME_PATTERN = re.compile(
    rf"(1[7-9]|2[01])\d\d(-{_MONTH}-{_DAY}|/{_MONTH}/{_DAY})"
    r"([ T]([01]?\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?)?",
    re.ASCII,
)
_ZERO_PADDED = re.compile(r"-?0\d+")

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+")
# Last words of the names of categories.
_CATEGORY_WORDS = re.compile(
    r"ad|addr|address|advertiser|airport|app|artist|asn|author|banner|brand|browser|campaign|carrier|cat|category|"
    r"channel|city|class|cluster|code|codes|country|creative|currency|customer|device|domain|dow|"
    r"gender|genre|group|hash|hour|id|ids|ip|ipv|isp|item|job|key|kind|lang|language|locale|make|manufacturer|"
    r"member|merchant|month|movie|network|occupation|operator|os|page|platform|postcode|product|"
    r"publisher|region|segment|seller|sex|shop|site|sku|slot|song|state|station|status|store|team|"
    r"track|type|types|user|video|visitor|weekday|zip"
)
# Last words of the names of measurements. Some are first words too, as in num_clicks and days_since.
_MEASUREMENT_WORDS = re.compile(
    r"age|amount|amt|area|avg|average|balance|bid|budget|bytes|clicks|cnt|comments|cost|count|"
    r"counts|ctr|days|depth|dist|distance|duration|fee|followers|frequency|friends|height|hours|"
    r"impressions|income|kb|lat|latitude|len|length|likes|lon|longitude|mb|mean|median|min|minutes|"
    r"ms|num|orders|pct|percent|percentage|points|price|prob|probability|purchases|qty|quantity|rate|"
    r"ratio|recency|revenue|salary|sales|score|sec|seconds|sessions|shares|size|speed|spend|std|sum|"
    r"tax|temp|temperature|tenure|total|value|views|visits|volume|weight|weeks|width|years"
)
_MEASUREMENT_PREFIXES = re.compile(r"avg|count|days|hours|max|mean|min|minutes|n|nb|num|pct|ratio|seconds|sum|total")
# Words that are followed by a number, as C14 and I3 in Criteo logs.
_SERIES_PREFIXES = {
    "c": "categorical",
    "cat": "categorical",
    "categorical": "categorical",
    "i": "dense",
    "int": "dense",
}


def infer_label(names: Sequence[str]) -> str | None:
    """Return the most likely label among the columns, or `None`."""
    by_name = {name.lower(): name for name in reversed(names)}
    return next((by_name[name] for name in LABEL_NAMES if name in by_name), None)


def require_label(where: str, names: Sequence[str]) -> str:
    """Return the most likely label among the columns. Raises MesetaError, with the prefix `where`, if there is none."""
    label = infer_label(names)
    if label is None:
        raise MesetaError(
            f"{where}: none of {join_names([*map(repr, names)], 10)} has the name of a label; choose one with --label"
        )
    return label


def is_header(first: Sequence[str], rows: Sequence[Sequence[str]] = ()) -> bool:
    """Whether the first record of a CSV file is a header. `rows` are the records that follow it.

    A record without numbers is a header, and so is one that counts the columns. A single record is a header if it has
    the name of a label. Otherwise, some text in the record must be in a column that only contains numbers in `rows`.
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
    """Return the column that contains only 0 and 1, for columns without names.

    The first column takes precedence, then the last one. Returns `None` if several other columns qualify, or none.
    """
    names = list(columns)
    binary = [name for name in names if columns[name] and {parse_number(text) for text in columns[name]} <= {0.0, 1.0}]
    return next((name for name in (names[0], names[-1]) if name in binary), binary[0] if len(binary) == 1 else None)


def has_negative(values: Sequence[str]) -> bool:
    """Whether any value is a negative number."""
    # Joining finds a minus sign much faster than a check of each value.
    signed = [value for value in values if value.startswith("-")] if "\n-" in "\n" + "\n".join(values) else []
    return any((number := parse_number(value)) is not None and number < 0 for value in signed)


def role_from_name(name: str) -> Literal["categorical", "dense"] | None:
    """Return the role of whole numbers in a column with this name, or `None` if the name is inconclusive.

    For example, user_id, zip and C1 are categories, and age and num_clicks are measurements.
    """
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
    """Return the role that ignores a second label, or `None` if the name is not that of a label."""
    if name.lower() not in SECONDARY_LABEL_NAMES:
        return None
    return ColumnRole("ignore", "the name of a label; to learn it too, list both under labels")


def keep_one_per_role(guesses: Mapping[str, ColumnRole]) -> dict[str, ColumnRole]:
    """Return the roles with at most one weight, group and time. Further columns with these roles are ignored."""
    taken: dict[Role, str] = {guess.role: name for name, guess in guesses.items() if guess.is_named}
    result: dict[str, ColumnRole] = {}
    for name, guess in guesses.items():
        first = taken.setdefault(guess.role, name) if guess.role in ("weight", "group", "time") else name
        reason = f"another {guess.role}, beside {first!r}: {guess.reason}"
        result[name] = guess if first == name else ColumnRole("ignore", reason, is_time=guess.is_time)
    return result


def infer_numeric_role(name: str, values: Sequence[float]) -> ColumnRole | None:
    """Return the role of numbers whose name and size mark them as a sample weight, time or group, or else `None`."""
    shown = format_examples([f"{value:.15g}" for value in values])
    known = name.lower()
    if known in WEIGHT_NAMES and values and all(v == 0 or MIN_WEIGHT <= v <= MAX_WEIGHT for v in values):
        return ColumnRole("weight", f"the name of a weight of samples: {shown}; if it is a feature, put it under dense")
    if known in TIME_NAMES and values and all(v >= _MIN_TIMESTAMP_S for v in values):
        return ColumnRole("time", f"the name of a time, in {_time_unit(values[0])}: {shown}", is_time=True)
    if known in GROUP_NAMES and all(v == int(v) for v in values if math.isfinite(v)):
        return ColumnRole("group", f"the name of a group: {shown}")
    return None


def infer_time_role(name: str, shown: str) -> ColumnRole:
    """Return the role of a column of times. `shown` is appended to "a time" in the reason."""
    if name.lower() in TIME_NAMES:
        return ColumnRole("time", f"a time{shown}", is_time=True)
    return ColumnRole(
        "ignore",
        f"a time{shown}; --time {name} splits by it, --time-features {name} makes features of it",
        is_time=True,
    )


def are_times(texts: Iterable[str]) -> bool:
    """Whether all texts have the form of a date or time whose year comes first."""
    return all(_TIME_PATTERN.fullmatch(text) or _LENIENT_TIME_PATTERN.fullmatch(text) for text in texts)


def infer_role(name: str, values: Sequence[str]) -> ColumnRole:
    """Infer the role of a column from its name and sampled values [n], which are texts in row order."""
    present = [value for value in values if value not in MISSING_TEXTS]
    if not name:
        return UNNAMED_COLUMN
    if not present:
        return ColumnRole("ignore", f"no value in {len(values):,} rows")
    outcome = secondary_label_role(name)
    if outcome is not None:
        return outcome
    distinct = dict.fromkeys(present)
    if are_times(distinct):
        return infer_time_role(name, f", as {present[0]!r}")
    if name.lower() in GROUP_NAMES:
        return ColumnRole("group", f"the name of a group: {format_examples(present)}")
    numbers = {text: number for text in distinct if (number := parse_number(text)) is not None}
    column = _ColumnSample(name, values, present, {text: n for text, n in numbers.items() if math.isfinite(n)})
    if len(numbers) == len(distinct):
        return _infer_role_of_numbers(column)
    guess = column.uninformative_role or ColumnRole("categorical", f"text: {format_examples(present)}")
    hint = format_hint(present)
    return guess if hint is None else guess._replace(reason=f"{guess.reason}; numbers if a --schema file says {hint}")


@dataclass(frozen=True)
class _ColumnSample:
    name: str
    values: Sequence[str]
    present: Sequence[str]
    finite_numbers: Mapping[str, float]
    """Finite number for each distinct text that spells one."""

    @cached_property
    def num_distinct(self) -> int:
        return len(set(self.present))

    @property
    def uninformative_role(self) -> ColumnRole | None:
        """Role that ignores the column because it is a constant or a key, or `None`."""
        num_rows, num_present = len(self.values), len(self.present)
        if num_rows < MIN_EVIDENCE_ROWS:
            return None
        # Missing values among equal ones carry information.
        if self.num_distinct == 1 and num_present == num_rows:
            return ColumnRole("ignore", f"the same in {num_rows:,} rows: {format_examples(self.present)}")
        has_name = role_from_name(self.name) is not None and not _ROW_NUMBER_NAME.fullmatch(self.name)
        if num_present < MIN_EVIDENCE_ROWS or self.num_distinct <= _MIN_KEY_SHARE * num_present:
            return None
        if self.num_distinct < num_present and has_name:
            return None
        return ColumnRole("ignore", f"a key: {self.num_distinct:,} different values in {num_present:,} rows")

    @property
    def numbers(self) -> list[float]:
        return [self.finite_numbers[text] for text in self.present if text in self.finite_numbers]


def _infer_role_of_numbers(column: _ColumnSample) -> ColumnRole:
    numbers = column.numbers
    shown = format_examples([text for text in column.present if text in column.finite_numbers])
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
    is_increasing = all(one < other for one, other in itertools.pairwise(numbers))
    if nothing is not None and (is_increasing or not _is_concentrated(numbers)):
        return nothing
    if column.num_distinct > _MIN_DISTINCT_SHARE * len(numbers) and _is_concentrated(numbers):
        return ColumnRole("dense", f"numbers, spread as measurements are: {shown}")
    return ColumnRole(
        "both",
        f"{column.num_distinct:,} whole numbers, {low:.15g} to {high:.15g}: doubtful, so a category and a measurement; "
        f"--sparse {column.name} or --dense {column.name} decides",
    )


def _are_codes(texts: Collection[str], largest: float) -> bool:
    # Numbers with leading zeros, or too large for float64, cannot be measurements.
    return largest > _MAX_EXACT_INTEGER or any(map(_ZERO_PADDED.fullmatch, texts))


def _is_concentrated(numbers: Sequence[float]) -> bool:
    # Most values are close together, relative to their range.
    ordered = sorted(numbers)
    quarter = len(ordered) // 4
    return ordered[-1 - quarter] - ordered[quarter] < _MAX_IQR_RATIO * (ordered[-1] - ordered[0])


def _time_unit(number: float) -> str:
    # Same thresholds as `to_seconds`.
    return next((name for least, name in ((1e17, "ns"), (1e14, "us"), (1e11, "ms")) if number >= least), "seconds")


def format_examples(values: Iterable[str]) -> str:
    """Return the first two distinct values for messages, quoted and truncated."""
    first = list(dict.fromkeys(values))[:2]
    return ", ".join(repr(value if len(value) <= 20 else value[:17] + "...") for value in first)


def _are_all_numbers(values: Sequence[str]) -> bool:
    # False if all values are missing.
    present = [value for value in values if value not in MISSING_TEXTS]
    return bool(present) and all(parse_number(value) is not None for value in present)


def parse_number(value: str) -> float | None:
    """Return the number that `value` spells, or `None`. The number is infinite if it is too large for a float."""
    try:
        return None if "_" in value else float(value)
    except ValueError:
        return None


_MISSING = frozenset(MISSING_TEXTS)
# Values to check before all others. The first one is enough for most columns with other text.
_NUM_FIRST_VALUES = 20


def holds_whole_numbers(values: Iterable[str]) -> bool:
    """Whether all values except missing ones are whole numbers. False if all values are missing."""
    present = list(set(values) - _MISSING)
    first = present[:_NUM_FIRST_VALUES]
    return bool(first) and are_whole_numbers(first) and are_whole_numbers(present)


def add_whole_numbers(layout: RawLayout, sample: Mapping[str, Iterable[str]]) -> RawLayout:
    """Return `layout` with `RawLayout.whole_numbers` inferred for its categories and groups.

    `sample` contains values of raw columns as texts. Those of list columns are items, or fields to split at the
    separator.
    """
    names = {column.raw_column: column.separator for column in layout.encoded_features if not column.cross}
    if layout.group is not None:
        names.setdefault(layout.group, None)
    whole = [
        name for name, separator in names.items() if holds_whole_numbers(_split_items(sample.get(name, ()), separator))
    ]
    return replace(layout, whole_numbers=tuple(whole))


def _split_items(values: Iterable[str], separator: str | None) -> Iterable[str]:
    return values if separator is None else (item for value in values for item in value.split(separator))
