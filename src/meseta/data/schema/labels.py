"""Labels from conditions such as 'rating >= 4', and from columns with the values -1 and 1."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from meseta.data.dataset.records import LabelRule
from meseta.data.schema.infer import MISSING_TEXTS, parse_number
from meseta.data.schema.layout import RawLayout
from meseta.errors import duplicates
from meseta.spec import MesetaError

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
        raise MesetaError(f"{where} has no column {left!r}, which label {entry!r} uses; choose one of its columns")
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
