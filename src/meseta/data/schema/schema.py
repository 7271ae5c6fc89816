"""Labels from conditions such as 'rating >= 4', and from columns with the values -1 and 1."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meseta.data.dataset.records import LabelRule, TimeAge
from meseta.data.schema.infer import MISSING_TEXTS, parse_number
from meseta.data.schema.layout import MAX_BUCKETS, NO_CATEGORY, NUM_TIME_PARTS, BucketRule, RawLayout, SparseColumn
from meseta.data.schema.separators import invalid_separator_reason
from meseta.data.schema.text_syntax import MAX_DELIMITER_LENGTH, NumberFormat, invalid_delimiter_reason
from meseta.errors import UnknownColumnError, duplicates
from meseta.spec import MesetaError, suggest
from meseta.spec.documents import read_mapping
from meseta.system.yaml_text import parse_yaml

COMPARISONS: Mapping[str, Callable[[NDArray[np.float64], float], NDArray[np.bool_]]] = {
    ">=": np.greater_equal,
    "<=": np.less_equal,
    "==": np.equal,
    "!=": np.not_equal,
    ">": np.greater,
    "<": np.less,
}
_CONDITION_PATTERN = re.compile(r"(?P<left>.+?)\s*(?P<operator>[<>=!]=|[<>])\s*(?P<threshold>[^<>=!]+)", re.DOTALL)


def resolve_labels(
    where: str, entries: Sequence[str], names: Sequence[str]
) -> tuple[tuple[str, ...], tuple[LabelRule, ...]]:
    """Return (names of labels, rules of labels that are conditions).

    An entry is the name of a column, `COLUMN OPERATOR NUMBER`, or `NAME=COLUMN OPERATOR NUMBER`. An entry in `names` is
    always a column, even if it looks like a condition.

    Raises MesetaError if a condition has an unknown column or no finite number, or if two labels have the same name.
    The message starts with `where`.
    """
    rules = {entry: rule for entry in entries if entry not in names and (rule := _parse_condition(where, entry, names))}
    labels = [rules[entry].name if entry in rules else entry for entry in entries]
    if twice := sorted(duplicates(labels)):
        raise MesetaError(f"{where}: two labels are called {twice[0]!r}; rename one, as in 'NAME=COLUMN >= NUMBER'")
    return tuple(labels), tuple(rules.values())


def raw_label_columns(where: str, entries: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the distinct raw columns that labels are computed from. Raises MesetaError as `resolve_labels` does."""
    labels, rules = resolve_labels(where, entries, names)
    columns = {rule.name: rule.column for rule in rules}
    return list(dict.fromkeys(columns.get(name, name) for name in labels))


def is_condition(entry: str) -> bool:
    """Whether an entry has the form of a condition."""
    return _CONDITION_PATTERN.fullmatch(entry.strip()) is not None


def _parse_condition(where: str, entry: str, names: Sequence[str]) -> LabelRule | None:
    match = _CONDITION_PATTERN.fullmatch(entry.strip())
    if match is None:
        return None
    operator, threshold = cast(Any, match["operator"]), parse_number(match["threshold"].strip())
    if threshold is None or not np.isfinite(threshold):
        raise MesetaError(
            f"{where}: label {entry!r} compares with {match['threshold'].strip()!r}, which is not a finite number; "
            "write a condition such as 'rating >= 4'"
        )
    left, name = match["left"], None
    if left not in names and "=" in left:
        name, left = (part.strip() for part in left.split("=", 1))
    if left not in names:
        raise MesetaError(
            f"{where} has no column {left!r}, which label {entry!r} uses (from --label or a schema file); "
            f"{suggest(left, filter(None, names))}"
        )
    rule = LabelRule(name=name or left, column=left, operator=operator, threshold=threshold)
    return rule if name else rule.model_copy(update={"name": rule.condition})


