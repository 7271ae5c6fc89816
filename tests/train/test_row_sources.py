"""Tests that rows of a parent are found by value, compared with a dictionary."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from meseta.train.start.row_sources import map_values

Values = list[bytes | None]


@st.composite
def vocabularies(draw: st.DrawFn) -> tuple[Values, Values]:
    """Draw two vocabularies: row 0 and freed rows are null, and some values keep their rows."""
    before: Values = [None, *draw(st.lists(st.binary(max_size=3), unique=True, max_size=12))]
    now = before[: draw(st.integers(1, len(before)))]
    taken = set(now)
    others = draw(st.lists(st.one_of(st.sampled_from(before), st.binary(max_size=3)), max_size=12))
    for value in others:
        if value is None or value not in taken:
            now.append(value)
            taken.add(value)
    for row in draw(st.lists(st.integers(1, 12), max_size=4)):
        if row < len(now):
            now[row] = None
        if row + 1 < len(before):
            before[row + 1] = None
    return before, now


@given(vocabularies())
def test_rows_of_equal_values(pair: tuple[Values, Values]) -> None:
    before, now = pair
    rows = {value: row for row, value in enumerate(before) if value is not None}
    expected = {(0, 0)} | {(rows[value], row) for row, value in enumerate(now) if value is not None and value in rows}
    row_map = map_values(*(pa.array(values, pa.large_binary()) for values in pair))
    pairs = {
        (int(source), int(target))
        for sources, targets in row_map.parts()
        for source, target in zip(np.arange(100)[sources], np.arange(100)[targets], strict=True)
    }
    assert pairs == expected and row_map.num_rows == len(expected)
