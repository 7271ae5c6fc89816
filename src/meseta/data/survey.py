"""What must be known of all rows before the first is encoded: where the test split begins in time, and quantiles.

A pass over the columns that decide it, which go to the disk as plain numbers; what is found there is exact, and memory
does not grow with the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meseta.data.bad_rows import good_parts
from meseta.data.order_statistics import count_numbers, order_statistics
from meseta.data.parse import parse_block
from meseta.data.raw_rows import RawRows
from meseta.data.schema import Layout
from meseta.data.sources import Block, Source, read_blocks
from meseta.data.splitting import Splitter
from meseta.data.workers import in_order
from meseta.spec import MesetaError

_CHUNK_ROWS = 1 << 20

OnRows = Callable[[int, float], None]
_Parsed = tuple[RawRows, NDArray[np.bool_]]
"""Rows, and which of them are for testing."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What was found; plain data."""

    test_from: float | None = None
    """First second of the test split."""
    boundaries: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Of each column that is cut by its quantiles."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it back."""
        return asdict(self)

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> Survey:
        """The inverse of `to_dict`."""
        boundaries = {name: tuple(values) for name, values in document["boundaries"].items()}
        return Survey(test_from=document["test_from"], boundaries=boundaries)


@dataclass(frozen=True, kw_only=True)
class Surveyor:
    """Finds what a layout and a splitter leave open."""

    sources: Sequence[Source]
    layout: Layout
    splitter: Splitter
    scratch: Path
    """Folder for 8 bytes per row and column."""
    pool: ThreadPoolExecutor
    num_threads: int
    on_rows: OnRows
    skip_bad: bool
    """Whether rows that cannot be parsed are passed over; a column that is not read here can make them bad, too."""

    @property
    def _seeks_time(self) -> bool:
        return self.splitter.by == "time" and self.splitter.test_from is None

    @property
    def _quantiles_wanted(self) -> dict[str, int]:
        """Column to its number of buckets."""
        cut = {c.buckets.column: c.buckets.num_quantiles for c in self.layout.sparse if c.buckets}
        return {column: number for column, number in cut.items() if number is not None}

    @property
    def leaves_all_as_it_is(self) -> bool:
        """Whether there is nothing to find."""
        return not (self._quantiles_wanted or self._seeks_time)

    def survey(self) -> Survey:
        """Read the sources once, if anything is left open.

        Raises MesetaError where times are too equal to be parted, and for a column without a value in training.
        """
        wanted = self._quantiles_wanted
        if self.leaves_all_as_it_is:
            return Survey(test_from=self.splitter.test_from)
        self._read(self._reduced(list(wanted)))
        test_from = self._first_test_second() if self._seeks_time else self.splitter.test_from
        boundaries = {
            column: self._quantiles(column, place, number, test_from)
            for place, (column, number) in enumerate(wanted.items())
        }
        for path in [self._path("time"), *(self._path(place) for place in range(len(wanted)))]:
            path.unlink(missing_ok=True)
        return Survey(test_from=test_from, boundaries=boundaries)

    def _reduced(self, columns: Sequence[str]) -> Layout:
        """The layout of the columns that this pass reads."""
        return Layout(
            labels=(),
            dense=(),
            sparse=(),
            group=self.layout.group if self.splitter.by == "group" else None,
            time=self.layout.time if self.splitter.by == "time" else None,
            surveyed=tuple(columns),
        )

    def _path(self, name: str | int) -> Path:
        return self.scratch / f"survey-{name}.f64"

    def _read(self, layout: Layout) -> None:
        """Write the times, and the numbers of the training rows as far as these are known."""
        total_bytes, done_bytes = sum(source.size_bytes for source in self.sources), dict.fromkeys(self.sources, 0)
        num_rows = 0
        with ExitStack() as stack:
            files = [stack.enter_context(self._path(place).open("wb")) for place in range(len(layout.surveyed))]
            times = stack.enter_context(self._path("time").open("wb"))
            for block, parts in in_order(self.pool, self._jobs(layout), self.num_threads + 1):
                for rows, test in parts:
                    for file, numbers in zip(files, rows.numbers, strict=True):
                        numbers[test] = np.nan
                        numbers.tofile(file)
                    if rows.time is not None:
                        rows.time.tofile(times)
                num_rows += block.num_rows
                done_bytes[block.source] = block.position_bytes
                self.on_rows(num_rows, sum(done_bytes.values()) / total_bytes)

    def _jobs(self, layout: Layout) -> Iterator[Callable[[], tuple[Block, list[_Parsed]]]]:
        whole = self.layout.with_boundaries(dict.fromkeys(self._quantiles_wanted, (0.0,)))

        def parse(block: Block, first_row: int) -> _Parsed:
            rows = parse_block(block, layout)
            return rows, self.splitter.is_test(block, first_row, rows)

        def parse_good(block: Block, rows_before: int) -> tuple[Block, list[_Parsed]]:
            def parse_part(part: Block) -> _Parsed:
                parse_block(part, whole)
                return parse(part, rows_before + part.first_row)

            return block, good_parts(block, parse_part).results

        first_row = 0
        for source in self.sources:
            for block in read_blocks(source, self.layout.columns if self.skip_bad else layout.columns):
                if self.skip_bad:
                    yield partial(parse_good, block, first_row - block.first_row)
                else:
                    yield lambda block=block, row=first_row: (block, [parse(block, row)])  # type: ignore[misc]
                first_row += block.num_rows

    def _chunks(self, name: str | int) -> Iterator[NDArray[np.float64]]:
        with self._path(name).open("rb") as file:
            while (chunk := np.fromfile(file, np.float64, _CHUNK_ROWS)).size:
                yield chunk

    def _first_test_second(self) -> float | None:
        """The first time of the test split, which has at most the wanted share of the rows; None for no share."""
        times = partial(self._chunks, "time")
        num_rows = count_numbers(times)
        num_test = int(num_rows * self.splitter.test_fraction)
        if not num_test:
            return None
        [last] = order_statistics(times, [num_rows - num_test - 1])
        later = [float(chunk[chunk > last].min()) for chunk in times() if (chunk > last).any()]
        if not later:
            raise MesetaError(
                f"prepare: the last {self.splitter.test_fraction:g} of the rows all have the time {last:.17g}, as rows "
                "before them have; give a larger --test-fraction, --test-after, or split otherwise"
            )
        return min(later)

    def _quantiles(self, column: str, place: int, number: int, test_from: float | None) -> tuple[float, ...]:
        """Boundaries of `number` buckets: value floor(k * n / number) of the n sorted training values, each once."""

        def training() -> Iterator[NDArray[np.float64]]:
            if not self._seeks_time or test_from is None:
                yield from self._chunks(place)
                return
            for numbers, times in zip(self._chunks(place), self._chunks("time"), strict=True):
                yield np.where(times >= test_from, np.nan, numbers)

        count = count_numbers(training)
        if not count:
            raise MesetaError(f"prepare: column {column!r} has no value in the training rows; leave it out of buckets")
        return tuple(sorted(set(order_statistics(training, [k * count // number for k in range(1, number)]))))