def add_signed_labels(layout: RawLayout, sample: Mapping[str, Sequence[str]]) -> RawLayout:
    """Return `layout` with a rule for each label whose sampled values are only -1 and 1.

    Labels that already have a rule are unchanged. `sample` contains sampled values of the label columns as texts.
    """
    rules, reasons = list(layout.label_rules), dict(layout.reasons)
    for name in layout.labels_without_rule:
        numbers = {parse_number(text.strip()) for text in set(sample.get(name, ())) if text not in MISSING_TEXTS}
        if -1.0 in numbers and numbers <= {-1.0, 1.0}:
            rules.append(LabelRule(name=name, column=name, is_signed=True))
            reasons[name] = "-1 and 1: -1 counts as 0"
    return replace(layout, label_rules=tuple(rules), reasons=reasons)


def apply_label_rule(rule: LabelRule, values: NDArray[np.float64]) -> tuple[NDArray[np.float64], str]:
    """Return (labels [n], requirement for values as text). Missing and invalid values become NaN labels."""
    if rule.is_signed:
        is_good = (values == 1) | (values == -1)
        return np.where(is_good, values > 0, np.nan), "-1 or 1, like the sampled labels"
    return np.where(np.isnan(values), np.nan, COMPARISONS[rule.operator or ">="](values, rule.threshold)), "a number"


