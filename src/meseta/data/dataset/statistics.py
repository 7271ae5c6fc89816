"""Statistics of sparse features for the planner: distinct rows, pooling factors and reuse."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from meseta.data.dataset.records import SparseStatistics
from meseta.spec import Reuse

WINDOW_SAMPLES = 65_536
REUSE_EDGES = (0, *(2**i for i in range(16)))
MAX_BITMAP_ROWS = 1 << 30
"""Largest table for which the distinct rows are counted with one bit per row."""


@runtime_checkable  # beartype asks for it where the tests check every call
class WindowCounter(Protocol):
    """Thread-safe counter of the ids of one sparse feature. Windows may be added in any order."""

    def add_window(self, ids: NDArray[np.integer], num_samples: int) -> None:
        """Count the ids [nnz] of `num_samples` consecutive samples."""

    def get_state(self) -> tuple[list[int], bytes]:
        """Return the counts, from which `set_state` of another counter continues."""

    def set_state(self, numbers: Sequence[int], seen: bytes) -> None:
        """Restore the result of `get_state`."""


class FeatureStatistics:
    """Thread-safe statistics of one sparse feature. Windows may be added in any order.

    The memory does not depend on the number of samples: one bit per row of the table, or 8 bytes per distinct row if
    the table has more than 2**30 rows.
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
        """Count the ids [nnz] of at most 65,536 consecutive samples."""
        uniques, counts = _count_ids(ids, self._num_embeddings)
        bins = np.searchsorted(REUSE_EDGES[1:], counts, side="left")
        rows = np.bincount(bins, minlength=len(REUSE_EDGES))
        lookups = np.bincount(bins, weights=counts, minlength=len(REUSE_EDGES)).astype(np.int64)
        # Only the updates need the lock. The sorting above runs in parallel.
        with self._lock:
            self._seen.add(uniques)
            self._num_samples += num_samples
            self._num_lookups += ids.size
            self._rows += rows
            self._lookups += lookups

    def get_state(self) -> tuple[list[int], bytes]:
        """Return (numbers as plain data, state of the distinct rows as bytes). `set_state` continues from both."""
        with self._lock:
            numbers = [self._num_samples, self._num_lookups, *self._rows.tolist(), *self._lookups.tolist()]
            return numbers, self._seen.get_state()

    def set_state(self, numbers: Sequence[int], seen: bytes) -> None:
        self._num_samples, self._num_lookups = numbers[:2]
        self._rows, self._lookups = np.array(numbers[2:], np.int64).reshape(2, len(REUSE_EDGES))
        self._seen.set_state(seen)

    def touched_bits(self) -> NDArray[np.uint8] | None:
        """Return one bit per row of the table, set if the row was looked up. The lowest bit of the first byte is row 0.

        Returns `None` for tables without a bitmap. The result is not a copy.
        """
        return self._seen.bits if isinstance(self._seen, _Bitmap) else None

    def result(self) -> SparseStatistics:
        """Return the statistics of all windows added so far."""
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
    def __init__(self, num_rows: int) -> None:
        self.bits = np.zeros(-(-num_rows // 8), np.uint8)
        self._count = 0

    def add(self, rows: NDArray[np.integer]) -> None:
        """Add distinct rows in ascending order."""
        byte = rows >> 3
        # Several rows may share a byte. Combine their bits first, because an indexed assignment keeps only the last
        # write to a byte.
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
    """Set of distinct rows in sorted runs. Each run is more than twice as long as the next."""

    def __init__(self) -> None:
        self._runs: list[NDArray[np.int64]] = []

    def add(self, rows: NDArray[np.integer]) -> None:
        self._runs.append(rows.astype(np.int64))
        # Each row then takes part in a logarithmic number of merges.
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
    """Mean and standard deviation of several columns, accumulated over windows.

    Source: Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983.
    """

    def __init__(self, num_columns: int) -> None:
        self._count = 0
        self._mean = np.zeros(num_columns)
        self._squares = np.zeros(num_columns)

    def add(self, columns: list[NDArray[np.float32]]) -> None:
        """Add one window of samples, as one float32 array [n] per column. The order of windows affects the last
        bits."""
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
        """Return plain data that JSON stores without rounding. `set_state` of another object continues from it."""
        return {"count": self._count, "mean": self._mean.tolist(), "squares": self._squares.tolist()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._count = state["count"]
        self._mean, self._squares = np.array(state["mean"], np.float64), np.array(state["squares"], np.float64)

    @property
    def mean(self) -> NDArray[np.float64]:
        return self._mean

    @property
    def std(self) -> NDArray[np.float64]:
        """Population standard deviation of each column, or 1 if the column is constant."""
        std = np.sqrt(self._squares / max(self._count, 1))
        return np.where(std > 0, std, 1.0)


def _count_ids(ids: NDArray[np.integer], num_embeddings: int) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    if num_embeddings <= 4 * ids.size:  # One counter per row is then cheaper than sorting.
        per_row = np.bincount(ids, minlength=num_embeddings)
        uniques = np.flatnonzero(per_row)
        return uniques, per_row[uniques]
    ordered = np.sort(ids)
    starts = _run_starts(ordered)
    return ordered[starts], np.diff(np.append(starts, ordered.size))


def _run_starts(ordered: NDArray[np.integer]) -> NDArray[np.int64]:
    if not ordered.size:
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
