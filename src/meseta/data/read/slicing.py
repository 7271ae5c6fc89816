"""Division of an epoch into global batches and of batches into the slices of ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meseta.data.read.options import LastBatch
from meseta.data.read.order import EpochOrder, Window
from meseta.data.read.rows import Rows, concatenate_rows


class EpochRows:
    """Rows of one epoch in its order. The last decoded window is kept, and the next one is decoded ahead."""

    def __init__(self, order: EpochOrder, read: Callable[[tuple[int, ...]], Rows], *, prefetch: bool) -> None:
        """Create the rows. `read` decodes row groups by number. `prefetch` decodes the next window in a thread."""
        self._order = order
        self._read = read
        self._index = -1
        self._prefetched: dict[int, Future[tuple[Window, Rows]]] = {}
        self._pool: ThreadPoolExecutor | None = None
        if prefetch:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="meseta-decode")

    def take(self, first: int, last: int) -> Rows:
        parts: list[Rows] = []
        at = first
        while at < last or not parts:
            self._open(self._order.find_window(min(at, self._order.num_rows - 1)))
            start = at - self._window.start
            stop = min(last - self._window.start, self._window.num_rows)
            places = self._window.rows
            parts.append(self._rows.take(slice(start, stop) if places is None else places[start:stop]))
            at = self._window.start + stop
        return concatenate_rows(parts)

    def take_next_epoch(self) -> None:
        """Return `None`, because reading ahead ends with the epoch."""

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _open(self, index: int) -> None:
        if index == self._index:
            return
        ahead = self._prefetched.pop(index, None)
        self._window, self._rows = self._decode(index) if ahead is None else ahead.result()
        self._index = index
        # Decode the next window while rows of this one are taken.
        if self._pool is not None and index + 1 < len(self._order):
            self._prefetched = {index + 1: self._pool.submit(self._decode, index + 1)}

    def _decode(self, index: int) -> tuple[Window, Rows]:
        window = self._order.window(index)
        return window, self._read(window.groups)


@dataclass(frozen=True)
class RankRanges(Collection[int]):
    """Set of ranks, stored as ranges."""

    ranges: tuple[range, ...]
    """Disjoint ranges with step 1, in ascending order."""

    @staticmethod
    def union(ranges: Iterable[range]) -> RankRanges:
        """Return the union of ranges with step 1."""
        merged: list[range] = []
        for one in sorted(filter(len, ranges), key=lambda one: one.start):
            if merged and one.start <= merged[-1].stop:
                merged[-1] = range(merged[-1].start, max(merged[-1].stop, one.stop))
            else:
                merged.append(one)
        return RankRanges(tuple(merged))

    def __contains__(self, rank: object) -> bool:
        return any(rank in one for one in self.ranges)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.ranges)

    def __len__(self) -> int:
        return sum(map(len, self.ranges))


class RankSlice(NamedTuple):
    """Part of a global batch that belongs to one rank: rows first..last-1 of the epoch, and padding samples."""

    first: int
    last: int
    num_padding: int


@dataclass(frozen=True, kw_only=True)
class BatchSlicer:
    """Division of the rows of an epoch into global batches and of these into slices of ranks.

        row   0        4        8   10          num_rows 10, batch_size 4, 2 ranks: rank 0 has a, rank 1 b
              a a b b  a a b b  a b             last_batch "keep": the last batch has 2 samples; "drop": it is omitted;
                                a a . .         "pad": it is padded before it is divided

    The first batch starts at the reader's position, which is row 0 unless it resumes in the middle of an epoch.
    """

    num_rows: int
    batch_size: int
    last_batch: LastBatch
    rank: int
    num_ranks: int

    def num_batches_from(self, row: int) -> int:
        """Return the number of global batches from a row to the end of the epoch."""
        left = self.num_rows - row
        return left // self.batch_size if self.last_batch == "drop" else -(-left // self.batch_size)

    def slice_at(self, row: int) -> RankSlice:
        """Return this rank's slice of the global batch that starts at `row`."""
        stop = min(row + self.batch_size, self.num_rows)
        size = self.batch_size if self.last_batch == "pad" else stop - row
        first, last = rank_range(self.rank, self.num_ranks, row, row + size)
        return RankSlice(min(first, stop), min(last, stop), max(last, stop) - max(first, stop))

    def rows_between(self, begin: int, first: int, last: int) -> NDArray[np.int64]:
        """Return this rank's rows [n] among first..last-1, ascending. `begin` is the first row of the first batch."""
        starts, lengths = self._runs_between(begin, first, last)
        before = np.cumsum(lengths) - lengths
        return np.repeat(starts - before, lengths) + np.arange(lengths.sum())

    def num_rows_between(self, begin: int, first: int, last: int) -> int:
        return int(self._runs_between(begin, first, last)[1].sum())

    def ranks_between(self, begin: int, first: int, last: int) -> RankRanges:
        """Return all ranks with any of the rows first..last-1. Ranks, rows and batches do not affect the time."""
        first, last = max(first, begin), min(last, self._end(begin))
        if first >= last:
            return RankRanges(())
        low, high = (first - begin) // self.batch_size, (last - 1 - begin) // self.batch_size
        # All batches between the first and the last one are complete, so one of them is enough.
        return RankRanges.union(
            self._ranks_in_batch(begin + number * self.batch_size, first, last)
            for number in {low, min(low + 1, high), high}
        )

    def _ranks_in_batch(self, start: int, first: int, last: int) -> range:
        stop = min(start + self.batch_size, self.num_rows)
        share, more = divmod(self.batch_size if self.last_batch == "pad" else stop - start, self.num_ranks)
        longer = more * (share + 1)  # Rows of the ranks with one more row, as in rank_range.

        def rank_of(place: int) -> int:
            return place // (share + 1) if place < longer else more + (place - longer) // share

        return range(rank_of(max(first, start) - start), rank_of(min(last, stop) - 1 - start) + 1)

    def _end(self, begin: int) -> int:
        return begin + min(self.num_batches_from(begin) * self.batch_size, self.num_rows - begin)

    def _runs_between(self, begin: int, first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (first row, number of rows) of this rank in each batch that has any of the rows first..last-1."""
        first, last = max(first, begin), min(last, self._end(begin))
        batches = np.arange((first - begin) // self.batch_size, -(-(last - begin) // self.batch_size))
        start = begin + batches * self.batch_size
        sizes = (
            np.full(batches.size, self.batch_size)
            if self.last_batch == "pad"
            else np.minimum(self.batch_size, self.num_rows - start)
        )
        share, more = np.divmod(sizes, self.num_ranks)  # As in rank_range.
        starts = start + self.rank * share + np.minimum(self.rank, more)
        stops = np.clip(starts + share + (self.rank < more), first, max(first, last))
        starts = np.clip(starts, first, max(first, last))
        return starts, stops - starts


def rank_range(rank: int, num_ranks: int, start: int, stop: int) -> tuple[int, int]:
    """Return (first row, row after the last one) of a rank in start..stop-1. Slices are contiguous. With a remainder,
    the first ranks get one more row."""
    share, more = divmod(stop - start, num_ranks)
    first = start + rank * share + min(rank, more)
    return first, first + share + (rank < more)