class Schema(BaseModel):
    """Schema file: roles of raw columns, and the text format of raw files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str | None = None
    """Column of the label, a number in 0..1, or a condition on a column, such as 'rating >= 4'."""
    labels: list[str] = []
    """Columns or conditions of several labels, in place of `label`. A condition may have a name: 'liked=rating >=
    4'."""
    weight: str | None = None
    """Column of sample weights, which are 0 or in 1e-9..1e9."""
    group: str | None = None
    """Column that identifies related samples, such as a user. It may be listed under `categorical` too."""
    time: str | None = None
    """Column of times: ISO 8601, or seconds, milli-, micro- or nanoseconds since 1970, distinguished by their size."""
    time_features: list[str] = []
    """Columns of times whose hour, weekday and age become features. They may include `time`."""
    dense: list[str] = []
    signed: list[str] = []
    """Columns under `dense` that keep negative values. Negative values of other columns count as 0."""
    categorical: list[str] = []
    """Columns with categories or lists of categories. A column NAME that is under `dense` too is also NAME.category."""
    whole_numbers: list[str] = []
    """Columns of categories, or of the group, in which 12, 12.0, +12 and 1.2e1 are the same value."""
    decimal: str | None = None
    """Decimal sign of numbers in text, such as ","."""
    thousands: str | None = None
    """Thousands separator of numbers in text, such as "."."""
    strip: str | None = None
    """Characters to remove around numbers in text, such as "€%"."""
    multi_valued: dict[str, str] = {}
    """Separator of the values in a text, for each multi-valued column that has no lists, such as {genres: "|"}."""
    weights: dict[str, str] = {}
    """Weights of categorical columns. In Parquet and JSON, the column of lists with the weights. In CSV, the separator
    between a value and its weight."""
    buckets: dict[str, list[float] | int] = {}
    """Bucket boundaries of columns with numbers, in ascending order, or the number of buckets of equal size."""
    crosses: dict[str, list[str]] = {}
    """Columns whose values are combined, for each new categorical feature."""
    ignore: list[str] = []
    """Columns to leave out. Columns that are not listed in any key are left out too."""
    delimiter: str | None = Field(default=None, min_length=1, max_length=MAX_DELIMITER_LENGTH)
    """Delimiter of fields in text. `None` detects it in the first lines. With several characters, quotes have no
    meaning."""
    encoding: str | None = None
    """Python name of the text encoding. `None` means UTF-16 or UTF-32 if there is a byte order mark, otherwise
    UTF-8."""
    header: list[str] = []
    """Names of all columns, in order, of text files that have no header."""

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names or conditions of all labels."""
        return tuple(self.labels) if self.label is None else (self.label,)

    @property
    def number_format(self) -> NumberFormat | None:
        """Number format of text, or `None` for the default. Raises ValueError if the characters make numbers
        ambiguous."""
        keys = {key: sign for key in ("decimal", "thousands", "strip") if (sign := getattr(self, key)) is not None}
        number_format = NumberFormat(**keys)
        return None if number_format == NumberFormat() else number_format

    @property
    def columns(self) -> list[str]:
        """Distinct raw columns in the schema, without labels and weights of ids."""
        crossed = [name for names in self.crosses.values() for name in names]
        samples = [name for name in (self.weight, self.group, self.time) if name is not None]
        features = [*self.dense, *self.categorical, *self.buckets, *crossed]
        return list(dict.fromkeys([*samples, *features, *self.time_features, *self.ignore]))

    @staticmethod
    def load(path: str | Path) -> Schema:
        """Load a YAML file. Raises MesetaError naming the key and the rule, also if a column has two roles."""
        where = f"schema {str(path)!r}"
        try:
            document = read_mapping(path)
        except MesetaError as error:
            raise MesetaError(f"{where}: {error}") from None
        try:
            # As usual in YAML, an empty key has the default value.
            schema = Schema.model_validate({key: value for key, value in document.items() if value is not None})
        except ValidationError as error:
            # Report an unknown key first. For 'lable', the problem is not that 'label' is missing.
            problem = min(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
            key = ".".join(map(str, problem["loc"][:2]))
            if problem["type"] == "extra_forbidden":
                raise MesetaError(f"{where}: unknown key {key!r}; {suggest(key, list(Schema.model_fields))}") from None
            raise MesetaError(f"{where}: key {key!r}: {problem['msg'].lower()}") from None
        broken = _invalid_schema_reason(schema)
        if broken:
            raise MesetaError(f"{where}: {broken}")
        return schema

    def derived_columns(self) -> tuple[SparseColumn, ...]:
        """Return the sparse features from buckets and crosses."""
        cut = [
            BucketRule(column=name, num_quantiles=how)
            if isinstance(how, int)
            else BucketRule(column=name, boundaries=tuple(how))
            for name, how in self.buckets.items()
        ]
        crosses = (SparseColumn(name=name, cross=tuple(columns)) for name, columns in self.crosses.items())
        return (*(SparseColumn(name=f"{buckets.column}.bucket", buckets=buckets) for buckets in cut), *crosses)


def _invalid_schema_reason(schema: Schema) -> str | None:
    if bool(schema.labels) == (schema.label is not None):
        both = "both are given" if schema.labels else "field required, or 'labels' for several"
        return f"key 'label': {both}; specify either 'label' or 'labels'"
    if problem := _invalid_dense_reason(schema):
        return problem
    features = list(dict.fromkeys([*schema.dense, *schema.categorical]))
    samples = [name for name in (*schema.label_names, schema.weight, schema.time) if name is not None]
    roles = [*samples, *dict.fromkeys([*features, *schema.buckets]), *schema.ignore]
    roles += [name for name in schema.time_features if name != schema.time]
    categorical = {*schema.categorical}
    roles += [schema.group] if schema.group and schema.group not in categorical else []
    twice = sorted(duplicates(roles))
    if twice:
        return f"column {twice[0]!r} is named twice; give it one role"
    if problem := _invalid_whole_numbers_reason(schema):
        return problem
    for key in ("multi_valued", "weights"):
        for name in getattr(schema, key):
            if name not in categorical:
                return f"key '{key}': column {name!r} is not under categorical"
    for name, separator in schema.multi_valued.items():
        weight = schema.weights.get(name)
        problem = invalid_separator_reason(separator)
        if weight == separator:
            problem = "is the separator of weights too; choose another one"
        if problem:
            return f"key 'multi_valued.{name}': {separator!r} {problem}"
    if schema.delimiter is not None and (problem := invalid_delimiter_reason(schema.delimiter)):
        return f"key 'delimiter': {schema.delimiter!r} {problem}"
    try:
        _ = schema.number_format
    except ValueError as error:
        return f"key {error}"
    if len(schema.header) == 1 or not all(schema.header):
        return f"key 'header': {schema.header} must name all columns, at least two, and no name may be empty"
    return _invalid_buckets_reason(schema) or _invalid_crosses_reason(schema)


def _invalid_dense_reason(schema: Schema) -> str | None:
    for key in ("dense", "categorical", "signed", "whole_numbers"):
        if twice := sorted(duplicates(getattr(schema, key))):
            return f"key {key!r}: column {twice[0]!r} is named twice"
    dense = {*schema.dense}
    for name in schema.signed:
        if name not in dense:
            return f"key 'signed': column {name!r} is not under dense"
    for name in schema.dense:
        if name in schema.multi_valued or name in schema.weights:
            return (
                f"column {name!r} is under dense, so it has one value per row; remove it from multi_valued or weights"
            )
    return None


def _invalid_whole_numbers_reason(schema: Schema) -> str | None:
    crossed = {name for names in schema.crosses.values() for name in names} - {*schema.buckets}
    values = crossed | {*schema.categorical, schema.group}
    for name in schema.whole_numbers:
        if name not in values:
            return f"key 'whole_numbers': column {name!r} is no category and not the group; list it under categorical"
    return None


def _invalid_buckets_reason(schema: Schema) -> str | None:
    categorical = {*schema.categorical}
    for name, how in schema.buckets.items():
        if name in categorical:
            return f"key 'buckets.{name}': the column is under categorical too; buckets are only for numbers"
        if isinstance(how, int):
            good = 2 <= how <= MAX_BUCKETS
        else:
            ascending = all(a < b for a, b in itertools.pairwise(how))
            good = len(how) > 0 and ascending and all(map(math.isfinite, how))
        if not good:
            return (
                f"key 'buckets.{name}': {how} must be boundaries in ascending order, such as [18, 25, 35], or a number "
                f"of buckets in 2..{MAX_BUCKETS}"
            )
    return None


def _invalid_crosses_reason(schema: Schema) -> str | None:
    closed = {*schema.label_names, schema.weight, schema.time, *schema.ignore}
    numbers = {*schema.dense} - {*schema.buckets, *schema.categorical}
    for name, columns in schema.crosses.items():
        if len(columns) < 2 or len(set(columns)) < len(columns):
            return f"key 'crosses.{name}': {columns} must be at least two different columns"
        for column in columns:
            if column in closed:
                return f"key 'crosses.{name}': column {column!r} has another role"
            if column in schema.multi_valued:
                return f"key 'crosses.{name}': column {column!r} is multi-valued and cannot be crossed"
            if column in numbers:
                return f"key 'crosses.{name}': column {column!r} is dense; list it under buckets or categorical"
    return None


def layout_from_schema(where: str, schema: Schema, plain: Iterable[SparseColumn], names: Sequence[str]) -> RawLayout:
    """Return the layout that a schema describes for files with the columns `names`.

    `plain` has the features of the columns under `categorical`. Raises MesetaError if a column is missing or occurs
    twice, or if `resolve_labels` fails. The message starts with `where`.
    """
    check_names(where, schema.columns, names)
    labels, rules = resolve_labels(where, schema.label_names, names)
    dense, signed = {*schema.dense}, {*schema.signed}
    # A column that is dense and categorical needs a second name for the category.
    named = (
        replace(column, name=f"{column.name}.category", column=column.name) if column.name in dense else column
        for column in plain
    )
    ages = tuple(TimeAge(column=name) for name in schema.time_features)
    parts = (
        SparseColumn(name=f"{name}.{part}", column=name, time_part=part)
        for name in schema.time_features
        for part in NUM_TIME_PARTS
    )
    return RawLayout(
        labels=labels,
        label_rules=rules,
        dense=(*schema.dense, *(age.name for age in ages)),
        ages=ages,
        signed=tuple(name for name in schema.dense if name in signed),
        sparse=(*named, *schema.derived_columns(), *parts) or (NO_CATEGORY,),
        whole_numbers=tuple(schema.whole_numbers),
        number_format=schema.number_format,
        weight=schema.weight,
        group=schema.group,
        time=schema.time,
    )


def format_schema(layout: RawLayout) -> str:
    """Return the text of a schema file that describes `layout`, with the reasons for roles as comments."""
    reasons = layout.reasons
    entries = {
        name: _format_scalar(name if (rule := layout.label_rule(name)) is None else rule.entry)
        for name in layout.labels
    }
    if len(entries) == 1:
        lines = [_format_line(f"label: {entry}", reasons.get(name)) for name, entry in entries.items()]
    else:
        lines = ["labels:", *(_format_line(f"  - {entry}", reasons.get(name)) for name, entry in entries.items())]
    for key in ("weight", "group", "time"):
        name = getattr(layout, key)
        lines += [] if name is None else [_format_line(f"{key}: {_format_scalar(name)}", reasons.get(name))]
    plain = [column for column in layout.encoded_features if not column.cross]
    dense = {*layout.raw_dense}
    both = {column.raw_column: column.name for column in plain if column.raw_column in dense}
    lists = {
        "time_features": tuple(age.column for age in layout.ages),
        "dense": layout.raw_dense,
        "signed": layout.signed,
        "categorical": tuple(column.raw_column for column in plain),
        "whole_numbers": layout.whole_numbers,
        "ignore": tuple(name for name in layout.ignored if name),
    }
    weights = {c.name: c.weight or c.weight_separator for c in plain}
    pairs: dict[str, dict[str, str | None]] = {
        "multi_valued": {column.name: column.separator for column in plain},
        "weights": weights,
        "buckets": {c.buckets.column: _format_boundaries(c.buckets) for c in layout.sparse if c.buckets},
        "crosses": {c.name: f"[{', '.join(map(_format_scalar, c.cross))}]" for c in layout.sparse if c.cross},
    }
    for key, names in lists.items():
        lines += [f"{key}:"] if names else []
        for name in names:
            reason = None if key in ("signed", "whole_numbers") else reasons.get(name)
            if key == "time_features":
                reason = ", ".join([f"{name}.{part}" for part in NUM_TIME_PARTS] + [f"{name}.age"])
            if key == "categorical" and name in both:
                reason = f"under dense too; this feature is called {both[name]}"
            lines.append(_format_line(f"  - {_format_scalar(name)}", reason))
        if key == "categorical":
            lines += _mapping_lines(pairs)
    lines += [] if layout.delimiter == "," else [f"delimiter: {json.dumps(layout.delimiter)}"]
    lines += [] if layout.number_format is None else layout.number_format.schema_lines
    lines += [] if layout.encoding in (None, "utf-8") else [f"encoding: {layout.encoding}"]
    lines += [f"header: [{', '.join(map(_format_scalar, layout.header))}]"] if layout.header else []
    return "\n".join(lines) + "\n"


def _mapping_lines(pairs: Mapping[str, Mapping[str, str | None]]) -> list[str]:
    # Entries that are `None` are left out.
    lines = []
    for key, values in pairs.items():
        entries = {name: value for name, value in values.items() if value is not None}
        lines += [f"{key}:"] if entries else []
        for name, value in entries.items():
            lines.append(
                f"  {_format_scalar(name)}: {value if key in ('buckets', 'crosses') else _format_scalar(value)}"
            )
    return lines


def _format_boundaries(buckets: BucketRule) -> str:
    if buckets.num_quantiles is not None:
        return str(buckets.num_quantiles)
    return f"[{', '.join(f'{boundary:.17g}' for boundary in buckets.boundaries)}]"


def _format_line(text: str, reason: str | None) -> str:
    return f"{text:<30}  # {reason}" if reason else text


def _format_scalar(name: str) -> str:
    # Plain if YAML reads it back unchanged, otherwise quoted as in JSON, which YAML accepts.
    plain = re.fullmatch(r"[^\W\d][\w. -]*\w|[^\W\d]", name) is not None and parse_yaml(name) == name
    return name if plain else json.dumps(name, ensure_ascii=False)


def check_names(where: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Check that each column in `names` occurs exactly once in `known`. Messages start with `where`.

    Raises UnknownColumnError if a column is missing, and MesetaError if it occurs twice.
    """
    times = Counter(known)
    for name in names:
        if name not in times:
            raise UnknownColumnError(where, name, known)
        if times[name] > 1:
            raise MesetaError(f"{where}: {name!r} is the name of two columns; rename one")
