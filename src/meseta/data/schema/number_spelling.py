"""Detection of text columns that contain only whole numbers, from sampled values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meseta.data.layout import RawLayout
from meseta.data.schema.infer import MISSING_TEXTS
from meseta.data.whole_numbers import are_whole_numbers

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
