"""Exact order statistics of sequences that are larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meseta.data.dataset.queues import run_in_order
from meseta.data.formats.bad_rows import parse_good_rows
from meseta.data.formats.format import Block, ScanProgress, Source, read_blocks
from meseta.data.prepare.encode import NO_SPLIT, TEST, TRAIN, VALID, Splitter
from meseta.data.schema.layout import RawLayout, RawRows
from meseta.spec import MesetaError

Chunks = Callable[[], Iterator[NDArray[np.float64]]]
"""Returns an iterator over all numbers, in chunks. It is called once per pass."""

# The counters of 13 bits take 64 KiB per rank.
_DIGIT_BITS = (13, 13, 13, 13, 12)
"""Number of bits of the sort key that each pass determines, the highest bits first."""
_SIGN_BIT = np.uint64(1 << 63)


def order_statistics(chunks: Chunks, ranks: Sequence[int]) -> list[float]:
    """Return the numbers at positions `ranks` (0 to count - 1) of the sorted sequence without NaN, in five passes."""
    prefixes = np.zeros(len(ranks), np.uint64)
    # A radix selection: each pass determines further bits of all results.
    left = np.array(ranks, np.int64)
    shift = 64
    for width in _DIGIT_BITS:
        shift -= width
        distinct_prefixes = np.unique(prefixes)
        counts = _count_digits(chunks, distinct_prefixes, shift, width)
        rows = np.cumsum(counts, axis=1)[np.searchsorted(distinct_prefixes, prefixes)]
        digits = np.array([np.searchsorted(row, place, side="right") for row, place in zip(rows, left, strict=True)])
        below = np.where(digits > 0, rows[np.arange(len(left)), digits - 1], 0)
        left, prefixes = left - below, prefixes << np.uint64(width) | digits.astype(np.uint64)
    return _from_sort_keys(prefixes).tolist()


def count_numbers(chunks: Chunks) -> int:
    """Return how many numbers are not NaN."""
    return sum(int(np.count_nonzero(~np.isnan(chunk))) for chunk in chunks())


def _count_digits(chunks: Chunks, known: NDArray[np.uint64], shift: int, width: int) -> NDArray[np.int64]:
    """Count the next digits [prefixes, digits] of sort keys, by their prefix in `known`."""
    counts = np.zeros((known.size, 1 << width), np.int64)
    for chunk in chunks():
        keys = _to_sort_keys(chunk[~np.isnan(chunk)])
        # NumPy cannot shift a uint64 by 64 bits.
        prefixes = keys >> np.uint64(shift) >> np.uint64(width)
        places = np.minimum(np.searchsorted(known, prefixes), known.size - 1)
        ours = known[places] == prefixes
        digits = (keys[ours] >> np.uint64(shift)).astype(np.int64) & (1 << width) - 1
        np.add.at(counts.reshape(-1), (places[ours] << width) + digits, 1)
    return counts


def _to_sort_keys(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    # Adding 0.0 turns -0.0 into 0.0, so that both zeros have the same key.
    bits = (values + 0.0).view(np.uint64)
    return np.where(bits & _SIGN_BIT, ~bits, bits | _SIGN_BIT)


def _from_sort_keys(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    return np.where(keys & _SIGN_BIT, keys & ~_SIGN_BIT, ~keys).view(np.float64)


_CHUNK_ROWS = 1 << 20
DAY_S = 86_400.0
MIN_VALID_ROWS = 200
"""Minimum number of rows of a valid split by time that no option asks for."""

_ParsedPart = tuple[RawRows, NDArray[np.int8]]
"""Parsed rows with their splits, as far as these are known."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Result of a survey as plain data."""

    test_from: float | None = None
    """First second of the test split, since 1970-01-01 UTC. `None` unless rows are split by time."""
    valid_from: float | None = None
    """First second of the valid split, since 1970-01-01 UTC. `None` unless rows are split by time."""
    boundaries: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Bucket boundaries of each column that is divided by its quantiles."""
    periods: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Times of the first and the last training row, for each column whose ages are features."""
    dates: tuple[str, ...] = ()
    """Columns of times that are all at midnight UTC in the training rows. Their hours are no features."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> Survey:
        boundaries = {name: tuple(values) for name, values in document["boundaries"].items()}
        periods = {name: (first, last) for name, (first, last) in document.get("periods", {}).items()}
        dates = tuple(document.get("dates", ()))
        return Survey(**{**document, "boundaries": boundaries, "periods": periods, "dates": dates})


@dataclass(frozen=True, kw_only=True)
class Surveyor:
    """Determines the start times of splits and the quantiles that a layout and a splitter leave open."""

    sources: Sequence[Source]
    layout: RawLayout
    splitter: Splitter
    scratch: Path
    """Folder for temporary files with 8 bytes per row and column."""
    pool: ThreadPoolExecutor
    num_threads: int
    on_rows: ScanProgress
    # If set, all columns are parsed, because any of them can make a row bad.
    skip_bad_rows: bool
    """Whether rows that cannot be parsed are skipped."""

    @property
    def _needs_split_times(self) -> bool:
        s = self.splitter
        shares = ((s.test_fraction, s.test_from), (s.valid_fraction, s.valid_from))
        return s.is_valid_by_time or (s.by == "time" and any(share > 0 and first is None for share, first in shares))

    @property
    def _quantile_counts(self) -> dict[str, int]:
        cut = {c.buckets.column: c.buckets.num_quantiles for c in self.layout.sparse if c.buckets}
        return {column: number for column, number in cut.items() if number is not None}

    @property
    def is_unnecessary(self) -> bool:
        return not (self._quantile_counts or self._needs_split_times or self.layout.ages)

    def survey(self) -> Survey:
        """Read the sources once, unless the survey is unnecessary, and return the results.

        If a valid split by time would have fewer than MIN_VALID_ROWS rows, it is drawn instead, and the sources are
        read again.

        Raises MesetaError if times are too equal to be split.
        """
        quantile_counts = self._quantile_counts
        if self.is_unnecessary:
            return Survey(test_from=self.splitter.test_from, valid_from=self.splitter.valid_from)
        self._read(self._reduced_layout(list(quantile_counts)))
        splitter = self._resolve_split_times() if self._needs_split_times else self.splitter
        if self.splitter.is_valid_by_time and not splitter.is_valid_by_time:
            return replace(self, splitter=splitter).survey()
        ends = [first for first in (splitter.valid_from, splitter.test_from) if first is not None]
        train_until = min(ends) if self._needs_split_times and ends else None
        boundaries = {
            column: self._quantiles(place, number, train_until)
            for place, (column, number) in enumerate(quantile_counts.items())
        }
        columns = [age.column for age in self.layout.ages]
        periods = {column: self._find_period(f"time-{place}", train_until) for place, column in enumerate(columns)}
        dates = [column for place, column in enumerate(columns) if self._are_dates(f"time-{place}", train_until)]
        for name in ["time", *range(len(quantile_counts)), *(f"time-{place}" for place in range(len(columns)))]:
            self._path(name).unlink(missing_ok=True)
        return Survey(
            test_from=splitter.test_from,
            valid_from=splitter.valid_from,
            boundaries=boundaries,
            periods=periods,
            dates=tuple(dates),
        )

    def _reduced_layout(self, columns: Sequence[str]) -> RawLayout:
        several = self.layout.labels if len(self.layout.labels) > 1 else ()
        return RawLayout(
            labels=several,  # To leave out rows that have none of them.
            label_rules=self.layout.label_rules if several else (),
            dense=(),
            sparse=(),
            whole_numbers=self.layout.whole_numbers,
            number_format=self.layout.number_format,
            group=self.layout.group if self.splitter.by == "group" else None,
            time=self.layout.time if self.splitter.by == "time" or self.splitter.is_valid_by_time else None,
            surveyed_columns=tuple(columns),
            surveyed_times=tuple(age.column for age in self.layout.ages),
        )

    def _path(self, name: str | int) -> Path:
        return self.scratch / f"survey-{name}.f64"

    def _read(self, layout: RawLayout) -> None:
        """Write the times, and the numbers of rows that may be training rows, to temporary files."""
        total_bytes, done_bytes = sum(source.size_bytes for source in self.sources), dict.fromkeys(self.sources, 0)
        num_rows = 0
        with ExitStack() as stack:
            names = [*range(len(layout.surveyed_columns)), *(f"time-{i}" for i in range(len(layout.surveyed_times)))]
            files = [stack.enter_context(self._path(name).open("wb")) for name in names]
            times = stack.enter_context(self._path("time").open("wb"))
            for block, parts in run_in_order(self.pool, self._jobs(layout), self.num_threads + 1):
                for rows, split in parts:
                    for file, numbers in zip(files, [*rows.surveyed_values, *rows.surveyed_times], strict=True):
                        # Only training rows count, and NaN is ignored.
                        numbers[split != TRAIN] = np.nan
                        numbers.tofile(file)
                    if rows.time is not None:  # Files with a fixed split do not count.
                        counts = np.isin(split, self._timed_splits) if block.source.split == "both" else np.False_
                        time = np.where(counts, rows.time, np.nan)
                        time.tofile(times)
                num_rows += block.num_rows
                done_bytes[block.source] = block.position_bytes
                self.on_rows(num_rows, sum(done_bytes.values()) / total_bytes)

    def _jobs(self, layout: RawLayout) -> Iterator[Callable[[], tuple[Block, list[_ParsedPart]]]]:
        whole = self.layout.with_survey(dict.fromkeys(self._quantile_counts, (0.0,)), {})

        def parse(block: Block, first_row: int) -> _ParsedPart:
            rows = block.source.format.parse(block, layout)
            split = self.splitter.assign_splits(block, first_row, rows)
            if rows.labels:
                split = np.where(rows.unlabeled_mask, np.int8(NO_SPLIT), split)
            return rows, split

        def parse_good(block: Block, rows_before: int) -> tuple[Block, list[_ParsedPart]]:
            def parse_part(part: Block) -> _ParsedPart:
                part.source.format.parse(part, whole)
                return parse(part, rows_before + part.first_row)

            return block, parse_good_rows(block, parse_part).results

        first_row = 0
        for source in self.sources:
            for block in read_blocks(source, self.layout.columns if self.skip_bad_rows else layout.columns):
                if self.skip_bad_rows:
                    yield partial(parse_good, block, first_row - block.first_row)
                else:
                    yield lambda block=block, row=first_row: (block, [parse(block, row)])  # type: ignore[misc]
                first_row += block.num_rows

    def _read_chunks(self, name: str | int) -> Iterator[NDArray[np.float64]]:
        with self._path(name).open("rb") as file:
            while (chunk := np.fromfile(file, np.float64, _CHUNK_ROWS)).size:
                yield chunk

    def _read_training(self, name: str | int, train_until: float | None) -> Iterator[NDArray[np.float64]]:
        """Yield the numbers of training rows: those before `train_until`, or all if it is `None`. Others may be NaN."""
        if train_until is None:
            yield from self._read_chunks(name)
            return
        for numbers, times in zip(self._read_chunks(name), self._read_chunks("time"), strict=True):
            yield np.where(times >= train_until, np.nan, numbers)

    @property
    def _timed_splits(self) -> tuple[int, ...]:
        """Splits whose rows count for shares by time."""
        return (TRAIN,) if self.splitter.is_valid_by_time else (TRAIN, VALID, TEST)

    def _find_period(self, name: str, train_until: float | None) -> tuple[float, float]:
        """Return the first and the last time of the training rows, or zeros if none has a time."""
        first, last = np.inf, -np.inf
        for times in self._read_training(name, train_until):
            if not np.isnan(times).all():
                first, last = min(first, np.nanmin(times)), max(last, np.nanmax(times))
        return (float(first), float(last)) if first <= last else (0.0, 0.0)

    def _are_dates(self, name: str, train_until: float | None) -> bool:
        """Whether training rows have times, and all are at midnight UTC."""
        has_times = False
        for times in self._read_training(name, train_until):
            present = times[~np.isnan(times)]
            if (present % DAY_S).any():
                return False
            has_times = has_times or present.size > 0
        return has_times

    def _resolve_valid_by_time(self) -> Splitter:
        """Return the splitter with the start of a valid split of the last rows, or with a drawn valid split."""
        splitter = self.splitter
        drawn = replace(splitter, is_valid_by_time=False)
        try:
            valid_from = self._find_split_start("valid", splitter.valid_fraction, None)
        except MesetaError:  # Too many rows have the same time.
            return drawn
        if valid_from is None:
            return drawn
        num_rows = sum(int(np.count_nonzero(times >= valid_from)) for times in self._read_chunks("time"))
        return drawn if num_rows < MIN_VALID_ROWS else replace(splitter, valid_from=valid_from)

    def _resolve_split_times(self) -> Splitter:
        splitter = self.splitter
        if splitter.is_valid_by_time:
            return self._resolve_valid_by_time()
        if splitter.test_from is None:
            splitter = replace(splitter, test_from=self._find_split_start("test", splitter.test_fraction, None))
        if splitter.valid_from is None:
            valid_from = self._find_split_start("valid", splitter.valid_fraction, splitter.test_from)
            splitter = replace(splitter, valid_from=valid_from)
        splitter.check_order()
        return splitter

    def _find_split_start(self, split: str, share: float, until: float | None) -> float | None:
        """Return the first time of the last rows before `until` that are at most `share` of all rows, or `None` for no
        row."""

        def times() -> Iterator[NDArray[np.float64]]:
            for chunk in self._read_chunks("time"):
                yield chunk if until is None else np.where(chunk < until, chunk, np.nan)

        num_rows, num_wanted = count_numbers(times), int(count_numbers(partial(self._read_chunks, "time")) * share)
        if not num_wanted:
            return None
        if num_wanted >= num_rows:
            raise MesetaError(
                f"prepare: the valid split would take {num_wanted} rows, but there are {num_rows} before the test "
                "split; use a smaller --valid-fraction"
            )
        # Rows with equal times stay together, so the split starts at the first time after that of the last training
        # row.
        [last] = order_statistics(times, [num_rows - num_wanted - 1])
        later = [float(chunk[chunk > last].min()) for chunk in times() if (chunk > last).any()]
        if not later:
            where = "" if until is None else " before the test split"
            raise MesetaError(
                f"prepare: the last {share:g} of the rows{where} have the same time {last:.17g} as rows before them; "
                f"use a larger --{split}-fraction or --{split}-after, or do not split by time"
            )
        return min(later)

    def _quantiles(self, place: int, number: int, train_until: float | None) -> tuple[float, ...]:
        """Return the boundaries of `number` buckets: the distinct values at places floor(k * n / number) of n sorted
        values. A column without values has no boundaries.

        Only training rows count: those before `train_until`, or all numbers except NaN if it is `None`.
        """

        training = partial(self._read_training, place, train_until)
        count = count_numbers(training)
        if not count:
            return ()
        return tuple(sorted(set(order_statistics(training, [k * count // number for k in range(1, number)]))))
