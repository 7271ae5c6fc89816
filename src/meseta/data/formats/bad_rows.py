"""Rows that cannot be parsed: found by halving the block they stand in, left out, counted, and too many refused.

So whatever a parser refuses is left out, row by row, and nothing else is; a block without such rows costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import pyarrow as pa

from meseta.data.dataset.dataset import BadRows
from meseta.data.formats.format import Block
from meseta.spec import MesetaError

Result = TypeVar("Result")
MAX_ERROR_EXAMPLES = 5
"""Rows whose place and fault are kept."""
MAX_RARE_SHARE = 0.01
"""Share of the rows above which leaving out bad ones is no remedy: they are a class of rows, not damage."""
MAX_SAMPLED_ROWS = 1_000
"""Rows of a block by which the share of bad ones is estimated."""
MIN_CHECKED_ROWS = 100_000
"""Rows from which on a share is held against its limit while the work goes on; before, only at the end."""


@dataclass
class ParsedRows(Generic[Result]):
    """What was made of a block without its bad rows."""

    results: list[Result] = field(default_factory=list)
    """One for each stretch of good rows, in order."""
    num_good: int = 0
    num_bad: int = 0
    first_errors: list[str] = field(default_factory=list)
    """What is wrong with the first few of them, and where."""


def parse_good_rows(block: Block, work: Callable[[Block], Result]) -> ParsedRows[Result]:
    """`work` on the whole block, else on its halves and theirs; a single row for which it raises MesetaError is bad."""
    try:
        return ParsedRows([work(block)], block.num_rows)
    except MesetaError:
        parsed: ParsedRows[Result] = ParsedRows()
        ends = block.source.format.row_ends(block)
        _bisect(block, ends, 0, len(ends), work, parsed)
        return parsed


def are_bad_rows_rare(block: Block, work: Callable[[Block], object]) -> bool:
    """Whether at most 1 % of the rows of a block, in a sample of it, raise MesetaError in `work`."""
    ends = block.source.format.row_ends(block)
    rows = range(0, len(ends), -(-len(ends) // MAX_SAMPLED_ROWS))
    num_bad = 0
    for row in rows:
        try:
            work(_slice_block(block, ends, row, row + 1))
        except MesetaError:
            num_bad += 1
            if num_bad > MAX_RARE_SHARE * len(rows):
                return False
    return True


def _slice_block(block: Block, ends: Sequence[int], first: int, stop: int) -> Block:
    """Rows first..stop-1 of a block whose rows end at `ends`."""
    start = ends[first - 1] if first else 0
    return replace(
        block,
        raw=block.raw.slice(start, stop - first)
        if isinstance(block.raw, pa.RecordBatch)
        else block.raw[start : ends[stop - 1]],
        first_row=block.first_row + first,
        first_line=block.first_line + (block.raw.count(b"\n", 0, start) if isinstance(block.raw, bytes) else 0),
        first_offset=block.first_offset + (start if isinstance(block.raw, bytes) else 0),
        num_rows=stop - first,
    )


def _bisect(
    block: Block,
    ends: Sequence[int],
    first: int,
    stop: int,
    work: Callable[[Block], Result],
    parsed: ParsedRows[Result],
) -> None:
    """Add what `work` makes of rows first..stop-1 to `parsed`."""
    try:
        result = work(_slice_block(block, ends, first, stop))
    except MesetaError as error:
        if stop - first > 1:
            middle = (first + stop) // 2
            _bisect(block, ends, first, middle, work, parsed)
            _bisect(block, ends, middle, stop, work, parsed)
            return
        parsed.num_bad += 1
        if len(parsed.first_errors) < MAX_ERROR_EXAMPLES:
            parsed.first_errors.append(error.reason)
    else:
        parsed.results.append(result)
        parsed.num_good += stop - first


class BadRowCounter:
    """Adds up bad rows and stops the work when there are too many."""

    def __init__(self, limit: int | float) -> None:
        """`limit`: rows as an int, or their share of all rows as a float."""
        self._limit = limit
        self._num_good = 0
        self._num_bad = 0
        self._first_errors: list[str] = []

    def add(self, parts: ParsedRows[Any]) -> None:
        """Count the rows of one more block. Raises MesetaError as `check`."""
        self._num_good += parts.num_good
        self._num_bad += parts.num_bad
        self._first_errors += parts.first_errors[: MAX_ERROR_EXAMPLES - len(self._first_errors)]
        if isinstance(self._limit, int) or self._num_good + self._num_bad >= MIN_CHECKED_ROWS:
            self.check()

    def check(self) -> None:
        """Raises MesetaError where more rows are bad than the limit allows."""
        num_rows = self._num_good + self._num_bad
        if self._num_bad > (self._limit if isinstance(self._limit, int) else self._limit * num_rows):
            more = ", or allow more" if self._num_bad <= MAX_RARE_SHARE * num_rows else ""
            raise MesetaError(
                f"prepare: {self._num_bad:,} of {num_rows:,} rows cannot be parsed, more than --max-bad-rows "
                f"{self._limit} allows; mend the files, or say what the columns are{more}: "
                + "; ".join(self._first_errors)
            )

    @property
    def bad_rows(self) -> BadRows:
        """How many there were, and the first of them."""
        return BadRows(num_rows=self._num_bad, first=tuple(self._first_errors))

    def get_state(self) -> dict[str, Any]:
        """Plain data; `set_state` of another one takes it up."""
        return {"num_good": self._num_good, "num_bad": self._num_bad, "first": self._first_errors}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `get_state` gave."""
        self._num_good, self._num_bad, self._first_errors = state["num_good"], state["num_bad"], list(state["first"])
