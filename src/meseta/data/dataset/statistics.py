"""Statistics for the planner: distinct rows, pooling factors and how soon rows come again."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from meseta.data.dataset.dataset import SparseStatistics
from meseta.spec import Reuse

WINDOW_SAMPLES = 65_536
REUSE_EDGES = (0, *(2**i for i in range(16)))
MAX_BITMAP_ROWS = 1 << 30
"""Rows of the largest table whose rows have a bit each."""


@runtime_checkable  # beartype asks for it where the tests check every call
class WindowCounter(Protocol):
    """Adds up windows of one sparse feature; windows may come in any order and from several threads."""

    def add_window(self, ids: NDArray[np.integer], num_samples: int) -> None:
        """Count the ids [nnz] of `num_samples` consecutive samples."""

    def get_state(self) -> tuple[list[int], bytes]:
        """Return the counts; `set_state` of another counter continues from them."""

    def set_state(self, numbers: Sequence[int], seen: bytes) -> None:
        """Continue from what `get_state` returned."""


class FeatureStatistics:
    """Adds up windows of one sparse feature; windows may come in any order and from several threads.

    Keeps one bit per row of the table, whatever the number of samples; of tables beyond 2**30 rows, eight bytes per
    distinct row.
    """

    def __init__(self, num_embeddings: int) -> None:
        self._num_embeddings = num_embeddings
        self._seen = _SortedRows() if num_embeddings > MAX_BITMAP_ROWS else _Bitmap(num_embeddings)
        self._num_samples = 0
        self._num_lookups = 0
        self._rows = np.zeros(len(REUSE_EDGES), np.int64)
        self._lookups = np.zeros(len(REUSE_EDGES), np.int64)
        self._lock = threading.Lock()

    def add_window(self, ids: NDArray[np.integer], num_samples: int) -> None:
        """Count the ids [nnz] of `num_samples` consecutive samples, at most 65,536 of them."""
        uniques, counts = _count_ids(ids, self._num_embeddings)
        bins = np.searchsorted(REUSE_EDGES[1:], counts, side="left")
        rows = np.bincount(bins, minlength=len(REUSE_EDGES))
        lookups = np.bincount(bins, weights=counts, minlength=len(REUSE_EDGES)).astype(np.int64)
        with self._lock:
            self._seen.add(uniques)
            self._num_samples += num_samples
            self._num_lookups += ids.size
            self._rows += rows
            self._lookups += lookups

    def get_state(self) -> tuple[list[int], bytes]:
        """What was counted, as plain data and bytes; `set_state` of another one takes it up."""
        with self._lock:
            numbers = [self._num_samples, self._num_lookups, *self._rows.tolist(), *self._lookups.tolist()]
            return numbers, self._seen.get_state()

    def set_state(self, numbers: Sequence[int], seen: bytes) -> None:
        """Go on from what `get_state` gave."""
        self._num_samples, self._num_lookups = numbers[:2]
        self._rows, self._lookups = np.array(numbers[2:], np.int64).reshape(2, len(REUSE_EDGES))
        self._seen.set_state(seen)

    def touched_bits(self) -> NDArray[np.uint8] | None:
        """A bit per row of the table, set where it was looked up, the first row in the lowest bit of the first byte;
        None where no such bits are kept."""
        return self._seen.bits if isinstance(self._seen, _Bitmap) else None

    def result(self) -> SparseStatistics:
        """The statistics of all windows added so far."""
        return SparseStatistics(
            num_rows=self._num_samples,
            num_lookups=self._num_lookups,
            num_uniques=self._seen.count(),
            mean_pooling_factor=self._num_lookups / max(self._num_samples, 1),
            reuse=Reuse(
                window_samples=WINDOW_SAMPLES,
                edges=REUSE_EDGES,
                rows=tuple((self._rows / max(self._rows.sum(), 1)).tolist()),
                lookups=tuple((self._lookups / max(self._num_lookups, 1)).tolist()),
            ),
        )


class _Bitmap:
    """Rows seen so far, a bit each."""

    def __init__(self, num_rows: int) -> None:
        self.bits = np.zeros(-(-num_rows // 8), np.uint8)
        self._count = 0

    def add(self, rows: NDArray[np.integer]) -> None:
        """Distinct rows, ascending."""
        byte = rows >> 3
        first = _run_starts(byte)
        if first.size:
            bits = np.left_shift(1, rows & 7).astype(np.uint8)
            before = self.bits[byte[first]]
            after = before | np.bitwise_or.reduceat(bits, first)
            self.bits[byte[first]] = after
            self._count += int(np.unpackbits(before ^ after).sum())

    def count(self) -> int:
        return self._count

    def get_state(self) -> bytes:
        return self.bits.tobytes()

    def set_state(self, state: bytes) -> None:
        self.bits = np.frombuffer(state, np.uint8).copy()
        self._count = int(np.unpackbits(self.bits).sum())


class _SortedRows:
    """Rows seen so far, in sorted runs of which each is more than twice as long as the next."""

    def __init__(self) -> None:
        self._runs: list[NDArray[np.int64]] = []

    def add(self, rows: NDArray[np.integer]) -> None:
        """Distinct rows, ascending."""
        self._runs.append(rows.astype(np.int64))
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            self._runs.append(np.union1d(self._runs.pop(), self._runs.pop()))

    def count(self) -> int:
        while len(self._runs) > 1:
            self._runs.append(np.union1d(self._runs.pop(), self._runs.pop()))
        return len(self._runs[0]) if self._runs else 0

    def get_state(self) -> bytes:
        self.count()
        return self._runs[0].tobytes() if self._runs else b""

    def set_state(self, state: bytes) -> None:
        self._runs = [np.frombuffer(state, np.int64)]


class Moments:
    """Mean and standard deviation of several columns, merged window by window.

    Source: Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983.
    """

    def __init__(self, num_columns: int) -> None:
        self._count = 0
        self._mean = np.zeros(num_columns)
        self._squares = np.zeros(num_columns)

    def add(self, columns: list[NDArray[np.float32]]) -> None:
        """Add one window: float32 [n] per column. The order of windows decides the last bits."""
        if not columns or not columns[0].size:
            return
        count = columns[0].size
        mean = np.array([column.mean(dtype=np.float64) for column in columns])
        squares = np.array([np.square(c - m, dtype=np.float64).sum() for c, m in zip(columns, mean, strict=True)])
        total = self._count + count
        shift = mean - self._mean
        self._mean += shift * (count / total)
        self._squares += squares + shift**2 * (self._count * count / total)
        self._count = total

    def get_state(self) -> dict[str, Any]:
        """Plain data that JSON keeps to the last bit; `set_state` of another one takes it up."""
        return {"count": self._count, "mean": self._mean.tolist(), "squares": self._squares.tolist()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `get_state` gave."""
        self._count = state["count"]
        self._mean, self._squares = np.array(state["mean"], np.float64), np.array(state["squares"], np.float64)

    @property
    def mean(self) -> NDArray[np.float64]:
        return self._mean

    @property
    def std(self) -> NDArray[np.float64]:
        """Population standard deviation; 1 where a column is constant."""
        std = np.sqrt(self._squares / max(self._count, 1))
        return np.where(std > 0, std, 1.0)


def _count_ids(ids: NDArray[np.integer], num_embeddings: int) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Distinct ids, ascending, and how often each occurs."""
    if num_embeddings <= 4 * ids.size:  # a counter per row is then cheaper than sorting
        per_row = np.bincount(ids, minlength=num_embeddings)
        uniques = np.flatnonzero(per_row)
        return uniques, per_row[uniques]
    ordered = np.sort(ids)
    starts = _run_starts(ordered)
    return ordered[starts], np.diff(np.append(starts, ordered.size))


def _run_starts(ordered: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where each run of equal numbers begins."""
    if not ordered.size:
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
