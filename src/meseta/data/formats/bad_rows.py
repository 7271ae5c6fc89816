"""Isolation of rows that cannot be parsed, by bisection of their block, and a limit on their number.

Exactly the rows that a parser rejects are skipped. A block without bad rows is parsed only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import pyarrow as pa

from meseta.data.dataset.records import BadRows
from meseta.data.formats.format import Block
from meseta.spec import MesetaError

Result = TypeVar("Result")
MAX_ERROR_EXAMPLES = 5
"""Maximum number of error messages to keep, with the position of each bad row."""
# A larger share is a whole class of rows rather than random damage.
MAX_RARE_SHARE = 0.01
"""Maximum share of bad rows for which skipping them is reasonable."""
MAX_SAMPLED_ROWS = 1_000
"""Maximum number of rows of a block on which the share of bad rows is estimated."""
MIN_CHECKED_ROWS = 100_000
"""Number of rows from which a limit given as a share is also checked before the end."""


@dataclass
class ParsedRows(Generic[Result]):
    """Results for the good rows of a block, and the errors of its bad rows."""

    results: list[Result] = field(default_factory=list)
    """Results of each contiguous range of good rows, in order."""
    num_good: int = 0
    num_bad: int = 0
    first_errors: list[str] = field(default_factory=list)
    """Messages of the first errors, at most `MAX_ERROR_EXAMPLES`. Each names the position of its row."""


def parse_good_rows(block: Block, work: Callable[[Block], Result]) -> ParsedRows[Result]:
    """Apply `work` to as much of a block as possible, and skip the bad rows.

    If `work` raises MesetaError, the block is halved recursively. A row is bad if `work` raises MesetaError for it
    alone.
    """
    try:
        return ParsedRows([work(block)], block.num_rows)
    except MesetaError:
        parsed: ParsedRows[Result] = ParsedRows()
        ends = block.source.format.row_ends(block)
        _bisect(block, ends, 0, len(ends), work, parsed)
        return parsed


def are_bad_rows_rare(block: Block, work: Callable[[Block], object]) -> bool:
    """Whether `work` raises MesetaError for at most 1 % of the rows of a block. Evaluates a sample of the rows."""
    ends = block.source.format.row_ends(block)
    # Equally spaced rows, at most `MAX_SAMPLED_ROWS`.
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
    """Counter of bad rows that raises an error if there are too many."""

    def __init__(self, limit: int | float) -> None:
        """Create a counter. `limit` is a number of rows if it is an int, and a share of all rows if it is a float."""
        self._limit = limit
        self._num_good = 0
        self._num_bad = 0
        self._first_errors: list[str] = []

    def add(self, parts: ParsedRows[Any]) -> None:
        """Count the rows of one more block. Raises MesetaError if the limit is exceeded."""
        self._num_good += parts.num_good
        self._num_bad += parts.num_bad
        self._first_errors += parts.first_errors[: MAX_ERROR_EXAMPLES - len(self._first_errors)]
        # A share is not meaningful until enough rows were read.
        if isinstance(self._limit, int) or self._num_good + self._num_bad >= MIN_CHECKED_ROWS:
            self.check()

    def check(self) -> None:
        """Raise MesetaError if there are more bad rows than the limit allows."""
        num_rows = self._num_good + self._num_bad
        if self._num_bad > (self._limit if isinstance(self._limit, int) else self._limit * num_rows):
            more = ", or allow more" if self._num_bad <= MAX_RARE_SHARE * num_rows else ""
            raise MesetaError(
                f"prepare: {self._num_bad:,} of {num_rows:,} rows cannot be parsed, but --max-bad-rows allows "
                f"{self._limit}; fix the files, or specify the columns{more}: " + "; ".join(self._first_errors)
            )

    @property
    def bad_rows(self) -> BadRows:
        return BadRows(num_rows=self._num_bad, first=tuple(self._first_errors))

    def get_state(self) -> dict[str, Any]:
        """Return the counts as plain data for `set_state`."""
        return {"num_good": self._num_good, "num_bad": self._num_bad, "first": self._first_errors}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._num_good, self._num_bad, self._first_errors = state["num_good"], state["num_bad"], list(state["first"])
