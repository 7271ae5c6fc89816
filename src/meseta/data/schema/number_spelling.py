"""How columns of text spell numbers, as far as a sample of their values shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meseta.data.layout import RawLayout
from meseta.data.schema.infer import MISSING_TEXTS
from meseta.data.whole_numbers import are_whole_numbers

_MISSING = frozenset(MISSING_TEXTS)
_NUM_FIRST_VALUES = 20
"""Values that are checked before all others: for most text columns the first one decides."""


def holds_whole_numbers(values: Iterable[str]) -> bool:
    """Whether there are values that are not missing, and all of them are whole numbers."""
    present = list(set(values) - _MISSING)
    first = present[:_NUM_FIRST_VALUES]
    return bool(first) and are_whole_numbers(first) and are_whole_numbers(present)


def add_whole_numbers(layout: RawLayout, sample: Mapping[str, Iterable[str]]) -> RawLayout:
    """Return `layout` with `RawLayout.whole_numbers` as the sampled values of its categories and groups show.

    Args:
        layout: a layout that was inferred.
        sample: values of raw columns as text; of lists, their items, or fields that `SparseColumn.separator` splits.
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
