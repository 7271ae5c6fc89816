"""Rows that cannot be parsed: found by halving the block they stand in, left out, counted, and too many refused.

So whatever a parser refuses is left out, row by row, and nothing else is; a block without such rows costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import pyarrow as pa

from meseta.data.dataset.dataset import BadRows
from meseta.data.formats.csv_records import is_record
from meseta.data.prepare.sources import Block
from meseta.spec import MesetaError

Result = TypeVar("Result")
MAX_SHOWN = 5
"""Rows whose place and fault are kept."""
MAX_LINES = 1000
"""Lines that a record of CSV may have, where one is looked for among bad rows."""
MIN_ROWS = 100_000
"""Rows from which on a share is held against its limit while the work goes on; before, only at the end."""


@dataclass
class GoodParts(Generic[Result]):
    """What was made of a block without its bad rows."""

    results: list[Result] = field(default_factory=list)
    """One for each stretch of good rows, in order."""
    num_good: int = 0
    num_bad: int = 0
    first: list[str] = field(default_factory=list)
    """What is wrong with the first few of them, and where."""


def good_parts(block: Block, work: Callable[[Block], Result]) -> GoodParts[Result]:
    """`work` on the whole block, else on its halves and theirs; a single row for which it raises MesetaError is bad."""
    try:
        return GoodParts([work(block)], block.num_rows)
    except MesetaError:
        found: GoodParts[Result] = GoodParts()
        ends = range(1, block.num_rows + 1) if isinstance(block.raw, pa.RecordBatch) else _row_ends(block, block.raw)
        _halve(block, ends, 0, len(ends), work, found)
        return found


def _halve(
    block: Block,
    ends: Sequence[int],
    first: int,
    stop: int,
    work: Callable[[Block], Result],
    found: GoodParts[Result],
) -> None:
    """Add what `work` makes of rows first..stop-1 to `found`."""
    start = ends[first - 1] if first else 0
    part = replace(
        block,
        raw=block.raw.slice(start, stop - first)
        if isinstance(block.raw, pa.RecordBatch)
        else block.raw[start : ends[stop - 1]],
        first_row=block.first_row + first,
        first_line=block.first_line + (block.raw.count(b"\n", 0, start) if isinstance(block.raw, bytes) else 0),
        num_rows=stop - first,
    )
    try:
        result = work(part)
    except MesetaError as error:
        if stop - first > 1:
            middle = (first + stop) // 2
            _halve(block, ends, first, middle, work, found)
            _halve(block, ends, middle, stop, work, found)
            return
        found.num_bad += 1
        if len(found.first) < MAX_SHOWN:
            found.first.append(str(error).rpartition("; fix")[0] or str(error))
    else:
        found.results.append(result)
        found.num_good += stop - first


class BadRowCounter:
    """Adds up bad rows and stops the work when there are too many."""

    def __init__(self, limit: int | float) -> None:
        """`limit`: rows as an int, or their share of all rows as a float."""
        self._limit = limit
        self._num_good = 0
        self._num_bad = 0
        self._first: list[str] = []

    def add(self, parts: GoodParts[Any]) -> None:
        """Count the rows of one more block. Raises MesetaError as `check`."""
        self._num_good += parts.num_good
        self._num_bad += parts.num_bad
        self._first += parts.first[: MAX_SHOWN - len(self._first)]
        if isinstance(self._limit, int) or self._num_good + self._num_bad >= MIN_ROWS:
            self.check()

    def check(self) -> None:
        """Raises MesetaError where more rows are bad than the limit allows."""
        num_rows = self._num_good + self._num_bad
        if self._num_bad > (self._limit if isinstance(self._limit, int) else self._limit * num_rows):
            raise MesetaError(
                f"prepare: {self._num_bad:,} of {num_rows:,} rows cannot be parsed, more than --max-bad-rows "
                f"{self._limit} allows; mend the files, say what the columns are, or allow more: "
                + "; ".join(self._first)
            )

    @property
    def found(self) -> BadRows:
        """How many there were, and the first of them."""
        return BadRows(num_rows=self._num_bad, first=tuple(self._first))

    def get_state(self) -> dict[str, Any]:
        """Plain data; `set_state` of another one takes it up."""
        return {"num_good": self._num_good, "num_bad": self._num_bad, "first": self._first}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `get_state` gave."""
        self._num_good, self._num_bad, self._first = state["num_good"], state["num_bad"], list(state["first"])


def _row_ends(block: Block, raw: bytes) -> list[int]:
    """Where each row ends in `raw`, whole lines.

    Of CSV a quote too many makes lines up to the next one look like one record; where such a record is not whole, its
    first line is taken for a row, and the next one begins another.
    """
    ends = list(_line_ends(raw))
    if block.source.kind != "csv" or b'"' not in raw:
        return ends
    found = []
    at = 0
    while at < len(ends):
        start = ends[at - 1] if at else 0
        last = at
        quotes = raw.count(b'"', start, ends[at])
        while quotes % 2 and last + 1 < min(len(ends), at + MAX_LINES):
            last += 1
            quotes += raw.count(b'"', ends[last - 1], ends[last])
        if last > at and not is_record(raw[start : ends[last]], block.source.delimiter, len(block.header)):
            last = at
        found.append(ends[last])
        at = last + 1
    return found


def _line_ends(raw: bytes) -> Iterator[int]:
    end = raw.find(b"\n") + 1
    while end:
        yield end
        end = raw.find(b"\n", end) + 1
